"""One trainer of `side_by_side.py`, alone in its process: train, count, time, and train again on recorded rollouts.

    python tests/benchmarks/contestants.py JOB.json

The job (see `Job`) is made by side_by_side.py; the figures are written to the job's ``out``. Both trainers get the same
model folder, prompts, sampling, engine settings and threads; the settings that TRL needs on a CPU are in `run_trl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

Step = dict[str, float]
FOLDER = "_journal"  # colograd.rollout.store.FOLDER, without its imports
LEARNING_RATE = 1e-6


VARIANTS = {
    "trl-uncorrected": "TRL without the sampler's correction, which saves its second forward",
    "trl-liger": "TRL with use_liger_kernel: Triton kernels, so on a GPU only",
    "colograd-repeated": "colograd with the prompt repeated before each completion",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """Input of one process."""

    trainer: str  # colograd, trl, or a variant in `VARIANTS`
    model: str  # a folder in the compared dtype
    rows: list[dict[str, Any]]  # prompts in the order of the steps, with the column `signal`
    prompt_tokens: int
    completion_tokens: int
    num_generations: int
    prompts_per_step: int
    steps: int  # counted steps; one more warms up
    repeats: int  # repetitions of training on the recorded rollouts
    rows_per_microbatch: int  # TRL's per_device_train_batch_size
    dtype: str
    kv_bytes: int
    ignore_eos: bool
    plain_malloc: bool
    seed: int
    rollouts: str  # folder of the recorded rollouts, which TRL's job writes
    folder: str  # the trainer's output folder
    out: str

    @property
    def completions(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def engine(self) -> dict[str, Any]:
        """Settings of vLLM that TRL has no name for."""
        on_gpu = _on_gpu()
        return {"kv_cache_memory_bytes": self.kv_bytes, "dtype": self.dtype, "enforce_eager": not on_gpu}

    def sampling(self) -> dict[str, Any] | None:
        return {"ignore_eos": True} if self.ignore_eos else None


def hash_reward(completions: Sequence[Any], signal: Sequence[bool], **columns: Any) -> list[float]:
    """Return a number in [0, 1) per text; 0.5 for a group without signal."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    digests = [hashlib.blake2b(text.encode(), digest_size=4).digest() for text in texts]
    return [int.from_bytes(d, "big") / 2**32 if s else 0.5 for d, s in zip(digests, signal, strict=True)]


def _on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


class Meter:
    """Adds up seconds by name, and counts tokens and forwards at a model's input embedding."""

    def __init__(self) -> None:
        from figures import PeakMemory

        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens = self.forwards = 0
        self.memory = PeakMemory()

    def watch(self, model: Any) -> None:
        def count(module: Any, given: tuple[Any, ...]) -> None:
            self.tokens += given[0].numel()
            self.forwards += 1

        model.get_input_embeddings().register_forward_pre_hook(count)

    def now(self) -> float:
        if self.memory.cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += self.now() - started

        return run

    def take(self) -> Step:
        taken = {**self.seconds, "tokens_through_model": self.tokens, "forwards": self.forwards}
        self.seconds.clear()
        self.tokens = self.forwards = 0
        return taken


