"""The trainer, with the real engine in the process: publish, step, save, evaluate, stop."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal

import launcher
import pytest
import tiny
import torch
from needs import needs
from transformers import TrainerCallback

from colograd import GRPOTrainer
from colograd.checkpoint.search import finished_checkpoint
from colograd.parallel import watchdog
from colograd.rewards import RewardError
from colograd.runtime import process

pytestmark = pytest.mark.engine


class Recorder(TrainerCallback):
    """A callback that calls ``look(trainer)`` after each optimizer step."""

    def __init__(self, look) -> None:
        self.look, self.trainer = look, None

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.look(self.trainer)


def make_trainer(model, folder, look=None, cls=GRPOTrainer, reward=tiny.vowels, **changes) -> GRPOTrainer:
    recorder = Recorder(look) if look else None
    trainer = cls(
        model=str(model),
        reward_funcs=reward,
        args=tiny.config(folder, **changes),
        train_dataset=tiny.prompts(),
        eval_dataset=tiny.prompts(6),
        callbacks=[recorder] if recorder else None,
    )
    if recorder:
        recorder.trainer = trainer
    return trainer


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_publish_copies_the_weights_bit_for_bit(tiny_model, tmp_path, closing, dtype) -> None:
    seen: list[tuple[int, list[str], int]] = []

    class Publishing(GRPOTrainer):
        def publish(self) -> None:
            behind = len(self.weights.differing())
            super().publish()
            seen.append((self.engine.version, self.weights.differing(), behind))

    trainer = closing(
        make_trainer(
            tiny_model, tmp_path, cls=Publishing, model_init_kwargs={"dtype": dtype}, max_steps=3, weights="copied"
        )
    )
    trainer.train()
    assert [(version, differing) for version, differing, _ in seen] == [(0, []), (1, []), (2, [])]
    assert seen[0][2] == 0, "both loaded the same checkpoint"
    assert seen[1][2] and seen[2][2], "a step changes weights, and the engine has them only after a publish"


def test_an_untied_model_with_biases_is_mapped_whole(tiny_qwen, tmp_path, closing) -> None:
    trainer = closing(make_trainer(tiny_qwen, tmp_path, max_steps=2, weights="copied"))
    trainer.train()
    trainer.publish()
    assert trainer.weights.differing() == []
    names = {part.name for part in trainer.weights.slices}
    assert names == dict(trainer.model.named_parameters()).keys()


def test_a_run_logs_trls_metrics_and_its_phases_explain_the_step(tiny_model, tmp_path, closing) -> None:
    trainer = closing(make_trainer(tiny_model, tmp_path))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == 4
    expected = {
        "loss", "grad_norm", "learning_rate", "num_tokens", "reward", "reward_std", "frac_reward_zero_std",
        "rewards/vowels/mean", "rewards/vowels/std", "completions/mean_length", "completions/min_length",
        "completions/max_length", "completions/clipped_ratio", "entropy", "clip_ratio/low_mean",
        "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max", "step_time", "time/publish", "time/generate", "time/reward",
        "time/pack", "time/train", "time/optimizer",
    }  # fmt: skip
    assert expected <= logs[0].keys(), expected - logs[0].keys()
    for entry in logs:
        phases = sum(value for name, value in entry.items() if name.startswith("time/"))
        assert phases == pytest.approx(entry["step_time"])
        assert entry["sampling/sampling_logp_difference/mean"] < 1e-5
        assert entry["clip_ratio/region_mean"] == 0, "on-policy: the ratio is 1"
    assert logs[-1]["num_tokens"] > logs[0]["num_tokens"] > 0


def test_tokens_through_the_model_are_prompts_once_and_completions(tiny_model, tmp_path, closing) -> None:
    """Tokens are counted at the embedding: a group's prompt once, the completions, and no padding."""
    counted, expected = [], []

    class Counting(GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            tokens = []
            handle = model.get_input_embeddings().register_forward_hook(lambda m, a, out: tokens.append(a[0].numel()))
            loss = super().training_step(model, inputs, num_items_in_batch)
            handle.remove()
            counted.append(sum(tokens))
            assert len(tokens) == len(inputs.rows), "one forward per micro-batch"
            return loss

        def compute_advantages(self, group, rewards):
            advantages = super().compute_advantages(group, rewards)
            if advantages.any():
                expected[-1] += len(group.rollouts[0].prompt_ids) + sum(len(r.completion_ids) for r in group.rollouts)
            return advantages

        def publish(self):
            expected.append(0)
            super().publish()

    trainer = closing(make_trainer(tiny_model, tmp_path, cls=Counting, max_tokens_per_microbatch=100000))
    trainer.train()
    assert counted == expected and all(counted)


@pytest.mark.slow  # test_padded.py has the rows without a run
def test_a_model_that_cannot_be_packed_trains_padded_to_the_same_result(
    tiny_model, tmp_path, monkeypatch, capfd
) -> None:
    from transformers import LlamaForCausalLM

    losses = {}
    for rows in ("packed", "padded"):
        if rows == "padded":
            monkeypatch.setattr(LlamaForCausalLM, "_supports_attention_backend", False)
        trainer = make_trainer(tiny_model, tmp_path / rows, max_steps=2)
        trainer.train()
        said = capfd.readouterr().out
        assert ("rows: padded, each completion with its prompt (LlamaForCausalLM" in said) == (rows == "padded")
        losses[rows] = [e[key] for e in trainer.state.log_history if "reward" in e for key in ("loss", "grad_norm")]
        trainer.close()
    assert losses["padded"] == pytest.approx(losses["packed"], rel=1e-3, abs=1e-5)


def test_equal_rewards_skip_forwards_but_take_the_step(tiny_model, tmp_path, closing) -> None:
    def equal(completions, **kwargs):
        return [1.0] * len(completions)

    before = {}
    trainer = closing(make_trainer(tiny_model, tmp_path, reward=equal, max_steps=2, weight_decay=0.1))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    log = [entry for entry in trainer.state.log_history if "reward" in entry][-1]
    assert log["train/packed_tokens"] == 0 and log["frac_reward_zero_std"] == 1 and log["loss"] == 0
    decayed = trainer.get_decay_parameter_names(trainer.model)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in decayed), "decay acts, nothing else does"


