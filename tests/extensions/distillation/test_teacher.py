"""The teacher of on-policy distillation: its values for the policy's rows, their effect on the loss, and the refused
teachers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from colograd import GRPOConfig, GRPOTrainer
from colograd.batch import MicroBatch, PackedRow, ScoredGroup, StepBatch
from colograd.extensions.distillation.head import TeacherHead, TeacherStep, TeacherTop
from colograd.extensions.distillation.teacher import (
    OtherAdapter,
    Teacher,
    check_teacher,
    check_teacher_context,
    teacher_bytes,
    teacher_of,
)
from colograd.losses.objective import Objective
from colograd.memory import token_budget
from colograd.memory.choice import plan_or_raise
from colograd.memory.description import Workload, describe_run, own_devices
from colograd.memory.table import GIB
from colograd.policy import head as policy_head
from colograd.policy import lora, row_proof
from colograd.policy.head import Head
from colograd.policy.loading import Policy, load_policy
from colograd.policy.logprobs import PolicyForward, policy_logprobs
from colograd.policy.packing import PackingRules, collate, plan_rows
from colograd.policy.padded import sequences
from colograd.policy.second_models import fill, second_model_bytes, second_models
from colograd.training.preparation import train_prompts_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of another architecture and size: four layers, four heads."""
    return tiny.make_model(tmp_path_factory.mktemp("teacher") / "qwen3", family="qwen3", layers=4, heads=4)


def made(folder: Path, teacher: Any, **changes: Any) -> GRPOConfig:
    """A configuration without the sampler's correction, because the rows of these tests weren't sampled."""
    given = teacher if isinstance(teacher, dict) else str(teacher)
    settings = {"teacher_model_name_or_path": given, "vllm_importance_sampling_correction": False}
    return tiny.config(folder, **(settings | changes))


def policy_of(model: Any, folder: Path, peft_config: Any = None) -> Policy:
    return load_policy(str(model), None, tiny.config(folder), peft_config)


def groups_of(policy: Policy) -> tuple[ScoredGroup, ...]:
    """Groups without rewards and advantages."""
    found = row_proof._samples(lora.unwrap(policy.model))
    return tuple(dataclasses.replace(group, advantages=torch.zeros(2)) for group in found)


def rows_of(policy: Policy, budget: int = 1000) -> tuple[PackedRow, ...]:
    return plan_rows(groups_of(policy), budget, False, CPU)


def plain_logits(model: Any, row: MicroBatch, temperature: float) -> torch.Tensor:
    """(N, V) logits by transformers' own forward of each completion after its prompt."""
    found = []
    for part in sequences(row):
        ids = torch.cat([part.prompt_ids, part.completion_ids])
        found.append(model(ids[None]).logits[0, len(part.prompt_ids) - 1 : -1] / temperature)
    return torch.cat(found)


