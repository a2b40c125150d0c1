"""A model that one rank can't hold under a limit of its memory: it fails there unsharded, and trains on several.

    python tests/benchmarks/larger.py [--ranks 4] [--limit 6.0] [--layers 24] [--runs none,tensor] [--out F.json]

Makes a random Llama of 17 M parameters a layer in bfloat16, and starts GRPO on it, engines included, one run after
another: unsharded on one rank without a limit, and with it; with it and the optimizer's state, gradients and layers'
inputs in host memory; cut by FSDP2 on several ranks with the limit, each with an engine; then with one engine over all
ranks; and in the layout of that engine (`tensor`). `--runs` selects runs by the beginning of their names.

The limit is the system's (RLIMIT_DATA): it bounds the private memory of each process, used or not. The limit doesn't
count shared memory, where offloaded data lies. So the limit stands for a GPU's memory. The run is made to believe that
it has a GPU, because a CPU run offloads nothing. Prints each rank's peak of private memory, and how each run ended;
exit status 1 unless only the limited one on one rank that offloads nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colograd.runtime import process

HIDDEN, INNER, HEADS = 1024, 4096, 16
GIB = 2**30
RANK = "COLOGRAD_LARGER_RANK"  # for ranks of a run: the limit in GiB, and the folder


ON_HOST = {"offload_optimizer": "stream", "offload_gradients": True, "gradient_checkpointing": "offload"}


@dataclass(frozen=True)
class Contest:
    name: str
    ranks: int
    settings: dict[str, Any]
    is_limited: bool = True
    offloads: bool = False


def contests(ranks: int) -> list[Contest]:
    return [
        Contest("none, no limit", 1, {}, is_limited=False),
        Contest("none", 1, {}),
        Contest("none, on the host", 1, ON_HOST, offloads=True),
        Contest("fsdp, an engine each", ranks, {"sharding": "fsdp"}),
        Contest("fsdp, one engine", ranks, {"sharding": "fsdp", "vllm_tensor_parallel_size": ranks}),
        Contest("tensor, one engine", ranks, {"sharding": "tensor", "vllm_tensor_parallel_size": ranks}),
    ]


# -- a rank of a run


def be_rank(limit: float, folder: Path) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * GIB),) * 2)
    process.prepare_threads()
    from figures import OwnMemory

    peak = OwnMemory()
    peak.start()
    from datasets import Dataset

    from colograd import GRPOConfig, GRPOTrainer

    settings = json.loads((folder / "settings.json").read_text())
    model = settings.pop("model")
    if settings.pop("offloads"):
        for name in ("streams_optimizer", "offloads_gradients"):
            setattr(GRPOConfig, name, property(lambda self: True))
    prompts = Dataset.from_dict({"prompt": ["What is 1 + 2?", "Say something.", "Count to ten.", "Why?"]})
    trainer = GRPOTrainer(model, reward_by_length, GRPOConfig(**settings), prompts)
    loss = trainer.train().training_loss
    trainer.close()
    report = {"resident": peak.resident, "mapped": peak.mapped, "loss": loss}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


def reward_by_length(completions: Sequence[Any], **_: Any) -> list[float]:
    return [len(str(completion)) % 7 / 7 for completion in completions]


# -- the runs


def make_model(folder: Path, layers: int) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
    import tiny

    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=256, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        dtype=torch.bfloat16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def settings_of(contest: Contest, model: Path, folder: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "output_dir": str(folder / "run"),
        "max_steps": 2,
        "prompts_per_step": 4,
        "num_generations": 2,
        "max_completion_length": 16,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "vllm_max_model_length": 128,
        "vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26},
        "save_strategy": "no",
        "report_to": "none",
        "log_completions": False,
        "offloads": contest.offloads,
        **contest.settings,
    }


def start(contest: Contest, model: Path, folder: Path, limit: float) -> dict[str, Any]:
    """Run to the end, and return the ranks' reports."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(settings_of(contest, model, folder)))
    environment = os.environ | {
        RANK: json.dumps([limit if contest.is_limited else 0, str(folder)]),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // contest.ranks)),
        "MALLOC_ARENA_MAX": "2",  # an arena of a thread is mapped whole, and would count
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(contest.ranks)]
    command += ["--master-port", str(process.free_port()), __file__]
    with (folder / "log").open("w") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    return {"name": contest.name, "ranks": contest.ranks, "limited": contest.is_limited, "status": status,
            "said": last_error((folder / "log").read_text()) if status else "", "of_ranks": ranks}  # fmt: skip


def last_error(log: str) -> str:
    """Return the last line that names an error, except torchrun's own."""
    lines = [line.strip() for line in log.splitlines() if "Error: " in line and "ChildFailedError" not in line]
    return lines[-1].split("]: ")[-1][:160] if lines else log[-160:]


def report(found: Sequence[dict[str, Any]], parameters: int, limit: float) -> str:
    from figures import machine, table

    def gib(run: dict[str, Any], key: str) -> str:
        return f"{max(rank[key] for rank in run['of_ranks']) / GIB:.2f}" if run["of_ranks"] else ""

    rows = [
        [run["name"], str(run["ranks"]), f"{limit:.2f}" if run["limited"] else "", gib(run, "mapped"),
         gib(run, "resident"), "fails: " + run["said"] if run["status"] else "trains"]
        for run in found
    ]  # fmt: skip
    head = ["sharding", "ranks", "limit", "mapped at most", "resident at most", "the run"]
    return f"{parameters / 1e6:,.0f} M parameters on {machine()}; GiB of the fullest rank\n\n{table(head, rows)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="larger.py", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="of the sharded runs (4)")
    parser.add_argument("--limit", type=float, default=6.0, help="GiB of memory that a process may have (6.0)")
    parser.add_argument("--layers", type=int, default=24, help="of 17 M parameters each (24)")
    parser.add_argument("--runs", default="none,fsdp,tensor", help="of those runs, by how their names begin (all)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from figures import write

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        parameters = make_model(folder / "model", options.layers)
        found = [
            start(contest, folder / "model", folder / str(index), options.limit)
            for index, contest in enumerate(contests(options.ranks))
            if contest.name.startswith(tuple(options.runs.split(",")))
        ]
    print(report(found, parameters, options.limit))
    write(options.out, {"parameters": parameters, "limit_gib": options.limit, "runs": found})
    as_expected = all(bool(run["status"]) == (run["name"] == "none") for run in found)
    return 0 if as_expected else 1


if __name__ == "__main__":
    if RANK in os.environ:
        limit, folder = json.loads(os.environ[RANK])
        be_rank(limit, Path(folder))
    else:
        sys.exit(main())