@pytest.mark.parametrize(
    "loss_type", ["dapo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "bnpo", "dr_grpo"))]
)
def test_leaving_out_groups_without_a_signal_changes_no_update(tiny_model, tmp_path, loss_type) -> None:
    """Half of the groups have no reward difference: packed or not, each step's loss and the weights are the same."""

    def half(completions, answer, **kwargs):
        return [1.0] * len(completions) if ord(answer[0]) % 2 else tiny.vowels(completions)

    found = []
    for skipped in (True, False):
        trainer = make_trainer(tiny_model, tmp_path / str(skipped), reward=half, loss_type=loss_type, max_steps=3)
        trainer.learner.rules = dataclasses.replace(trainer.learner.rules, skip_without_signal=skipped)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()
        found.append(([entry["loss"] for entry in logs], [entry["train/packed_tokens"] for entry in logs], weights))
        assert all(0 < entry["frac_reward_zero_std"] < 1 for entry in logs)
        trainer.close()
    (few, packed, left_out), (all_losses, all_packed, kept) = found
    assert all(a < b for a, b in zip(packed, all_packed, strict=True))
    assert few == pytest.approx(all_losses, rel=1e-6, abs=1e-6)  # sums of terms near 1 that cancel
    assert (left_out - kept).norm() < 1e-6 * kept.norm()


def test_several_steps_per_generation_train_on_the_old_logprobs(tiny_model, tmp_path, closing) -> None:
    generations = []

    class Counting(GRPOTrainer):
        def generate(self, prompts):
            generations.append(len(prompts))
            return super().generate(prompts)

    trainer = closing(
        make_trainer(
            tiny_model,
            tmp_path,
            cls=Counting,
            max_steps=8,
            prompts_per_step=4,
            steps_per_generation=2,
            num_iterations=2,
            save_strategy="steps",
            save_steps=3,
            learning_rate=1e-2,
        )
    )
    trainer.train()
    assert generations == [8, 8], "two rounds of four optimizer steps, two steps' prompts each"
    ratios = [e["clip_ratio/region_mean"] for e in trainer.state.log_history if "clip_ratio/region_mean" in e]
    assert ratios[0] == ratios[4] == 0, "a round's first step is on-policy"
    assert any(ratios), "later ones aren't"
    saved = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert saved == ["checkpoint-4", "checkpoint-8"], "checkpoints wait for the end of a round"


def test_save_model_writes_what_transformers_and_vllm_load(tiny_model, tmp_path, closing) -> None:
    """The saved folder's greedy completions in a plain vLLM equal the trained policy's."""
    trainer = closing(make_trainer(tiny_model, tmp_path / "run", max_steps=3))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for (name, ours), theirs in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = AutoTokenizer.from_pretrained(tmp_path / "saved")("hello").input_ids
    expected = loaded.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
    script = tmp_path / "greedy.py"
    script.write_text(
        "import sys; from vllm import LLM, SamplingParams\n"
        "llm = LLM(model=sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=64, "
        "kv_cache_memory_bytes=2**24)\n"
        "ids = [int(i) for i in sys.argv[2].split(',')]\n"
        "out = llm.generate({'prompt_token_ids': ids}, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)\n"
        "print('IDS', list(out[0].outputs[0].token_ids))"
    )
    environment = tiny.clean_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = launcher.run(script, tmp_path / "saved", ",".join(map(str, ids)), env=environment)
    assert f"IDS {expected}" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow  # test_failed_start.py has seven in a row
def test_two_trainers_in_one_process_one_after_the_other(tiny_model, tmp_path, monkeypatch) -> None:
    """No trainer leaves rank variables behind. Programs that the script starts would inherit them."""
    rewards = []
    for name in (*process.RANK_VARIABLES, process.RANK_OF_ONE):
        monkeypatch.delenv(name, raising=False)
    for name in ("first", "second"):
        python, torch_state = random.getstate(), torch.get_rng_state()
        trainer = make_trainer(tiny_model, tmp_path / name, max_steps=2)
        assert not {*process.RANK_VARIABLES, process.RANK_OF_ONE} & os.environ.keys()
        trainer.train()
        rewards.append([entry["reward"] for entry in trainer.state.log_history if "reward" in entry])
        trainer.close()
        random.setstate(python)
        torch.set_rng_state(torch_state)
    assert rewards[0] == rewards[1]


def test_a_trainer_can_train_twice_with_the_same_engine(tiny_model, tmp_path, closing) -> None:
    """Steps start at zero again, but the second run samples from the first run's weights. The watchdog has the run's
    limit, and knows whom it waits for."""
    seen: list[list[str]] = []
    watched: list[tuple[float | None, str]] = []

    def reward(completions, **kwargs):
        watched.append((watchdog.limit(), watchdog.stage()))
        return tiny.vowels(completions)

    class Watching(GRPOTrainer):
        def generate(self, prompts):
            seen.append(self.weights.differing())
            return super().generate(prompts)

    trainer = closing(make_trainer(tiny_model, tmp_path, cls=Watching, reward=reward, max_steps=1, rank_timeout=1234))
    trainer.train()
    engine = trainer.engine
    watchdog.set_limit(None)
    trainer.train()
    assert set(watched) == {(1234, "reward function 'reward'")}
    assert trainer.engine is engine and trainer.state.global_step == 1
    assert seen == [[], []]


@pytest.mark.slow
def test_an_ordinary_optimizer_trains_a_bfloat16_policy_too(tiny_model, tmp_path, closing, capfd) -> None:
    trainer = closing(
        make_trainer(tiny_model, tmp_path, model_init_kwargs={"dtype": "bfloat16"}, optim="adamw_torch", max_steps=2)
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert "`adamw_split` doesn't" in capfd.readouterr().out


def test_a_nan_loss_names_step_and_micro_batch(tiny_model, tmp_path, closing) -> None:
    class Broken(GRPOTrainer):
        def compute_loss(self, model, micro_batch, **kwargs):
            output = super().compute_loss(model, micro_batch)
            if self.state.global_step == 1:
                output.loss.data.fill_(float("nan"))
            return output

    trainer = closing(make_trainer(tiny_model, tmp_path, cls=Broken, save_strategy="steps", save_steps=1))
    with pytest.raises(FloatingPointError, match=r"loss of step 2, micro-batch 1 is nan"):
        trainer.train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_nan_gradient_names_the_step_and_the_weights_stay(tiny_model, tmp_path, closing) -> None:
    class Broken(GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.state.global_step == 1:
                next(model.parameters()).grad[0, 0] = float("nan")
            return loss

    trainer = closing(make_trainer(tiny_model, tmp_path, cls=Broken, save_strategy="steps", save_steps=1))
    with pytest.raises(FloatingPointError, match=r"gradient of step 2 has norm nan"):
        trainer.train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_broken_reward_ends_the_run_with_its_name(tiny_model, tmp_path, closing) -> None:
    """It raises, or returns too many rewards. Further faults: tests/rewards/test_reward_faults.py."""
    ways = {
        r"'faulty'.*it raised ZeroDivisionError: division by zero": lambda n: 1 / 0,
        r"'faulty'.*it returned 5 rewards for 4 completions": lambda n: [0.0] * (n + 1),
    }

    def faulty(completions, **kwargs):
        return values(len(completions))

    trainer = closing(make_trainer(tiny_model, tmp_path, reward=faulty))
    for said, values in ways.items():  # noqa: B007 (the reward reads it)
        with pytest.raises(RewardError, match=said):
            trainer.train()
        assert not trainer.engine.core.has_unfinished_requests()


def test_a_reward_that_abstains_is_left_out(tiny_model, tmp_path, closing) -> None:
    def half(completions, **kwargs):
        return [None if i % 2 else float(i) for i in range(len(completions))]

    trainer = closing(make_trainer(tiny_model, tmp_path, reward=[tiny.vowels, half], max_steps=1))
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert log["rewards/half/mean"] == 1.0 and log["rewards/half/abstained"] == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_and_ends_the_run(tiny_model, tmp_path, closing, number) -> None:
    def look(trainer):
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), number)

    trainer = closing(make_trainer(tiny_model, tmp_path, look=look, max_steps=50))
    before = signal.getsignal(number)
    trainer.train()
    assert trainer.state.global_step == 2
    step = trainer.state.global_step
    assert json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())["global_step"] == step
    assert signal.getsignal(number) == before