def plain_logprobs(model: Any, row: MicroBatch, temperature: float) -> torch.Tensor:
    return plain_logits(model, row, temperature).log_softmax(-1).gather(1, row.labels[:, None])[:, 0]


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_loss_and_its_gradient_are_those_of_a_plain_computation(tiny_model, tmp_path, family) -> None:
    path = tiny.make_model(tmp_path / "teacher", family=family, layers=4, heads=4)
    policy = policy_of(tiny_model, tmp_path)
    config = made(tmp_path, path, temperature=0.7, distillation_weight=0.5)
    check_teacher(policy, config)
    objective, teacher = Objective.from_config(config).with_terms(config, policy), teacher_of(config, policy)
    assert objective.needs == ("teacher_logprobs",) and objective.every_group
    assert "teacher: " in teacher.describe() and not any(p.requires_grad for p in teacher.model.parameters())
    rows = fill({"teacher_logprobs": teacher}, rows_of(policy, budget=20), 0.7)
    assert len(rows) > 1
    tokens = 0
    for row in map(collate, rows):
        logprobs, entropy = policy_logprobs(policy.model, row, 0.7)
        output = objective(logprobs, entropy, row)
        output.loss.backward()
        tokens += len(row.labels)
        assert float(output.sums["teacher_kl"][1]) == len(row.labels)
    mine = {name: p.grad / tokens for name, p in policy.model.named_parameters()}

    student, other = plain(tiny_model), plain(path)
    losses, divergence = [], []
    for row in map(collate, rows):
        own = plain_logprobs(student, row, 0.7)
        with torch.no_grad():
            theirs = plain_logprobs(other, row, 0.7)
        torch.testing.assert_close(row.scores["teacher_logprobs"], theirs, rtol=0, atol=1e-5)
        losses.append(-(0.5 * (theirs - own.detach()) * own).sum())
        divergence.append((own - theirs).detach())
    (sum(losses) / tokens).backward()
    assert torch.cat(divergence).abs().mean() > 0.5, "the two are far apart"
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_term_stands_beside_the_rewards(tiny_model, tmp_path, large) -> None:
    policy = policy_of(tiny_model, tmp_path)
    config = made(tmp_path, large, distillation_weight=2.0)
    rows = fill({"teacher_logprobs": teacher_of(config, policy)}, rows_of(policy), 1.0)
    (row,) = map(collate, rows)
    row = dataclasses.replace(row, advantages=torch.linspace(-1, 1, len(row.labels)))
    objective = Objective.from_config(config).with_terms(config, policy)
    with torch.no_grad():
        logprobs, entropy = policy_logprobs(policy.model, row, 1.0)
        of_rewards = dataclasses.replace(objective, terms=())(logprobs, entropy, row)
        of_teacher = objective(logprobs, entropy, dataclasses.replace(row, advantages=torch.zeros(len(row.labels))))
        both = objective(logprobs, entropy, row)
        masked = dataclasses.replace(row, loss_mask=torch.zeros_like(row.loss_mask))
        nothing = objective(
            logprobs, entropy, dataclasses.replace(masked, scores={"teacher_logprobs": logprobs - torch.inf})
        )
    torch.testing.assert_close(both.loss, of_rewards.loss + of_teacher.loss)
    torch.testing.assert_close(of_teacher.loss, 2.0 * of_teacher.sums["teacher_kl"][0])
    assert float(nothing.loss) == 0, "what a tool wrote may be impossible for the teacher"


def test_it_goes_with_its_completions_when_a_step_is_packed_again(tiny_model, tmp_path, large) -> None:
    policy = policy_of(tiny_model, tmp_path)
    teacher = teacher_of(made(tmp_path, large), policy)
    rows = fill({"teacher_logprobs": teacher}, rows_of(policy), 1.0)
    step = StepBatch(rows, 1, 1, {}, groups_of(policy))
    again = token_budget.repack(step, PackingRules(1, False, False, True, False, False, 0.0, CPU))
    assert len(again.rows) > len(rows)
    for row in again.rows:
        (fresh,) = fill({"teacher_logprobs": teacher}, [dataclasses.replace(row, scores={})], 1.0)
        torch.testing.assert_close(row.scores["teacher_logprobs"], fresh.scores["teacher_logprobs"], rtol=0, atol=1e-5)


# -- several


