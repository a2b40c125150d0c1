"""How far a mixture's trainer is from its sampler, with and without router replay: the same tokens, the same weights.

    python tests/benchmarks/router_replay.py [--layers 8] [--experts 32] [--prompts 16] [--out F.json]

Makes a random Qwen3-MoE, lets vLLM sample from it, and asks the policy for the tokens' log-probabilities twice: its
routers choose the experts, or the engine's choice is replayed. In bfloat16, where scores that are nearly alike round to
another order, and in float32. Prints a Markdown table: mean and largest |trainer - sampler| in nats, the estimate k3 of
KL(sampler, trainer), and the share of expert choices (one token, one layer) on which the two disagree. With replay the
last column compares the engine's choice with the one that the trainer's routers would have made.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # tests/helpers/tiny.py

import tiny  # noqa: E402
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import versions  # noqa: E402

from colograd import GRPOTrainer  # noqa: E402
from colograd.batch import MicroBatch, ScoredGroup  # noqa: E402
from colograd.engine.sampling import Sampling  # noqa: E402
from colograd.extensions.experts.router_replay import APART, UNKNOWN, RowExperts, routers_of  # noqa: E402  # noqa: E402
from colograd.policy.logprobs import PolicyForward  # noqa: E402
from colograd.policy.packing import pack  # noqa: E402

DTYPES = ("bfloat16", "float32")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="router_replay.py", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="layers, all with experts (8)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states (256)")
    parser.add_argument("--experts", type=int, default=32, help="experts of a layer (32)")
    parser.add_argument("--chosen", type=int, default=4, help="experts of a token (4)")
    parser.add_argument("--prompts", type=int, default=16, help="groups of 4 completions (16)")
    parser.add_argument("--completion-tokens", type=int, default=64, help="tokens of a completion at most (64)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    """Random weights make each token's distribution, and its experts, depend on its context."""
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    model = hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=options.hidden, intermediate_size=2 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            num_experts=options.experts, num_experts_per_tok=options.chosen, moe_intermediate_size=options.hidden // 2,
            max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(trainer: GRPOTrainer) -> tuple[MicroBatch, ...]:
    """Sample the first prompts, and pack the groups into rows."""
    prompts = trainer.train_prompts.prompts()
    groups = trainer.engine.generate(prompts, Sampling.for_training(trainer.args), version=0, seed=0)
    scored = [ScoredGroup(g, torch.zeros(len(g.rollouts), 1), torch.ones(len(g.rollouts))) for g in groups]
    return pack(scored, 4096, False, trainer.args.device)


@torch.no_grad()
def asked(model: Any, row: MicroBatch, replay: bool) -> tuple[torch.Tensor, float, float]:
    """Return the trainer's less the sampler's log-probabilities (N,), the number of different expert choices, and of
    all."""
    own: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, args, output: own.append(output[2])) for router in routers_of(model)
    ]
    logprobs, _, values = PolicyForward(model, 1.0)(row if replay else dataclasses.replace(row, riders=()))
    for hook in hooks:
        hook.remove()
    difference = (logprobs - row.sampler_logprobs).double().cpu()
    if replay:
        strange, count = values[APART]
        return difference, float(strange), float(count)
    rider = row.get(RowExperts)
    assert rider is not None
    told = rider.experts[:, 0, 0] != UNKNOWN
    chosen, theirs = torch.stack(own, 1)[told], rider.experts[told].long()
    strange = (theirs[..., :, None] != chosen[..., None, :]).all(-1).sum()
    return difference, float(strange), float(theirs.numel())


def measure(folder: Path, dtype: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    args = tiny.config(
        folder / dtype, model_init_kwargs={"dtype": dtype}, router_replay=True, prompts_per_step=options.prompts,
        max_completion_length=options.completion_tokens,
    )  # fmt: skip
    data = tiny.prompts(options.prompts)
    trainer = GRPOTrainer(str(folder), tiny.vowels, args, data)
    try:
        trainer.publish()
        trainer.model.eval()
        rows = rows_of(trainer)
        found = {}
        for name, replay in (("off", False), ("on", True)):
            parts = [asked(trainer.model, row, replay) for row in rows]
            difference = torch.cat([part[0] for part in parts])
            found[name] = {
                "tokens": float(len(difference)),
                "mean": float(difference.abs().mean()),
                "max": float(difference.abs().max()),
                "k3": float((difference.exp() - 1 - difference).mean()),
                "disagreement": sum(part[1] for part in parts) / sum(part[2] for part in parts),
            }
        return found
    finally:
        trainer.close()


def report(found: dict[str, dict[str, dict[str, float]]]) -> str:
    header = ("dtype", "replay", "mean", "max", "k3", "choices that differ")
    rows = [
        (dtype, name, f"{v['mean']:.2e}", f"{v['max']:.2e}", f"{v['k3']:.2e}", f"{v['disagreement']:.3%}")
        for dtype, of_dtype in found.items()
        for name, v in of_dtype.items()
    ]
    return table(header, rows, text_columns=2)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="router-replay-") as folder:
        model = make_model(Path(folder), options)
        found = {dtype: measure(model, dtype, options) for dtype in DTYPES}
    tokens = next(iter(found.values()))["off"]["tokens"]
    print(f"\n{tokens:,.0f} tokens, {options.layers} layers of {options.experts} experts, {options.chosen} a token")
    print(report(found))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write(options.out, {"settings": {**settings, "machine": machine(), **versions()}, "dtypes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