@needs("recording")
def test_the_model_card_and_a_push_carry_what_was_saved(tiny_model, tmp_path, closing, monkeypatch) -> None:
    """Only the Hub is faked: the test sees the order and the content of calls."""
    import transformers.trainer as hf

    uploaded = {}

    def upload(repo_id, folder_path, **kwargs):
        uploaded.update(repo=repo_id, files=sorted(os.listdir(folder_path)))

    class Hub:
        def create_repo(self, name, **kwargs):
            return type("Repo", (), {"repo_id": f"me/{name}"})()

        def upload_folder(self, **kwargs):
            return upload(**kwargs)

    monkeypatch.setattr(hf, "hf_api", Hub)
    trainer = closing(make_trainer(tiny_model, tmp_path / "my-model", max_steps=2, hub_model_id="my-model"))
    trainer.train()
    trainer.push_to_hub(dataset_name="me/sums", tags="maths")  # as TRL's scripts call it
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= set(uploaded["files"])
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert "vowels" in card and "vllm" in card.lower() and str(tmp_path) not in card
    assert "[me/sums](https://huggingface.co/datasets/me/sums)" in card and "- maths\n" in card


def test_a_finished_run_is_not_trained_further_by_resuming_it(tiny_model, tmp_path, closing, capfd) -> None:
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "resume_from_checkpoint": "auto"}
    first = closing(make_trainer(tiny_model, tmp_path, **changes))
    first.train()
    again = closing(make_trainer(tiny_model, tmp_path, **changes))
    again.train()
    assert again.state.global_step == 2 and "nothing is left to train" in capfd.readouterr().out
    for ours, theirs in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    first.save_state()
    asked = "auto", str(tmp_path)
    assert finished_checkpoint(*asked, 2) == str(tmp_path / "checkpoint-2"), "`colograd train` ends before it loads"
    assert finished_checkpoint(*asked, 3) is finished_checkpoint(False, str(tmp_path), 2) is None

    changes |= {"max_steps": 3, "learning_rate": 0.5, "adam_beta1": 0.5, "lr_scheduler_type": "constant"}
    on = closing(make_trainer(tiny_model, tmp_path, **changes))
    on.train()
    assert on.state.log_history[-2]["learning_rate"] == 0.5, "a resumed run follows its recipe"
    assert on.optimizer.param_groups[0]["betas"][0] == 0.5
    assert "hold from here on: adam_beta1 0.9, now 0.5, learning_rate 0.001, now 0.5, lr" in capfd.readouterr().out