def test_of_several_teachers_each_scores_the_prompts_that_name_it(tiny_model, tmp_path, large) -> None:
    """Rows have groups of both teachers and groups of none. The term ignores the latter."""
    policy, small = policy_of(tiny_model, tmp_path), tiny.make_model(tmp_path / "small", layers=1)
    config = made(tmp_path, {"big": str(large), "small": str(small)}, distillation_weight=0.5)
    check_teacher(policy, config)
    names = ["small", "big", None]
    groups = [
        dataclasses.replace(scored, group=dataclasses.replace(scored.group, example={"teacher": name, "answer": 1}))
        for scored, name in zip(groups_of(policy) * 2, names, strict=False)
    ]
    groups = [group.for_training() for group in groups]
    objective = Objective.from_config(config).with_terms(config, policy)
    models = second_models(objective.needs, config, policy)
    assert [second.name for second in models.values()] == [str(large), str(small)]
    assert second_model_bytes(objective.needs, config, policy)["teacher"] == sum(
        parameter.nbytes for path in (large, small) for parameter in plain(path).parameters()
    )
    (packed,) = fill(models, plan_rows(groups, 1000, False, CPU), 0.7)
    row = collate(packed)
    with torch.no_grad():
        theirs = {name: plain_logprobs(plain(path), row, 0.7) for name, path in config.teachers.items()}
        own, entropy = policy_logprobs(policy.model, row, 0.7)
    named = [
        part.example.get("teacher") or ""
        for part in packed.parts
        for rollout in part.rollouts
        for _ in rollout.completion_ids
    ]
    assert set(named) == {"small", "big", ""}
    for at, name in enumerate(named):
        expected = theirs[name][at] if name else torch.tensor(float("inf"))
        torch.testing.assert_close(row.scores["teacher_logprobs"][at], expected, rtol=0, atol=1e-5)
    output = objective(own, entropy, row)
    gaps = torch.stack([own[at] - theirs[name][at] for at, name in enumerate(named) if name])
    torch.testing.assert_close(output.sums["teacher_kl"][0], gaps.sum(), rtol=0, atol=1e-4)
    assert float(output.sums["teacher_kl"][1]) == len(gaps)
    torch.testing.assert_close(output.loss, 0.5 * gaps.sum(), rtol=0, atol=1e-4)


def test_a_dataset_names_teachers_that_there_are(tiny_model, tmp_path) -> None:
    config, policy = made(tmp_path, {"math": "m", "code": "c"}), policy_of(tiny_model, tmp_path)

    def check(**columns: Any) -> None:
        given = {"prompt": ["1", "2"], **columns}
        dataset = Dataset.from_dict({name: values * 2 for name, values in given.items()})
        train_prompts_of(dataset, policy, config)

    check(teacher=["math", None])
    with pytest.raises(ValueError, match=r"names 'maths', but teacher_model_name_or_path has math, code"):
        check(teacher=["maths", "code"])
    with pytest.raises(ValueError, match="has no column 'teacher'"):
        check()


# -- adapters

LORA = {"r": 4, "target_modules": "all-linear"}


def an_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    """An adapter with random values, as if trained."""
    model = peft.get_peft_model(plain(base), peft.LoraConfig(**(LORA | changes)))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("rank", "kind"), [(4, OtherAdapter), (8, Teacher)])
def test_an_adapter_on_the_policy_s_base_needs_no_second_model(tiny_model, tmp_path, rank, kind) -> None:
    folder = an_adapter(tiny_model, tmp_path / "adapter", r=rank)
    policy = policy_of(tiny_model, tmp_path, peft.LoraConfig(**LORA))
    config = made(tmp_path, folder)
    check_teacher(policy, config)
    teacher = teacher_of(config, policy)
    assert type(teacher) is kind
    whole = sum(p.nbytes for p in plain(tiny_model).parameters())
    assert (teacher_bytes(config, policy) < whole) == (kind is OtherAdapter)
    policy.model.train()
    before = [(p.data_ptr(), p.requires_grad) for p in policy.model.parameters()]
    (row,) = map(collate, fill({"teacher_logprobs": teacher}, rows_of(policy), 1.0))
    theirs = peft.PeftModel.from_pretrained(plain(tiny_model), folder)
    with torch.no_grad():
        torch.testing.assert_close(row.scores["teacher_logprobs"], plain_logprobs(theirs, row, 1.0), rtol=0, atol=1e-5)
        assert (row.scores["teacher_logprobs"] - plain_logprobs(plain(tiny_model), row, 1.0)).abs().mean() > 1e-2
    assert [(p.data_ptr(), p.requires_grad) for p in policy.model.parameters()] == before and policy.model.training


def test_each_rank_of_fsdp_has_an_adapter_teacher(tiny_model, tmp_path, monkeypatch) -> None:
    folder = an_adapter(tiny_model, tmp_path / "adapter", r=4)
    policy = policy_of(tiny_model, tmp_path, peft.LoraConfig(**LORA))
    config = made(tmp_path, folder)
    nbytes = teacher_bytes(config, policy)
    monkeypatch.setattr(GRPOConfig, "cuts_weights", True)
    monkeypatch.setattr(GRPOConfig, "world_size", 3)
    assert teacher_bytes(config, policy) == 3 * nbytes  # the plan divides by the number of ranks


