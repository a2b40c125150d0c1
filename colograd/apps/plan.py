"""``colograd plan`` shows a model's memory per GPU for each sharding strategy, without loading weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime import process, registry
from ..runtime.importing import is_import_path

if TYPE_CHECKING:
    from ..memory.description import RunDescription

GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    from ..memory.choice import auto, fits

    process.quiet_logs(False)
    options = parse(argv)
    run = described(options)
    if options.offload_optimizer == "auto":
        registry.require("offload", "`offload_optimizer: auto`")
        from ..extensions.offload.ways import WAYS, cheapest

        kept = cheapest(run, auto(run))
        run = dataclasses.replace(run, **kept)
        name = next(name for name, changes in WAYS.items() if changes == kept) if kept else "nothing"
        options.notes["offload_optimizer"] = f"offload_optimizer: auto keeps on the host: {name}"
    print(*report(run, options), sep="\n")
    return 0 if fits(run, auto(run)) else 1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from ..config.policy import checkpointing_way

    parser = _parser()
    options, flags = parser.parse_known_args(argv)
    if options.config is not None:
        found, assumed = recipe_options(["--config", str(options.config), *flags])
        parser.set_defaults(**found)
        options, _ = parser.parse_known_args(argv)
        options.notes = {name: line for name, line in assumed.items() if getattr(options, name) == found[name]}
    elif flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if not options.model_name_or_path:
        raise ValueError("--model is missing: give a folder with a config.json, a Hub id, or a recipe (--config).")
    given = {"--gpus": options.gpus, "--gpu-memory": options.gpu_memory}
    if missing := " and ".join(flag for flag, value in given.items() if value is None):
        import torch

        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        if not sizes:
            remedy = "set --gpus and --gpu-memory (such as --gpus 8 --gpu-memory 80)"
            raise ValueError(f"this machine has no GPU, so {missing} can't be read from it: {remedy}.")
        options.gpus = len(sizes) if options.gpus is None else options.gpus
        options.gpu_memory = min(sizes) / GIB if options.gpu_memory is None else options.gpu_memory
    _check(options)
    way = checkpointing_way(options.gradient_checkpointing)
    options.checkpointing = int(way is not False)
    options.offloads_activations = options.offload_activations or way == "offload"
    return options


def recipe_options(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert the command line of `colograd train` to options of `colograd plan`.

    Return the options, and a line to print for each option whose value is assumed.
    """
    import torch

    from ..config.parse import planned_settings
    from ..config.policy import default_dtype, resolve_optimizer

    settings, assumed = planned_settings(argv), {}
    for name in ("model_init_kwargs", "vllm_engine_kwargs", "teacher_model_init_kwargs"):
        value = settings[name]
        settings[name] = dict(json.loads(value) if isinstance(value, str) else value or {})
    loading = settings["model_init_kwargs"]
    dtype = loading.get("dtype") or loading.get("torch_dtype") or settings["dtype"] or default_dtype(settings["optim"])
    if dtype == "auto":
        dtype = "bfloat16"
        assumed["dtype"] = "dtype: auto is planned as bfloat16; --dtype float32 plans float32"
    completion = max(settings["max_completion_length"] or 0, settings["max_completion_length_eval"] or 0)
    prompt = settings["max_prompt_tokens"]
    if prompt is None:  # The plan doesn't read the data, so prompts are assumed to be as long as completions.
        prompt = completion
        if completion and not settings["vllm_max_model_length"]:
            line = f"prompts are planned with up to {prompt:,} tokens, as no limit is given (--context)"
            assumed["vllm_max_model_length"] = line
    dtype, budget = str(dtype).removeprefix("torch."), settings["max_tokens_per_microbatch"]
    # Some settings count completions per generation over all GPUs, others per engine. The plan keeps this difference.
    accumulated, together = settings["gradient_accumulation_steps"], settings["steps_per_generation"] or 1
    batch, generation = settings["per_device_train_batch_size"], settings["generation_batch_size"] or 0
    if (prompts := settings["prompts_per_step"]) is not None:
        counted, count = "sequences", max(prompts * settings["num_generations"] * together, generation)
    elif generation > batch * accumulated:
        counted, count = "sequences", generation
    else:
        counted, count = "sequences_per_engine", batch * max(accumulated, together)
    options = settings | {
        "dtype": dtype,
        "optim": resolve_optimizer(settings["optim"], getattr(torch, dtype, None)),
        "lora_r": settings["lora_r"] if settings["use_peft"] else 0,
        "bits": 4 if settings["load_in_4bit"] else 8 if settings["load_in_8bit"] else None,
        "vllm_max_model_length": settings["vllm_max_model_length"] or prompt + completion or None,
        "max_tokens_per_microbatch": 0 if budget in (None, "auto") else int(budget),
        counted: math.ceil(count / (settings["carry_over"] or 1)),
    }
    # Settings that are None get the plan's defaults, except lora_target_modules: there None means peft's default.
    kept = {name: value for name, value in options.items() if value is not None or name == "lora_target_modules"}
    return kept, assumed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colograd plan", description="A model's memory on each GPU, with each strategy of sharding. Loads nothing."
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="RECIPE", help="read the other options from it, and from flags as for training")
    add("--model", dest="model_name_or_path", metavar="MODEL", help="a folder with a config.json, or a Hub id")
    add("--gpus", type=int, help="number of GPUs, one rank each; default: this machine's")
    add("--gpu-memory", type=float, metavar="GIB", help="memory of each GPU; default: this machine's")
    size: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--tensor-parallel", dest="vllm_tensor_parallel_size", **size, default=1, help="ranks per engine; default: 1")
    add("--sequence-parallel", dest="sequence_parallel_size", **size, default=1, help="ranks per row; default: 1")
    add("--context", dest="vllm_max_model_length", **size, default=8192, help="tokens of a sequence; default: 8192")
    add("--completion", dest="max_completion_length", **size, help="tokens; default: half of the context")
    add("--group", dest="num_generations", **size, default=8, help="completions per prompt; default: 8")
    add("--sequences", **size, help="completions of a generation, over all GPUs; default: 64 for each engine")
    add("--max-tokens", dest="max_tokens_per_microbatch", **size, default=0, help="tokens of a row; default: what fits")
    add("--lora-rank", dest="lora_r", **size, default=0, help="train an adapter; without a recipe on all linear layers")
    add("--bits", type=int, choices=(4, 8), help="quantise the base below the adapter (load_in_4bit, load_in_8bit)")
    add("--nested", dest="use_bnb_nested_quant", action="store_true", help="with --bits 4, quantise the scales too")
    add("--served", dest="weights", action="store_const", const="shared", help="the engine reads the quantised base")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of policy and engine; default: bfloat16")
    add("--optim", default="adamw_split", help="default: adamw_split")
    add("--reference", dest="beta", action="store_const", const=1.0, help="a frozen copy for a KL term (beta > 0)")
    add("--teacher", dest="teacher_model_name_or_path", metavar="MODEL", help="to distil from, in the policy's dtype")
    switch: dict[str, Any] = {"action": "store_true"}
    add("--sleep", dest="vllm_enable_sleep_mode", **switch, help="the KV cache makes room for training")
    ways: dict[str, Any] = {"const": "sampling", "default": "none", "choices": ("none", "sampling", "stream", "auto")}
    offloads = "the optimizer state is on the host while the engine samples, or passes through the GPU in each step"
    add("--offload-optimizer", nargs="?", **ways, help=offloads)
    add("--offload-gradients", **switch, help="sums of gradients are in host memory")
    add("--offload-activations", **switch, help="gradient_checkpointing: offload")
    add("--no-checkpointing", dest="gradient_checkpointing", action="store_false", help="gradient_checkpointing: false")
    add("--bus", type=float, metavar="GB/S", help="speed of one GPU's bus, each way at once; default: 50 (PCIe 5)")
    add("--trust-remote-code", action="store_true", help="allow code that comes with the model")
    parser.set_defaults(
        bus=50.0, sequences_per_engine=64, weights="auto", beta=0.0, offload_reference=False,
        offload_teacher=False, teacher_model_init_kwargs={}, fsdp_reshard_after_forward=True, fsdp_offload_params=False,
        vllm_engine_kwargs={}, vllm_gpu_memory_utilization=None, sharding="none", lora_target_modules=["all-linear"],
        lora_dropout=0.0, notes={},
    )  # fmt: skip
    return parser


