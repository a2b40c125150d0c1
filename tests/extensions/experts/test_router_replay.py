"""Router replay: the engine's choice of experts is used in the trainer's forward, and travels with the rollouts.

Tests of their use change the router after sampling, so the trainer prefers other experts. Tests of their origin run in
float32, where the trainer chooses the same experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import decoder_families
import pytest
import tiny
import tool_cases
import torch
import transformers as hf
from conversation_cases import written
from engine_ranks import TWO, run
from image_cases import needs
from row_cases import PACKED, SHAPE, make, make_groups

from colograd import GRPOTrainer
from colograd.batch import MicroBatch, Prompt, ScoredGroup
from colograd.engine.sampling import Sampling
from colograd.extensions.custom_rollouts.source import UserFeature
from colograd.extensions.experts.engine import routed
from colograd.extensions.experts.losses import ReplayTerm
from colograd.extensions.experts.router_replay import UNKNOWN, RoutedExperts, RowExperts, make_replaying, routers_of
from colograd.extensions.tools.toolbox import Toolbox
from colograd.policy import attention, second_models
from colograd.policy.logprobs import PolicyForward, policy_logprobs
from colograd.policy.packing import collate, pack, plan_rows
from colograd.policy.padded import rows_of
from colograd.policy.row_proof import choose_rows
from colograd.policy.supported import check_supported
from colograd.rollout.group_records import Logged, RewardedGroup, group_bytes, group_of
from colograd.training.recorded_settings import settings_of

CPU = torch.device("cpu")
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": PACKED["qwen3_moe"],
    "mixtral": PACKED["mixtral"],
    "glm4_moe": PACKED["glm4_moe"],
    "gpt_oss": PACKED["gpt_oss"],
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**SHAPE, **ROUTED, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    ),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SHAPE, **ROUTED)),
}
# Hybrids, and latent attention, of `decoder_families`.
OTHERS = ("deepseek_v3", "flex_olmo", "mellum", "qwen3_5_moe_text", "qwen3_next")


def model_of(family: str) -> Any:
    model = make(MODELS[family] if family in MODELS else lambda: decoder_families.build(family)).eval()
    choose_rows(model)
    make_replaying(model)
    return model


def with_experts(groups: list[ScoredGroup], layers: int, choose: Callable[..., torch.Tensor]) -> list[ScoredGroup]:
    """The groups with experts of ``choose(tokens, layers)``."""
    found = []
    for scored in groups:
        prompt = choose(len(scored.group.rollouts[0].input), layers)
        rollouts = tuple(
            r.carrying(RoutedExperts(prompt, choose(len(r.completion_ids), layers))) for r in scored.group.rollouts
        )
        found.append(dataclasses.replace(scored, group=dataclasses.replace(scored.group, rollouts=rollouts)))
    return found


def random_experts(tokens: int, layers: int) -> torch.Tensor:
    return torch.rand(tokens, layers, 4).argsort(-1)[..., :2].to(torch.int8)


def experts_in(row: MicroBatch) -> torch.Tensor:
    rider = row.get(RowExperts)
    assert rider is not None
    return rider.experts


def row_with(model: Any, choose: Callable[..., torch.Tensor]) -> MicroBatch:
    share = model.config._attn_implementation == attention.NAME
    torch.manual_seed(1)
    (row,) = pack(with_experts(make_groups(), len(routers_of(model)), choose), 1000, False, CPU, share)
    return row


def choices(model: Any, row: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities, and the experts (T, L, K) that the row's tokens used."""
    found: list[torch.Tensor] = []
    blocks = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [block.register_forward_pre_hook(lambda _, args: found.append(args[1])) for block in blocks]
    try:
        logprobs = policy_logprobs(model, row, 1.0)[0]
    finally:
        for hook in hooks:
            hook.remove()
    experts = torch.stack(found, 1).to(torch.int8)
    packed = model.config._attn_implementation == attention.NAME
    return logprobs, experts if packed else experts[rows_of(row.layout).places]