def test_a_quantised_teacher_stays_packed(tiny_model, tmp_path, large) -> None:
    pytest.importorskip("bitsandbytes")
    policy = policy_of(tiny_model, tmp_path)
    config = made(tmp_path, large, teacher_model_init_kwargs={"load_in_4bit": True})
    check_teacher(policy, config)
    teacher = teacher_of(config, policy)
    assert "28 matrices quantised" in teacher.describe()
    nbytes = sum(p.nbytes for p in plain(large).parameters())
    assert teacher_bytes(config, policy) < 0.7 * nbytes
    rows = rows_of(policy)
    packed = fill({"teacher_logprobs": teacher}, rows, 1.0)[0].scores["teacher_logprobs"]
    exact = fill({"teacher_logprobs": teacher_of(made(tmp_path, large), policy)}, rows, 1.0)[0].scores[
        "teacher_logprobs"
    ]
    assert 1e-3 < (packed - exact).abs().mean() < 2.0


# -- at start


def test_the_memory_plan_counts_it(tiny_model, tmp_path, large, monkeypatch) -> None:
    config, policy = made(tmp_path, large), policy_of(tiny_model, tmp_path)
    assert teacher_bytes(config, policy) == sum(p.nbytes for p in plain(large).parameters())
    devices, work = own_devices(config.device, policy.model), Workload(64, 4, 64)
    run = describe_run(config, policy.model, devices, work, shared=False, teacher=GIB)
    assert ("weights of the teacher", GIB, GIB) in plan_or_raise(run, "none").rows()
    waits = made(tmp_path, large, offload_teacher=True)
    monkeypatch.setattr(GRPOConfig, "on_cpu", False)
    assert teacher_bytes(waits, policy) == 0
    exact = made(tmp_path, large, offload_teacher=True, distillation_kl="exact")
    head = teacher_bytes(exact, policy)
    monkeypatch.setattr(GRPOConfig, "world_size", 4)
    monkeypatch.setattr(GRPOConfig, "cuts_weights", True)
    assert teacher_bytes(exact, policy) == 4 * head > 0, (
        "with FSDP each rank has a whole head, and the plan divides by 4"
    )


def test_a_teacher_that_can_t_score_the_policy_s_tokens_is_refused(tiny_model, tmp_path, large) -> None:
    policy = policy_of(tiny_model, tmp_path)
    other = tiny.make_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"A": ', '"?A": '))
    with pytest.raises(ValueError, match=r"another tokenizer than.* policy's 258 tokens, 1 have .* For example, 'A'"):
        check_teacher(policy, made(tmp_path, other))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (other / file).unlink()
    with pytest.raises(ValueError, match="no tokenizer that can be loaded"):
        check_teacher(policy, made(tmp_path, other))
    with pytest.raises(ValueError, match="no/such"):
        check_teacher(policy, made(tmp_path, "./no/such"))
    check_teacher_context(made(tmp_path, large), policy, 256)
    with pytest.raises(ValueError, match=r"may have 257 tokens, but teacher .* reads at most 256"):
        check_teacher_context(made(tmp_path, large), policy, 257)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"distillation_weight": 0.0}, "distillation_weight is 0.0 .* must be positive"),
        ({"teacher_model_name_or_path": {"math": None}}, "must map a teacher's name to a model"),
        ({"teacher_model_name_or_path": {"a": "b"}, "distillation_kl": "exact"}, "with one teacher's logits"),
        ({"distillation_kl": "forward"}, "choose one of sampled, exact, top_k"),
        ({"distillation_kl": "top_k", "distillation_top_k": 0}, "`distillation_top_k` is 0"),
        ({"teacher_model_name_or_path": None, "offload_teacher": True}, "but there is no teacher"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, given, said) -> None:
    with pytest.raises(ValueError, match=said):
        made(tmp_path, "some", **given)


# -- the divergence over the vocabulary


