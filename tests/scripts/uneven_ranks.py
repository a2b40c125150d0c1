"""Draw, pack and differentiate one step. Its lengths differ widely between ranks.

Started by tests/parallel/test_balance.py.

    torchrun --nproc-per-node 2 uneven_ranks.py OUT_DIR

Every stage but these is the real one: the engine and the rewards are stand-ins that know each prompt's outcome.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from colograd.batch import FinishReason, Group, Prompt, Rollout, SampledStep, StepBatch
from colograd.losses.entropy import with_step_entropy
from colograd.losses.objective import Objective
from colograd.losses.token_losses import SAPOLoss
from colograd.parallel.ranks import rank, world_size
from colograd.parallel.shards import sum_over_ranks, zero_gradients
from colograd.policy import attention
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import PackingRules, collate
from colograd.reporting.metrics import PhaseTimes
from colograd.rewards import Ready
from colograd.rollout.rounds import PlainRound
from colograd.rollout.stages import Stages
from colograd.rollout.statistics import RolloutStatistics
from colograd.training.learner import step_batch

# (prompt tokens, completion tokens) of six groups: the first half is long.
LENGTHS = [(60, (50, 40, 60)), (40, (60, 60, 50)), (50, (40, 30, 60)), (5, (3, 2, 1)), (4, (1, 6, 2)), (6, (2, 2, 2))]


class Outcomes:
    """Stages with results that depend only on the prompt's position."""

    def generate(self, prompts: Any) -> Any:
        for prompt in reversed(prompts):
            draw = torch.Generator().manual_seed(prompt.position)
            rollouts = []
            for length in LENGTHS[prompt.position][1]:
                ids = tuple(torch.randint(128, (length,), generator=draw).tolist())
                logprobs = -torch.rand(length, generator=draw)
                kept = torch.rand(length, generator=draw) < 0.9
                rollouts.append(Rollout(prompt.prompt_ids, ids, logprobs, kept, FinishReason.STOP, 3))
            yield Group(prompt.example, tuple(rollouts), prompt.position)

    def begin_score(self, groups: Any) -> Any:
        return Ready(torch.cat([self.score(group) for group in groups]))

    def score(self, group: Group) -> torch.Tensor:
        return torch.tensor([[float(sum(r.completion_ids) % 7)] for r in group.rollouts])

    def judge(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        return rewards[:, 0] - rewards.mean()

    def collect(self, prompts: list[Prompt], rules: PackingRules) -> tuple[StepBatch, SampledStep]:
        stages = Stages(self.generate, self.begin_score, self.judge)
        (drawn,) = PlainRound(PhaseTimes()).draw([prompts], stages)
        statistics = RolloutStatistics.of(drawn.sampled, lambda rewards: rewards[:, 0], rules.mask_truncated)
        return step_batch(drawn, statistics, rules, ["outcome"], PhaseTimes()), drawn


def step(model: Any, max_tokens: int, balance_ranks: bool, equal_counts: bool) -> dict[str, Any]:
    """Return this rank's part of one step, with the gradient of all ranks."""
    share = len(LENGTHS) // world_size()
    prompts = [
        Prompt({"unpicklable": lambda: 0}, tuple(range(1, LENGTHS[i][0] + 1)), i)
        for i in range(rank() * share, (rank() + 1) * share)
    ]
    rules = PackingRules(max_tokens, False, True, True, balance_ranks, equal_counts, 1e-3, torch.device("cpu"))
    batch, drawn = Outcomes().collect(prompts, rules)
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in map(collate, batch.rows):
        logprobs, _ = policy_logprobs(model, row, 1.0)
        weight = (logprobs.detach() - row.sampler_logprobs).exp()
        loss = -(weight * row.advantages * row.loss_mask * logprobs).sum().double() / batch.num_loss_tokens
        loss.backward()
        total += loss.detach()
    zero_gradients(model.parameters())
    if world_size() > 1:
        sum_over_ranks([parameter.grad for parameter in model.parameters()])
        dist.all_reduce(total)
    return {
        "loss": total.item(),
        "gradient": torch.cat([p.grad.flatten() for p in model.parameters()]).tolist(),
        "tokens": sum(row.num_tokens for row in batch.rows),
        "micro_batches": len(batch.rows),
        "moved": batch.metrics["train/moved_groups"],
        "own_groups": [group.group.position for group in drawn.sampled],
        "metrics": {k: v for k, v in batch.metrics.items() if k not in ("train/moved_groups", "train/micro_batches")},
    }


def entropy_step(model: Any, max_tokens: int) -> dict[str, Any]:
    """The loss and gradient with every term that must know the tokens of all ranks: the top quantile, the bonus."""
    share = len(LENGTHS) // world_size()
    prompts = [Prompt({}, tuple(range(1, LENGTHS[i][0] + 1)), i) for i in range(rank() * share, (rank() + 1) * share)]
    rules = PackingRules(max_tokens, False, True, True, False, False, 1e-3, torch.device("cpu"))
    batch, _ = Outcomes().collect(prompts, rules)
    objective = Objective(SAPOLoss(1.0, 1.05), top_entropy_quantile=0.3, entropy_bonus=True)
    batch = with_step_entropy(batch, objective, 0.1, lambda row: policy_logprobs(model, row, 1.0)[1])
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in map(collate, batch.rows):
        loss = objective(*policy_logprobs(model, row, 1.0, True), row).loss
        (loss / objective.loss.denominator(batch)).backward()
        total += loss.detach() / objective.loss.denominator(batch)
    zero_gradients(model.parameters())
    if world_size() > 1:
        sum_over_ranks([parameter.grad for parameter in model.parameters()])
        dist.all_reduce(total)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
    return {"loss": total.item(), "gradient": gradient, "tokens": batch.rows[0].step_constants.tokens}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, attn_implementation=attention.NAME,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    results = [step(model, *case) for case in ((1000, False, False), (1000, True, False), (120, True, True))]
    entropy = [entropy_step(model, max_tokens) for max_tokens in (1000, 120)]
    Path(sys.argv[1], f"rank{rank()}-of-{world_size()}.json").write_text(json.dumps([results, entropy]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
