"""Runs of a tiny trainer on the device of `host_cuda`. Each takes other branches of a GPU.

    python tests/helpers/host_cuda_cases.py FOLDER CASE ...      # prints a dictionary per case

FOLDER keeps the random models for the next call. With a launcher's variables all ranks run this script.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cuda_places
import host_cuda

GIB = host_cuda.GIB
BASE: dict[str, Any] = {
    "max_steps": 3, "max_tokens_per_microbatch": 256, "prompts_per_step": 2, "reward_workers": 0,
    "lr_scheduler_type": "constant",
    "vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_memory_bytes": 2**24},
}  # fmt: skip
BF16: dict[str, Any] = {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}  # resumed for the third
STREAMED: dict[str, Any] = {
    "offload_optimizer": "stream",
    "offload_gradients": True,
    "gradient_checkpointing": "offload",
}
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "loss_eval": True}
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
REFERENCE: dict[str, Any] = {"beta": 0.1, "offload_reference": True, "sync_ref_model": True, "ref_model_sync_steps": 1}

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
EARLY: dict[str, Any] = {  # groups are trained before all are sampled
    "overlap": "auto", "prompts_per_step": 8, "max_tokens_per_microbatch": 64, "max_completion_length": 48,
    "generation_kwargs": {"stop_token_ids": [*range(3, 256, 8)]},
}  # fmt: skip

# Changes of `BASE`. Besides the fields of `GRPOConfig`: `model` (a name of `_model`), `lora` (a LoraConfig's fields),
# `quantised`, `teacher`, `images`; `nats` replaces `ROUNDING`, and `waits` adds to `WAITS`.
CASES: dict[str, dict[str, Any]] = {
    "float32": {"model": "untied"},
    "bfloat16": BF16,
    "untied": {**BF16, "model": "untied"},
    "budget": {**BF16, "max_tokens_per_microbatch": "auto"},
    "copied": {**BF16, "weights": "copied"},
    "streamed": {**BF16, **STREAMED},
    "sampling": {**BF16, "offload_optimizer": "sampling", "gradient_checkpointing": True},
    "muon": {**BF16, "optim": "muon"},
    "reference": {**BF16, **REFERENCE},
    "teacher": {**BF16, "teacher": "llama", "offload_teacher": True},
    "teacher's tokens": {
        **BF16, "teacher": "llama", "distillation_kl": "top_k", "distillation_top_k": 4,
        "waits": {"policy/second_models.py _top"},
    },
    "dropout": {**BF16, "model": "dropout", "disable_dropout": True},
    "experts": {**BF16, "model": "qwen3_moe", "nats": 0.1},  # of a token between two experts
    # in each micro-batch transformers asks whether a hybrid's mask hides a token, and looks for images that are padding
    "hybrid": {"model": "lfm2", "waits": {"policy/logprobs.py run_body"}},
    "images": {"model": "idefics3", "images": True, "waits": {"extensions/images/towers.py _features"}},
    "lora": {**BF16, "lora": LORA},
    "merged": {**BF16, "lora": LORA, "weights": "copied"},
    "dora": {**BF16, "lora": {**LORA, "use_dora": True}},
    "qlora": {**BF16, "lora": LORA, "quantised": NF4},
    "saved": {**BF16, **SAVED, "save_in_background": True},
    "streamed saved": {**BF16, **SAVED, **STREAMED},
    "overlap": {**BF16, "overlap": "auto"},
    "evaluated": {**BF16, **EVALUATED},
    "heads": {**BF16, "cast_lm_head_to_fp32": True, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
    "iterations": {**BF16, "num_iterations": 2, "max_steps": 4},
    "carried": {
        **BF16, "carry_over": 0.6, "nats": math.inf, "generation_kwargs": {"stop_token_ids": [*range(3, 256, 8)]},
        "max_completion_length": 48, "vllm_importance_sampling_mode": "token_truncate",
    },
    "asleep": {**BF16, "vllm_enable_sleep_mode": True},
    "drafts": {
        **BF16, "vllm_engine_kwargs": {"speculative_config": NGRAM},
        # each step of the engine waits for the tokens that its drafts are compared with
        "waits": {f"extensions/drafts/engine/speculation.py SeededSpeculation.{name}" for name in (
            "_sample", "_sample.<locals>.<listcomp>", "forward", "forward.<locals>.<genexpr>",
        )},
    },
    "planned": {
        **BF16, "sharding": "auto", "offload_optimizer": "auto", "vllm_engine_kwargs": {"enforce_eager": True},
        "reward_workers": None,
    },
    # several branches at once, for the suite that runs each time
    "all on the host": {**BF16, **SAVED, **STREAMED, **EVALUATED, **REFERENCE, "save_in_background": True},
    "lora and teacher": {**BF16, **EVALUATED, "lora": LORA, "teacher": "llama", "offload_teacher": True,
                         "offload_optimizer": "sampling", "vllm_enable_sleep_mode": True},
    # on two ranks
    "none": {**BF16, "sharding": "none"},
    "optimizer": {**BF16, "sharding": "optimizer"},
    "gradients": {**BF16, "sharding": "gradients"},
    "fsdp": {**BF16, "sharding": "fsdp"},
    "fsdp saved": {
        **BF16, **SAVED, "sharding": "fsdp", "fsdp_offload_params": True,
        # parameters of ordinary host memory: `?` is FSDP's thread of the backward
        "waits": {"?", "extensions/fsdp/rows.py gathered", "extensions/fsdp/strategy.py FullySharded.state_dict",
                  "extensions/fsdp/strategy.py FullySharded._register.<locals>.take"},
    },
    "tensor": {**BF16, "sharding": "tensor", "model": "two key heads", "vllm_tensor_parallel_size": 2},
    "sequence": {**BF16, "sequence_parallel_size": 2},
    "early on ranks": {**BF16, **EARLY},
    "gradients on the host": {**BF16, **SAVED, "sharding": "gradients", "offload_optimizer": "stream",
                              "offload_gradients": True},
}  # fmt: skip
RANKS = (
    "none", "optimizer", "gradients", "fsdp", "fsdp saved", "tensor", "sequence", "early on ranks",
    "gradients on the host",
)  # fmt: skip
DIFFERENCE = "sampling/sampling_logp_difference/max"
ROUNDING = {"float32": 1e-5, "bfloat16": 0.03}  # nats between sampler and trainer, at most
LEFT = 2**19  # bytes that the process keeps after a trainer has closed, at most
# Functions that may let the host wait for the device during a run. None of them runs between two tokens. vLLM's waits
# don't count, since its runner here is the one for CPUs.
WAITS = {
    # once in a step, or less often
    "loop.py Loop._log_evaluate_save", "loop.py Loop._prepare", "extensions/offload/adamw.py OptimizerOffload._wait",
    "reporting/metrics.py PhaseTimes._now", "reporting/metrics.py numbers",
    "extensions/offload/host_stream.py HostSums.squared_norm", "sharding/strategy.py squared_norm",
    "sharding/strategy.py ShardingStrategy.sum_over_parts",
    "extensions/tensor_parallel/strategy.py TensorStrategy.sum_of_squares", "trainer.py GRPOTrainer.training_step",
    "extensions/recording/recorder.py by_completion",
    "loop.py Loop.run", "extensions/recording/utilisation.py peak_flops",
    # with a reference that follows the policy, and with checkpoints
    "checkpoint/writing.py HostFiles.take", "extensions/reference/model.py FrozenCopy.mix",
    "rollout/store.py digest_of",
    "training/checkpointer.py Checkpointer._write_contents", "weights/sync.py state_dict_on_host",
}  # fmt: skip
MEASURED = ("loss", "grad_norm", "reward", DIFFERENCE, "eval_reward", "eval_loss")


def _model(kind: str, folder: Path) -> Path:
    """Return the folder of a random model, which ranks and later calls share."""
    import tiny
    import tiny_images

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place = folder / kind.replace(" ", "-")
        if not (place / "config.json").exists():
            if kind == "untied":
                tiny.make_model(place, family="qwen2", tied=False)
            elif kind == "two key heads":
                tiny.make_model(place, keys=2)
            elif kind == "dropout":
                config = tiny.make_model(place) / "config.json"
                config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.1}))
            elif kind in tiny_images.FAMILIES:
                tiny_images.make_model(place, kind)
            else:
                tiny.make_model(place, family=kind)
    return place


def _trainer(changes: dict[str, Any], models: Path, output: Path) -> Any:
    import tiny
    import tiny_images
    from peft import LoraConfig

    from colograd import GRPOTrainer

    changes, more = dict(changes), dict[str, Any]()
    model, prompts = _model(changes.pop("model", "llama"), models), tiny.prompts
    if changes.pop("images", False):
        prompts = tiny_images.prompts
    if lora := changes.pop("lora", None):
        more["peft_config"] = LoraConfig(**lora)
    if quantised := changes.pop("quantised", None):
        changes["model_init_kwargs"] = changes["model_init_kwargs"] | {"quantization_config": quantised}
    if teacher := changes.pop("teacher", None):
        changes["teacher_model_name_or_path"] = str(_model(teacher, models))
    if "eval_strategy" in changes:
        more["eval_dataset"] = prompts(2)
    config = tiny.config(output, **changes)
    return GRPOTrainer(model=str(model), reward_funcs=tiny.vowels, args=config, train_dataset=prompts(8), **more)


@contextlib.contextmanager
def _forwards_counted(counts: dict[str, int]) -> Iterator[None]:
    """Count the forwards of transformers' models by the device of their tokens."""
    import torch

    def count(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            kind = inputs[0].device.type
            counts[kind] = counts.get(kind, 0) + 1

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def run(name: str, models: Path, output: Path, record: Any = None) -> dict[str, Any]:
    """Train, save and resume if the case saves, and return measurements. On a real GPU ``record`` replaces the
    device's."""
    import torch

    real, changes = record is not None, BASE | CASES[name]
    record = record or host_cuda.install()
    changes = {name: value for name, value in changes.items() if name not in ("nats", "waits")}
    gc.collect()
    torch.cuda.synchronize()
    record.clear()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    result: dict[str, Any] = {"case": name}
    trainer = None
    result["forwards"] = {}
    try:
        with _forwards_counted(result["forwards"]):
            trainer = _trainer(changes, models, output)
        result["built"] = round(time.perf_counter() - started, 1)
        record.waits.clear()
        complaints: list[str] = []
        trainer.console.warn = complaints.append
        trainer.train()
        result["complaints"] = [line for line in complaints if "please report this" in line]
        result["steps"] = [{key: entry[key] for key in MEASURED if key in entry} for entry in trainer.state.log_history]
        result["waits"] = _listed(record.waits)
        trainer.publish()
        result["differing"] = trainer.weights.differing()
        if "save_strategy" in changes:
            trainer.close()
            trainer = _trainer({**changes, "max_steps": 3}, models, output)
            trainer.train(resume_from_checkpoint=True)
            result["resumed"] = trainer.state.global_step
        result["digest"] = _digest(trainer)
    except Exception as error:
        result["error"] = "".join(traceback.format_exception(error))[-6000:]
    if trainer is not None:
        with contextlib.ExitStack() as closing:
            closing.callback(trainer.close)
    trainer = None
    gc.collect()
    torch.cuda.synchronize()
    if real:
        torch._C._cuda_clearCublasWorkspaces()  # frees 32 MiB for each stream
    return result | {
        "races": _listed(record.races), "kernels": dict(record.kernels), "peak": torch.cuda.max_memory_allocated(),
        "left": torch.cuda.memory_allocated() - before, "seconds": round(time.perf_counter() - started, 1),
        "reached": cuda_places.reached(),
    }  # fmt: skip


def faults(result: dict[str, Any]) -> list[str]:
    """List the rules that a result breaks."""
    if "error" in result:
        return [result["error"]]
    case, broken = CASES[result["case"]], []
    dtype = case.get("model_init_kwargs", {}).get("dtype", "float32")
    most = case.get("nats", ROUNDING[dtype])
    differences = [step[DIFFERENCE] for step in result["steps"] if DIFFERENCE in step]
    if len(differences) != case.get("max_steps", BASE["max_steps"]) or not 0 < max(differences) < most:
        broken.append(f"sampler and trainer differ by {differences} nats")
    if result["races"]:
        broken.append(f"races: {result['races']}")
    if result["differing"]:
        broken.append(f"the engine hasn't the policy's {result['differing']}")
    if result["left"] > LEFT:
        broken.append(f"{result['left']} bytes are left after the trainer closed")
    allowed = WAITS | case.get("waits", set())
    if waits := [wait for wait in result["waits"] if wait[1] not in allowed and not wait[1].startswith("vllm: ")]:
        broken.append(f"the host waits in a step: {waits}")
    if result["forwards"].get("cpu"):
        broken.append(f"forwards on the host at the start: {result['forwards']}")
    if result["complaints"]:
        broken.append(str(result["complaints"]))
    if "save_strategy" in case and result["resumed"] != 3:
        broken.append(f"the resumed run ended at step {result['resumed']}")
    return broken


def _digest(trainer: Any) -> str:
    """Return a digest of the weights as a checkpoint has them."""
    weights = trainer.sharding.state_dict(keep=True)
    digest = hashlib.sha256()
    for name, value in sorted((trainer.model.state_dict() if weights is None else weights).items()):
        digest.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _listed(counts: Any) -> list[tuple[str, str, int]]:
    return [(what, caller, count) for (what, caller), count in counts.most_common()]


def prepare() -> None:
    """Install the device, and import the packages that trainers import."""
    host_cuda.install(total=2 * GIB)
    with mock.patch("torch.cuda.is_available", lambda: False):  # selects kernels for CPUs
        import bitsandbytes  # noqa: F401
    import host_cuda_engine
    import launcher

    host_cuda_engine.prepare()
    launcher.preload()
    gc.collect()
    gc.freeze()  # see `vllm_imported` of conftest.py
    gc.freeze = gc.unfreeze = lambda: None


def shorten() -> None:
    """Shorten measurements that take minutes here."""
    from colograd.extensions.recording import utilisation
    from colograd.memory import token_budget

    utilisation.SIZES["cuda"], utilisation.SECONDS, token_budget.LARGEST = 64, 0.0, 2048


def main(folder: Path, names: list[str]) -> None:
    shorten()
    for name in names:
        rank = os.environ.get("RANK", "")
        print(json.dumps(run(name, folder / "models", folder / f"run-{name}") | {"rank": rank}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    prepare()
    main(Path(sys.argv[1]), sys.argv[2:] or [name for name in CASES if name not in RANKS])
