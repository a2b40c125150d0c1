"""Results of `gpu_check.py` as a Markdown section for docs/measurements.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from figures import GB, table

UNKNOWN = "-"


def page(settings: Mapping[str, Any], results: Sequence[Any]) -> str:
    """Return the section. ``results`` are `gpu_check.Result`s."""
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    head = (
        f"{settings['model']}, {versions}. A step has {settings['prompts']} prompts of {settings['prompt']} tokens x "
        f"{settings['group']} completions of at most {settings['completion']}."
    )
    if len({result.code for result in results if result.code}) > 1:
        head += " The rows are of several versions of the code."
    parts = [f"## {settings['machine']}", head, _checks(results), *_training(results)]
    for result in results:
        if result.status == "ok" and result.report and "flops" not in result.figures:
            parts += [f"### {result.name.capitalize()}", result.report]
    return "\n\n".join(parts)


def _checks(results: Sequence[Any]) -> str:
    rows = [
        [
            result.name,
            result.status.upper() if result.is_bad else result.status,
            _cell(result.said),
            f"{result.seconds:.0f}",
        ]
        for result in results
    ]
    return table(["Check", "Result", "What it found", "s"], rows, text_columns=3)


def _cell(text: str) -> str:
    """Replace bars, because a bar would end the table's cell."""
    return " ".join(text.split()).replace("|", "/")[:300]


def _training(results: Sequence[Any]) -> list[str]:
    """Return rows with measured memory next to planned memory."""
    runs = [(result.name.removeprefix("path, "), result.figures) for result in results if "flops" in result.figures]
    if not runs:
        return []
    rows = []
    for name, found in runs:
        share = UNKNOWN if found["utilisation"] is None else f"{found['utilisation']:.1%}"
        rate = UNKNOWN if found["flops_per_second"] is None else f"{found['flops_per_second'] / 1e12:.3g}"
        memory = [
            f"{found['peak'][phase] / GB:.2f} ({found['planned'][phase] / GB:.2f})"
            for phase in ("sampling", "training")
        ]
        seconds = found["seconds"]
        rows.append(
            [
                name, f"{seconds.get('train', 0.0):.3f}", f"{seconds.get('optimizer', 0.0):.3f}",
                f"{found['tokens']:,}", f"{found['tokens_per_second']:,.0f}", rate, share, *memory,
            ]
        )  # fmt: skip
    header = [
        "Run", "training, s", "optimizer, s", "tokens", "tokens/s", "model TFLOP/s", "of the peak",
        "GB sampling (plan)", "GB training (plan)",
    ]  # fmt: skip
    note = (
        "Medians of the steps after the first. The first rows' completions are sampled, of the others made up, the "
        "same for each. Model FLOPs by the formula in colograd/extensions/recording/utilisation.py; memory is what "
        "torch allocated "
        "at the peak, beside the plan's without what it keeps free (on a CPU what the whole process gained)."
    )
    return ["### The training path", note, table(header, rows)]
