"""Runs a benchmark: this rank's engine samples or scores the questions, while worker processes judge the answers."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

import torch

from ...batch import FinishReason, Group, ModelInput, Prompt, ScoredGroup
from ...engine.protocol import Engine, Sampled, stepping
from ...engine.sampling import Sampling
from ...parallel import watchdog
from ...parallel.ranks import gather, on_all_ranks
from ...rewards.answers import after_thinking
from ...runtime import process
from ...training.preparation import engine_context, longest_completion
from ...usercode.worker_pool import WorkerPool
from .harness import HarnessBenchmark, LoadedTask, Question, Request, Rules, stops, thinks
from .judging import Judge
from .results import Answer, SuiteResult, TaskResult
from .specs import names_of

SCORED = Sampling(1, 1, 0.0, {"prompt_logprobs": 0})  # Settings to score given tokens. vLLM has to sample one token.
MOST_WORKERS = 8
CHECK_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Host:
    config: Any
    engine: Any
    tokenizer: Any
    console: Any
    version: int


def checkers(benchmarks: Iterable[HarnessBenchmark]) -> WorkerPool:
    judges = {f"{each.text}: {task.name}": Judge(task.task) for each in benchmarks for task in each.tasks}
    pool = WorkerPool("benchmarks", judges, min(MOST_WORKERS, process.cpu_threads()), CHECK_SECONDS)
    if lost := [name for name in judges if name not in pool]:
        reason = pool.reasons[lost[0]]
        raise ValueError(f"The checks of {lost[0]} can't run in a worker process ({reason}): leave the task out.")
    return pool


def take(
    benchmark: HarnessBenchmark, host: Host, pool: WorkerPool, turn: AbstractContextManager[Any]
) -> tuple[SuiteResult, list[Answer]]:
    """Answer and judge all questions; all ranks must call. Return the result of all ranks, and this rank's answers."""
    started, mine = time.perf_counter(), host.config.layout
    with turn, on_all_ranks("the benchmark"):
        answers: list[Answer] = host.engine.on_engine_leader(
            lambda: [
                each
                for task in benchmark.tasks
                for each in _sit(task, task.questions[mine.data_rank :: mine.data_size], host, pool, benchmark.text)
            ],
            others=[],
        )
    for each in answers:
        for call in each.calls:
            watchdog.progress(f"the checks of {each.task}")
            outcome = call.result()
            each.verdicts.append(dict(outcome.value) if outcome.kind == "value" else {})
            if outcome.kind != "value":
                each.failed.append((outcome.kind, outcome.value[0] if outcome.kind == "raised" else ""))
        rollouts = [rollout for group in each.groups for rollout in group.rollouts]
        each.tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        each.cut_off = sum(rollout.finish_reason is not FinishReason.STOP for rollout in rollouts)
    own = [Answer(each.task, each.row, each.verdicts, each.tokens, each.cut_off, each.failed) for each in answers]
    of_all, results = sorted(itertools.chain(*gather(own)), key=lambda each: each.row), []
    for task in benchmark.tasks:
        of_task = [each for each in of_all if each.task == task.name]
        results.append(TaskResult(task, of_task, time.perf_counter() - started))
    with on_all_ranks("the benchmark's metrics"):
        return SuiteResult.of(benchmark, results), answers


def _sit(task: LoadedTask, questions: Sequence[Question], host: Host, pool: WorkerPool, text: str) -> list[Answer]:
    """Answer a task's questions on this engine: score first, then sample. Workers judge meanwhile."""
    answers = {
        each.row: Answer(task.name, each.row, question=each, texts=[[] for _ in each.requests]) for each in questions
    }
    judge = f"{text}: {task.name}"
    responses: dict[int, list[list[Any]]] = {each.row: [[] for _ in each.requests] for each in questions}

    def answer(question: Question, index: int, found: list[Any]) -> None:
        row = question.row
        responses[row][index] = found
        if not all(responses[row]):
            return
        of_requests = responses.pop(row)
        instances = [each.instance for each in question.requests]
        # One call of `Judge` per question, or per completion that is judged alone.
        alone = [[[each] for each in of_one] for of_one in zip(*of_requests, strict=True)] if task.n else [of_requests]
        answers[row].calls = [pool.submit(judge, {"instances": instances, "responses": of_call}) for of_call in alone]

    requests = [(each, index, request) for each in questions for index, request in enumerate(each.requests)]
    scores = iter(score(host.engine, [part for _, _, request in requests for part in request.parts]))
    wanted: dict[int, tuple[Question, int, Request]] = {}
    by_sampling: dict[str, list[Prompt]] = {}
    for question, index, request in requests:
        if request.parts:
            of_parts = [next(scores) for _ in request.parts]
            total, kind = sum(logprob for logprob, _ in of_parts), request.instance.request_type
            answer(question, index, [total if kind.endswith("rolling") else (total, of_parts[0][1])])
        if request.prompt:
            position = question.row * len(question.requests) + index
            wanted[position] = question, index, request
            example = {"prompt": request.instance.args[0], "answer": question.target}
            prompt = Prompt(example, ModelInput(request.prompt), position)
            by_sampling.setdefault(repr(request.sampling), []).append(prompt)
    for prompts in by_sampling.values():
        bar = host.console.progress(len(prompts), task.name, "question")
        sampling, seed = wanted[prompts[0].position][2].sampling, host.config.seed
        generated = host.engine.generate(prompts, sampling, version=host.version, seed=seed, purpose="eval")
        with closing(bar), stepping(host.engine, bar.sampled):
            for group in generated:
                bar.update(sum(len(rollout.completion_ids) for rollout in group.rollouts))
                question, index, request = wanted[group.position]
                texts = _texts(group, request, host.tokenizer)
                answers[question.row].groups.append(group)
                answers[question.row].texts[index] = texts
                answer(question, index, texts)
    return [*answers.values()]


