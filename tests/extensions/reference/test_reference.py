"""The reference policy: its values, its memory, its updates, and that it survives a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colograd import GRPOTrainer
from colograd.batch import MicroBatch, PackedRow, StepBatch
from colograd.config import GRPOConfig
from colograd.extensions.reference.model import (
    FrozenCopy,
    OfAdapter,
    check_reference,
    reference_bytes,
    reference_of,
)
from colograd.losses.objective import Objective
from colograd.memory import token_budget
from colograd.memory.choice import plan_or_raise
from colograd.memory.description import Workload, describe_run, own_devices
from colograd.memory.table import GIB
from colograd.policy import lora, row_proof
from colograd.policy.loading import Policy, load_policy
from colograd.policy.logprobs import policy_logprobs
from colograd.policy.packing import PackingRules, collate, plan_rows
from colograd.policy.padded import sequences
from colograd.policy.second_models import fill, with_second_logprobs
from colograd.training.adamw_split import accumulate_in_float32

CPU = torch.device("cpu")


def made(folder: Path, **changes: Any) -> GRPOConfig:
    return tiny.config(folder, **({"beta": 0.1} | changes))


def policy_of(model: Any, folder: Path, peft_config: Any = None, **changes: Any) -> Policy:
    return load_policy(str(model) if isinstance(model, Path) else model, None, made(folder, **changes), peft_config)


def rows_of(policy: Policy) -> tuple[PackedRow, ...]:
    return plan_rows(row_proof._samples(lora.unwrap(policy.model)), 1000, False, CPU)


@torch.no_grad()
def says(model: Any, rows: Any, temperature: float = 1.0) -> torch.Tensor:
    return torch.cat([policy_logprobs(model, collate(row), temperature)[0] for row in rows])


@torch.no_grad()
def filled(reference: Any, rows: Any, temperature: float) -> tuple[PackedRow, ...]:
    return fill({"ref_logprobs": reference}, rows, temperature)


@torch.no_grad()
def plain(model: Path, row: MicroBatch, temperature: float) -> torch.Tensor:
    """(N,) log-probabilities by transformers' own forward of each completion after its prompt."""
    own, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    for part in sequences(row):
        ids = torch.cat([part.prompt_ids, part.completion_ids])
        logits = own(ids[None]).logits[0, len(part.prompt_ids) - 1 : -1] / temperature
        found.append(logits.log_softmax(-1).gather(1, part.completion_ids[:, None])[:, 0])
    return torch.cat(found)


