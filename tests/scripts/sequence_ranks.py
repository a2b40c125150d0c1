"""Rows that ranks share out, compared with whole rows: log-probabilities, entropies, losses of routers, gradients.

Started by tests/extensions/sequence_parallel/test_shared_rows.py.

    torchrun --nproc-per-node S sequence_ranks.py OUT_DIR [CASE ...]

Each rank computes the step's whole rows, then its share of their tokens. Gradients of shares are summed over ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import torch
import torch.distributed as dist
import transformers as hf
from peft import LoraConfig
from row_cases import PACKED, RECURRENT, SHAPE, make, make_groups
from saved_tensors import kept

from colograd.batch import PackedRow, Rollout, ScoredGroup
from colograd.extensions.experts.losses import RoutingStep
from colograd.extensions.experts.router_replay import UNKNOWN, RowExperts, make_replaying
from colograd.extensions.kept_tokens.rider import KeptStep, KeptTokens
from colograd.extensions.sequence_parallel import forward
from colograd.extensions.sequence_parallel.forward import RowStep, over_rows
from colograd.extensions.sequence_parallel.forward import _unreached as unreached
from colograd.parallel.layout import RankLayout
from colograd.parallel.ranks import gather, rank, world_size
from colograd.policy import attention
from colograd.policy.layers import tells_routing
from colograd.policy.logprobs import PolicyForward, install, policy_logprobs, remove
from colograd.policy.lora import unwrap, wrap
from colograd.policy.packing import collate, dummy, plan_rows
from colograd.policy.row_proof import choose_rows
from colograd.sharding import zero
from colograd.sharding.zero import buckets_of

CPU = torch.device("cpu")
OVER_ROWS: Any = SimpleNamespace(sequence_parallel_size=2)


def heads(queries: int, keys: int) -> Callable[[], Any]:
    shape = {**SHAPE, "num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 16 * queries}
    return lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**shape, head_dim=16))


CASES: dict[str, Callable[[], Any]] = {
    **{name: PACKED[name] for name in ("llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "granite")},
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, head_dim=16)),
    "one key-value head": heads(4, 1),
    "three heads": heads(3, 1),
    "six heads, three of keys": heads(6, 3),
    "keys in place": PACKED["llama"],
    "sinks, keys in place": PACKED["gpt_oss"],
    "checkpoints": PACKED["qwen3_moe"],
    "adapter": PACKED["llama"],
    "kept": PACKED["llama"],
    "trees": PACKED["llama"],
    **{name: RECURRENT[name] for name in ("lfm2", "qwen3_5", "qwen3_5_moe", "granitemoehybrid")},
    "replayed experts": PACKED["qwen3_moe"],
    "trees of a hybrid": RECURRENT["qwen3_5"],
    "checkpoints of a hybrid": RECURRENT["lfm2"],
}


def rows_of(name: str) -> list[PackedRow]:
    """Return rows of 31, 5 and 39 tokens, and a dummy row of 2, where some ranks have no token."""
    first, *others = make_groups()
    short = first_of(others[0])
    if name.startswith("trees"):
        first = with_trees(first)
    return [*(row for each in ([first], [short], others) for row in plan_rows(each, 100, False, CPU)), dummy(CPU)]


def first_of(scored: ScoredGroup) -> ScoredGroup:
    """A group of its first completion."""
    group = dataclasses.replace(scored.group, rollouts=scored.group.rollouts[:1])
    return ScoredGroup(group, scored.rewards[:1], scored.advantages[:1])


def with_trees(scored: ScoredGroup) -> ScoredGroup:
    """Completions of more than 3 tokens go on from their first 2 twice."""

    from colograd.extensions.agents.branches import Branch, Branches

    def tree(rollout: Rollout) -> Rollout:
        rest = len(rollout.completion_ids) - 3
        branches = Branch(2, prompt=len(rollout.prompt_ids)), Branch(1, after=0), Branch(rest, after=0)
        return rollout.carrying(Branches(branches)) if rest > 0 else rollout

    group = dataclasses.replace(scored.group, rollouts=tuple(map(tree, scored.group.rollouts)))
    return dataclasses.replace(scored, group=group)


def some_kept(labels: torch.Tensor) -> KeptTokens:
    """Every third label was drawn from the whole vocabulary, the others from two or four tokens."""
    counts = torch.arange(len(labels), dtype=torch.int32) % 3 * 2
    ids = [(label + 7 * torch.arange(int(n))) % SHAPE["vocab_size"] for label, n in zip(labels, counts, strict=True)]
    return KeptTokens(torch.cat(ids).int(), counts)


def some_experts(tokens: int, draw: torch.Generator) -> torch.Tensor:
    """Two of four experts for each token in both layers. Every fifth token's are unknown."""
    found = torch.rand(tokens, 2, 4, generator=draw).argsort(-1)[..., :2].to(torch.int8)
    found[::5] = UNKNOWN
    return found


