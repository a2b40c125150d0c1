"""A step's rows through layers with a state (Qwen3.5's): packed, each prompt's state computed once, and padded.

    python tests/benchmarks/hybrid_rows.py [--prompt 400] [--group 8] [--completion 64] [--repeats 3] [--out F.json]

Makes a random Qwen3.5 (three layers of Gated DeltaNet to one of attention) and one group, and runs its forward and
backward in both kinds of rows, by turns. Prints a Markdown table: tokens through a layer, seconds (the best of the
repeats), their ratio; and how far loss and gradients are apart.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()

import torch  # noqa: E402
import transformers as hf  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import versions  # noqa: E402

from colograd.batch import FinishReason, Group, MicroBatch, ModelInput, Rollout, ScoredGroup  # noqa: E402
from colograd.policy.logprobs import policy_logprobs  # noqa: E402
from colograd.policy.packing import pack  # noqa: E402
from colograd.policy.row_proof import choose_rows  # noqa: E402

VOCABULARY = 1000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hybrid_rows.py", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="layers, one in four of attention (4)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states (256)")
    parser.add_argument("--prompt", type=int, default=400, help="tokens of the prompt (400)")
    parser.add_argument("--group", type=int, default=8, help="completions of the group (8)")
    parser.add_argument("--completion", type=int, default=64, help="tokens of the longest completion (64)")
    parser.add_argument("--repeats", type=int, default=3, help="of each kind, by turns; the best one counts (3)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def make_model(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    return hf.Qwen3_5ForCausalLM(
        hf.Qwen3_5TextConfig(
            vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        )
    )  # fmt: skip


def make_group(options: argparse.Namespace) -> ScoredGroup:
    """Make completions of between half of the longest length and the longest length."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> array[int]:
        return array("i", torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    prompt, rollouts = ModelInput(tuple(draw(options.prompt))), []
    for index in range(options.group):
        ids = draw(options.completion - index * options.completion // (2 * options.group))
        written = torch.ones(len(ids), dtype=torch.bool)
        rollouts.append(Rollout(prompt, ids, torch.zeros(len(ids)), written, FinishReason.STOP, 0))
    advantages = torch.linspace(-1, 1, options.group)
    return ScoredGroup(Group({}, tuple(rollouts), 0), torch.zeros(options.group, 1), advantages)


def step(model: Any, rows: Sequence[MicroBatch]) -> tuple[float, float]:
    """Return the seconds of forward and backward of all rows, and the loss."""
    model.zero_grad()
    total, began = 0.0, time.perf_counter()
    for row in rows:
        loss = -(row.advantages * policy_logprobs(model, row, 1.0)[0]).sum()
        loss.backward()
        total += float(loss.detach())
    return time.perf_counter() - began, total


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    group, device, kinds = make_group(options), torch.device("cpu"), {}
    for kind, why in (("packed", ""), ("padded", "asked for")):
        model = make_model(options).train()
        assert bool(choose_rows(model, why=why)) == bool(why)
        rows = pack([group], 100_000, False, device, share_prompts=not why)
        tokens: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(
            lambda m, args, t=tokens: t.append(args[0].shape[:2].numel())
        )
        step(model, rows)
        kinds[kind] = {"model": model, "rows": rows, "tokens": sum(tokens), "seconds": []}
    for _ in range(options.repeats):
        for of in kinds.values():
            seconds, of["loss"] = step(of["model"], of["rows"])
            of["seconds"].append(seconds)
    gradients = [torch.cat([p.grad.flatten() for p in of["model"].parameters()]) for of in kinds.values()]
    apart = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    best = {kind: min(of["seconds"]) for kind, of in kinds.items()}
    lines = [
        [kind, f"{of['tokens']:,}", f"{best[kind]:.2f}", f"{best[kind] / best['padded']:.2f}"]
        for kind, of in kinds.items()
    ]
    print(f"P={options.prompt}, G={options.group}, completions of up to {options.completion} tokens; {machine()}\n")
    print(table(["rows", "tokens through a layer", "seconds", "of padded"], lines))
    losses = [of["loss"] for of in kinds.values()]
    print(f"\nloss {losses[0]:.5f} and {losses[1]:.5f}; gradients differ by {apart:.1e} of their length")
    if options.out:
        write(options.out, {"versions": versions(), "options": vars(options), "seconds": best, "gradients": apart})


if __name__ == "__main__":
    main()
