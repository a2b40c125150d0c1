"""The policy's passes as a GPU would take them, without one (`fake_gpu`): devices, dtypes, flash calls, waits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cuda_places
import fake_gpu
import fake_gpu_cases
import native_library
import pytest
from needs import has, needs
from paths import HELPERS

from colograd.training.adamw_split import GPU_PIECE

FIGURES = dict[str, Any]
LAYERS = 4


# Passes, an optimizer's step, a checkpoint: 15 seconds. The others are left to `pytest -m slow`.
FAST = ("dense_untied", "sinks", "adapter", "checkpointed", "old_logprobs", "optimizer", "checkpoint")
LONG = ("long_sequences", "long_sequences_of_a_packed_base", "long_windows", "long_soft_caps")  # half a minute each
PARTS = (FAST, LONG, tuple(name for name in fake_gpu_cases.CASES if name not in (*FAST, *LONG)))


class Cases(dict[str, FIGURES]):
    """Cases by name. When one is read its part runs, in one process: imports take longer than most passes."""

    def __missing__(self, name: str) -> FIGURES:
        (part,) = (part for part in PARTS if name in part)
        self.update((case["name"], case) for case in fake_gpu.run(Path(HELPERS) / "fake_gpu_cases.py", *part))
        return self[name]


@pytest.fixture(scope="module")
def cases() -> Cases:
    if reason := native_library.why_not():
        pytest.skip(reason)
    return Cases()


def fast(*names: str) -> list[Any]:
    """Test parameters. Names outside `FAST` run only in `pytest -m slow`."""
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def found(cases: Cases, name: str) -> FIGURES:
    case = cases[name]
    assert "error" not in case, case["error"]
    return case


def check_on_the_gpu(case: FIGURES, *others: str) -> None:
    assert case["devices"] == ["cuda"], "something was computed on the host"
    assert case["products"] == ["bfloat16", *others], "matrix products in another dtype"
    assert case["waits"] == [], "the host would wait for the device"


def check_plan(case: FIGURES) -> None:
    assert 0.9 < case["plan"] / case["peak"] < 1.1, (case["plan"] / 2**20, case["peak"] / 2**20)


# Each case has its number of flash calls (two per layer: the segments' own keys and their prompts' keys; one if the
# layer has a window), and the dtypes of products other than bfloat16: routers and adapters use float32.
PASSES = {
    "dense_tied": (8, ()), "dense_untied": (8, ()), "entropy": (8, ()), "windows": (4, ()), "several_groups": (8, ()),
    "many_segments": (8, ()), "long_prompt": (8, ()), "sinks": (3, ()), "adapter": (8, ("float32",)),
}  # fmt: skip
PASSES |= {"mixture": (4, ("float32",))} if has("experts") else {}
PASSES |= {"packed_base": (8, ("float32",))} if has("quantized") else {}


@pytest.mark.parametrize("name", fast(*PASSES))
def test_forward_and_backward(name: str, cases: Cases) -> None:
    case, (calls, others) = found(cases, name), PASSES[name]
    check_on_the_gpu(case, *others)
    assert case["flash"] == {"forward": calls, "backward": calls}
    assert case["outputs"] == case["gradients"] == ["cuda torch.float32"]
    check_plan(case)


@pytest.mark.slow
def test_a_long_prompt_s_keys_are_not_copied_for_its_completions(cases: Cases) -> None:
    """Rows of equal token counts: 32 completions of a prompt that is half the row take no additional memory."""
    assert found(cases, "long_prompt")["peak"] < 1.02 * found(cases, "dense_untied")["peak"]


def test_layers_that_are_computed_again(cases: Cases) -> None:
    case = found(cases, "checkpointed")
    check_on_the_gpu(case)
    assert case["flash"] == {"forward": 2 * 2 * LAYERS, "backward": 2 * LAYERS}
    check_plan(case)


def check_long(case: FIGURES, calls: int, *others: str) -> None:
    check_on_the_gpu(case, *others)
    assert case["flash"] == {"forward": 2 * calls * LAYERS, "backward": calls * LAYERS}
    assert case["copied"] < 64 * 2 * 2**17
    check_plan(case)


@pytest.mark.slow
def test_sequences_of_131072_tokens_take_what_is_planned(cases: Cases) -> None:
    """Two long completions have the flash calls of short ones, and few numbers per token cross the bus."""
    check_long(found(cases, "long_sequences"), 2)
    check_long(found(cases, "long_windows"), 1)


@needs("quantized")
@pytest.mark.slow
def test_long_sequences_of_packed_base_are_planned(cases: Cases) -> None:
    check_long(found(cases, "long_sequences_of_a_packed_base"), 2, "float32")


def check_soft_caps(case: FIGURES) -> None:
    """No flash call supports soft caps, so all scores are in memory."""
    check_on_the_gpu(case)
    assert case["flash"] == {}
    check_plan(case)


@pytest.mark.slow
def test_soft_capped_scores_are_planned(cases: Cases) -> None:
    check_soft_caps(found(cases, "soft_caps"))


@pytest.mark.slow
def test_a_long_sequence_s_soft_capped_scores_need_more_than_there_is(cases: Cases) -> None:
    case = found(cases, "long_soft_caps")
    check_soft_caps(case)
    assert case["plan"] > 2**40


@needs("offload")
@pytest.mark.slow
def test_inputs_of_layers_leave_the_gpu_and_come_back(cases: Cases) -> None:
    case = found(cases, "inputs_on_the_host")
    assert case["waits"] == [] and case["products"] == ["bfloat16"]
    assert case["flash"] == {"forward": 8 * LAYERS, "backward": 4 * LAYERS}
    check_plan(case)
    assert case["plan_without"] - case["plan"] == case["inputs"] * 6 // 8, "two of eight inputs stay"
    moved = case["inputs"] * 14 // 8  # all leave, and all but the last ones come back
    assert moved <= case["copied"] < 1.01 * moved
    assert case["locked"] == [case["inputs"]] * 2 + [0], "the shorter row has their places, and nothing stays"


@pytest.mark.parametrize("name", fast("old_logprobs", "reference"))
def test_a_pass_without_gradients_keeps_no_activations(name: str, cases: Cases) -> None:
    case = found(cases, name)
    check_on_the_gpu(case)
    assert case["flash"] == {"forward": 2 * LAYERS}
    assert case["peak"] < 0.15 * found(cases, "dense_untied")["peak"]
    if name == "reference":
        assert 0 <= case["copy"] - case["weights"] < 2**10, "the weights once more, and frequencies"


def test_an_optimizer_s_step_stays_on_the_gpu(cases: Cases) -> None:
    """Two float32 moments, 16 bits of a master weight, and a bucket's temporaries, per weight."""
    case = found(cases, "optimizer")
    assert case["devices"] == ["cuda"] and case["waits"] == [] and case["copied"] == 0
    assert case["state"] == 5 * case["weights"]
    assert case["peak"] <= 4 * 4 * GPU_PIECE


