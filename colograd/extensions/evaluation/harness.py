"""`HarnessBenchmark`: loads tasks of lm-evaluation-harness, and tokenises their questions."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from ...config.sampling import SHAPING
from ...engine.sampling import Sampling
from .judging import code_runs_apart
from .specs import YAML, TaskSpec, check_harness

GENERATE, SCORE = "generate_until", "loglikelihood"
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NO_SAMPLING = ("until", "do_sample", "temperature", "num_beams", *LENGTHS)
DEFAULT_TOKENS = 256  # The harness's default maximum of a completion's tokens.
FEWSHOT_SEED = 1234  # The harness's default seed for choosing few-shot examples.


@dataclass(frozen=True, slots=True)
class Request:
    """One of a question's requests to the engine: sample completions of a prompt, or score given continuations."""

    instance: Any
    prompt: tuple[int, ...] = ()
    sampling: Sampling | None = None  # None: this request scores `parts`.
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # Pairs (context, continuation) of token ids.

    @property
    def tokens(self) -> int:
        return max(len(self.prompt), *(len(context) + len(target) for context, target in self.parts), 0)

    @property
    def sequences(self) -> int:
        return len(self.parts) if self.sampling is None else self.sampling.n


@dataclass(frozen=True, slots=True)
class Question:
    row: int
    target: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    tokenizer: Any
    context: int
    max_tokens: int | None = None
    limits: bool = False  # Whether a task's own maximum of tokens applies if it is below `max_tokens`.
    temperature: float | None = None
    top_p: float | None = None
    spread: float = 1.0  # Temperature for several completions per question, if the task samples greedily.
    template: bool | None = None  # None: tasks that sample use the chat template, if there is one.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    include: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedTask:
    name: str
    task: Any
    questions: tuple[Question, ...]
    n: int | None  # Completions per question that are judged one by one. None: all are judged together.
    cut: int

    @property
    def sampling(self) -> Sampling | None:
        return next((each.sampling for each in self.questions[0].requests if each.sampling is not None), None)


class HarnessBenchmark:
    def __init__(self, text: str, rules: Rules) -> None:
        check_harness()
        self.text, self.rules, spec = text, rules, TaskSpec.parse(text)
        with _as_the_harness():
            loaded = _load(spec.name, rules.include)
            self.groups: dict[str, Any] = loaded["groups"]
            self.tasks = [_questions(name, task, spec, rules) for name, task in loaded["tasks"].items()]
        self.dropped = any(task.cut for task in self.tasks)
        self._questions = [question for task in self.tasks for question in task.questions]
        requests = [request for question in self._questions for request in question.requests]
        self.longest = max(each.tokens for each in requests)
        self.generations = max(sum(each.sequences for each in question.requests) for question in self._questions)
        # Tokens of the longest prompt with its completion, or of the longest scored text.
        self.longest_sequence = max(e.tokens + (e.sampling.max_tokens if e.sampling else 0) for e in requests)

    def dropped_line(self) -> str:
        cut = ", ".join(f"{task.cut} of {len(task.questions)} of {task.name}" for task in self.tasks if task.cut)
        return (
            f"data: prompts don't fit into the context of {self.rules.context:,} tokens, so their beginnings are cut "
            f"off, as lm-evaluation-harness does: {cut}"
        )

    def __len__(self) -> int:
        return len(self._questions)

    def metric_names(self) -> list[str]:
        names = ["accuracy", "accuracy_ci95", "completions", "runtime", "samples_per_second", "num_tokens"]
        if len(self.tasks) > 1:
            return [*names, *(f"{task.name}_accuracy" for task in self.tasks)]
        return [*names, *map(str, self.tasks[0].task.aggregation())]


@contextlib.contextmanager
def _as_the_harness() -> Iterator[None]:
    """Run code with lm-evaluation-harness's default seeds, and without its progress lines."""
    logger = logging.getLogger("lm_eval")
    with contextlib.ExitStack() as restored, torch.random.fork_rng(devices=[]), code_runs_apart():
        restored.callback(logger.setLevel, logger.level)
        restored.callback(random.setstate, random.getstate())
        restored.callback(np.random.set_state, np.random.get_state())
        logger.setLevel(logging.ERROR)
        random.seed(0)
        np.random.seed(1234)
        torch.default_generator.manual_seed(1234)
        with contextlib.redirect_stderr(io.StringIO()):
            yield


@functools.cache
def _manager(folders: tuple[str, ...], builtin: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders), include_defaults=builtin)


def _load(name: str, include: tuple[str, ...]) -> Any:
    """Load a task, group or tag by its name or YAML file. The slow index of all tasks is searched last."""
    import lm_eval.tasks
    from lm_eval.tasks._index import Kind, TaskIndex

    try:
        if name.endswith(YAML):
            if not Path(name).is_file():
                raise ValueError(f"the file doesn't exist (current directory: {Path.cwd()})")
            return _manager((str(Path(name).resolve().parent), *include), False).load([name])
        if name in (own := _manager(include, False)).task_index:
            return own.load([name])
        for file in Path(lm_eval.tasks.__file__).parent.glob(f"**/{name}.yaml"):
            entry = TaskIndex.entry_from_path(file)  # Groups need the index of all tasks.
            if entry is not None and entry.kind in (Kind.TASK, Kind.PY_TASK) and entry.name == name:
                return own.load([str(file)])
        whole = _manager(include, True)
        if name in whole.task_index:
            return whole.load([name])
        near = difflib.get_close_matches(name, whole.all_tasks, n=3)
    except Exception as error:  # code and data of a task may raise anything
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ValueError(
            f"The task {name!r} can't be loaded: {why}. The task may need a package, a connection to the Hub or "
            "a filled cache. A task of your own is a YAML file: give its path."
        ) from error
    meant = f" Did you mean {', '.join(near)}?" if near else ""
    places = "lm-evaluation-harness, or in a folder of `colograd eval --include-path`"
    raise ValueError(f"There is no task {name!r} in {places}.{meant}")