def replay_figures(model: Any, row: MicroBatch) -> dict[str, Any]:
    logprobs, _, values = PolicyForward(model, 1.0)(row)
    return ReplayTerm().observe(logprobs, SimpleNamespace(batch=row), values)


@pytest.mark.parametrize("family", [*MODELS, *OTHERS])
def test_recorded_experts_are_used_whatever_the_router_prefers(family: str) -> None:
    """The router learns from its logits at the recorded experts: its gradient equals a finite difference."""
    model = model_of(family)
    row = row_with(model, random_experts)
    logprobs, used = choices(model, row)
    assert torch.equal(used, experts_in(row))
    figures = replay_figures(model, row)
    assert float(figures["router/replayed"][0]) == figures["router/replayed"][1] == row.layout.num_tokens
    strange, count = figures["router/disagreement"]
    assert 0.1 < float(strange / count) < 0.9, "what is drawn at random isn't what it would choose"
    free = dataclasses.replace(row, riders=())
    own_logprobs, own = choices(model, free)
    assert (logprobs - own_logprobs).abs().max() > 1e-3

    weight = routers_of(model)[0].weight
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    step = torch.randn_like(weight) * 0.02
    with torch.no_grad():
        ends = []
        for sign in (1, -2):
            weight.add_(sign * step)
            ends.append(float(choices(model, row)[0].double().sum()))
        assert (ends[0] - ends[1]) / 2 == pytest.approx(float((gradient * step).sum()), rel=0.05, abs=2e-3)
        weight.add_(torch.randn_like(weight) * 3)
        assert not torch.equal(choices(model, free)[1], own) and torch.equal(choices(model, row)[1], used)


@pytest.mark.parametrize("family", MODELS)
def test_own_or_unknown_experts_change_no_logprobs(family: str) -> None:
    model = model_of(family)
    row = row_with(model, lambda tokens, layers: torch.full((tokens, layers, 2), UNKNOWN, dtype=torch.int8))
    plain, used = choices(model, dataclasses.replace(row, riders=()))
    assert replay_figures(model, dataclasses.replace(row, riders=())) == {
        "router/replayed": (0.0, row.layout.num_tokens)
    }
    untold, _ = choices(model, row)
    assert torch.equal(untold, plain)
    assert [float(part) for part in replay_figures(model, row)["router/replayed"]] == [0, row.layout.num_tokens]
    own = dataclasses.replace(row, riders=(RowExperts(used),))
    assert torch.equal(policy_logprobs(model, own, 1.0)[0], plain)
    assert float(replay_figures(model, own)["router/disagreement"][0]) == 0
    untouched = make(MODELS[family]).eval()
    choose_rows(untouched)
    assert torch.equal(policy_logprobs(untouched, row, 1.0)[0], plain), "a model that replays nothing takes none"


def test_checkpointed_layers_go_the_same_way_in_the_backward() -> None:
    """The recomputation uses a row's own experts, even if another row, or none, was processed in between."""
    found = []
    for checkpointing in (False, True):
        model = model_of("qwen3_moe").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        row = row_with(model, random_experts)
        logprobs, _ = policy_logprobs(model, row, 1.0)
        with torch.no_grad():
            policy_logprobs(model, dataclasses.replace(row, riders=()), 1.0)
        logprobs.sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_padded_rows_replay_as_packed_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    packed = policy_logprobs(model, row := row_with(model, random_experts), 1.0)[0]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(policy_logprobs(model, row, 1.0)[0], packed, rtol=1e-4, atol=1e-5)


