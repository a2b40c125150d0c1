"""``colograd plan``: what a model needs on each GPU in each way of sharding, for machines that one doesn't have.

    colograd plan --model Qwen/Qwen2.5-7B-Instruct --gpus 8 --gpu-memory 80
    colograd plan --config recipes/X.yaml --gpus 8 --gpu-memory 80 [--any_flag value]

A recipe says what else would be asked for by options, and an option that is given wins (`recipe_options`). Without
--gpus and --gpu-memory they are this machine's.

Nothing is loaded: the model's ``config.json`` gives the shapes of its parameters. The figures are those of the table
at the start of a run (`colograd.memory`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime import process
from . import recipe_options

if TYPE_CHECKING:
    from ..memory.choice import Run
    from ..memory.table import MemoryPlan

GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status, 2 for bad input."""
    process.quiet_logs(False)
    try:
        options = parse(argv)
        lines = [*told(run_of(options), options)]
    except ValueError as error:
        print(f"colograd plan: error: {error}", file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with what a recipe and this machine say of those that aren't given.

    Raises:
        ValueError: bad input.
    """
    parser = _parser()
    options, flags = parser.parse_known_args(argv)
    if options.config is not None:
        found, notes = recipe_options.read(["--config", str(options.config), *flags])
        told = [line for name, line in notes.items() if getattr(options, name) == parser.get_default(name)]
        parser.set_defaults(**found, notes=told)
        options, _ = parser.parse_known_args(argv)
    elif flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if not options.model:
        raise ValueError("--model is missing: give a folder with a config.json, a Hub id, or a recipe (--config).")
    if options.gpus is None or options.gpu_memory is None:
        _take_own_gpus(options)
    _check(options)
    return options


def _take_own_gpus(options: argparse.Namespace) -> None:
    """Plan for this machine's GPUs, as far as none are named.

    Raises:
        ValueError: it has none.
    """
    import torch

    found = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    if not found:
        given = {"--gpus": options.gpus, "--gpu-memory": options.gpu_memory}
        missing = " and ".join(flag for flag, value in given.items() if value is None)
        raise ValueError(
            f"this machine has no GPU from which to take {missing}: say which GPUs, such as --gpus 8 --gpu-memory 80."
        )
    options.gpus = len(found) if options.gpus is None else options.gpus
    options.gpu_memory = min(found) / GIB if options.gpu_memory is None else options.gpu_memory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colograd plan", description="What a model needs on each GPU, in each way of sharding. Nothing is loaded."
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="RECIPE", help="take from it, and from flags as for training, what isn't given")
    add("--model", help="a folder with a config.json, or a Hub id")
    add("--gpus", type=int, help="ranks: one per GPU; default: this machine's")
    add("--gpu-memory", type=float, metavar="GIB", help="of each GPU; default: this machine's")
    add("--tensor-parallel", type=int, default=1, metavar="T", help="ranks that share one engine; default: 1")
    add("--context", type=int, default=8192, help="tokens of the longest prompt and completion together; default: 8192")
    add("--completion", type=int, help="tokens of the longest completion; default: half of the context")
    add("--group", type=int, default=8, help="completions per prompt; default: 8")
    add("--sequences", type=int, help="completions of a generation, over all GPUs; default: 64 for each engine")
    add("--max-tokens", type=int, default=0, help="of a micro-batch; default: 16384, or fewer where they don't fit")
    add("--lora-rank", type=int, default=0, metavar="R", help="train an adapter on all linear layers")
    add("--bits", type=int, choices=(4, 8), help="quantise the base below the adapter (load_in_4bit, load_in_8bit)")
    add("--nested", action="store_true", help="with --bits 4, quantise the scales too (use_bnb_nested_quant)")
    add("--served", action="store_true", help="the engine reads the quantised base too (weights: shared)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of policy and engine; default: bfloat16")
    add("--optim", default="adamw_split", help="default: adamw_split")
    add("--reference", action="store_true", help="a frozen copy for the KL term (beta above 0)")
    add("--sleep", action="store_true", help="vllm_enable_sleep_mode: the KV cache is away while the policy trains")
    add("--offload-optimizer", action="store_true", help="its state is on the host while the engine samples")
    add("--no-checkpointing", action="store_true", help="gradient_checkpointing: false")
    add("--trust-remote-code", action="store_true", help="allow code that comes with the model")
    parser.set_defaults(weights="auto", sequences_per_engine=64, notes=[])  # what only a recipe says otherwise
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("gpus", "gpu_memory", "tensor_parallel", "context", "group"):
        if getattr(options, name) <= 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(options, name):g}, but must be above 0: give how many there are.")
    if options.gpus % options.tensor_parallel:
        divisors = [str(n) for n in range(1, options.gpus + 1) if options.gpus % n == 0]
        raise ValueError(
            f"--tensor-parallel is {options.tensor_parallel}, but must divide --gpus ({options.gpus}): choose one of "
            f"{', '.join(divisors)}."
        )
    if options.bits and not options.lora_rank:
        raise ValueError(
            f"--bits is {options.bits}, but only an adapter is trained on a quantised base: give --lora-rank (16, say)."
        )
    if options.completion is not None and not 0 < options.completion < options.context:
        raise ValueError(
            f"--completion is {options.completion}, but must leave room for a prompt in --context ({options.context}): "
            "lower it."
        )


def run_of(options: argparse.Namespace) -> Run:
    """The run that the options describe, on empty GPUs."""
    import torch

    from ..engine.arguments import check_parts
    from ..memory.choice import AVAILABLE, WHOLE, Run
    from ..memory.shape import Lengths, Shape
    from ..memory.tower import Tower
    from ..memory.ways import PolicySizes
    from ..policy.outline import outline, to_pack, with_adapter
    from ..policy.supported import check_planned

    dtype = getattr(torch, options.dtype)
    model = outline(options.model, dtype, options.trust_remote_code)
    per_engine = options.tensor_parallel
    check_parts(model.config, per_engine, options.gpus)
    settings = _quantization(options, model.config)
    check_planned(model.config, per_engine)
    packed = to_pack(model, settings)
    if options.lora_rank:
        model = with_adapter(model, options.lora_rank)
    engines, memory = options.gpus // per_engine, int(options.gpu_memory * GIB)
    sequences = -(-(options.sequences or options.sequences_per_engine * engines) // engines)
    completion = options.completion or max(1, options.context // 2)
    sizes = PolicySizes.of(model, options.optim, dtype.itemsize, packed)
    return Run(
        device="a GPU",
        on_gpu=True,
        total=memory,
        available=memory,
        ranks=options.gpus,
        ranks_per_engine=per_engine,
        shape=Shape.of(model.config),
        sizes=sizes,
        engine_itemsize=dtype.itemsize,
        cache_itemsize=dtype.itemsize,
        length=options.context,
        sequences=sequences,
        running=sequences,
        lengths=Lengths(max(1, options.context - completion), completion, options.group),
        tokens=options.max_tokens,
        checkpointing=not options.no_checkpointing,
        shared=options.weights != "copied",
        served=options.served and sizes.packed > 0,
        sleeps=options.sleep,
        offloads=options.offload_optimizer,
        reference=sizes.weights if options.reference and not options.lora_rank else 0,
        ways=WHOLE if options.lora_rank or options.weights not in ("auto", "gathered") else AVAILABLE,
        tower=Tower.of(model),
    )


def _quantization(options: argparse.Namespace, model_config: Any) -> dict[str, Any]:
    """How the base is quantised, as in a checkpoint's config.json: as asked, or already; empty: it isn't.

    Raises:
        ValueError: in a way that can't be trained.
    """
    from ..policy.quantized import check_method, saved_in

    if saved := saved_in(model_config):
        check_method(saved, "The model's configuration")
        return saved
    return {f"load_in_{options.bits}bit": True, "bnb_4bit_use_double_quant": options.nested} if options.bits else {}


def told(run: Run, options: argparse.Namespace) -> Iterator[str]:
    """The lines that are printed."""
    from ..memory.choice import auto, fits, remedies

    sizes, name = run.sizes, Path(options.model).name
    packed = f" on a quantised base of {sizes.packed / GIB:,.1f} GiB" if sizes.packed else ""
    adapter = f", {sizes.trained / 1e6:,.1f} M of them trained (LoRA){packed}" if options.lora_rank else ""
    engine = "an engine each" if run.ranks_per_engine == 1 else f"an engine for {run.ranks_per_engine} of them"
    yield (
        f"{name}: {sizes.elements / 1e9:,.2f} billion parameters{adapter}, {options.dtype}, {options.optim}; on "
        f"{run.ranks} GPU(s) of {options.gpu_memory:.4g} GiB, {engine}"
    )
    yield (
        f"sequences of up to {run.length:,} tokens, {run.sequences:,} per engine and generation; their KV cache would "
        f"take {run.need.wanted / GIB:,.1f} GiB per GPU"
    )
    yield from options.notes
    if run.tower is not None:
        yield "activations include a vision tower's, as if all of a prompt's tokens were pictures'; the engine's don't"
    yield ""
    yield from table([*rows(run)])
    yield ""
    if run.ranks_per_engine > 1:
        yield "* isn't available in this version: the policy cut as its engine is, in its tensors"
    taken = auto(run)
    if fits(run, taken):
        yield f"sharding: auto takes {taken!r}"
    else:
        yield f"sharding: auto finds none that fits; {remedies(run, taken)}"


def rows(run: Run) -> Iterator[tuple[str, MemoryPlan, bool]]:
    """Each way's name, its plan, and whether it fits; what this version doesn't have with a star."""
    import dataclasses

    from ..memory.choice import fits, plan_of

    for way in run.ways if run.ranks > 1 else run.ways[:1]:
        yield way, plan_of(run, way), fits(run, way)
    if run.ranks_per_engine > 1:
        laid_out = dataclasses.replace(run, in_layout=True)
        for way in ("none", "optimizer", "gradients"):
            yield f"{way}, in its layout *", plan_of(laid_out, way), fits(laid_out, way)


HEADS = (
    "GiB per GPU", "engine", "policy", "gradients", "optimizer", "exchange", "activations", "of tokens", "kept free",
    "left for KV", "KV tokens", "fits",
)  # fmt: skip


def table(rows: Sequence[tuple[str, MemoryPlan, bool]]) -> Iterator[str]:
    """A line per way: what each part takes at its peak, what is left for the KV cache, and its tokens."""
    cells = [HEADS, *(_cells(way, plan, fitting) for way, plan, fitting in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    for first, *others in cells:
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *rest])


def _cells(way: str, plan: MemoryPlan, fitting: bool) -> tuple[str, ...]:
    parts = (
        plan.engine_weights,
        plan.policy_weights + plan.reference,
        plan.gradients,
        plan.optimizer,
        plan.exchange,
        plan.activations,
    )
    return (
        way,
        *(f"{part / GIB:.1f}" for part in parts),
        f"{plan.tokens:,}",
        f"{plan.margin / GIB:.1f}",
        f"{plan.room / GIB:.1f}",
        f"{max(plan.room, 0) // plan.kv_per_token:,}",
        "yes" if fitting else "no",
    )
