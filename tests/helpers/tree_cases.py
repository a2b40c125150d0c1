"""Trees of tokens, and the same branches as separate rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch

from colograd.batch import ModelInput, Rollout
from colograd.extensions.agents.branches import Branch, branches_of


def sequences(rollout: Rollout) -> Iterator[Rollout]:
    """Yield a tree's branches as plain rollouts. A sampled token counts in the first branch that has it."""
    tree = branches_of(rollout) or (Branch(len(rollout.completion_ids), prompt=len(rollout.input)),)
    ends = set(range(len(tree))) - {branch.after for branch in tree}
    starts = [sum(branch.length for branch in tree[:index]) for index in range(len(tree))]
    done: set[int] = set()
    for end in sorted(ends):
        path = [end]
        while (before := tree[path[0]].after) is not None:
            path.insert(0, before)
        cuts = [slice(starts[index], starts[index] + tree[index].length) for index in path]
        own = [rollout.sampled[cut] & (index not in done) for index, cut in zip(path, cuts, strict=True)]
        done.update(path)
        ids = [token for cut in cuts for token in rollout.completion_ids[cut]]
        seen = tree[path[0]].prompt
        yield Rollout(
            input=ModelInput(rollout.input.ids[:seen] or tuple(ids[:1])),
            completion_ids=array("i", ids if seen else ids[1:]),
            sampler_logprobs=torch.cat([rollout.sampler_logprobs[cut] for cut in cuts])[0 if seen else 1 :],
            sampled=torch.cat(own)[0 if seen else 1 :],
            finish_reason=rollout.finish_reason,
            policy_version=rollout.policy_version,
        )