def test_rows_carry_experts_in_their_order_and_a_second_model_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups()
    (told,), untold = with_experts(groups[:1], 2, random_experts), groups[1:]
    assert all(collate(row).riders == () for row in plan_rows(untold, 1000, False, CPU))
    (row,) = plan_rows([told, *untold], 1000, False, CPU)
    experts, rollouts = experts_in(collate(row)), told.group.rollouts
    layout = collate(row).layout
    places = [start for start, seen in zip(layout.starts, layout.attends_to, strict=True) if seen]
    starts = dict(zip(row.rollouts, places, strict=True))
    for identity, rollout in zip(told.group.rollout_ids, rollouts, strict=True):
        start = starts[identity]
        assert torch.equal(experts[start : start + len(rollout.completion_ids)], rollout.get(RoutedExperts).completion)
    told_of = len(rollouts[0].input) + sum(len(r.completion_ids) for r in rollouts)
    assert int((experts[:, 0, 0] != UNKNOWN).sum()) == told_of
    told_second: list[Any] = []
    monkeypatch.setattr(
        second_models, "policy_logprobs", lambda model, batch, t: told_second.append(batch.get(RowExperts)) or [0]
    )
    second_models.fill({"ref_logprobs": SimpleNamespace(present=contextlib.nullcontext)}, [row], 1.0)
    assert told_second == [None]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_the_journal_keeps_them_and_without_them_not_a_byte_more(dtype: torch.dtype) -> None:
    plain = make_groups()[0]
    (told,) = with_experts([plain], 3, lambda *size: random_experts(*size).to(dtype))
    rollouts = (*told.group.rollouts[:2], *plain.group.rollouts[2:])
    mixed = dataclasses.replace(told.group, rollouts=rollouts)
    recorded = RewardedGroup(mixed, told.rewards, Logged({}, {}))
    content = group_bytes(recorded)
    found = group_of(content, Prompt({}, rollouts[0].input, 0)).group.rollouts
    pairs = zip(*([r.get(RoutedExperts) for r in each] for each in (found, rollouts)), strict=True)
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours.prompt, theirs.prompt) and ours.prompt.dtype == dtype
            assert torch.equal(ours.completion, theirs.completion)
    assert found[0].get(RoutedExperts).prompt is found[1].get(RoutedExperts).prompt, "once for the group"
    without = dataclasses.replace(recorded, group=plain.group)
    assert content.startswith(group_bytes(without))
    assert group_of(group_bytes(without), Prompt({}, rollouts[0].input, 0)).group.rollouts[0].get(RoutedExperts) is None
    sent = pickle.loads(pickle.dumps(told.for_training())).group.rollouts
    assert sent[0].get(RoutedExperts).prompt is sent[1].get(RoutedExperts).prompt


def test_settings_name_it_where_it_is_on_alone(tmp_path: Path) -> None:
    """Journals from before this setting are accepted, and journals with experts are refused without router replay."""
    assert "router_replay" not in settings_of(tiny.config(tmp_path), ["reward"])
    assert settings_of(tiny.config(tmp_path, router_replay=True), ["reward"])["router_replay"] is True


def test_a_conversation_has_its_last_turns_experts() -> None:
    """Tokens behind the last turn have no known experts."""
    whole = random_experts(9, 2)
    found = RoutedExperts.of_turns([(RoutedExperts(whole[:6], whole[6:]), 5), (None, 2)], 4)
    assert torch.equal(found.prompt, whole[:4]) and torch.equal(found.completion[:5], whole[4:])
    assert len(found.completion) == 7 and (found.completion[5:] == UNKNOWN).all()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hf.LlamaConfig(), r"The model has no experts \(llama\): set router_replay: false"),
        (hf.Qwen3MoeConfig(), ""),
    ],
)
def test_what_has_no_experts_is_refused(config: Any, said: str, tmp_path: Path) -> None:
    model = SimpleNamespace(config=config)
    args = tiny.config(tmp_path, router_replay=True)
    if not said:
        check_supported(model, args)
        return
    with pytest.raises(ValueError, match=said):
        check_supported(model, args)


def test_what_takes_no_experts_or_tells_none_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router_replay and torch_compile are both true.*set one of them to false"):
        tiny.config(tmp_path, router_replay=True, torch_compile=True)
    args = tiny.config(tmp_path, router_replay=True)
    with pytest.raises(ValueError, match=r"rollout_func is a function, which can't return.*: set router_replay"):
        UserFeature.of(tiny.trainer_arguments(rollout_func=lambda prompts, trainer: {}), args)
    with pytest.raises(ValueError, match=r"router_replay is true and .*enable_prefix_caching: false.*remove one"):
        routed.RouterLog(cast(Any, SimpleNamespace(on_cpu=False))).arguments({"enable_prefix_caching": False})
    model = make(MODELS["mixtral"])
    routers_of(model)[1].norm_topk_prob = False
    with pytest.raises(ValueError, match=r"MixtralTopKRouter .* in an unknown way.*set router_replay: false"):
        make_replaying(model)