def run(model: Any, name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the outputs of the rows' forwards, and the gradients of a loss of all outputs."""
    model.zero_grad(set_to_none=True)
    if name == "kept":
        install(model, KeptStep())
    found: list[torch.Tensor] = []
    for number, row in enumerate(rows_of(name)):
        batch = collate(row)
        count = len(batch.labels)
        if name == "kept":
            batch = dataclasses.replace(batch, riders=(some_kept(batch.labels),))
        draw = torch.Generator().manual_seed(number)
        if name == "replayed experts":
            batch = dataclasses.replace(batch, riders=(RowExperts(some_experts(batch.layout.num_tokens, draw)),))
        first, second = torch.randn(2, count, generator=draw)
        with attention.keys_in_place_from(0) if "in place" in name else nullcontext():
            routed = tells_routing(unwrap(model))
            forward = PolicyForward(model, 0.7, True, (RoutingStep(),) if routed else ())
            logprobs, entropy, values = forward(batch)
            more = [torch.zeros(())]
            if routed:
                routing = [value for name, value in values.items() if name.startswith("routing/")]
                more = [*routing, values["routing/balance_loss"]]
            loss = (logprobs * first).sum() + (entropy * second).sum() + 3.0 * more[-1]
            loss.backward()
        found += [logprobs.detach(), entropy.detach(), loss.detach(), *(x.detach() for x in more)]
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def held(step: RowStep) -> list[int]:
    """Return the bytes that autograd keeps for a row of 1,200 tokens: for the whole row, and for this rank's part. The
    model has a key head for every rank, so that no rank repeats another's."""
    model = make(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE | {"num_key_value_heads": 4}, head_dim=16)))
    row = collate(dummy(CPU, [(300, (300, 300, 300))]))
    model.config.max_position_embeddings = 1200
    found = []
    for prepare in (choose_rows, functools.partial(install, step=step)):
        prepare(model)
        found.append(kept(model, lambda: policy_logprobs(model, row, 1.0)[0]))
    return found


def compare(name: str, step: RowStep) -> dict[str, float]:
    model = make(CASES[name]).eval()
    if name == "adapter":
        model = wrap(model, LoraConfig(r=4, target_modules="all-linear"), 7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02 if parameter.requires_grad else 0)
    assert choose_rows(unwrap(model)) == ""
    if name == "replayed experts":
        make_replaying(model)
    if name.startswith("checkpoints"):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    whole, expected = run(model, name)
    install(model, step)
    seen: list[int] = []
    hook = unwrap(model).get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    parts, gradients = run(model, name)
    hook.remove()
    remove(model, RowStep)
    assert gradients.keys() == expected.keys()
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    size = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    off = torch.stack([(gradients[n] - gradient).norm() for n, gradient in expected.items()]).norm()
    return {
        "forward": max(float((a - b).abs().max() / (1 + a.abs().max())) for a, b in zip(whole, parts, strict=True)),
        "gradient": float(off / size),
        "labels": sum(seen),  # number of labels with logits of this rank
        "all_labels": sum(len(collate(row).labels) for row in rows_of(name)),
    }


class SomeExperts(torch.nn.Module):
    """Two experts. The second one has a token on some ranks only."""

    def __init__(self, first: torch.nn.Module) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([first, copy.deepcopy(first)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum(expert(hidden) for expert in self.experts[: 1 + rank() % 2])  # type: ignore[return-value]


def experts_without_tokens(step: RowStep) -> list[float]:
    """Return the error of ZeRO-2's summed gradients, with one parameter per bucket, against whole backwards."""
    model = make(CASES["llama"]).eval()
    assert choose_rows(model) == ""
    for layer in model.model.layers:
        layer.mlp = SomeExperts(layer.mlp)
    install(model, step)
    batch = collate(rows_of("llama")[0])
    policy_logprobs(model, batch, 1.0)[0].sum().backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    for gradient in expected.values():
        dist.all_reduce(gradient)
    model.zero_grad(set_to_none=True)
    zero.buckets_of = functools.partial(buckets_of, elements=1)
    sharding = over_rows(zero.SharedGradients, OVER_ROWS)(model)
    sharding.backward(policy_logprobs(model, batch, 1.0)[0].sum())
    off = [float((piece.part.grad - piece.of(expected[piece.name])).abs().max()) for piece in sharding.owned()]
    sharding.close()
    return [max(off), float(len(sharding.buckets))]


def walks(step: RowStep) -> list[int]:
    """How often graphs are looked at in two backwards: of a dense model, and of a mixture."""
    found = []
    for name in ("llama", "qwen3_moe"):
        model, looked = make(CASES[name]), []
        assert choose_rows(model) == ""
        install(model, step)
        batch = collate(rows_of("llama")[0])
        with mock.patch.object(forward, "_unreached", lambda *given: looked.append(1) or unreached(*given)):  # noqa: B023
            sharding = over_rows(zero.SharedGradients, OVER_ROWS)(model)
            for _ in range(2):
                sharding.backward(policy_logprobs(model, batch, 1.0)[0].sum())
        sharding.close()
        found.append(len(looked))
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = world_size()
    layout = RankLayout(rank(), size, ranks_per_node=size, ranks_per_sequence=size)
    step = RowStep.of(layout, None)
    found = {name: compare(name, step) for name in sys.argv[2:] or CASES}
    alike = len({*map(str, gather([entry["forward"] for entry in found.values()]))}) == 1
    result = {"cases": found, "alike": alike, "held": held(step), "walks": walks(step)}
    result["experts"] = experts_without_tokens(step)
    Path(sys.argv[1], f"rank{rank()}-of-{size}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
