"""Pairs of settings that exclude each other, and refused values.

Extensions add their pairs through the seam (extension point) "conflicts".
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..runtime import registry
from ..runtime.importing import is_import_path
from .knob import shown

# Liger's kernels for the loss that a model computes itself. GRPO doesn't use that loss.
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
# Optimizers that update each element by itself, so a rank can update a slice of a parameter.
ELEMENTWISE = ("auto", "adamw_split", "adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
# Names of metrics that `evaluate` can only compute with a forward of the policy.
OF_LOSS = re.compile(r"(^|_)(loss|entropy|kl|(clip_ratio|cispo_clip_ratio|sampling|vespo)(/.*)?)$")
# Values of `attn_implementation` may begin with these names, which transformers knows. Other values are refused.
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community")
DRAFTS = "vllm_engine_kwargs.speculative_config"


@dataclass(frozen=True, slots=True)
class When:
    words: str  # The condition as text, for docs/configuration.md.
    holds: Callable[[Any], Any]


SET = When("", bool)
UNSET = When("unset", operator.not_)
ANY = When("", lambda value: value is not None)
OWN_CLASS = When("an import path", lambda value: is_import_path(str(value)))
DIVIDED = When("other than `none` or an import path", lambda value: value != "none" and not is_import_path(str(value)))


def equal(*values: Any) -> When:
    return When(", ".join(f"`{_plain(value)}`" for value in values), lambda value: value in values)


def other_than(*values: Any) -> When:
    return When(f"other than {', '.join(f'`{_plain(value)}`' for value in values)}", lambda value: value not in values)


def above(number: float) -> When:
    return When(f"above {number}", lambda value: value is not None and value > number)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two settings that exclude each other, or a refused value.

    `field` and `other` name an attribute of the settings, an entry of a mapping (``generation_kwargs.min_tokens``), or
    a fact that the caller of the check passes. If the settings lack the attribute, the conflict doesn't apply.
    """

    field: str
    when: When
    other: str  # Empty if a value of `field` is refused by itself.
    other_when: When
    reason: str
    remedy: str
    also: Callable[[Any], Any] | None = None

    def error(self, settings: Any, facts: Mapping[str, Any]) -> str | None:
        try:
            value, other = (
                facts[name] if name in facts else value_of(settings, name) if name else None
                for name in (self.field, self.other)
            )
            if not self.when.holds(value) or (self.other and not self.other_when.holds(other)):
                return None
            if self.also is not None and not self.also(settings):
                return None
        except AttributeError:
            return None
        if value is True and other is True:
            subject = f"{self.field} and {self.other} are both true"
        else:
            subject = f"{self.field} is None" if value is None else _said(self.field, value)
            subject += f" and {_said(self.other, other)}" if self.other else ""
        return f"{subject}, but {self.reason}{'. ' if self.remedy[0].isupper() else ': '}{self.remedy}."


def check_conflicts(settings: Any, facts: Mapping[str, Any] | None = None, about: str = "") -> None:
    """Raise a ValueError for the first conflict of settings.

    Args:
        facts: values by name, which take precedence over attributes of ``settings``.
        about: check only conflicts of this setting.
    """
    if (error := conflict(settings, facts, about)) is not None:
        raise ValueError(error)


def conflict(settings: Any, facts: Mapping[str, Any] | None = None, about: str = "") -> str | None:
    rows = (row for of_one in tables().values() for row in of_one if about in ("", row.field, row.other))
    return next((error for row in rows if (error := row.error(settings, facts or {}))), None)


@functools.cache
def tables() -> dict[str, tuple[Conflict, ...]]:
    """Return the conflicts of each installed extension, by extension name. The name "" stands for Colograd's core."""
    offers = {name: registry.hooks_of(name, "conflicts") for name in registry.installed()}
    return {"": CONFLICTS} | {name: tuple(row for rows in offer for row in rows) for name, offer in offers.items()}


def value_of(settings: Any, name: str) -> Any:
    mapping, _, key = name.partition(".")
    value = getattr(settings, mapping)
    return value if not key else value.get(key) if isinstance(value, Mapping) else None


def _said(name: str, value: Any) -> str:
    mapping, _, key = name.partition(".")
    if key:
        return f"{mapping} has {key}: {shown(value)}"
    if value is None:
        return f"{name} isn't set"
    if not isinstance(value, bool | int | float | str | list | tuple | dict):
        return f"{name} is set"
    return f"{name} is {value if ' ' in name else shown(value)}"


def _plain(value: Any) -> str:
    return "null" if value is None else shown(value).strip("'")