def jsd_of_trl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of GKD's generalised divergence at beta 1, the reverse KL divergence."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    return gkd.GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=1.0, reduction="sum")


@pytest.mark.parametrize("tiles", [(3, 100), (8192, 258)])
@pytest.mark.parametrize("offload", [False, True])
def test_the_exact_divergence_and_its_gradient_are_trl_s(
    tiny_model, tmp_path, large, monkeypatch, tiles, offload
) -> None:
    """The exact KL equals TRL's: in tiles, with a temperature, and with a copy of the offloaded teacher's head."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda *_: tiles)
    policy = policy_of(tiny_model, tmp_path)
    config = made(tmp_path, large, temperature=0.7, distillation_kl="exact", distillation_weight=0.5)
    objective, teacher = Objective.from_config(config).with_terms(config, policy), teacher_of(config, policy)
    assert objective.needs == ("teacher_states",) and objective.every_group
    rows = fill({"teacher_states": teacher}, rows_of(policy, budget=20), 0.7)
    head = teacher.head
    if offload:  # the head's remaining copy
        head = TeacherHead.of(teacher.model, CPU)
        teacher.model.get_output_embeddings().weight.zero_()
    forward = PolicyForward(policy.model, 0.7, steps=(TeacherStep(head),))
    total, tokens = 0.0, 0
    for row in map(collate, rows):
        found, entropy, values = forward(row)
        output = objective(found, entropy, row, values)
        output.loss.backward()
        total, tokens = total + float(output.sums["teacher_kl"][0]), tokens + len(row.labels)
    mine = {name: p.grad / tokens for name, p in policy.model.named_parameters()}

    student, other, losses = plain(tiny_model), plain(large), []
    for row in map(collate, rows):
        with torch.no_grad():
            theirs = plain_logits(other, row, 0.7)
        losses.append(jsd_of_trl(plain_logits(student, row, 0.7), theirs))
    (0.5 * sum(losses) / tokens).backward()
    assert total == pytest.approx(float(sum(losses)), abs=1e-4) and total / tokens > 0.5
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_a_divergence_and_an_entropy_have_gradients_together(monkeypatch, cap, entropy_gradient) -> None:
    """Heads with a soft cap, a scale and biases, in float64. A larger teacher vocabulary is cut to the policy's
    size."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda *_: (3, 4))
    torch.manual_seed(0)
    kind = {"dtype": torch.float64}
    hidden, weight, bias = torch.randn(7, 6, **kind), torch.randn(11, 6, **kind), torch.randn(11, **kind)
    given = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    transform = {"scale": 0.5, "softcap": cap}
    teacher = TeacherHead.of(tiny.head_only(torch.randn(13, 5, **kind), torch.randn(13, **kind), 0.5, cap))
    states, labels = torch.randn(7, 5, **kind), torch.randint(0, 11, (7,))
    weights = torch.randn(3, 7, **kind)

    def plain(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logits = 0.5 * (h @ w.t() + b)
        return ((cap * torch.tanh(logits / cap) if cap else logits) / 0.8).log_softmax(-1)

    logp, logq = plain(*given), plain(states, teacher.weight[:11], teacher.bias[:11])
    expected = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1), (logp.exp() * (logp - logq)).sum(-1)
    head = Head(0.8, dtype=torch.float64, **transform)
    found = policy_head.label_logprobs(*given, labels, head, entropy_gradient, teacher.logits(states, 0.8))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    counted = [0, 1, 2] if entropy_gradient else [0, 2]
    theirs = torch.autograd.grad(sum((expected[i] * weights[i]).sum() for i in counted), given)
    mine = torch.autograd.grad(sum((found[i] * weights[i]).sum() for i in counted), given)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tiles", [(3, 100), (8192, 258)])
