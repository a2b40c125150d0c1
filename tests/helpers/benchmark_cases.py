"""Tiny tasks of lm-evaluation-harness in local YAML files, with their data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUESTIONS = 5
# Judges a completion of `letters`. A document can request a check that hangs, dies or raises.
UTILS = """
import os, signal, time

def process_results(doc, results):
    text = results[0]
    if doc["mood"] == "hang":
        time.sleep(1000)
    if doc["mood"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if doc["mood"] == "raise":
        raise KeyError("no such thing")
    return {"right": float(sum(each.isalpha() for each in text) >= int(doc["answer"]))}
"""


def write(folder: Path, moods: tuple[str, ...] = ("",) * QUESTIONS) -> Path:
    """Write the tasks `letters` (completions), `choices` and `words` (log-probabilities), and their group."""
    rows = [
        {"question": f"q{number}", "answer": "3", "mood": mood, "choices": ["aa", f" {number}b"], "gold": number % 2}
        for number, mood in enumerate(moods)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "utils.py").write_text(UTILS)
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    metric = {"aggregation": "mean", "higher_is_better": True}
    tasks: dict[str, dict[str, Any]] = {
        "letters": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0},
            "metric_list": [{"metric": "right", **metric}],
        },
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": name, **metric} for name in ("acc", "acc_norm")],
        },
        "words": {
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{question}} and more of it",
            "doc_to_text": "",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }
    for name, task in tasks.items():
        text = json.dumps({"task": name, **common, **task})  # JSON is YAML
        own = ', "process_results": !function utils.process_results}' if name == "letters" else "}"
        (folder / f"{name}.yaml").write_text(text[:-1] + own)
    both = {"group": "both", "task": ["choices", "letters"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "both.yaml").write_text(json.dumps(both))
    return folder
