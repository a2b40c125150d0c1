"""`carry_over`: a round ends before its last completions, which go on in the next one; nothing is sampled twice."""

from __future__ import annotations

import dataclasses
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import tiny
import torch
from paths import SCRIPTS
from transformers import AutoModelForCausalLM

from colograd import GRPOTrainer
from colograd.apps.replaying.replayer import Replay, Replayer
from colograd.batch import FinishReason, Group, ModelInput, Prompt, Rollout, ScoredGroup
from colograd.engine.protocol import Sampled
from colograd.engine.sampling import Sampling
from colograd.extensions.carry_over import rounds
from colograd.extensions.carry_over.in_flight import (
    InFlight,
    TokenAges,
    Versions,
    VersionSpan,
    extended,
    versions_of,
)
from colograd.losses.objective import Objective
from colograd.policy.packing import pack

STEPS, GROUPS = 6, 4


class Observed(GRPOTrainer):
    """A trainer that records each round's groups, the weights that sampled them, and the number of tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds: dict[int, list[Group]] = {}
        self.weights_of: dict[int, dict[str, torch.Tensor]] = {}
        self.sampled = 0
        core = self.engine.core.engine_core
        own = core.get_output

        def get_output() -> Any:
            outputs = own()
            self.sampled += sum(len(each.new_token_ids) for each in outputs.outputs)
            return outputs

        core.get_output = get_output

    def publish(self) -> None:
        super().publish()
        self.weights_of[self.state.global_step] = {n: v.clone() for n, v in self.model.state_dict().items()}

    def compute_advantages(self, group: Group, rewards: torch.Tensor) -> torch.Tensor:
        self.rounds.setdefault(self.state.global_step, []).append(group)
        return super().compute_advantages(group, rewards)

    @property
    def in_flight_tokens(self) -> int:
        return sum(len(each.completion_ids) for group in self.round.in_flight.groups for each in group.rollouts)


def tokens(rounds: dict[int, list[Group]]) -> list[tuple[int, list[list[int]]]]:
    return [(g.position, [[*r.completion_ids] for r in g.rollouts]) for step in sorted(rounds) for g in rounds[step]]


def logprobs_of(model: Any, rollout: Rollout) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        found = model(ids).logits[0, len(rollout.input) - 1 : -1].float().log_softmax(-1)
    return found.gather(1, ids[0, len(rollout.input) :, None])[:, 0]


@pytest.mark.engine
def test_tokens_are_sampled_once_by_their_named_version(tiny_model: Path, tmp_path: Path, closing: Any) -> None:
    """A run that is cut and resumed has the same bits."""
    run = tmp_path / "run"
    trainer = closing(Observed(str(tiny_model), tiny.vowels, tiny.config(run, **tiny.CARRYING), tiny.prompts()))
    trainer.train()
    rounds, last = trainer.rounds, {name: value.clone() for name, value in trainer.model.state_dict().items()}
    groups = [group for of_round in rounds.values() for group in of_round]
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    # Counted once: groups, and tokens.
    assert [len(rounds[step]) for step in range(STEPS)] == [GROUPS] * STEPS
    assert max(Counter(group.position for group in groups).values()) == 1
    assert trainer.sampled == sum(len(r.completion_ids) for r in rollouts) + trainer.in_flight_tokens

    # Old tokens are there, no older than they may be, and each log-probability is of the version that it names.
    for step, of_round in rounds.items():
        assert all(step - 2 <= int(versions_of(r).min()) <= step for group in of_round for r in group.rollouts)
    assert {len(rollout.riders and rollout.get(Versions).spans) for rollout in rollouts} >= {0, 1, 2}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    moved = []
    for step, of_round in rounds.items():
        for rollout in (rollout for group in of_round for rollout in group.rollouts):
            versions = versions_of(rollout)
            for version in versions.unique().tolist():
                model.load_state_dict(trainer.weights_of[version])
                wrong = (logprobs_of(model, rollout) - rollout.sampler_logprobs).abs()
                assert wrong[versions == version].max() < 1e-4
                moved += wrong[versions < version].tolist() if version == step else []
    assert sum(moved) / len(moved) > 0.01, "by the round's own weights they would be others"

    logs = [entry for entry in trainer.state.log_history if "carry_over/groups" in entry]
    assert [entry["carry_over/groups"] for entry in logs] == [3.0] * STEPS
    assert logs[0]["carry_over/old_tokens_share"] == 0 < logs[1]["carry_over/old_tokens_share"] < 1
    assert 0 < logs[2]["carry_over/mean_age"] < logs[2]["carry_over/max_age"] <= 2
    assert all(entry["carry_over/old_logp_difference"] > 0 for entry in logs[1:])

    # As if it had been killed in the fifth round, with two of its groups recorded, after checkpoint 2.
    journal = run / "_journal"
    for name in ("checkpoint-4", "checkpoint-6", "_journal/step-00000005"):
        shutil.rmtree(run / name)
    (journal / "step-00000004" / "rank-00000.carried").unlink()
    records = journal / "step-00000004" / "rank-00000.records"
    records.write_bytes(records.read_bytes()[: records.stat().st_size // 2])
    trainer.rounds, trainer.sampled = {}, 0
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert tokens(trainer.rounds) == tokens({step: rounds[step] for step in range(2, STEPS)})
    again = [r for step in (4, 5) for group in trainer.rounds[step] for r in group.rollouts]
    in_flight = [rollout for group in trainer.round.in_flight.groups for rollout in group.rollouts]
    own = sum(int((versions_of(rollout) >= 4).sum()) for rollout in (*again, *in_flight) if rollout.completion_ids)
    assert trainer.sampled == own, "the third and the fourth round aren't sampled again"
    assert all(torch.equal(value, last[name]) for name, value in trainer.model.state_dict().items())
    trainer.close()

    replayer = closing(
        Replayer(
            replay=Replay(run, 3, STEPS),
            model=str(tiny_model),
            reward_funcs=tiny.vowels,
            args=tiny.config(tmp_path / "again", **tiny.CARRYING | {"save_strategy": "no"}),
            train_dataset=tiny.prompts(),
        )
    )
    replayer.train()
    assert [any(apart.values()) for apart in replayer._apart] == [False] * (STEPS - 2)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("call", "ranks", "settings"),
    [
        (9, 2, {}),  # in the fifth round
        (7, 0, {"top_k": 40, "top_p": 0.9, "prompts_per_step": 2, "steps_per_generation": 2}),  # in the second of three
        (7, 0, {}),  # in the second of six, before any checkpoint
        (19, 0, {}),  # in the fifth
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    call: int, ranks: int, settings: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    exact = tiny.clean_environment() | {"MKL_CBWR": "COMPATIBLE"}

    def start(run: str, *kill_at: str) -> int:
        arguments = (tiny_model, tmp_path / run, json.dumps(settings), *kill_at)
        return launcher.run(SCRIPTS / "carrying_run.py", *arguments, ranks=ranks, env=exact).returncode

    assert start("whole") == 0
    assert start("cut", str(call)) != 0
    assert start("cut") == 0
    whole, cut = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "cut"))
    assert whole == cut


def length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [len(ids) / 48 for ids in completion_ids]


@pytest.mark.slow
@pytest.mark.engine
def test_mean_length_reward_matches_the_synchronous_run(tiny_model: Path, tmp_path: Path) -> None:
    """A trainer that took the first completions and dropped the others would have lower rewards."""
    settings = tiny.CARRYING | {"max_steps": 40, "save_strategy": "no", "journal": "off", "learning_rate": 1e-3}
    means: dict[float | None, list[float]] = {}
    for share in (None, 0.75):
        args = tiny.config(tmp_path / str(share), **settings | {"carry_over": share})
        trainer = GRPOTrainer(str(tiny_model), length, args, tiny.prompts())
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        for seed in range(5):
            trainer.args.seed = seed
            trainer.model.load_state_dict(start)
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.train()
            rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
            assert len(rewards) == 40
            means.setdefault(share, []).append(sum(rewards) / len(rewards))
        trainer.close()
    waiting, carrying = (torch.tensor(means[share]) for share in (None, 0.75))
    print(f"rewards of 40 rounds, by seed: {waiting.tolist()} and, carried over, {carrying.tolist()}")
    assert abs(float(waiting.mean() - carrying.mean())) < float(waiting.std())


# -- by hand


def test_an_old_tokens_ratio_is_to_the_version_that_sampled_it(tiny_model: Path, tmp_path: Path) -> None:
    """Three versions: two tokens of the first, two of the second, and one of the third, which is being trained."""
    torch.manual_seed(1)
    models = [AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32) for _ in range(3)]
    for number, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data += number * 0.02 * torch.randn_like(parameter)
    spans = (VersionSpan(2, 5), VersionSpan(2, 6), VersionSpan(1, 7))
    prompt, ids = ModelInput((65, 66, 67)), array("i", [68, 69, 70, 71, 72])
    bare = Rollout(
        prompt, ids, torch.zeros(5), torch.ones(5, dtype=torch.bool), FinishReason.STOP, 7, riders=(Versions(spans),)
    )
    by_version = torch.stack([logprobs_of(model, bare) for model in models])
    assert versions_of(bare).tolist() == [5, 5, 6, 6, 7]
    sampler = by_version[versions_of(bare) - 5, torch.arange(5)]
    rollout = dataclasses.replace(bare, sampler_logprobs=sampler)
    scored = ScoredGroup(Group({}, (rollout, rollout), 0), torch.zeros(2, 1), torch.tensor([1.0, -1.0]))
    (row,) = pack([scored], 100, False, torch.device("cpu"))
    assert row.get(TokenAges).ages.tolist() == [2, 2, 1, 1, 0] * 2

    objective = Objective.from_config(tiny.config(tmp_path, **tiny.CARRYING))
    assert objective.correction is not None
    trainer = by_version[2].repeat(2)
    expected = (by_version[2] - sampler).exp()
    assert expected[-1] == 1 and (expected[:4] - 1).abs().min() > 1e-4
    assert objective.correction.mode == "token_truncate"
    weights = objective.correction.weights(trainer - row.sampler_logprobs)
    assert torch.allclose(weights, expected.clamp(max=3.0).repeat(2))
    logprobs = trainer.clone().requires_grad_()
    output = objective(logprobs, torch.zeros(10), row)
    output.loss.backward()
    advantages = torch.tensor([1.0, -1.0]).repeat_interleave(5)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -advantages * expected.clamp(max=3.0).repeat(2))
    total, count = output.sums["carry_over/old_logp_difference"]
    assert float(count) == 8 and float(total) == pytest.approx(2 * float(expected.log().abs().sum()), rel=1e-4)


def sampled(count: int, reason: FinishReason) -> Sampled:
    return Sampled(array("i", range(count)), array("f", [-0.5] * count), reason)


def test_what_is_in_flight_is_saved_and_shared_out_among_other_ranks(tmp_path: Path) -> None:
    def group(position: int, since: int, *lengths: int) -> Group:
        (new,) = InFlight(2, 4, max_age=2, completions=1, longest=9).begin([prompt_at(position)], since)
        begun = [extended(new.rollouts[0], sampled(n, FinishReason.ABORT), since) for n in lengths]
        ended = extended(begun[0], sampled(3, FinishReason.STOP), since + 1)
        return dataclasses.replace(new, rollouts=(ended, *begun[1:]))

    def shown(groups: Sequence[Group]) -> list[Any]:
        """Return each rollout's values in comparable form, because tensors have no equality."""
        return [
            (g.position, r.completion_ids, r.sampler_logprobs.tolist(), r.finish_reason, r.policy_version, r.riders)
            for g in groups
            for r in g.rollouts
        ]

    def prompt_at(position: int) -> Prompt:
        return Prompt({"prompt": str(position)}, (1, 2, position), position)

    one, two = (InFlight(2, 4, max_age=2, completions=2, longest=9) for _ in range(2))
    one.groups, two.groups = (group(3, 5, 2, 0), group(2, 6, 1, 4)), (group(9, 4, 7, 1),)
    one.save(tmp_path, 0, 2)
    two.save(tmp_path, 1, 2)
    loaded = InFlight(2, 4, max_age=2, completions=2, longest=9)
    loaded.load(tmp_path, 0, 2, prompt_at)
    assert shown(loaded.groups) == shown(one.groups)
    loaded.load(tmp_path, 0, 1, prompt_at)
    assert [each.position for each in loaded.groups] == [9, 3, 2], "the oldest first"
    assert loaded.due(loaded.groups, version=6) == {9} and loaded.due(loaded.groups, version=8) == {9, 3}
    for other in (Prompt({"prompt": "other"}, (1, 2, 3), 3), Prompt({"prompt": "3"}, (1, 2, 4), 3)):
        with pytest.raises(ValueError, match=r"(3 is of another prompt|other prompt tokens at position 3)"):
            loaded.load(tmp_path, 0, 2, lambda _, other=other: other)
    shorter = InFlight(2, 4, max_age=2, completions=2, longest=4)
    assert shorter.load(tmp_path, 0, 2, prompt_at) == ""
    reasons = [[each.finish_reason for each in group.rollouts] for group in shorter.groups]
    assert reasons == [[FinishReason.STOP, FinishReason.ABORT], [FinishReason.STOP, FinishReason.LENGTH]], (
        "it has all it may have"
    )
    with pytest.raises(ValueError, match="unfinished groups of 2 completions, but num_generations is 3"):
        InFlight(2, 4, max_age=2, completions=3, longest=9).load(tmp_path, 0, 2, prompt_at)
    Path(tmp_path, "in_flight_1.records").unlink()
    Path(tmp_path, "in_flight_5.records").write_bytes(b"")
    assert "lacks the groups in flight of some of its ranks" in loaded.load(tmp_path, 0, 3, prompt_at)
    assert loaded.groups == ()