def _check(options: argparse.Namespace) -> None:
    from ..config.conflicts import check_conflicts
    from ..config.sharding import TENSOR

    counts = {
        "--gpus": options.gpus, "--gpu-memory": options.gpu_memory, "--context": options.vllm_max_model_length,
        "--tensor-parallel": options.vllm_tensor_parallel_size, "--group": options.num_generations,
        "--bus": options.bus, "--sequence-parallel": options.sequence_parallel_size,
    }  # fmt: skip
    for flag, count in counts.items():
        if count <= 0:
            raise ValueError(f"{flag} is {count:g}, but must be above 0: give the real number.")
        if flag in ("--tensor-parallel", "--sequence-parallel") and options.gpus % count:
            choices = ", ".join(str(n) for n in range(1, options.gpus + 1) if options.gpus % n == 0)
            raise ValueError(f"{flag} is {count}, but must divide --gpus ({options.gpus}): choose one of {choices}.")
    parts = options.vllm_tensor_parallel_size if options.sharding in TENSOR else 1
    if options.gpus % (options.sequence_parallel_size * parts):
        raise ValueError(
            f"--sequence-parallel ({options.sequence_parallel_size}) times --tensor-parallel ({parts}) must divide "
            f"--gpus ({options.gpus}), because the recipe's sharding is {options.sharding!r}: choose other numbers."
        )
    check_conflicts(options, about="sequence_parallel_size")
    if options.bits and not options.lora_r:
        raise ValueError(
            f"--bits is {options.bits}, but a quantised base needs an adapter to train: give --lora-rank, e.g. 16."
        )