def disturb(model: torch.nn.Module, seed: int = 1) -> None:
    """Change all trainable weights at random, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)


# -- a frozen copy


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_copy_stays_what_the_policy_was(tiny_model, tmp_path, dtype, offload) -> None:
    policy = policy_of(tiny_model, tmp_path, model_init_kwargs={"dtype": dtype})
    whole = torch.cat(
        [p.detach().flatten() for p in policy.model.parameters()]
    )  # as in an engine: slices of one tensor
    at = 0
    for parameter in policy.model.parameters():
        parameter.data = whole[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    rows = rows_of(policy)
    before = says(policy.model, rows)
    reference = FrozenCopy(policy.model, CPU, offload)
    places = [p.data_ptr() for p in reference.model.parameters()]
    assert whole.untyped_storage().data_ptr() not in {
        p.untyped_storage().data_ptr() for p in reference.model.parameters()
    }
    policy.model.train()
    disturb(policy.model)
    assert not torch.equal(says(policy.model, rows), before)
    found = torch.cat([row.scores["ref_logprobs"] for row in filled(reference, rows, 1.0)])
    assert torch.equal(found, before), "bit for bit"
    assert all(not p.requires_grad and p.dtype == policy.model.dtype for p in reference.model.parameters())
    assert not reference.model.training and policy.model.training
    assert reference.model.get_input_embeddings().weight is reference.model.get_output_embeddings().weight, "tied"
    with reference.present() as model:
        visited = [p.data_ptr() for p in model.parameters()]
    assert all((a != b) == offload for a, b in zip(visited, places, strict=True))
    with pytest.raises(ZeroDivisionError), reference.present():
        raise ZeroDivisionError
    assert [p.data_ptr() for p in reference.model.parameters()] == places, "home again"


def test_reference_has_the_given_model_objects_weights(tiny_model, tmp_path) -> None:
    """Weights of the checkpoint on disk are different."""
    given = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    disturb(given)
    policy = policy_of(given, tmp_path, model_init_kwargs=None)
    reference = reference_of(made(tmp_path), policy)
    rows = rows_of(policy)
    assert torch.equal(
        torch.cat([row.scores["ref_logprobs"] for row in filled(reference, rows, 0.5)]), says(given, rows, 0.5)
    )


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_mixing_is_trl_s(tiny_model, tmp_path, alpha, offload) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    policy = policy_of(tiny_model, tmp_path)
    reference, theirs = FrozenCopy(policy.model, CPU, offload), FrozenCopy(policy.model, CPU, False).model
    for seed in (1, 2):
        disturb(policy.model, seed)
        reference.mix(policy.model, alpha)
        callbacks.SyncRefModelCallback._sync_target_model(policy.model, theirs, alpha)
    for mine, other, trained in zip(
        reference.model.parameters(), theirs.parameters(), policy.model.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other)
        assert torch.equal(mine, trained) == (alpha == 1.0)


def test_a_checkpoint_holds_what_the_reference_became_and_nothing_where_it_stays(tiny_model, tmp_path) -> None:
    policy = policy_of(tiny_model, tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    following, still = FrozenCopy(policy.model, CPU, False, "follows"), FrozenCopy(policy.model, CPU, False)
    still.save(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    disturb(policy.model)
    following.mix(policy.model, 0.5)
    following.save(tmp_path)
    saved = load_file(tmp_path / "reference.safetensors")
    assert saved.keys() == dict(policy.model.named_parameters()).keys()
    still.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(still.model.parameters(), following.model.parameters(), strict=True))
    (tmp_path / "next").mkdir()
    still.save(tmp_path / "next")
    assert (tmp_path / "next" / "reference.safetensors").is_file(), "it isn't the checkpoint's any more"


# -- adapters

LORA = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)


def state(model: Any) -> list[tuple]:
    return [(name, p.requires_grad, p.data_ptr(), p.grad_dtype) for name, p in model.named_parameters()] + [
        m.training for m in model.modules()
    ]


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, False),
        ({"use_dora": True}, False),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"bias": "lora_only"}, True),
    ],
    ids=["lora", "dora", "modules_to_save", "bias"],
)
def test_the_reference_of_a_new_adapter_is_the_base(tiny_qwen, tmp_path, changes, copies) -> None:
    config = peft.LoraConfig(**({"r": 4, "target_modules": "all-linear", "lora_dropout": 0.3} | changes))
    policy = policy_of(tiny_qwen, tmp_path, config)
    base = policy_of(tiny_qwen, tmp_path)
    rows = rows_of(base)
    accumulate_in_float32(policy.model.parameters())
    reference = reference_of(made(tmp_path), policy)
    assert isinstance(reference, OfAdapter) and bool(reference.initial) == copies
    disturb(policy.model.train())
    before = state(policy.model)
    found = torch.cat([row.scores["ref_logprobs"] for row in filled(reference, rows, 1.0)])
    assert torch.equal(found, says(base.model, rows))
    assert (found - says(policy.model.eval(), rows)).abs().mean() > 1e-3, "and the policy is another"
    policy.model.train()
    assert state(policy.model) == before, "what is trained is so again, in its place"
    policy_logprobs(policy.model, collate(rows[0]), 1.0)[0].sum().backward()
    assert all(
        p.grad.dtype == torch.float32 for p in policy.model.parameters() if p.requires_grad and p.grad is not None
    )


def test_the_reference_of_an_adapter_that_was_given_is_that_adapter(tiny_model, tmp_path) -> None:
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), LORA)
    disturb(model)
    policy = policy_of(model, tmp_path, model_init_kwargs=None)
    rows = rows_of(policy)
    start = says(policy.model.eval(), rows)
    reference = reference_of(made(tmp_path), policy)
    assert isinstance(reference, OfAdapter) and reference.initial
    disturb(policy.model.train(), seed=2)
    before = state(policy.model)
    assert torch.equal(torch.cat([row.scores["ref_logprobs"] for row in filled(reference, rows, 1.0)]), start)
    with pytest.raises(ZeroDivisionError), reference.present():
        raise ZeroDivisionError
    assert state(policy.model) == before
    assert not torch.equal(says(policy.model.eval(), rows), start)


# -- at start


def test_nothing_exists_without_beta(tmp_path) -> None:
    for beta, needs in ((0.0, ()), (0.1, ("ref_logprobs",))):
        run = made(tmp_path, beta=beta)
        assert Objective.from_config(run).with_terms(run, None).needs == needs


def test_two_terms_share_one_reference(tmp_path) -> None:
    run = made(tmp_path, kl_in_reward=0.1)
    objective = Objective.from_config(run).with_terms(run, None)
    assert len(objective.terms) == 2 and objective.needs == ("ref_logprobs",)


def test_a_reference_that_is_to_follow_has_to_be_there(tiny_model, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"sync_ref_model is true and beta is 0\.0, but then there is no reference"):
        made(tmp_path, beta=0.0, sync_ref_model=True)
    with pytest.raises(ValueError, match=r"`ref_model_mixup_alpha` is 0.0, but .* in \(0, 1\]"):
        made(tmp_path, sync_ref_model=True, ref_model_mixup_alpha=0.0)
    with pytest.raises(ValueError, match="`ref_model_sync_steps` is 0, but must be at least 1"):
        made(tmp_path, ref_model_sync_steps=0)
    with pytest.raises(ValueError, match="no second model to mix"):
        check_reference(policy_of(tiny_model, tmp_path, LORA), made(tmp_path, sync_ref_model=True))


def test_the_memory_plan_counts_it(tiny_model, tmp_path, monkeypatch) -> None:
    config, policy = made(tmp_path), policy_of(tiny_model, tmp_path)
    nbytes = sum(p.nbytes for p in policy.model.parameters())
    assert reference_bytes(config, policy) == nbytes
    assert reference_bytes(config, policy_of(tiny_model, tmp_path, LORA)) == 0
    devices, work = own_devices(config.device, policy.model), Workload(64, 4, 64)
    with_it, without = (
        plan_or_raise(describe_run(config, policy.model, devices, work, shared=False, reference=size), "none")
        for size in (GIB, 0)
    )
    assert ("weights of the reference", GIB, GIB) in with_it.rows()
    assert without.remains("sampling") - with_it.remains("sampling") == pytest.approx(GIB, abs=GIB // 8)
    assert len(without.rows()) == len(with_it.rows()) - 1
    monkeypatch.setattr(GRPOConfig, "on_cpu", False)
    assert reference_bytes(made(tmp_path, offload_reference=True), policy) == 0


def test_they_go_with_their_completions_when_a_step_is_packed_again(tiny_model, tmp_path) -> None:
    policy = policy_of(tiny_model, tmp_path)
    groups, rows = tuple(row_proof._samples(policy.model)), rows_of(policy)
    empty = StepBatch((), 1, 1, {}, ())
    reference = reference_of(made(tmp_path), policy)
    none, step = with_second_logprobs({"ref_logprobs": reference}, [empty, StepBatch(rows, 1, 1, {}, groups)], 1.0)
    assert none.rows == ()
    rules = PackingRules(1, False, False, True, False, False, 0.0, CPU)
    again = token_budget.repack(step, rules)
    assert len(again.rows) > len(rows)
    for row in again.rows:
        (fresh,) = filled(reference, [dataclasses.replace(row, scores={})], 1.0)
        torch.testing.assert_close(row.scores["ref_logprobs"], fresh.scores["ref_logprobs"], rtol=0, atol=1e-5)


# -- in the trainer


class Watching(GRPOTrainer):
    """Keeps each step's rows, with the policy's log-probabilities at the time of training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rows: dict[int, list[tuple[MicroBatch, torch.Tensor]]] = {}
        self.totals: list[torch.Tensor] = []
        self.dies_above: int | None = None
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, micro_batch: MicroBatch, **kwargs: Any) -> Any:
        if self.dies_above is not None and micro_batch.input_ids.numel() > self.dies_above:
            raise torch.OutOfMemoryError("no room")
        with torch.no_grad():
            found = policy_logprobs(model, micro_batch, self.args.temperature)[0]
        self.rows.setdefault(self.state.global_step + 1, []).append((micro_batch, found))
        return super().compute_loss(model, micro_batch)

    def combine(self, rewards: torch.Tensor) -> torch.Tensor:
        self.totals.append(super().combine(rewards))
        return self.totals[-1]