@pytest.mark.slow
def test_a_compiled_step_s_constants_are_not_waited_for(cases: Cases) -> None:
    case = found(cases, "compiled_optimizer")
    assert case["devices"] == ["cuda"] and case["waits"] == [] and 0 < case["copied"] < 2**12


@needs("offload")
@pytest.mark.slow
def test_a_streamed_state_passes_through_the_gpu_and_nothing_waits(cases: Cases) -> None:
    case = found(cases, "streamed_optimizer")
    assert case["state"] == 0 and case["waits"] == []
    assert case["copied"] == 2 * 5 * case["weights"], "there and back"
    assert case["peak"] < 0.11 * 5 * case["weights"]


@needs("offload")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradients_on_host", "gradients_on_host_tied", "small_vocabulary_on_host"])
def test_gradients_go_to_the_host_while_the_backward_goes_on(name: str, cases: Cases) -> None:
    case = found(cases, name)
    assert case["waits"] == [] and case["flash"] == {"forward": 6 * LAYERS, "backward": 6 * LAYERS}
    assert 5 * case["gradients"] <= case["copied"] < 1.01 * 5 * case["gradients"], "out three times, in twice; ids"
    check_plan(case)
    assert case["held"] == 0, "all is given back when the sums are there"
    once, *later = case["locked"]
    assert 0 <= once - case["gradients"] < 4096 * 100 and later == [once, once], "whole pages, locked once"
    assert case["locked_again"] == 0


@needs("offload")
@pytest.mark.slow  # test_host_cuda.py runs it with values
def test_model_too_large_for_gpu_trains_from_host(cases: Cases) -> None:
    """Keeps on the host all that can be there."""
    case = found(cases, "all_on_host")
    assert case["waits"] == [] and case["products"] == ["bfloat16"]
    check_plan(case)
    assert case["without"].endswith(f"on a GPU of {case['capacity']:,}")
    first, second = case["locked"]
    assert first == second and case["locked_again"] == 0, "the second step has the first one's memory"


def test_a_checkpoint_s_copies_are_waited_for_once(cases: Cases) -> None:
    case = found(cases, "checkpoint")
    assert case["waits"] == ["synchronize"] and case["copied"] == case["weights"] and case["peak"] == 0


@needs("images")
@pytest.mark.slow
def test_a_tower_s_windows_are_one_flash_call_per_layer(cases: Cases) -> None:
    case = found(cases, "tower")
    check_on_the_gpu(case)
    assert case["flash"] == {"forward": 2, "backward": 2}


@needs("images")
@pytest.mark.slow
def test_fakes_run_the_places_of_their_table(cases: Cases) -> None:
    names = [name for name in fake_gpu_cases.CASES if name not in LONG]
    reached = sum((Counter(cases[name].get("reached", {})) for name in names), Counter[str]())
    assert not cuda_places.listed("fake").keys() - reached.keys()