def step_clock(meter: Meter, phases: Callable[[dict[str, Any], Step], Step]) -> Any:
    """Return a callback that keeps a `Step` per optimizer step. ``phases(logs, counted)`` gives its seconds."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[Step] = []
            self.last = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            meter.take()
            self.last = meter.now()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not logs or "step_time" not in logs:
                return
            counted, now = meter.take(), meter.now()
            peak = meter.memory.peak()
            if not self.steps:
                meter.memory.reset()
            self.steps.append(
                {
                    "step_s": now - self.last,
                    **phases(logs, counted),
                    "tokens_through_model": counted["tokens_through_model"],
                    "forwards": counted["forwards"],
                    "peak_memory_bytes": peak,
                    "completion_tokens": logs["completions/mean_length"],
                }
            )
            self.last = now

    return Clock()


# -- colograd


def run_colograd(job: Job) -> dict[str, Any]:
    from datasets import Dataset

    from colograd import GRPOTrainer

    meter, rows = Meter(), Dataset.from_list(job.rows)
    clock = step_clock(meter, lambda logs, counted: _our_phases(logs))
    trainer = GRPOTrainer(job.model, hash_reward, _our_config(job), rows, callbacks=[clock])
    _apply_variant(trainer, job)
    meter.watch(trainer.model)
    trainer.train()
    trainer.close()
    if not Path(job.rollouts).exists():
        shutil.copytree(Path(job.folder) / FOLDER, Path(job.rollouts) / FOLDER)
    return {"steps": clock.steps[1:], "recorded": _replayed(job, rows)[1:]}


def _apply_variant(trainer: Any, job: Job) -> None:
    if job.trainer == "colograd-repeated":
        trainer.learner.rules = dataclasses.replace(trainer.learner.rules, share_prompts=False)


def _our_config(job: Job, **changes: Any) -> Any:
    from colograd import GRPOConfig

    settings = _shared_settings(job) | {
        "bf16": False,
        "prompts_per_step": job.prompts_per_step,
        "vllm_engine_kwargs": {**job.engine(), "max_num_seqs": job.completions, "max_num_batched_tokens": 4096},
        "journal": "keep",
    }
    return GRPOConfig(**(settings | changes))


def _replayed(job: Job, rows: Any) -> list[Step]:
    """Train the recorded first step several times. The first repetition warms up."""
    from colograd.apps.replaying.replayer import Replay, Replayer

    meter, found = Meter(), list[Step]()

    class Timed(Replayer):
        def publish(self) -> None:
            meter.take()
            self.cpu = time.process_time()
            super().publish()

        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            seconds = _our_phases({f"time/{name}": value for name, value in self.times.seconds.items()})["train_s"]
            found.append(_recorded_step(seconds, self.cpu, meter.take()))
            return loss

    if not job.repeats:
        return []
    config = _our_config(job, output_dir=f"{job.folder}-replayed", learning_rate=0.0)  # so that weights stay
    replay = Replay(Path(job.rollouts), 1, 1)
    trainer = Timed(replay=replay, model=job.model, reward_funcs=hash_reward, args=config, train_dataset=rows)
    _apply_variant(trainer, job)
    meter.watch(trainer.model)
    for _ in range(job.repeats + 1):
        trainer.train()
    trainer.close()
    return found


def _our_phases(logs: dict[str, Any]) -> Step:
    """Packing is charged to training; TRL's padding isn't."""
    seconds = {name: logs.get(f"time/{name}", 0.0) for name in ("pack", "old_logprobs", "train")}
    return {
        "train_s": sum(seconds.values()),
        "generate_s": logs.get("time/generate", 0.0),
        "publish_s": logs.get("time/publish", 0.0),
        "optimizer_s": logs.get("time/optimizer", 0.0),
    }


def _recorded_step(seconds: float, cpu_before: float, counted: Step) -> Step:
    """``cpu_s`` are processor seconds of all threads, collation included."""
    tokens = counted["tokens_through_model"]
    return {"train_s": seconds, "cpu_s": time.process_time() - cpu_before, "tokens_through_model": tokens}


def recorded_groups(job: Job) -> list[Any]:
    """Return the recorded groups of the first step, in the order of its prompts."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from colograd.apps.replaying.replayer import Replay, ReplayStore
    from colograd.data import PromptRules, tokenize_prompts
    from colograd.rollout.store import RolloutStore

    rules = PromptRules(AutoTokenizer.from_pretrained(job.model), sys.maxsize, "error", {}, "train")
    prompts = tokenize_prompts(Dataset.from_list(job.rows), rules)
    run = Path(job.rollouts)
    rounds = ReplayStore(Replay(run, 1, 1), 0, RolloutStore(run, 0, {}).recorded_settings())
    rounds.begin(0, weights="")
    found = rounds.recall([prompts[row, row] for row in range(job.prompts_per_step)])
    return [found[position].group for position in sorted(found)]


# -- TRL


