"""Settings that can't be combined with `carry_over`."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import GRPOConfig
from ...config.conflicts import ANY, SET, Conflict, When, equal, other_than

# Sampling parameters that act on each token alone, so that several requests can sample one completion.
OF_A_TOKEN = ("top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos")
ALLOWED = ", ".join(OF_A_TOKEN)
LEAVE = "leave one of the two out"
UNCORRECTED = "that leaves tokens of older weights uncorrected"

OTHERS = (
    ("dynamic_sampling", SET, "dynamic_sampling chooses a round's groups among all that were sampled"),
    ("curriculum", ANY, "curriculum draws prompts by the pass rates of whole rounds"),
    ("overlap", other_than("off"), "overlap trains groups of a round whose groups aren't known yet"),
    ("router_replay", SET, "router_replay needs the experts of completions that were stopped"),
    ("vllm_importance_sampling_correction", equal(False), UNCORRECTED),
    ("the sampler's distribution", When("changed (a `top_k` with `top_p` or `min_p` may stay)", bool),
     f"{UNCORRECTED} (a top_k alone doesn't)"),
    ("generation_kwargs", When(f"with others than {ALLOWED}", lambda kwargs: bool({*(kwargs or {})} - {*OF_A_TOKEN})),
     f"a completion in parts may have only {ALLOWED} of these"),
)  # fmt: skip
CONFLICTS = (
    *(Conflict("carry_over", ANY, name, when, why, LEAVE) for name, when, why in OTHERS),
    Conflict(
        "carry_over", ANY, "the dataset", equal("a stream"),
        "further rows are drawn at random, which a stream hasn't", "load it whole, or leave carry_over out",
    ),
)  # fmt: skip


def advice(config: GRPOConfig) -> Iterator[str]:
    if config.carry_over is None:
        return
    takes, holds = config.groups_per_round, config.groups_in_flight
    yield f"carry_over: an engine has {holds} groups in flight; a round takes {takes} ({takes / holds:.0%})"
    mode = config.vllm_importance_sampling_mode
    if mode.startswith("sequence"):
        yield (
            f"carry_over: vllm_importance_sampling_mode {mode} multiplies the ratios of all old tokens of a "
            "completion, so that long ones hardly count: token_truncate weighs each apart."
        )
