"""The tests that also run with vLLM's Model Runner V2, which its engines have on a GPU (see v2/sitecustomize.py).

    python tests/helpers/model_runner_v2.py [--small] [PYTEST'S ARGUMENTS]      # `make test-v2`

Triton's kernels run in its interpreter, about 40 tokens a second.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL = (
    "engine/test_engine.py",
    "extensions/tensor_parallel/test_tensor_parallel.py",
    "weights/test_weights.py",
    "extensions/lora/test_weights_adapter.py",
    "weights/test_gathered_weights.py",
    "weights/test_written_through.py",
    "extensions/lora/test_lora.py",
    "extensions/quantized/test_quantized.py",
    "extensions/images/test_images.py",
    "extensions/experts/test_router_replay.py",
    "extensions/kept_tokens/test_kept_tokens.py",
    "extensions/tools/test_conversations.py",
    "extensions/recording/test_reproducible_rollouts.py",
    "memory/test_device_turns.py",
    "training/test_trainer.py",
)
# The only slow tests that run with V2.
SLOW = (
    "test_router_replay.py::", "test_weights.py::", "test_tensor_parallel.py::test_a_mixture_of_experts_in_parts",
    "test_tensor_parallel.py::test_an_adapter_is_merged",
)  # fmt: skip
SMALL = (
    "engine/test_engine.py::test_sampler_and_trainer_agree_on_logprobs_in_float32",
    "engine/test_engine.py::test_asynchronous_scheduling_comes_with_model_runner_v2",
)
# end of a test's name -> why it proves nothing in Triton's interpreter
SKIPPED: dict[str, str] = {
    "replay_what_their_engine_chose[deepseek_v3]": "V2 keeps experts by the prefix cache's blocks, of which vLLM has "
    "none for latent attention on a CPU",
    "test_without_a_prefix_cache_and_with_an_adapter": "V2 keeps experts by the prefix cache's blocks, and is refused",
}


def steps(many: int) -> int:
    """Return the number of steps of a longer run: two with V2, otherwise ``many``."""
    return 2 if running() else many


def running() -> bool:
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not running():
        return
    kept, left = [], []
    for item in items:
        long = item.get_closest_marker("slow") and not any(name in item.nodeid for name in SLOW)
        (left if long else kept).append(item)
        for name, reason in SKIPPED.items():
            if item.nodeid.endswith(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def main(arguments: list[str]) -> None:
    small = "--small" in arguments
    path = os.pathsep.join((str(ROOT / "tests/helpers/v2"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    options = [argument for argument in arguments if argument != "--small"] + ["-m", "not gpu"]
    tests = [f"tests/{name}" for name in (SMALL if small else ALL) if (ROOT / "tests" / name.split("::")[0]).exists()]
    os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *options, *tests], {**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    main(sys.argv[1:])