def described(options: argparse.Namespace) -> RunDescription:
    import torch

    from ..config import ModelConfig
    from ..engine.arguments import check_parts
    from ..memory.description import Devices, Workload, describe_run
    from ..policy.loading import outline, to_pack, with_adapter
    from ..policy.row_proof import obstacle
    from ..policy.supported import check_planned, check_shared_rows

    per_engine = options.vllm_tensor_parallel_size
    model = outline(options.model_name_or_path, getattr(torch, options.dtype), options.trust_remote_code)
    check_parts(model.config, per_engine, options.gpus)
    context, completion = options.vllm_max_model_length, options.max_completion_length
    longest = min(context, getattr(model.config.get_text_config(), "max_position_embeddings", None) or context)
    if longest < context:
        options.notes["vllm_max_model_length"] = f"the context is the model's, {longest:,} tokens, not {context:,}"
    completion = max(1, longest // 2) if completion is None else completion
    options.vllm_max_model_length, options.max_completion_length = longest, completion
    if not 0 < completion < longest:
        raise ValueError(
            f"--completion is {completion}, but must be from 1 to {longest - 1}, because the context ({longest} "
            "tokens) also holds the prompt: choose a number in this range."
        )
    settings: dict[str, Any] = {}
    if options.bits or getattr(model.config, "quantization_config", None) is not None:
        registry.require("quantized", "a quantised base", "choose another model")
        from ..extensions.quantized.checkpoints import check_method, saved_in

        if saved := saved_in(model.config):
            check_method(saved, "The model's configuration")
        nested = {"bnb_4bit_use_double_quant": options.use_bnb_nested_quant}
        settings = saved or {f"load_in_{options.bits}bit": True, **nested}
    check_planned(model.config, per_engine)
    check_shared_rows(model, options.sequence_parallel_size, obstacle(model))
    packed, reference = to_pack(model, settings), 0
    shared = options.weights != "copied" and not is_import_path(options.weights)
    if options.lora_r:
        fields = {field.name for field in dataclasses.fields(ModelConfig)}
        chosen = {name: value for name, value in vars(options).items() if name in fields} | {"use_peft": True}
        model = with_adapter(model, ModelConfig(**chosen).peft_config())
        shared = shared and not registry.hooks("adapter")[0](model).why_merged
    elif options.beta > 0 and not options.offload_reference:
        reference = sum(packed.get(p, p.nbytes) for p in model.parameters())
    given = options.teacher_model_init_kwargs
    names = None if options.offload_teacher else options.teacher_model_name_or_path
    dtype = getattr(torch, str(given.get("dtype") or options.dtype).removeprefix("torch."), torch.bfloat16)
    bits = {name: True for name in ("load_in_4bit", "load_in_8bit") if given.get(name)}
    teacher = 0  # Bytes of all teachers on the GPU. A LoRA teacher is planned as if it were a whole model.
    for name in names.values() if isinstance(names, dict) else filter(None, [names]):
        other = outline(name, dtype, options.trust_remote_code)
        of_other = to_pack(other, given.get("quantization_config") or bits)
        teacher += sum(of_other.get(parameter, parameter.nbytes) for parameter in other.parameters())
    engines, memory = options.gpus // per_engine, int(options.gpu_memory * GIB)
    sequences = -(-(options.sequences or options.sequences_per_engine * engines) // engines)
    devices, work = Devices(options.gpus, memory, memory), (longest, sequences, options.max_tokens_per_microbatch)
    run = describe_run(
        options, model, devices, Workload(*work), shared=shared, reference=reference, teacher=teacher, to_pack=packed
    )
    return dataclasses.replace(run, strategies=(options.sharding,)) if is_import_path(options.sharding) else run


def report(run: RunDescription, options: argparse.Namespace) -> Iterator[str]:
    from ..memory.choice import auto, best_plan, fits, remedies

    sizes, name = run.sizes, Path(options.model_name_or_path).name
    packed = f" on a quantised base of {sizes.packed / GIB:,.1f} GiB" if sizes.packed else ""
    adapter = f", {sizes.trained / 1e6:,.1f} M of them trained (LoRA){packed}" if options.lora_r else ""
    engine = "an engine each" if run.ranks_per_engine == 1 else f"an engine for {run.ranks_per_engine} of them"
    yield (
        f"{name}: {sizes.elements / 1e9:,.2f} billion parameters{adapter}, {options.dtype}, {options.optim}; on "
        f"{options.gpus} GPU(s) of {options.gpu_memory:.4g} GiB, {engine}"
    )
    yield (
        f"sequences of up to {run.length:,} tokens, {run.sequences:,} per engine and generation; their KV cache would "
        f"take {run.need.wanted / GIB:,.1f} GiB per GPU"
    )
    yield from options.notes.values()
    if run.ranks_per_sequence > 1:
        yield f"{run.ranks_per_sequence} GPUs share out the tokens of each row; activations are those of one GPU's part"
    if run.further:
        yield "activations include a vision tower's, as if each prompt token were an image token; the engine's don't"
    yield ""
    lines: list[Sequence[str]] = [
        ("GiB per GPU", "engine", "policy", "gradients", "optimizer", "exchange", "activations", "of tokens",
         "kept free", "left for KV", "KV tokens", "fits"),
    ]  # fmt: skip
    for strategy in run.strategies if options.gpus > 1 else run.strategies[:1]:
        plan = best_plan(run, strategy)
        weights = plan.policy_weights + plan.reference + plan.teacher
        parts = gibs(plan.engine_weights, weights, plan.gradients, plan.optimizer, plan.exchange, plan.activations)
        tokens, fitting = f"{max(plan.room, 0) // run.need.per_token:,}", "yes" if fits(run, strategy) else "no"
        lines.append([strategy, *parts, f"{plan.tokens:,}", *gibs(plan.margin, plan.room), tokens, fitting])
    yield from aligned(lines)
    yield ""
    strategy = auto(run)
    takes, finds = f"auto takes {strategy!r}", "auto finds none that fits"
    if is_import_path(strategy):
        takes, finds = f"{strategy} fits, planned like none", f"{strategy}, planned like none, doesn't fit"
    yield f"sharding: {takes if fits(run, strategy) else f'{finds}; {remedies(run, strategy)}'}"
    if options.gpus == 1 and "offload" in registry.installed():
        yield ""
        yield from one_gpu(run, options.bus)


def one_gpu(run: RunDescription, speed: float) -> Iterator[str]:
    """Yield lines for one GPU: a table of ways to offload training state to host memory, and the fastest that fits."""
    from ..extensions.offload.ways import ways

    found = [*ways(run)]
    lines: list[Sequence[str]] = [
        ("on the host", "gradients", "optimizer", "activations", "of tokens", "left for KV", "bus in", "bus out",
         "seconds", "fits"),
    ]  # fmt: skip
    for way in found:
        plan, seconds = way.plan, f"{way.seconds(speed):.1f}"
        parts = (*gibs(plan.gradients, plan.optimizer, plan.activations), f"{plan.tokens:,}")
        moved = (*gibs(plan.room, way.to_gpu, way.to_host), seconds)
        lines.append((way.name, *parts, *moved, "yes" if way.fits else "no"))
    yield from aligned(lines)
    best = min((way for way in found if way.fits), key=lambda way: way.seconds(speed), default=None)
    which = f"the fastest way that fits is: {best.name}" if best else "none of these ways fits"
    yield (
        f"{which}. Seconds are one step's transfers, with all {run.sequences:,} sequences at full length, at {speed:g} "
        "GB/s each way (--bus; `colograd doctor` measures it), without overlap with computation"
    )


def gibs(*sizes: int) -> list[str]:
    return [f"{size / GIB:.1f}" for size in sizes]


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for first, *others in lines:
        rest = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *rest])
