"""`colograd export` writes the model of a checkpoint, without the files that only a resume needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from colograd.apps import cli

LEFT = (
    "optimizer-00000-of-00002.safetensors",
    "scheduler.pt",
    "rng_state_0.pth",
    "training_args.bin",
    "lengths_0.json",
    "trainer_state.json",
)


def checkpoint(model: Path, step: int = 3) -> Path:
    """Turn the saved model's folder into a checkpoint by adding a run's files."""
    folder = model.rename(model.with_name(f"checkpoint-{step}"))
    for name in LEFT:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("of_the_run", [False, True])
def test_a_checkpoint_s_model_is_copied_without_the_run_s_state(tmp_path: Path, of_the_run: bool) -> None:
    saved = checkpoint(tiny.make_model(tmp_path / "run" / "model"))
    for name in ("_journal", "completions"):  # the run's folder has these too
        (saved / name).mkdir()
    out = tmp_path / "exported"
    assert cli.main(["export", str(saved.parent if of_the_run else saved), str(out)]) == 0
    assert {path.name for path in saved.iterdir()} - {path.name for path in out.iterdir()} == {
        *LEFT,
        "_journal",
        "completions",
    }
    assert (out / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]


def test_a_run_exports_the_model_that_it_saved(tmp_path: Path) -> None:
    """The export takes the run's saved model. With `load_best_model_at_end` the newest checkpoint is another model."""
    best = tiny.make_model(tmp_path / "run")
    (best / "trainer_state.json").write_text('{"global_step": 3}')
    newest = checkpoint(tiny.make_model(tmp_path / "other"))
    newest = newest.rename(best / newest.name)
    (newest / "model.safetensors").write_bytes(b"another")
    assert cli.main(["export", str(best), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()
    assert not [*(tmp_path / "out").glob("checkpoint-*")]


def test_an_adapter_is_merged_into_its_base_without_chatter(tmp_path: Path, capsys) -> None:
    import peft

    base = tiny.make_model(tmp_path / "base")
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    model.save_pretrained(tmp_path / "saved")
    tiny.make_tokenizer().save_pretrained(tmp_path / "saved")
    saved = checkpoint(tmp_path / "saved")
    capsys.readouterr()
    assert cli.main(["export", str(saved), str(tmp_path / "exported")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("exported ") and said.out.count("\n") == 1 and "%|" not in said.err  # no progress bars
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert merged.dtype == AutoModelForCausalLM.from_pretrained(base).dtype
    ids = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert cli.main(["export", str(saved), str(tmp_path / "adapter"), "--no-merge"]) == 0
    copied = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= copied.difference(LEFT) == copied


def test_push_names_the_hub_model_or_reason(tmp_path: Path, capsys, monkeypatch) -> None:
    """The test fakes only the Hub's calls."""
    saved = checkpoint(tiny.make_model(tmp_path / "model"))
    pushed: list[tuple[str, set[str]]] = []

    def upload(repo_id: str, folder_path: Path) -> SimpleNamespace:
        pushed.append((repo_id, {path.name for path in folder_path.iterdir()}))
        return SimpleNamespace(repo_url=f"https://huggingface.co/{repo_id}")

    def refuse(name: str, **kwargs: Any) -> None:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(huggingface_hub, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "create_repo", refuse)
    command = ["export", str(saved), str(tmp_path / "out"), "--merge", "--push", "sums"]
    assert cli.main(command) == 2 and not (tmp_path / "out").exists(), "nothing is done in vain"
    said = capsys.readouterr().err
    assert "'sums'" in said and "ConnectError: no route" in said and "HF_TOKEN" in said and said.count("\n") == 1
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda name, **kwargs: SimpleNamespace(repo_id=f"me/{name}"))
    assert cli.main(command) == 0
    ((repo, files),) = pushed
    assert repo == "me/sums" and {"model.safetensors", "config.json"} <= files and not files & set(LEFT)
    assert "https://huggingface.co/me/sums" in capsys.readouterr().out


def test_export_refuses_non_checkpoints_and_overwriting(tmp_path: Path, capsys) -> None:
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has no checkpoint: give a checkpoint's folder" in capsys.readouterr().err
    saved = checkpoint(tiny.make_model(tmp_path / "model"))
    assert cli.main(["export", str(saved), str(saved)]) == 2
    assert "exists already" in capsys.readouterr().err