def score(engine: Engine, parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """Return (log-probability, whether greedy decoding gives the continuation) per pair (context, continuation)."""
    names = [engine.submit([*context, *target], SCORED, seed=0) for context, target in parts]
    ended: dict[str, list[Sampled]] = {}
    while len(ended) < len(names):
        ended.update(engine.advance())
    scores = []
    for name, (context, _) in zip(names, parts, strict=True):
        tokens = [token for token in ended[name][0].prompt[len(context) :] if token is not None]
        scores.append((sum(logprob for logprob, _ in tokens), all(rank == 1 for _, rank in tokens)))
    return scores


def _texts(group: Group, request: Request, tokenizer: Any) -> list[str]:
    ids = [list(rollout.completion_ids) for rollout in group.rollouts]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if thinks(tokenizer):
        begun = str(request.instance.args[0]).rstrip().endswith("<think>")
        texts = [after_thinking(text, begun).lstrip() for text in texts]
    for stop in stops(request.instance.args[1]):
        texts = [text.partition(stop)[0] for text in texts]
    return texts


class RunBenchmark(HarnessBenchmark):
    """A benchmark that a run's evaluations use in place of a `PromptDataset`."""

    pool: WorkerPool | None = None

    def evaluate(self, trainer: Any, name: str) -> dict[str, float]:
        started, sampler = time.perf_counter(), trainer.sampler
        host = Host(trainer.args, trainer.engine, trainer.policy.tokenizer, trainer.console, trainer.state.global_step)
        with on_all_ranks("the benchmark's checkers"):
            if self.pool is None:
                self.pool = checkers([self])
                weakref.finalize(self, self.pool.close)
        result, answers = take(self, host, self.pool, sampler.device_turns.sampling(trainer.optimizer))
        if trainer.completion_log is not None:
            groups = []
            primary: dict[str, Any] = {each.loaded.name: each.primary for each in result.tasks}
            for each in answers:
                values = [float(verdict.get(primary[each.task], 0.0)) for verdict in each.verdicts]
                for group in each.groups:
                    size = len(group.rollouts)
                    rewards = torch.tensor(values if len(values) == size else values[:1] * size).reshape(-1, 1)
                    groups.append(ScoredGroup(group, rewards, torch.zeros(size)))
            trainer.completion_log.add_evaluation(groups, trainer.decode, trainer.state, name, [name])
        seconds = time.perf_counter() - started
        times = {"runtime": seconds, "samples_per_second": len(self) / seconds}
        return {**result.metrics(), **times, "num_tokens": float(trainer.state.num_input_tokens_seen)}


def with_benchmarks(dataset: Any, policy: Any, args: Any, context: int | None) -> Any:
    """Replace benchmarks' names in ``eval_dataset`` (one name, a list, or a dict's values) by `RunBenchmark`s."""
    if isinstance(dataset, str) or (isinstance(dataset, list | tuple) and all(isinstance(n, str) for n in dataset)):
        dataset = names_of([dataset] if isinstance(dataset, str) else dataset)
    if not isinstance(dataset, Mapping) or not (texts := [one for one in dataset.values() if isinstance(one, str)]):
        return dataset
    names_of(texts)
    temperature = args.temperature if args.temperature_eval is None else args.temperature_eval
    rules = Rules(
        policy.tokenizer,
        engine_context(policy, args, context),
        int(args.max_completion_length_eval or longest_completion(args)),
        limits=True,
        spread=temperature or 1.0,
        template_kwargs=dict(args.chat_template_kwargs or {}),
    )
    return {name: RunBenchmark(one, rules) if isinstance(one, str) else one for name, one in dataset.items()}