def _questions(name: str, task: Any, spec: TaskSpec, rules: Rules) -> LoadedTask:
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"The task {name!r} has images or sounds, but only text is supported: leave the task out.")
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(FEWSHOT_SEED)
    generates, has_template = task.OUTPUT_TYPE == GENERATE, bool(getattr(rules.tokenizer, "chat_template", None))
    repeats = int(task.get_config("repeats") or 1)
    if spec.n is not None and (not generates or repeats > 1):
        why = f"sets {repeats} repeats" if generates else "is scored by log-probabilities"
        raise ValueError(
            f"{spec.n} completions per question are requested (@{spec.n}), but the task {name!r} {why}: leave out "
            f"@{spec.n}."
        )
    template = has_template and generates if rules.template is None else rules.template
    if template and not has_template:
        raise ValueError("The model has no chat template: leave out --chat-template, or set --chat_template_path.")

    def chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        text = functools.partial(rules.tokenizer.apply_chat_template, tokenize=False, **ends, **rules.template_kwargs)
        try:
            return str(text(messages))
        except jinja2.TemplateError:  # Many templates refuse a system message, so leave it out as the harness does.
            return str(text([message for message in messages if message["role"] != "system"]))

    options = {"apply_chat_template": template, "fewshot_as_multiturn": template}
    task.build_all_requests(limit=spec.limit, chat_template=chat if template else None, **options)
    encoder = _encoder(rules.tokenizer)
    by_row: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_row.setdefault(instance.doc_id, []).append(instance)
    cut, questions = 0, []
    for row, instances in by_row.items():
        instances.sort(key=lambda each: each.idx)
        requests = [_request(name, each, spec.n or repeats, rules, encoder) for each in instances]
        cut += any(shortened for _, shortened in requests)
        target = str(task.doc_to_target(instances[0].doc))
        questions.append(Question(row, target, tuple(request for request, _ in requests)))
    return LoadedTask(name, task, tuple(questions), spec.n, cut)


def _encoder(tokenizer: Any) -> Any:
    from lm_eval.api.model import TemplateLM

    class Encoder(TemplateLM):
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            if add_special_tokens is None:  # No second BOS token for a text that begins with it.
                add_special_tokens = not (tokenizer.bos_token and string.startswith(tokenizer.bos_token))
            ids: list[int] = tokenizer(string, add_special_tokens=add_special_tokens).input_ids
            return ids

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any:
            return [(context, continuation) for _, context, continuation in requests]

        loglikelihood_rolling = generate_until = None

    return Encoder()


def _request(name: str, instance: Any, n: int, rules: Rules, encoder: Any) -> tuple[Request, bool]:
    """Return a request as token ids, and whether its beginning was cut off to fit the context."""
    kind, arguments = instance.request_type, instance.args
    if kind == GENERATE:
        sampling = _sampling(name, arguments[1], n, rules)
        ids = encoder.tok_encode(arguments[0])
        room = max(rules.context - sampling.max_tokens, rules.context // 2)
        return Request(instance, tuple(ids[-room:]), sampling), len(ids) > room
    room = rules.context - 1  # vLLM has to sample one token even for scoring.
    if kind == SCORE:
        ((context, target),) = encoder.loglikelihood([instance], disable_tqdm=True)
        kept = max(room - len(target), 1)
        part = tuple(context[-kept:]), tuple(target[-(room - 1) :])
        return Request(instance, parts=(part,)), len(context) + len(target) > room
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    ids = encoder.tok_encode(arguments[0], add_special_tokens=False)
    windows = get_rolling_token_windows(ids, encoder.prefix_token_id, room - 1, 1)
    pairs = [make_disjoint_window(window) for window in windows]
    return Request(instance, parts=tuple((tuple(a), tuple(b)) for a, b in pairs)), False


def _sampling(name: str, kwargs: dict[str, Any], n: int, rules: Rules) -> Sampling:
    if unknown := [key for key in kwargs if key not in (*NO_SAMPLING, *SHAPING)]:
        raise ValueError(
            f"The task {name!r} has the unsupported key {unknown[0]!r} in generation_kwargs: leave the task out."
        )
    own = next((int(kwargs[key]) for key in LENGTHS if kwargs.get(key) is not None), DEFAULT_TOKENS)
    tokens = own if rules.max_tokens is None else min(own, rules.max_tokens) if rules.limits else rules.max_tokens
    temperature = 0.0 if kwargs.get("do_sample") is False else float(kwargs.get("temperature") or 0.0)
    if temperature == 0 and n > 1:
        temperature = rules.spread
    options = {key: kwargs[key] for key in SHAPING if key in kwargs}
    if rules.temperature is not None:
        temperature = rules.temperature
    if temperature == 0 and n > 1:
        raise ValueError(
            f"{name}: {n} completions per question at temperature 0 would be equal: raise the temperature, or "
            "request 1 completion."
        )
    if rules.top_p is not None:
        options["top_p"] = rules.top_p
    if not thinks(rules.tokenizer) and (stop := stops(kwargs)):
        options["stop"] = stop
    return Sampling(n, tokens, temperature, options)


def stops(kwargs: dict[str, Any]) -> list[str]:
    until = kwargs.get("until") or []
    return [each for each in ([until] if isinstance(until, str) else until) if each]


def thinks(tokenizer: Any) -> bool:
    """Return whether the chat template has ``</think>``. If so, stop strings apply only behind the reasoning."""
    return "</think>" in str(getattr(tokenizer, "chat_template", None) or "")