# -- the engine

GREEDY, PAIRS = Sampling(1, 4, 0.0, {}), Sampling(2, 20, 1.0, {})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("routed")
    return lambda family: (
        folder / family if (folder / family).exists() else tiny.make_model(folder / family, family, tied=False)
    )


class Counting(GRPOTrainer):
    """A trainer that counts sampled prompts."""

    sampled = 0

    def generate(self, prompts: Any) -> Any:
        self.sampled += len(prompts)
        yield from super().generate(prompts)


def build(model: Path, folder: Path, **changes: Any) -> Counting:
    settings = {"max_steps": 3, "router_replay": True, **changes}
    return Counting(str(model), tiny.vowels, tiny.config(folder, **settings), tiny.prompts())


def steps(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def sampled(engine: Any, prompts: list[tuple[int, ...]], sampling: Sampling = PAIRS) -> list[Any]:
    """Sample, and return the rollouts of each prompt."""
    asked = [Prompt({}, ids, position) for position, ids in enumerate(prompts)]
    groups = engine.generate(asked, sampling, version=0, seed=0)
    return [group.rollouts for group in sorted(groups, key=lambda group: group.position)]


def own_choice(model: Any, rollout: Any) -> torch.Tensor:
    """(T, L, K) experts that the model's own forward of the sequence sends its tokens to."""
    found: list[torch.Tensor] = []
    hooks = [r.register_forward_hook(lambda _, args, output: found.append(output[2])) for r in routers_of(model)]
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


def check_told(model: Any, rollout: Any) -> None:
    whole = torch.cat([rollout.get(RoutedExperts).prompt, rollout.get(RoutedExperts).completion])
    assert whole.dtype == torch.int8 and (whole[-1] == UNKNOWN).all() and (whole[:-1] != UNKNOWN).all()
    assert torch.equal(whole[:-1].long().sort(-1).values, own_choice(model, rollout)[:-1])


def router_log(trainer: GRPOTrainer) -> routed.RouterLog:
    (found,) = (each for each in trainer.engine._features if isinstance(each, routed.RouterLog))
    return found


FURTHER = [family for family in MODELS if family not in ("qwen3_moe", "gpt_oss")]
SHARED = tuple(range(3, 70))  # two blocks of the prefix cache, and some


@pytest.mark.engine
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_oss", *FURTHER))]
)
def test_a_run_replays_what_its_engine_chose(family: str, models, tmp_path: Path, closing, tried) -> None:
    """Cached prefixes (of the same prompt, another prompt and an earlier turn) and prompts that are read in pieces."""
    changes = {"max_steps": 2, "prompts_per_step": 2, "gradient_checkpointing": True}  # V2's kernels are slow on a CPU
    changes |= {"vllm_max_model_length": 200, "vllm_engine_kwargs": {"max_num_batched_tokens": 256}}
    trainer = closing(build(models(family), tmp_path, **changes))
    trainer.publish()
    engine, model, log = trainer.engine, trainer.model, router_log(trainer)
    groups = sampled(engine, [SHARED, (*SHARED[:40], 9, 8, 7), (5, 6)])
    for rollouts in groups:
        assert rollouts[0].get(RoutedExperts).prompt is rollouts[1].get(RoutedExperts).prompt
        for rollout in rollouts:
            check_told(model, rollout)
    first = groups[0][0]
    again = sampled(engine, [(*first.prompt_ids, *first.completion_ids, 11, 12)])[0]
    in_pieces = sampled(engine, [tuple(range(n, n + 100)) for n in range(3)], GREEDY)
    for rollout in (*again, *(rollouts[0] for rollouts in in_pieces)):
        check_told(model, rollout)
    engine.prompt_logprobs([4, 5, 6])
    abandoned = engine.generate([Prompt({}, (5, 6, 7), 0), Prompt({}, (5, 6), 1)], GREEDY, version=0, seed=0)
    next(abandoned)
    abandoned.close()
    assert log._seen == {}, "nothing is kept of a request that is over"
    trainer.train()
    for step in steps(trainer):
        assert step["sampling/sampling_logp_difference/mean"] < 1e-5
        assert step["router/disagreement"] == 0 and 0.9 < step["router/replayed"] < 1
    trainer.publish()
    trainer.processing_class.chat_template = tiny.TOOL_TEMPLATE
    for group in written(trainer, Toolbox([tool_cases.add])):
        for rollout in group.rollouts:
            check_told(model, rollout)
    tried(family, "replay")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=needs("torchvision")) if f == "qwen3_5_moe_text" else f for f in OTHERS]
)
def test_other_families_replay_what_their_engine_chose(family: str, tmp_path: Path, closing) -> None:
    """Families with a recurrent state use bfloat16, the only dtype of vLLM's state kernel on a CPU."""
    rounded = family.startswith("qwen")
    changes = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "adamw_torch"} if rounded else {}
    trainer = closing(build(decoder_families.make_model(tmp_path / "model", family), tmp_path / "run", **changes))
    trainer.train()
    for step in steps(trainer):
        assert 0.9 < step["router/replayed"] < 1
        assert step["router/disagreement"] <= (0.02 if rounded else 0)
        assert step["sampling/sampling_logp_difference/mean"] < (0.02 if rounded else 1e-5)


