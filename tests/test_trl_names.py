"""What TRL's users read off a trainer, and what they may have replaced in it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from colograd import GRPOTrainer
from colograd.policy.reference import FrozenCopy, WithoutAdapter
from colograd.rewards import resolve_rewards
from colograd.training.trl_names import HOOKS, OF_ARGUMENTS, TRLNames


class Bare(TRLNames):
    """The names alone, on what a trainer would have."""

    def __init__(self, args: Any, reference: Any = None) -> None:
        self.args, self.reference = args, reference
        self.rewards = resolve_rewards([tiny.vowels, len], [2.0, 1.0])
        self.estimator = SimpleNamespace(weights=[2.0, 1.0])


def test_attributes_of_trl_are_there_under_its_names(tmp_path) -> None:
    bare = Bare(tiny.config(tmp_path, num_generations_eval=2, epsilon=0.1))
    assert (bare.num_generations, bare.num_generations_eval, bare.max_completion_length) == (4, 2, 12)
    assert (bare.epsilon_low, bare.epsilon_high, bare.beta, bare.temperature) == (0.1, 0.1, 0.0, 1.0)
    assert bare.reward_funcs == [tiny.vowels, len] and bare.reward_func_names == ["vowels", "len"]
    assert bare.reward_weights == [2.0, 1.0] and bare.reward_processing_classes == [None, None]
    for name in OF_ARGUMENTS:
        getattr(bare, name)


def test_the_reference_is_a_model_where_there_is_a_second_one(tmp_path) -> None:
    import torch

    args, model = tiny.config(tmp_path), torch.nn.Linear(2, 2)
    frozen = FrozenCopy(model, torch.device("cpu"), offload=False)
    assert Bare(args).ref_model is None and Bare(args, WithoutAdapter(model)).ref_model is None
    assert Bare(args, frozen).ref_model is frozen.model


def test_what_is_not_there_is_an_attribute_error_that_may_help(tmp_path) -> None:
    bare = Bare(tiny.config(tmp_path))
    assert not hasattr(bare, "nothing") and not hasattr(bare, "llm")
    with pytest.raises(AttributeError, match=r"'Bare' object has no attribute 'vllm_generation': .*trainer\.engine"):
        _ = bare.vllm_generation


@pytest.mark.parametrize("name", HOOKS)
def test_a_subclass_that_replaces_what_nothing_calls_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine defines {name}, which nothing calls here: override {HOOKS[name]}"):
        type("Mine", (GRPOTrainer,), {name: lambda self: None})


def test_the_stages_may_be_replaced() -> None:
    class Mine(GRPOTrainer):
        def score(self, group: Any) -> Any:
            return super().score(group)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    assert issubclass(Mine, GRPOTrainer)


def test_every_method_of_trls_trainer_is_ours_too_or_refused() -> None:
    theirs = pytest.importorskip("trl").GRPOTrainer
    own = {name for name, value in vars(theirs).items() if inspect.isfunction(value) or isinstance(value, staticmethod)}
    unaccounted = {name for name in own if name not in HOOKS and not hasattr(GRPOTrainer, name)}
    assert unaccounted <= INTERNAL, unaccounted - INTERNAL


# Of TRL's methods, those that only make sense inside of it.
INTERNAL = {"_log_completion_extra", "_log_metric", "_get_tool_suffix_ids"}