def trainer_of(model: Path, folder: Path, peft_config: Any = None, **changes: Any) -> Watching:
    return Watching(
        model=str(model),
        reward_funcs=tiny.vowels,
        args=made(folder, **changes),
        train_dataset=tiny.prompts(),
        peft_config=peft_config,
    )


@pytest.mark.engine
def test_every_step_is_held_to_the_checkpoint_that_the_run_started_from(tiny_model, tmp_path, closing, capfd) -> None:
    """The run has rounds of several steps, a temperature, shared weights, and a step repeated after memory ran out."""
    trainer = closing(
        trainer_of(
            tiny_model, tmp_path, max_steps=4, steps_per_generation=2, temperature=0.8, learning_rate=1e-2,
            max_tokens_per_microbatch=200,
        )
    )  # fmt: skip
    assert "reference: a frozen copy of the policy beside it" in capfd.readouterr().out
    shared = {p.untyped_storage().data_ptr() for p in trainer.engine.model.parameters()}
    assert shared & {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    assert not shared & {p.untyped_storage().data_ptr() for p in trainer.ref_model.parameters()}
    trainer.dies_above = 150
    trainer.train()
    assert "ran out of memory and is repeated" in capfd.readouterr().out
    assert trainer.rows.keys() == {1, 2, 3, 4}
    for step, rows in trainer.rows.items():
        for row, policy in rows:
            torch.testing.assert_close(row.scores["ref_logprobs"], plain(tiny_model, row, 0.8), rtol=0, atol=1e-4)
            moved = (row.scores["ref_logprobs"] - policy).abs().max()
            # Tolerances allow for rows that were packed again: they have other shapes than the reference's rows.
            assert moved < 1e-5 if step == 1 else moved > 1e-3
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logs[0]["time/ref_logprobs"] > 0
    assert logs[0]["kl"] < 1e-9 and logs[-1]["kl"] > 1e-3
    for entry in logs:
        phases = sum(value for name, value in entry.items() if name.startswith("time/"))
        assert phases == pytest.approx(entry["step_time"])


@pytest.mark.engine
def test_a_reference_that_follows_is_resumed_as_it_was(tiny_model, tmp_path, closing, capfd) -> None:
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 2, "save_strategy": "steps", "save_steps": 3}
    trainer = closing(trainer_of(tiny_model, tmp_path, max_steps=6, learning_rate=1e-2, **settings))
    assert "mixed with 0.6 of it every 2 steps" in capfd.readouterr().out
    trainer.train()
    for row, policy in trainer.rows[1]:
        assert torch.equal(row.scores["ref_logprobs"], policy), "the divergence of the first step is 0, bit for bit"
    kl = [entry["kl"] for entry in trainer.state.log_history if "reward" in entry]
    assert kl[0] == 0 and kl[2] < kl[1], "it came closer after step 2"
    final = [p.clone() for p in trainer.ref_model.parameters()]
    first, trainer.rows = trainer.rows, {}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.rows.keys() == {4, 5, 6}
    for step, rows in trainer.rows.items():
        for (row, _), (before, _) in zip(rows, first[step], strict=True):
            assert torch.equal(row.scores["ref_logprobs"], before.scores["ref_logprobs"])
    assert all(torch.equal(a, b) for a, b in zip(final, trainer.ref_model.parameters(), strict=True))
    (row, _), *_ = first[3]
    assert (row.scores["ref_logprobs"] - plain(tiny_model, row, 1.0)).abs().max() > 1e-3, "it had moved after step 2"


