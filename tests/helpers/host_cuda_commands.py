"""A user's commands on the device of `host_cuda`: check a recipe, train, replay a step, take a benchmark, plan.

    python tests/helpers/host_cuda_commands.py FOLDER      # prints each command's exit status, and the places reached

It also runs the thread of a user's environment, because the tiny models' template has no tools.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import cuda_places
import host_cuda_cases


def main(folder: Path) -> None:
    host_cuda_cases.prepare()
    import benchmark_cases
    import tiny
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from colograd.apps import cli, doctor
    from colograd.extensions.tools.environments import EnvironmentThread

    host_cuda_cases.shorten()
    doctor.bus_speed.__defaults__ = (2**20,)  # bytes
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    model, judge, run = tiny.make_model(folder / "model"), folder / "judge", folder / "run"
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1, "vocab_size": 258}
    LlamaForSequenceClassification(LlamaConfig(**shape, **heads)).save_pretrained(judge)
    tiny.make_tokenizer().save_pretrained(judge)
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 2**24}
    flags = [text for name, value in engine.items() for text in (f"--vllm_engine_kwargs.{name}", json.dumps(value))]
    recipe = folder / "recipe.yaml"
    settings = {
        "output_dir": str(run),
        "journal": "keep",
        "report_to": "none",
        "max_tokens_per_microbatch": 256,
        "vllm_engine_kwargs": engine,
    }
    rewards = {"reward_funcs": ["tiny:vowels", str(judge)]}
    recipe.write_text(json.dumps(tiny.recipe(model, **settings, **rewards)))  # JSON is YAML
    tasks = benchmark_cases.write(folder)
    statuses = {
        command: cli.main([command, *map(str, arguments)])
        for command, *arguments in (
            ("plan", "--model", model),
            ("doctor", "--config", recipe),
            ("train", "--config", recipe),
            ("replay", run, "--step", 1),
            ("eval", model, "--tasks", "letters", "choices", "--include-path", tasks, *flags),
        )
    }
    thread = EnvironmentThread()
    assert thread.ask(torch.cuda.current_device).result() == 0
    thread.close()
    print(json.dumps({"statuses": statuses, "reached": cuda_places.reached()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