def test_no_more_is_sampled_at_once_than_the_share_says() -> None:
    """A resumed run may have more groups in flight than its own share or number of ranks allows."""
    in_flight = InFlight(2, 3, max_age=2, completions=2, longest=9)
    prompts = [Prompt({"prompt": str(number)}, (1, number), number) for number in range(6)]
    begun, waiting = in_flight.begin(prompts[:2], version=4)
    part = extended(begun.rollouts[0], sampled(2, FinishReason.ABORT), 4)
    in_flight.groups = (dataclasses.replace(begun, rollouts=(part, part)), waiting)
    groups = in_flight.begin(prompts, version=7)
    assert [group.rollouts[0].policy_version for group in groups] == [4, *[7] * 5], "what hasn't begun doesn't age"
    engine = SimpleNamespace(submit=lambda *given, **more: str(next(numbers)))
    numbers = iter(range(100))
    source: Any = rounds.CarryOver(engine, in_flight)  # type: ignore[arg-type]
    requests = source._submit({group.position: group for group in groups}, Sampling(2, 9, 1.0, {}), 0, "train")
    assert {position for position, _ in requests.values()} == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"carry_over": 0.3}, r"`carry_over` is 0.3, but must be in \[0.5, 1\)"),
        ({"carry_over_max_age": 0}, "carry_over_max_age"),
        ({"dynamic_sampling": True}, "dynamic_sampling is true, but dynamic_sampling chooses"),
        ({"overlap": "auto"}, "overlap is 'auto', but overlap trains"),
        ({"curriculum": {}}, "curriculum draws"),
        ({"router_replay": True}, "router_replay is true, but router_replay needs"),
        (
            {"vllm_importance_sampling_correction": False},
            "correction is false, but that leaves",
        ),
        ({"repetition_penalty": 1.1}, "changed by repetition_penalty 1.1, .* uncorrected"),
        ({"generation_kwargs": {"stop": ["."]}}, r"generation_kwargs is {'stop'.*, but a completion in parts"),
    ],
)
def test_what_it_does_not_go_with_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tiny.config(tmp_path, **{**tiny.CARRYING, **changes})


@pytest.mark.engine
def test_tools_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def look(place: str) -> str:
        """Look there.

        Args:
            place: where.
        """
        return place

    with pytest.raises(ValueError, match=r"carry_over is 0\.6, but can't be combined with tools"):
        GRPOTrainer(str(tiny_model), tiny.vowels, tiny.config(tmp_path, **tiny.CARRYING), tiny.prompts(), tools=[look])
