"""Reward models: found, checked, called in batches of similar lengths; the same rewards as TRL's code gives."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from reward_cases import odd

from colograd import GRPOTrainer
from colograd.batch import FinishReason, Group, ModelInput, Rollout
from colograd.extensions.graders.models import batches
from colograd.rewards import RewardError, RewardModel, Scorer, resolve_rewards, with_models

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip


def make_classifier(family: str = "Qwen2", labels: int = 1) -> Any:
    torch.manual_seed(1)
    config = getattr(hf, f"{family}Config")(num_labels=labels, **SHAPE)
    model = getattr(hf, f"{family}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0) if parameter.dim() == 2 else None
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-reward"
    make_classifier("Llama").save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.config(tmp_path_factory.mktemp("run"))


PLAIN = [("What is 2 + 2? ", "4"), ("x", "y" * 40), ("a longer prompt than that: ", ""), ("What is 2 + 2? ", "four")]
CHATS = [
    ([{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}])
    for prompt, completion in PLAIN
]


def trl_rewards(model: Any, tokenizer: Any, pairs: Any) -> list[float]:
    """Rewards by TRL's own method, on a bare trainer that has only the attributes that the method reads."""
    trl = pytest.importorskip("trl")
    from accelerate import Accelerator

    trainer = object.__new__(trl.GRPOTrainer)
    trainer.accelerator = Accelerator(cpu=True)
    trainer.args = SimpleNamespace(device=torch.device("cpu"), report_to=[], past_index=-1)
    trainer.reward_funcs, trainer.reward_func_names = [model], ["model"]
    trainer.reward_processing_classes, trainer.chat_template_kwargs = [tokenizer], {}
    trainer.state, trainer.environments = hf.TrainerState(), None
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.is_deepspeed_enabled, trainer._past = False, None
    prompts, completions = ([pair[i] for pair in pairs] for i in (0, 1))
    inputs = [{"prompt": prompt} for prompt in prompts]
    return trainer._calculate_rewards(inputs, prompts, completions, [[0]] * len(pairs))[:, 0].tolist()