CONFLICTS = (
    Conflict("attn_implementation",
             When("unknown", lambda name: name is not None and not name.startswith(KNOWN_ATTENTION)), "", ANY,
             "it is unknown", "remove it (training runs the packed attention)"),
    Conflict("fp16", SET, "", ANY, "policies train in bfloat16 or float32", "remove it (bfloat16 is the default)"),
    Conflict("auto_find_batch_size", SET, "", ANY,
             "it would split groups of completions", "remove it and lower max_tokens_per_microbatch instead"),
    Conflict("fsdp", SET, "", ANY,
             "accelerate would wrap the policy itself", "remove fsdp and fsdp_config, and set sharding: fsdp"),
    Conflict("parallelism_config", SET, "", ANY, "accelerate shards nothing here",
             "remove it, and set sharding, vllm_tensor_parallel_size or sequence_parallel_size"),
    Conflict("num_generations", When("below 2", lambda value: value is None or value < 2), "", ANY,
             "a group needs at least 2 completions, as an advantage compares completions of the same prompt",
             "Set num_generations to 2 or more (8 is common)"),
    Conflict("max_completion_length", equal(None), "", ANY, "memory is planned by it", "give a number of tokens"),
    Conflict("temperature", When("0 or below", lambda value: value <= 0), "", ANY,
             "completions of a group must differ",
             "set it above 0 (1.0 is usual), and for greedy evaluation temperature_eval: 0"),
    *(
        Conflict("sharding", OWN_CLASS, name, when, "your own class sums whole gradients on the device",
                 f"remove {name}, or choose a strategy of Colograd's")
        for name, when in (
            ("sequence_parallel_size", above(1)), ("offload_gradients", SET), ("offload_optimizer", equal("auto"))
        )
    ),
    Conflict("sharding", DIVIDED, "optim", other_than(*ELEMENTWISE),
             "a rank updates slices of parameters, which that optimizer can't",
             f"choose one of {', '.join(ELEMENTWISE)}, or set sharding: none"),
    Conflict("sharding", other_than("none", "optimizer"), "gradient_checkpointing_kwargs.use_reentrant", SET,
             "then a gradient may come after its parameter was exchanged",
             "remove use_reentrant (it is false by default)"),
    Conflict("weights", other_than("auto", "copied"), "vllm_tensor_parallel_size", above(1),
             "an engine over several ranks holds parts of the weights, into which those of the policy are copied",
             "set weights: auto, or vllm_tensor_parallel_size: 1", lambda settings: not settings.tensor_parallel),
    Conflict("num_generations_eval", above(1), "temperature_eval", equal(0),
             "then all completions of a prompt are equal", "set it to 1, or raise temperature_eval"),
    Conflict("metric_for_best_model", When("a metric of the loss", lambda name: OF_LOSS.search(str(name or ""))),
             "loss_eval", equal(False), "then `evaluate` computes no loss", "use `reward`, or leave loss_eval out"),
    Conflict("temperature_eval", When("other than `temperature`", lambda value: value is not None), "loss_eval", SET,
             "the loss compares the sampler's probabilities with the trainer's, at the training's temperature",
             "leave temperature_eval out, or loss_eval",
             lambda settings: settings.temperature_eval != settings.temperature),
    Conflict("top_entropy_quantile", When("below 1", lambda value: value < 1), "loss_type", equal("gmpo"),
             "gmpo has one ratio per completion, the mean of all its tokens",
             "set top_entropy_quantile: 1.0, or another loss_type"),
    Conflict("entropy_coef_min", ANY, "entropy_coef_max", When("that is lower", lambda value: value is not None),
             "the lower bound must be at most the upper one", "raise entropy_coef_max, or lower entropy_coef_min",
             lambda settings: settings.entropy_coef_min > settings.entropy_coef_max),
    Conflict("vllm_importance_sampling_clip_min", ANY,
             "vllm_importance_sampling_clip_max", When("that isn't higher", lambda value: value is not None),
             "the lower bound must be less than the upper one", "raise the second, or lower the first",
             lambda settings: settings.vllm_importance_sampling_clip_min >= settings.vllm_importance_sampling_clip_max),
    Conflict("vllm_importance_sampling_mode", When("of sequences", lambda mode: mode.startswith("sequence")),
             "loss_type", equal("vespo"), "vespo computes a completion's weight from its tokens' weights",
             "set token_truncate or token_mask, or vllm_importance_sampling_correction: false",
             lambda settings: settings.vllm_importance_sampling_correction),
    Conflict("vllm_importance_sampling_mode", When("that truncates", lambda mode: mode.endswith("truncate")),
             "vllm_importance_sampling_clip_max", equal(None),
             "truncation needs a bound", "set vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min",
             lambda settings: settings.vllm_importance_sampling_correction
             and settings.vllm_importance_sampling_clip_min is None),
    Conflict("advantage_baseline", equal("leave_one_out"), "multi_objective_aggregation", equal("normalize_then_sum"),
             "normalize_then_sum compares with the mean, and scaling over the step undoes any other baseline",
             "Set one of the two to its default"),
    Conflict("sync_ref_model", SET, "beta", equal(0),
             "then there is no reference model", "set beta, or remove sync_ref_model"),
    Conflict("log_completions_hub_repo", SET, "log_completions", UNSET,
             "then no completions are logged", "set log_completions: true, or remove it"),
    Conflict("reward_timeout", SET, "rank_timeout", When("that isn't longer", lambda value: value is not None),
             "a rank may wait for one call as long as reward_timeout, and would be ended for it",
             "raise rank_timeout above it, or lower reward_timeout",
             lambda settings: settings.reward_timeout >= settings.rank_timeout),
)  # fmt: skip
