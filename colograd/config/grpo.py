"""`GRPOConfig`: all settings of a run."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from ..parallel.ranks import attempt, join
from ..runtime import process, registry
from . import objective
from .conflicts import LIGER_LOSSES, OF_LOSS
from .engine import EngineKnobs
from .knob import REFUSED, RENAMED, UNUSED, Rules, check_values, knob, names_checked, unknown_name
from .outputs import TRACKERS, LogKnobs, SavingKnobs
from .policy import CHECKPOINTING, COMPILE_MODES, PolicyKnobs
from .sampling import EvaluationKnobs
from .sharding import ShardingKnobs
from .steps import StepKnobs


@dataclass
class TRLKnobs(TrainingArguments):
    """Settings that only TRL's recipes have.
    Each has no effect, or must have TRL's default, or is the old name of another setting."""

    use_vllm: bool = knob(True)
    vllm_mode: str = knob("colocate", "Always `colocate`; TRL's other mode, `server`, is an error.")
    ds3_gather_for_generation: bool = knob(True)
    pad_to_multiple_of: int | str | None = knob("auto")
    vllm_server_base_url: str | None = knob(None)
    vllm_server_host: str = knob("0.0.0.0")
    vllm_server_port: int = knob(8000)
    vllm_server_timeout: float = knob(240.0)
    vllm_group_port: int = knob(51216)
    cache_implementation: str | None = knob(None)
    use_transformers_continuous_batching: bool = knob(False)
    transformers_continuous_batching_config: dict[str, Any] | str | None = knob(None)
    use_transformers_paged: bool = knob(False)
    vllm_importance_sampling_cap: float | None = knob(None)

    def _check_trl(self) -> None:
        """Raise a ValueError for a refused setting of TRL. A trainer checks again, as the setting may have changed."""
        for each in fields(self):
            if each.name in REFUSED and getattr(self, each.name) != each.default:
                raise ValueError(unknown_name(each.name, ()))
        Rules(one_of=("colocate",), note=" (there is no server: each rank has its own engine)").check(
            "vllm_mode", self.vllm_mode
        )


