"""`GRPOConfig`: how a run samples, scores, trains and reports. TRL 1.16's names and meanings wherever the thing is
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from .advantages import AdvantageKnobs
from .engine import EngineKnobs
from .evaluation import EvaluationKnobs
from .knob import knob
from .logs import LogKnobs
from .names import names_checked
from .objective import ObjectiveKnobs
from .policy import PolicyKnobs, check_launcher
from .reference import ReferenceKnobs
from .rewards import RewardKnobs


@names_checked
@dataclass
class GRPOConfig(  # a dataclass has the fields of its last base first: output_dir
    LogKnobs, ReferenceKnobs, ObjectiveKnobs, AdvantageKnobs, RewardKnobs, EngineKnobs, EvaluationKnobs, PolicyKnobs
):
    """Arguments of `GRPOTrainer`: the groups of knobs above, the sampling and steps that evaluation derives from, and
    the fields of `transformers.TrainingArguments`.

    After construction ``prompts_per_step`` (global), ``per_device_train_batch_size`` (completions per rank and step)
    and ``steps_per_generation`` (optimizer steps whose prompts are sampled together) hold their final values; the
    trainer settles ``optim: auto`` and ``bf16`` when it knows the policy's dtype.

    Raises:
        ValueError: at construction, with the value, the rule and the remedy.
    """

    notes: ClassVar[Sequence[str]] = ()  # of each instance: a line for every given name that has no effect or is old
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "vllm_engine_kwargs",
    ]

    # Fields of TrainingArguments with other defaults.
    learning_rate: float = knob(1e-6, "Peak learning rate of AdamW.")
    logging_steps: float = knob(10, "Log every so many optimizer steps.")
    gradient_checkpointing: bool = knob(
        True, "Recompute activations in the backward pass: less memory, about 20 %% more time."
    )
    bf16: bool | None = knob(
        None,
        "With `dtype: float32`, run the forward under bfloat16 autocast: on unless set to false, as in TRL. With the "
        "default bfloat16 policy there is nothing to cast and the value has no effect.",
    )
    remove_unused_columns: bool | None = knob(
        False, "Leave the reward functions the column `prompt` alone (and so an answer's column out)."
    )
    optim: str = knob(
        "auto",
        "`auto`: `adamw_split` for a bfloat16 policy, `adamw_torch` otherwise. `adamw_split`: AdamW on an exact "
        "float32 master kept as the bfloat16 parameter and a 16-bit remainder; `optim_args: compiled=true` (or "
        "`false`) makes it one compiled pass, the default on a GPU. Or any optimizer name of transformers.",
    )

    def __post_init__(self) -> None:
        check_launcher()
        optim, self.optim = self.optim, "adamw_torch"  # transformers checks names and doesn't know ours
        autocast, self.bf16 = self.bf16, False  # likewise: what it means depends on the policy's dtype
        if not torch.accelerator.is_available():
            self.use_cpu = True  # ranks on a CPU wouldn't find each other
        self._settle_best_metric()
        super().__post_init__()
        self.optim, self.bf16 = optim, autocast
        self.logging_nan_inf_filter = False  # a NaN loss must be seen
        given: dict[str, Any] | None = getattr(self, "gradient_checkpointing_kwargs", None)
        self.gradient_checkpointing_kwargs = {"use_reentrant": False, **(given or {})}
        self._settle_budget(self.on_cpu)
        self._check_policy()
        self._check_steps()
        self._check_sampling()
        self._check_evaluation()
        self._check_engine()
        self._check_rewards()
        self._settle_advantages()
        self._settle_objective()
        self._check_reference()
        self._check_logs()
        self._fold_batch(self.layout.data_size)

    @property
    def on_cpu(self) -> bool:
        """Whether the policy trains on the CPU."""
        return bool(self.device.type == "cpu")