@pytest.mark.parametrize("pairs", [PLAIN, CHATS], ids=["plain", "chat"])
@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_the_rewards_are_trl_s(config, monkeypatch, family: str, pairs: Any) -> None:
    model, tokenizer = make_classifier(family), tiny.make_tokenizer()
    ours = RewardModel(model, tokenizer, config)
    model.config.pad_token_id = tokenizer.pad_token_id  # as TRL's trainer has it
    expected = trl_rewards(model.eval(), tokenizer, pairs)
    assert len(set(expected)) == 4
    for tokens in (4096, 60, 1):  # in one batch, in two or three, one by one
        ours.batch_tokens = tokens
        assert ours(*zip(*pairs, strict=True)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("padding", ["none", "end", "named"])
def test_a_reward_is_the_model_s_for_the_text_alone(config, padding: str) -> None:
    """Texts end in the end token, even if it is the padding token of the tokenizer or of the checkpoint."""
    model, tokenizer = make_classifier(), tiny.make_tokenizer()
    tokenizer.pad_token = None if padding == "none" else tokenizer.eos_token
    model.config.pad_token_id = tokenizer.eos_token_id if padding == "named" else None
    texts = [prompt + completion + tokenizer.eos_token for prompt, completion in PLAIN]
    rows = [torch.tensor([tokenizer.encode(text, add_special_tokens=False)]) for text in texts]
    assert all(row[0, -1] == tokenizer.eos_token_id for row in rows)
    with torch.inference_mode():
        expected = [model.eval()(row).logits.item() for row in rows]
    ours = RewardModel(model, tokenizer, config)
    assert ours([""] * len(texts), texts) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_batches_hold_rows_of_similar_lengths_within_the_budget() -> None:
    lengths = [3, 50, 10, 9, 120, 11, 2]
    assert list(batches(lengths, 40)) == [[4], [1], [5, 2, 3], [0, 6]]
    assert list(batches(lengths, 10**6)) == [[4, 1, 5, 2, 3, 0, 6]] and list(batches([], 10)) == []


def test_a_folder_is_loaded_with_its_tokenizer_in_eval_mode(config, folder: Path) -> None:
    (found,) = with_models(str(folder), None, config)
    assert isinstance(found, RewardModel) and not found.model.training and found.tokenizer.vocab_size
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    (given,) = with_models([model.train()], None, config)  # the tokenizer's folder comes from its configuration
    assert not given.model.training
    assert given(*zip(*PLAIN, strict=True)) == pytest.approx(found(*zip(*PLAIN, strict=True)))
    (reward,) = resolve_rewards([given], [0.5])
    assert (reward.name, reward.weight) == ("tiny-reward", 0.5)


def test_a_module_that_is_no_model_of_transformers_needs_a_tokenizer_only(config) -> None:
    class Counting(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
            return SimpleNamespace(logits=attention_mask.sum(1, keepdim=True).float())

    (model,) = with_models(Counting(), tiny.make_tokenizer(), config)
    assert model.__name__ == "Counting"
    assert model(*zip(*PLAIN, strict=True)) == [len(prompt + completion) for prompt, completion in PLAIN]
    with pytest.raises(ValueError, match=r"'Counting' has no tokenizer .*: give one in reward_processing_classes"):
        with_models([Counting()], None, config)


def test_each_model_has_its_own_processing_class_and_functions_none(config) -> None:
    first, second = make_classifier(), make_classifier()
    given = [tiny.make_tokenizer(), None, tiny.make_tokenizer()]
    found = with_models([first, tiny.vowels, second], given, config)
    assert [getattr(item, "tokenizer", None) for item in found] == given and found[1] is tiny.vowels
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries for 2 reward functions"):
        with_models([first, second], given[:1], config)


def unusable(folder: Path, kind: str) -> tuple[Any, Any]:
    """A reward model and its processing class that can't be used."""
    tokenizer = tiny.make_tokenizer()
    if kind == "two outputs":
        return make_classifier(labels=2), tokenizer
    if kind == "no tokenizer":
        return make_classifier(), None
    if kind == "no head":
        hf.LlamaModel(hf.LlamaConfig(num_labels=1, **SHAPE)).save_pretrained(folder)
    elif kind == "folder of two outputs":
        make_classifier(labels=2).save_pretrained(folder)
    return str(folder), None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("two outputs", "'Qwen2ForSequenceClassification' has num_labels 2, but a reward is one number"),
        ("folder of two outputs", "has num_labels 2, but a reward is one number"),
        ("no head", r"has no weights for score\\.weight, so it wasn't trained to give rewards"),
        ("no tokenizer", "has no tokenizer .*: give one in reward_processing_classes"),
        ("nothing there", "can't be loaded .*: give a folder, a Hub id, or the import path of a function"),
    ],
)
def test_what_gives_no_rewards_is_refused(config, tmp_path: Path, monkeypatch, kind: str, said: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = unusable(tmp_path / "model", kind)
    with pytest.raises(ValueError, match=said.replace("\\\\", "\\")):
        with_models([model], [tokenizer], config)


def make_group(position: int, size: int = 3) -> Group:
    rollout = Rollout(ModelInput((1, 2)), (3,), torch.zeros(1), torch.ones(1, dtype=torch.bool), FinishReason.STOP, 0)
    return Group({"prompt": f"prompt {position}: "}, (rollout,) * size, position)


async def even(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if int(text) % 2 else 10.0 for text in completions]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_routed_by_none_between_functions_of_every_kind(config, workers: int) -> None:
    """A sync function and an async function each judge some rows, and a model judges all."""
    (model,) = with_models(make_classifier(), tiny.make_tokenizer(), config)
    scorer = Scorer(resolve_rewards([odd, even, model], None), workers)
    try:
        rewards = scorer.submit([make_group(0)], [["1", "2", "33"]]).result()
    finally:
        scorer.close()
    assert rewards[:, 0].isnan().tolist() == [False, True, False] and rewards[0, 0] == 1 and rewards[2, 0] == 2
    assert rewards[:, 1].isnan().tolist() == [True, False, True] and rewards[1, 1] == 10
    prompts = ["prompt 0: "] * 3
    assert rewards[:, 2].tolist() == pytest.approx(model(prompts, ["1", "2", "33"]), rel=1e-5)


def test_pending_completions_are_scored_in_one_call(config, monkeypatch) -> None:
    """Cancelled completions are not scored."""
    (model,) = with_models(make_classifier(), tiny.make_tokenizer(), config)
    calls: list[int] = []
    scorer = Scorer(resolve_rewards([model], None), timeout=1e-6)  # for functions, which may hang: not for models
    original = RewardModel.__call__

    def watching(self: Any, prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        calls.append(len(prompts))
        return original(self, prompts, completions)

    monkeypatch.setattr(RewardModel, "__call__", watching)
    scorings = [scorer.submit([make_group(p)], [["1", "2", str(p)]]) for p in range(4)]
    assert not calls and not scorings[0].done()
    scorings[2].cancel()
    rewards = [scorings[p].result()[:, 0].tolist() for p in (0, 1, 3)]
    assert calls == [9]
    assert rewards[1] == pytest.approx(original(model, ["prompt 1: "] * 3, ["1", "2", "1"]), rel=1e-5)
    assert scorer.take_counts()["rewards/Qwen2ForSequenceClassification/seconds"] > 0


def test_a_model_that_fails_is_named(config) -> None:
    class Broken(torch.nn.Module):
        def forward(self, **kwargs: Any) -> Any:
            return SimpleNamespace(logits=torch.zeros(3, 2))

    (model,) = with_models(Broken(), tiny.make_tokenizer(), config)
    with pytest.raises(RewardError, match=r"'Broken', prompt 4: it raised .*logits of shape \(3, 2\), not \(3, 1\)"):
        Scorer(resolve_rewards([model], None)).submit([make_group(4)], [["1", "2", "3"]]).result()


@pytest.mark.engine
def test_a_run_with_a_model_and_a_function(tiny_model: Path, folder: Path, tmp_path: Path, closing) -> None:
    config = tiny.config(tmp_path, max_steps=1, reward_weights=[0.5, 1.0])
    trainer = closing(GRPOTrainer(str(tiny_model), [str(folder), tiny.vowels], config, tiny.prompts()))
    before = {name: p.clone() for name, p in trainer.rewards[0].function.model.named_parameters()}
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "reward" in entry)
    mean = 0.5 * entry["rewards/tiny-reward/mean"] + entry["rewards/vowels/mean"]
    assert entry["reward"] == pytest.approx(mean, rel=1e-4) and entry["rewards/tiny-reward/std"] > 0
    after = dict(trainer.rewards[0].function.model.named_parameters())
    assert all(torch.equal(after[name], before[name]) and after[name].grad is None for name in before)