def test_top_k_divergence_equals_a_plain_computation(tiny_model, tmp_path, large, monkeypatch, tiles) -> None:
    """All other tokens count as one token. The divergence is below the exact one, and close if they are rare."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda *_: tiles)
    policy, k = policy_of(tiny_model, tmp_path), 40
    given = {"temperature": 0.7, "distillation_weight": 0.5}
    config = made(tmp_path, large, distillation_kl="top_k", distillation_top_k=k, **given)
    objective, teacher = Objective.from_config(config).with_terms(config, policy), teacher_of(config, policy)
    assert objective.needs == ("teacher_top",) and objective.every_group
    rows = fill({"teacher_top": teacher}, rows_of(policy, budget=20), 0.7)
    forward, student, other = (
        PolicyForward(policy.model, 0.7, steps=(TeacherStep(TeacherTop),)),
        plain(tiny_model),
        plain(large),
    )
    total, exact, losses, tokens = 0.0, 0.0, [], 0
    for row in map(collate, rows):
        found, entropy, values = forward(row)
        output = objective(found, entropy, row, values)
        output.loss.backward()
        total, tokens = total + float(output.sums["teacher_kl"][0]), tokens + len(row.labels)
        logp = plain_logits(student, row, 0.7).log_softmax(-1)
        with torch.no_grad():
            logq = plain_logits(other, row, 0.7).log_softmax(-1)
        ids = logq.topk(k).indices

        def lumped(log: torch.Tensor, ids: torch.Tensor = ids) -> torch.Tensor:
            kept = torch.zeros_like(log, dtype=torch.bool).scatter(1, ids, True)
            rest = log.masked_fill(kept, -torch.inf).logsumexp(-1, keepdim=True)
            return torch.cat([log.gather(1, ids), rest], 1)

        p, q = lumped(logp), lumped(logq)
        losses.append((p.exp() * (p - q)).sum())
        exact += float((logp.exp() * (logp - logq)).sum().detach())
    (0.5 * sum(losses) / tokens).backward()
    assert total == pytest.approx(float(sum(losses).detach()), abs=1e-3) and 0.1 < total < exact
    for (_, mine), theirs in zip(policy.model.named_parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(mine.grad / tokens, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_top_tokens_that_the_policy_doesn_t_know_are_of_the_rest(monkeypatch, cap) -> None:
    """The teacher has a larger vocabulary. An entropy term with a gradient is in the same loss. All is in float64."""
    monkeypatch.setattr(policy_head, "tile_shape", lambda *_: (3, 4))
    torch.manual_seed(0)
    kind = {"dtype": torch.float64}
    given = [torch.randn(7, 6, **kind), torch.randn(11, 6, **kind), torch.randn(11, **kind)]
    given = [tensor.requires_grad_() for tensor in given]
    logq, labels = torch.randn(7, 13, **kind).log_softmax(-1), torch.randint(0, 11, (7,))
    top = TeacherTop(logq.topk(9).indices, logq.topk(9).values)

    def plain(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logits = 0.5 * (h @ w.t() + b)
        return ((cap * torch.tanh(logits / cap) if cap else logits) / 0.8).log_softmax(-1)

    logp = torch.cat([plain(*given), torch.full((7, 2), -torch.inf, **kind)], 1)
    kept = torch.zeros(7, 13, dtype=torch.bool).scatter(1, top.ids, True)
    kept[:, 11:] = False  # which the policy doesn't know
    rest, theirs = (log.masked_fill(kept, -torch.inf).logsumexp(-1) for log in (logp, logq))
    of_kept = (logp.exp() * (logp - logq).where(kept, 0.0)).nan_to_num(0.0).sum(-1)
    expected = of_kept + rest.exp() * (rest - theirs)
    entropy = -(plain(*given).exp() * plain(*given)).sum(-1)
    head = Head(0.8, dtype=torch.float64, scale=0.5, softcap=cap)
    found = policy_head.label_logprobs(*given, labels, head, True, top)
    torch.testing.assert_close(found[2], expected)
    weights = torch.randn(2, 7, **kind)
    theirs = torch.autograd.grad((weights[0] * expected + weights[1] * entropy).sum(), given)
    mine = torch.autograd.grad((weights[0] * found[2] + weights[1] * found[1]).sum(), given)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_states_go_with_their_completions_too(tiny_model, tmp_path, large) -> None:
    policy = policy_of(tiny_model, tmp_path)
    teacher = teacher_of(made(tmp_path, large, distillation_kl="exact"), policy)
    rows = fill({"teacher_states": teacher}, rows_of(policy), 1.0)
    step = StepBatch(rows, 1, 1, {}, groups_of(policy))
    again = token_budget.repack(step, PackingRules(1, False, False, True, False, False, 0.0, CPU))
    forward = PolicyForward(policy.model, 1.0, steps=(TeacherStep(teacher.head),))
    for row in again.rows:
        (fresh,) = fill({"teacher_states": teacher}, [dataclasses.replace(row, scores={})], 1.0)
        ours, theirs = (forward(collate(each))[2]["divergence"] for each in (row, fresh))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# -- in a run


def trained(
    student: Path, teacher: Path, folder: Path, closing: Any, rewards: Any = None, **changes: Any
) -> GRPOTrainer:
    config = made(folder, teacher, **changes)
    trainer = closing(GRPOTrainer(str(student), rewards, config, tiny.prompts(), tiny.prompts(8)))
    trainer.train()
    return trainer


def a_taught_model(folder: Path, layers: int = 4) -> Path:
    """A model that has learnt which class of eight follows a token's class, whatever the prompt."""
    path = tiny.make_model(folder, layers=layers, heads=4)
    model = plain(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    for _ in range(120):
        classes = (torch.randint(8, (16, 1)) + torch.arange(24)) % 8
        ids = classes * 32 + torch.randint(32, classes.shape)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


@pytest.mark.engine
@pytest.mark.slow
def test_distillation_closes_most_of_the_divergence(tiny_model, tmp_path, closing, capfd) -> None:
    """Distil four layers into two, without a reward. A middle checkpoint resumes bit for bit, and evaluation logs the
    divergence."""
    teacher = a_taught_model(tmp_path / "teacher")
    settings = {
        "distillation_kl": "exact", "learning_rate": 1e-2, "max_completion_length": 32, "prompts_per_step": 8,
        "max_steps": 40, "save_strategy": "steps", "save_steps": 20, "log_completions": True, "eval_on_start": True,
        "eval_strategy": "steps", "eval_steps": 40,
    }  # fmt: skip
    trainer = trained(tiny_model, teacher, tmp_path / "run", closing, **settings)
    said = capfd.readouterr().out
    assert "teacher: " in said and "| teacher KL " in said and "no group has a reward difference" not in said
    assert "abstained" not in said
    history = trainer.state.log_history
    closed = [entry["eval_teacher_kl"] for entry in history if "eval_teacher_kl" in entry]
    steps = [entry["teacher_kl"] for entry in history if "teacher_kl" in entry]
    assert closed[0] > 0.3 and closed[-1] < 0.2 * closed[0], (closed, steps)
    assert not any("reward" in entry or "frac_reward_zero_std" in entry for entry in history)
    final = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-20"))
    assert all(torch.equal(a, b) for a, b in zip(final, trainer.model.parameters(), strict=True))


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_learns_from_several_teachers(tiny_model, tmp_path, closing) -> None:
    """Two teachers of different sizes learnt the same task. A middle checkpoint resumes bit for bit."""
    teachers = {f"of {layers}": str(a_taught_model(tmp_path / f"teacher-{layers}", layers)) for layers in (3, 4)}
    config = tiny.config(
        tmp_path / "run", teacher_model_name_or_path=teachers, learning_rate=1e-2, prompts_per_step=8, max_steps=40,
        save_strategy="steps", save_steps=20, max_completion_length=32, reward_weights=[0.0],
    )  # fmt: skip
    prompts = tiny.prompts()
    prompts = prompts.add_column("teacher", [f"of {3 + row % 2}" for row in range(len(prompts))])
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, prompts))
    trainer.train()
    far = [entry["teacher_kl"] for entry in trainer.state.log_history if "teacher_kl" in entry]
    assert len(far) == 40 and sum(far[-10:]) < 0.9 * sum(far[:10]), far
    final = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-20"))
    assert all(torch.equal(a, b) for a, b in zip(final, trainer.model.parameters(), strict=True))