@names_checked
@dataclass
class GRPOConfig(  # A dataclass begins with the fields of its last base, so `output_dir` is the first argument.
    TRLKnobs, LogKnobs, SavingKnobs, objective.DistillationKnobs, objective.ReferenceKnobs,
    objective.RewardPenaltyKnobs, objective.ObjectiveKnobs, objective.AdvantageKnobs, objective.RewardKnobs,
    EngineKnobs, EvaluationKnobs, StepKnobs, ShardingKnobs, PolicyKnobs,
):  # fmt: skip
    """All settings of `GRPOTrainer`, including the fields of `transformers.TrainingArguments`. A bad value raises a
    ValueError at construction, or when the trainer is made.

    After construction ``prompts_per_step`` (over all ranks), ``per_device_train_batch_size`` (completions per optimizer
    step and engine) and ``steps_per_generation`` (optimizer steps whose completions are sampled together) hold their
    final values. A trainer resolves the settings that depend on policy, device and nodes, then calls `freeze`. After
    construction Colograd writes to a configuration only in the methods named ``resolve_*``.
    """

    notes: ClassVar[list[str]]
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "teacher_model_name_or_path",
        "teacher_model_init_kwargs", "generation_kwargs", "transformers_continuous_batching_config",
        "chat_template_kwargs", "vllm_engine_kwargs", "liger_kernel_config", "curriculum",
    ]  # fmt: skip

    # Fields of TrainingArguments with other defaults or meanings than in transformers.
    learning_rate: float = knob(1e-6)
    """Peak learning rate of AdamW. With `warmup_steps` the first step has 0, as in transformers."""
    logging_steps: float = knob(10, "Log every so many optimizer steps.")
    gradient_checkpointing: str | None = knob(None, nargs="?", const=True)
    """Recompute activations in the backward: less memory, about a third more training time. Unset, the memory plan
    chooses no layer, or every fourth, second or each one (`gradient_checkpointing_kwargs: {every_n_layers: 2}` sets
    it). `offload`: each layer's input waits in page-locked host memory, to the same bits; `true` on a CPU."""
    bf16: bool | None = knob(None, nargs="?", const=True)
    """With `dtype: float32`, run the forward under bfloat16 autocast: on unless false, as in TRL. No effect with a
    bfloat16 policy."""
    remove_unused_columns: bool | None = knob(False, "Pass only the column `prompt` to reward functions.")
    optim: str = knob("auto", extension={"muon": "muon"})
    """`auto`: `adamw_split` for a bfloat16 policy, else `adamw_torch`. `adamw_split`: AdamW on an exact float32 master,
    kept as the bfloat16 parameter and 16 more bits; one compiled kernel on a GPU, unless `optim_args: compiled=false`.
    `muon`: Muon for the layers' matrices on such a master, `adamw_split` for the rest. Or an optimizer name of
    transformers."""
    torch_compile: bool = knob(False)
    """Compile the policy's decoder layers: norms, rotary embedding, activation and residuals become a few fused
    kernels. One compilation at start (17 s on an H100, 15 to 50 s on two CPU cores) serves all layers and lengths.
    Needs packed rows."""
    use_liger_kernel: bool = knob(False, extension="liger")
    """On a GPU, use Liger's Triton kernels for norms, rotary embedding and activation in policy and reference; they are
    compared with the model's at start. Liger's losses aren't used. Needs the package liger-kernel."""
    liger_kernel_config: dict[str, Any] | str | None = knob(None)
    """Which of Liger's kernels are used, such as `{rope: false}`; default: all for the model."""

    def __post_init__(self) -> None:
        self.__dict__.setdefault("notes", [])  # The `__init__` of a subclass that is a dataclass sets no `notes`.
        self._check_trl()
        for old, present in RENAMED.items():
            if (value := getattr(self, old)) is not None:
                if getattr(self, present) not in (type(self).__dataclass_fields__[present].default, value):
                    raise ValueError(f"`{old}` is the old name of `{present}`, and both are set: remove the old name.")
                setattr(self, present, value)
                self.notes.append(f"config: `{old}` is the old name of `{present}`")
        self._take_checkpointing()
        checkpoints: Any = self.gradient_checkpointing  # Kept, because transformers may replace None (unset) by False.
        self._take_sharding()
        optim, self.optim = self.optim, "adamw_torch"  # transformers would refuse names of Colograd's optimizers.
        autocast, self.bf16 = self.bf16, False  # The value of `bf16` depends on the policy's dtype, known later.
        # If transformers saw the settings of torch.compile, it would allow TF32 and compile the whole model.
        compiling = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
        compiled = {name: getattr(self, name) for name in compiling}
        self.__dict__.update(dict.fromkeys(compiling))
        if not torch.accelerator.is_available():
            if not self.use_cpu and (why := process.why_gpu_unused(torch.__version__, torch.version.cuda)):
                raise ValueError(why)
            self.use_cpu: bool = True  # Without `use_cpu`, transformers doesn't connect ranks on a CPU.
        process.drop_inherited_ranks()
        process.prepare_network()
        if self.use_cpu and self.ddp_backend in (None, "gloo"):
            # Colograd connects the ranks itself, because on a CPU transformers ignores `ddp_timeout`.
            join(timedelta(seconds=self.ddp_timeout))
        # After torchrun has restarted the ranks, accelerate would connect them by addresses of ended processes.
        elif attempt() and torch.cuda.is_available():
            join(timedelta(seconds=self.ddp_timeout), self.ddp_backend or "nccl")
        self._resolve_best_metric()
        # transformers would replace None (unset) by true, because its log level is ERROR.
        self.disable_tqdm: bool = bool(self.disable_tqdm)
        super().__post_init__()
        self.optim, self.bf16 = optim, autocast
        if self.metric_for_best_model is not None:
            registry.require("best_model", f"`metric_for_best_model: {self.metric_for_best_model}`")
        # As in transformers, torch_compile_backend or torch_compile_mode also turns on torch_compile.
        self.__dict__.update(compiled, torch_compile=any(compiled.values()))
        self.logging_nan_inf_filter = False  # With this filter transformers would log an average for a NaN loss.
        kwargs: dict[str, Any] = getattr(self, "gradient_checkpointing_kwargs", None) or {}
        if checkpoints is None and {"every_n_layers", "offload"} & set(kwargs):
            checkpoints = True
        self._set_checkpointing(checkpoints, {"use_reentrant": False, **kwargs})
        check_values(self)
        if self.offloads_activations:
            registry.require("offload", "`gradient_checkpointing: offload`")
        self._resolve_budget(self.on_cpu)
        note = " (rows have other lengths in each micro-batch)"
        Rules(one_of=COMPILE_MODES, note=note).check("torch_compile_mode", self.torch_compile_mode)
        if self.use_liger_kernel:  # Liger's own default turns on one of its losses, which must stay off.
            kernels: dict[str, Any] = self.liger_kernel_config or {}  # type: ignore[assignment]
            self.liger_kernel_config = dict.fromkeys(LIGER_LOSSES, False) | kernels
        self.notes.extend(self._drop_what_is_done_anyway())
        if self.loss_eval is None:
            needed = OF_LOSS.search(str(self.metric_for_best_model or "")) is not None
            self.loss_eval = needed or self.temperature_eval in (None, self.temperature)
        self._check_ranks()
        for check in registry.hooks("check_settings"):
            check(self)
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        self.notes.extend(self._check_conflicts_and_bias())
        if self.journal is None:
            saves = str(getattr(self.save_strategy, "value", self.save_strategy)) != "no"
            self.journal: str | None = "until_checkpoint" if saves else "off"
        self._fold_batch(self.layout.data_size)

    def freeze(self) -> None:
        """Forbid changes of settings that a trainer reads only once. A change then raises an AttributeError."""
        self.__dict__["_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_frozen" in vars(self) and name in _read_at_start() and value != (now := getattr(self, name)):
            raise AttributeError(
                f"{name} is {now!r} and can't become {value!r}: a trainer was made with the present value. "
                "Set the new value in the configuration of a new trainer."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name != "_frozen"
        }  # A copied configuration isn't frozen.

    @property
    def on_cpu(self) -> bool:
        return bool(self.device.type == "cpu")

    def check_for_trainer(self) -> None:
        self._check_trl()
        for name in self.report_to or ():  # transformers would refuse a missing tracker only after loading the model.
            if name in TRACKERS and name not in sys.modules and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"`report_to` has {name!r}, but the package {name} isn't installed: run `pip install {name}`, or "
                    f"remove {name!r} from `report_to`."
                )
        if self.n_gpu > 1:
            raise ValueError(
                f"{self.n_gpu} GPUs are visible to one process, but each needs its own rank: start with `torchrun`, or "
                "`accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU."
            )
        best, length = self.save_strategy == "best", self.round_length
        if self.max_steps > 0 and self.max_steps % length:
            raise ValueError(
                f"max_steps is {self.max_steps}, but a round is {length} optimizer steps (steps_per_generation x "
                f"num_iterations): set max_steps to a multiple, such as {-(-self.max_steps // length) * length}."
            )
        if length == 1 or not (best or self.load_best_model_at_end):
            return
        reason = "save_strategy is best" if best else "load_best_model_at_end is true"
        for name, strategy in (("eval_steps", self.eval_strategy), ("save_steps", self.save_strategy)):
            steps = getattr(self, name)
            if strategy == "steps" and (steps < 1 or steps % length):
                raise ValueError(
                    f"{name} is {steps} and {reason}, but checkpoints are written at the ends of rounds of {length} "
                    f"optimizer steps (steps_per_generation x num_iterations): make {name} a multiple of {length}."
                )

    def advice(self) -> Iterator[str]:
        loss, sequence = self.loss_type, self.importance_sampling_level == "sequence"
        for each in fields(self):
            if each.name in UNUSED and getattr(self, each.name) != each.default:
                yield f"config: `{each.name}` has no effect: {UNUSED[each.name]}"
        if self.sharding_note:
            yield self.sharding_note
        for advise in registry.hooks("advice"):
            yield from advise(self)
        if sequence and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
            yield (
                f"loss: {loss} sums over tokens, so with importance_sampling_level: sequence a completion weighs by "
                "its length. GSPO is loss_type: grpo."
            )
        if not sequence and loss == "luspo":
            yield "loss: luspo is meant for importance_sampling_level: sequence."
        if loss == "cispo" and (self.epsilon_high or 0.0) < 1:
            yield (
                f"loss: cispo bounds the ratio itself by epsilon_high, and {self.epsilon_high} is below 1: the "
                "gradient of every token is scaled down. 5.0 is usual."
            )


@functools.cache
def _read_at_start() -> frozenset[str]:
    known = {field.name for field in fields(GRPOConfig)} - {field.name for field in fields(TrainingArguments)}
    return frozenset(
        {name for name in known if not name.endswith("_eval")}
        | {"bf16", "optim", "save_on_each_node", *CHECKPOINTING, *(f"{name}_kwargs" for name in CHECKPOINTING)}
    )