@pytest.mark.engine
def test_an_adapter_is_held_to_its_base(tiny_model, tmp_path, closing) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    trainer = closing(
        trainer_of(tiny_model, tmp_path, config, max_steps=3, learning_rate=1e-2, weights="copied")  # merged: no slots
    )
    trainer.train()
    for row, policy in trainer.rows[1]:
        assert torch.equal(row.scores["ref_logprobs"], policy)
    for row, policy in trainer.rows[3]:
        torch.testing.assert_close(row.scores["ref_logprobs"], plain(tiny_model, row, 1.0), rtol=0, atol=1e-4)
        assert (row.scores["ref_logprobs"] - policy).abs().max() > 1e-4


@pytest.mark.engine
def test_evaluation_loss_uses_reference_and_batch_scale(tiny_model, tmp_path, closing) -> None:
    trainer = closing(trainer_of(tiny_model, tmp_path, loss_eval=True, scale_rewards="batch"))
    metrics = trainer.evaluate(tiny.prompts(4))
    rows = [row for row, _ in trainer.rows[1]]
    advantages, mask = (torch.cat([getattr(row, name) for row in rows]) for name in ("advantages", "loss_mask"))
    assert metrics["eval_loss"] == pytest.approx(float(-(advantages * mask).sum() / mask.sum()), abs=1e-3)
    assert all(torch.equal(row.scores["ref_logprobs"], policy) for row, policy in trainer.rows[1])
    totals = torch.cat(trainer.totals)
    expected = torch.cat([of_group - of_group.mean() for of_group in trainer.totals]) / (totals.std() + 1e-4)
    found = [row.advantages[row.sequence.diff(prepend=row.sequence[:1] - 1) != 0] for row in rows]
    torch.testing.assert_close(torch.cat(found).sort().values, expected.sort().values)