def run_trl(job: Job) -> dict[str, Any]:
    """Run TRL's colocated trainer.

    On a CPU vLLM packs its weights away, and TRL's weight update fails: `live_weights` keeps them in place. TRL passes
    neither a dtype nor a cache size to vLLM, so `Job.engine` is added. TRL sets rank variables after its accelerator is
    made; earlier ones would wrap the model in DDP.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from colograd.engine.building import check_vllm, live_weights

    check_vllm()
    plain = vllm_generation.LLM
    vllm_generation.LLM = lambda **kwargs: plain(**kwargs, **job.engine())
    config = GRPOConfig(
        **_shared_settings(job),
        use_vllm=True,
        vllm_mode="colocate",
        per_device_train_batch_size=job.rows_per_microbatch,
        gradient_accumulation_steps=job.completions // job.rows_per_microbatch,
        use_cpu=not _on_gpu(),
        bf16=False,
        vllm_importance_sampling_correction=job.trainer != "trl-uncorrected",
        use_liger_kernel=job.trainer == "trl-liger",
    )
    meter = Meter()
    clock = step_clock(meter, lambda logs, counted: _their_phases(counted))
    with contextlib.ExitStack() as while_built:
        if not _on_gpu():
            while_built.enter_context(live_weights())
        trainer = GRPOTrainer(job.model, hash_reward, config, Dataset.from_list(job.rows), callbacks=[clock])
    meter.watch(trainer.model)
    _time_trl(trainer, meter)
    trainer.train()
    groups = recorded_groups(job)
    _replay(trainer, groups)
    rows = [dict(group.example) for group in groups for _ in range(job.num_generations)]
    recorded = []
    for _ in range(job.repeats and job.repeats + 1):  # the first warms up
        meter.take()
        cpu = time.process_time()
        for _ in range(config.gradient_accumulation_steps):
            trainer.training_step(trainer.model_wrapped, rows, None)
        trainer.model.zero_grad(set_to_none=True)
        counted = meter.take()
        recorded.append(_recorded_step(_their_phases(counted)["train_s"], cpu, counted))
    return {"steps": clock.steps[1:], "recorded": recorded[1:]}


def _time_trl(trainer: Any, meter: Meter) -> None:
    """Time TRL's stages. TRL's forward for log-probabilities while it prepares inputs counts as training."""
    preparing = False
    prepare, logprobs = trainer._prepare_inputs, trainer._get_per_token_logps_and_entropies

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        nonlocal preparing
        preparing = True
        try:
            return prepare(*args, **kwargs)
        finally:
            preparing = False

    def both(*args: Any, **kwargs: Any) -> Any:
        return (meter.timed("old_logprobs", logprobs) if preparing else logprobs)(*args, **kwargs)

    trainer._prepare_inputs = meter.timed("prepare", prepare_inputs)
    trainer._get_per_token_logps_and_entropies = both
    trainer.training_step = meter.timed("training_step", trainer.training_step)
    trainer.vllm_generation.generate = meter.timed("generate", trainer.vllm_generation.generate)
    trainer.vllm_generation.sync_weights = meter.timed("publish", trainer.vllm_generation.sync_weights)


def _their_phases(counted: Step) -> Step:
    return {
        "train_s": counted["training_step"] - counted["prepare"] + counted.get("old_logprobs", 0.0),
        "generate_s": counted.get("generate", 0.0),
        "publish_s": counted.get("publish", 0.0),
    }


def _replay(trainer: Any, groups: Sequence[Any]) -> None:
    """Let TRL's engine return the recorded completions, and skip its weight updates."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def generate(prompts: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        ids = [list(rollout.completion_ids) for rollout in rollouts]
        assert len(prompts) == len(ids), (len(prompts), len(ids))
        return None, ids, [[[value] for value in rollout.sampler_logprobs.tolist()] for rollout in rollouts], None

    trainer.vllm_generation.generate = generate
    trainer.vllm_generation.sync_weights = lambda: None


# -- both


def _shared_settings(job: Job) -> dict[str, Any]:
    return {
        "output_dir": job.folder,
        "num_generations": job.num_generations,
        "max_completion_length": job.completion_tokens,
        "temperature": 1.0,
        "generation_kwargs": job.sampling(),
        "vllm_max_model_length": job.context,
        "model_init_kwargs": {"dtype": job.dtype},
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_steps": job.steps + 1,
        "logging_steps": 1,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
    }


def main() -> int:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    process.prepare_threads()
    process.quiet_logs(verbose=False)
    if not _on_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if job.plain_malloc:
            process.keep_freed_memory = lambda: None  # type: ignore[method-assign]
        process.keep_freed_memory()
    figures = run_colograd(job) if job.trainer.startswith("colograd") else run_trl(job)
    Path(job.out).write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # An engine that another package holds may not end.