def test_autocast_runs_the_forward_in_bfloat16_and_keeps_float32_weights(
    tiny_model, tmp_path, closing, monkeypatch
) -> None:
    """Autocast also applies to the comparison of packed rows, when the policy is on its device."""
    seen, proved = [], []

    def prove(model, device, reference, asked):
        proved.append(torch.is_autocast_enabled(device.type))
        return "as a test"

    monkeypatch.setattr("colograd.training.assembly.choose_rows_where_it_trains", prove)

    class Watching(GRPOTrainer):
        def compute_loss(self, model, micro_batch, **kwargs):
            layer = model.model.layers[0].mlp.down_proj
            handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
            output = super().compute_loss(model, micro_batch)
            handle.remove()
            return output

    trainer = closing(make_trainer(tiny_model, tmp_path, cls=Watching, bf16=True, max_steps=1))
    assert proved == [True] and not trainer.learner.rules.share_prompts and trainer.policy.why_padded == "as a test"
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tiny_model, tmp_path, closing) -> None:
    """The best evaluation falls on a step that is saved; only it and the last checkpoint stay."""
    scores = {1: 1.0, 2: 3.0, 3: 2.0, 4: 0.5}

    class Scored(GRPOTrainer):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_reward": scores[self.state.global_step]}
            self.log(metrics)
            return metrics

    trainer = closing(
        make_trainer(
            tiny_model,
            tmp_path,
            cls=Scored,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            save_total_limit=1,
            load_best_model_at_end=True,
        )
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert (
        tiny.optimizer_state(tmp_path / "checkpoint-2") and (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    )
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert torch.equal(trainer.model.state_dict()["model.norm.weight"], saved["model.norm.weight"])


def test_what_was_not_logged_yet_is_logged_at_the_end(tiny_model, tmp_path, closing) -> None:
    trainer = closing(make_trainer(tiny_model, tmp_path, max_steps=3, logging_steps=2))
    trainer.train()
    assert [(entry["step"], "reward" in entry) for entry in trainer.state.log_history] == [(2, True), (3, True)]


def test_the_users_own_optimizer_is_taken(tiny_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = tiny.config(tmp_path, max_steps=1, model_init_kwargs=None)
    trainer = GRPOTrainer(model, tiny.vowels, args, tiny.prompts(), optimizers=(optimizer, None))
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
    again = [model(input_ids=written[:, :end]).logits[:, -1].argmax(-1) for end in range(3, written.shape[1])]
    assert written.shape == (2, 7) and torch.equal(written[:, 3:], torch.stack(again, dim=1)), (
        "still a model of its own"
    )
    trainer.close()
    assert torch.distributed.is_initialized(), "the process group is the trainer's, not the engine's"