@pytest.mark.slow
@pytest.mark.engine
def test_an_adapter_replays_too(models, tmp_path: Path, closing) -> None:
    """The reference's routers choose their own experts."""
    import peft

    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = tiny.config(tmp_path, router_replay=True, beta=0.1, max_steps=2, num_iterations=2, learning_rate=1e-2)
    trainer = closing(GRPOTrainer(str(models("mixtral")), tiny.vowels, args, tiny.prompts(), peft_config=adapter))
    trainer.train()
    first, second = steps(trainer)
    assert first["router/disagreement"] == 0 and first["kl"] == 0 < second["kl"]
    assert first["router/replayed"] == second["router/replayed"] > 0.9
    assert first["sampling/sampling_logp_difference/mean"] < 1e-5


@pytest.mark.slow  # the journal has them, as a test above shows
@pytest.mark.engine
def test_a_resumed_run_replays_what_was_recorded_bit_for_bit(models, tmp_path: Path) -> None:
    """The run is in bfloat16, where the trainer's routers sometimes prefer other experts."""
    found = []
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "model_init_kwargs": {"dtype": "bfloat16"}}
    for resumes in (False, True):
        trainer = build(models("qwen3_moe"), tmp_path, journal="keep", **changes)
        try:
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumes else None)
            found.append([p.detach().clone() for p in trainer.model.parameters()])
            assert all(step["router/replayed"] > 0.9 for step in steps(trainer))
            assert trainer.sampled == (0 if resumes else 16), "the second half is trained from the journal"
        finally:
            trainer.close()
    assert all(map(torch.equal, *found))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("changes", [TWO, {"sharding": "fsdp"}], ids=["an engine of two", "in rows"])
def test_ranks_replay_what_the_first_of_their_engine_was_told(changes: dict[str, Any], models, tmp_path: Path) -> None:
    ranks = run(models("qwen3_moe"), tmp_path, 2, router_replay=True, sampled=True, **changes)
    assert max(rank["parity"] for rank in ranks) < 1e-5
    for step in ranks[0]["logs"]:
        assert step["router/disagreement"] == 0 and 0.9 < step["router/replayed"] < 1
        assert step["sampling/sampling_logp_difference/mean"] < 1e-5


def test_model_runner_v1_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(on_cpu=False)
    routed.RouterLog(config).arguments({})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    remedy = "router_replay: false"
    with pytest.raises(ValueError, match=f"VLLM_USE_V2_MODEL_RUNNER is 0: remove the variable, or set {remedy}"):
        routed.RouterLog(config).arguments({})
