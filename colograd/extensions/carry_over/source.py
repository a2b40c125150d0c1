"""`CarryOver`: a rollout source that ends a round of sampling before all completions end.

More groups are in flight than a round trains. When the round has enough whole groups, all other completions stop where
they are. The next round continues these completions, and keeps their tokens with the log-probabilities of the weights
that sampled them. A round waits for groups of the maximum age, so that no token is older than `carry_over_max_age`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from ...batch import Group, Prompt
from ...config import GRPOConfig
from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling, request_seed
from ...policy.loading import Policy
from ...rollout.features import SourceFeature, TrainerArguments
from .in_flight import GroupInFlight, InFlight


class CarryOverFeature(SourceFeature):
    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        if config.carry_over is None:
            return None
        others = dict(arguments.sources)
        others |= {"a generate of your own": "generate" in arguments.replaced}
        others |= {"a column of images": arguments.has_images}
        if name := next((name for name, value in others.items() if value), None):
            raise ValueError(
                f"carry_over is {config.carry_over}, but with {name} a completion isn't a single answer of the engine "
                "to a text. Only such answers can stop and go on: leave one of the two out."
            )
        return cls()

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> CarryOver:
        return CarryOver(engine, trainer.round.in_flight)


class CarryOver:
    """Rollout source that keeps groups that a round doesn't train, in ``in_flight``, for the next round."""

    def __init__(self, engine: Engine, in_flight: InFlight) -> None:
        self.engine, self.in_flight = engine, in_flight

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """Yield the first `InFlight.takes` groups of a training round that finish, or all groups of an evaluation. The
        arguments are those of `RolloutSource.generate`."""
        if purpose != "train":
            yield from self.engine.generate(prompts, sampling, version=version, seed=seed, purpose=purpose)
            return
        self.engine.require(version)
        groups = self.in_flight.begin(prompts, version)
        round_ = _Round(self.engine, groups, self.in_flight.due(groups, version), self.in_flight.takes)
        round_.submit(sampling, seed, purpose, self.in_flight.size)
        try:
            while round_.lacks:
                yield from round_.hand_over(version)
                if round_.lacks:
                    round_.extend(self.engine.advance(), version)
            round_.extend(self.engine.stop(round_.requests), version)
            self.in_flight.groups = tuple(round_.groups.values())
        finally:
            self.engine.abort(round_.requests)


class _Round:
    """The groups of one round of sampling: unfinished groups, and whole groups that aren't yielded yet. ``due`` are the
    positions of groups that the round must wait for, because of their age. ``takes``: number of groups to yield."""

    def __init__(self, engine: Engine, groups: Sequence[GroupInFlight], due: set[int], takes: int) -> None:
        self.engine, self.due, self.lacks = engine, due, takes
        self.groups = {group.prompt.position: group for group in groups}  # Groups that aren't yielded yet, by position.
        self.whole = [group.prompt.position for group in groups if group.is_whole]  # Positions of whole groups.
        self.requests: dict[str, tuple[int, int]] = {}  # Request -> position of the group, index of the completion.

    def submit(self, sampling: Sampling, seed: int, purpose: str, size: int) -> None:
        """Submit a request to the engine for each unfinished completion of the ``size`` oldest groups. (A resumed run
        may have more groups, if `carry_over` or the number of ranks has changed.)"""
        for position, group in itertools.islice(self.groups.items(), size):
            for index, each in enumerate(group.completions):
                if each.finish_reason is not None:
                    continue
                own = request_seed(seed, position, purpose) + index  # The seed as in one request of n completions.
                if each.ids:  # A continued completion needs new random numbers, independent of its earlier tokens.
                    own = request_seed(seed, position, f"{purpose}/{index}/{len(each.ids)}")
                read = group.prompt.input.followed_by(each.ids)
                request = self.engine.submit(read, sampling, own, n=1, spent=len(each.ids))
                self.requests[request] = position, index

    def hand_over(self, version: int) -> Iterator[Group]:
        """Yield whole groups, but only so many that the round still has room for each group that it must wait for."""
        for position in [*self.whole]:
            if position in self.due or self.lacks > len(self.due):
                self.due.discard(position)
                self.whole.remove(position)
                self.lacks -= 1
                yield self.groups.pop(position).group(version)

    def extend(self, ended: Iterable[tuple[str, Sequence[Sampled]]], version: int) -> None:
        for request, (part,) in ended:
            position, index = self.requests.pop(request)
            group = self.groups[position]
            parts = [*group.completions]
            parts[index] = parts[index].extended(part, version)
            self.groups[position] = group = GroupInFlight(group.prompt, tuple(parts), group.since)
            if group.is_whole:
                self.whole.append(position)
