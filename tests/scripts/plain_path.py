"""Trace one optimizer step of a plain run, and print the functions through which its prompts and tokens go.

    python tests/scripts/plain_path.py [--list]

Plain: text, one rank, a reward function in this process, all options off. The path has the package's functions that get
or return a value of a stage (`STAGES`: a prompt, a group, a row ...), and the functions on the stack above the
milestones (`MILESTONES`), which are calls of other packages. At the start only the way of a dataset's row to its tokens
counts, not the proofs on made-up rows. Observers (`OBSERVERS`) take a value and return nothing: they and the functions
they call don't count. Comprehensions count with the function around them.

Prints how many frames (functions), files and lines of these files there are, and the share of these lines that names an
option (`OPTIONS`).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

PACKAGE = str(ROOT / "colograd") + "/"
STAGES = (
    "Prompt", "Group", "Rollout", "ScoredGroup", "SampledStep", "SampledRound", "PackedGroup", "PackedRow", "StepBatch",
    "MicroBatch", "Tokens", "LossOutput",
)  # fmt: skip
# Words that name an option, in any form of the code: names, strings and comments. An `example` is a dataset's row, and
# functools and itertools are no tools.
OPTIONS = re.compile(
    r"image|picture|\bmedia\b|own_media|tower|(?<!output_)processor|(?<!func)(?<!iter)tool|environment|agent"
    r"|session|branch|\btree\b|overlap|\bearly_|between_steps|teacher|distil|expert|rout(?:er|ing|ed)|carr(?:y"
    r"|ied)_|in_flight|quantiz|curriculum|replay|kept_|dynamic.sampling|DynamicRound|tensor.parallel"
    r"|sequence.parallel|row_part|ranks_per_row|SharedRows|around_forward|telling|lora|peft|adapter|offload|liger"
    r"|muon|exams?\b|hybrid|recurrent|streamed|prompt_stream|stream_of|\bstreams(?:_|\b)|streaming|IterableDataset"
    r"|iterable dataset|reference(?! to)|\bref_|\bbeta\b|\bkl\b|_kl\b|second_model|FrozenModel|share_frozen"
    r"|frozen model|for_other_models|OtherDistribution|row\.other|second_logprobs|second\.|benchmark"
    r"|metric_for_best|best_metric|is_best|lacks_best|SaveStrategy.BEST|best one|take_turns|(?<!sum_)\bof_parts"
    r"|split_parts|part_rewards|per turn|single turns|add_advantages|rollout_func|without_rewards|\bspent\b"
    r"|completion_log|log_completions",
    re.IGNORECASE,
)
OBSERVERS = ("reporting/", "extensions/recording/")
SKIPPED = {"<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>"}


def holds_stage(value: Any, depth: int = 2) -> bool:
    """Return whether a value is of a stage, or a short way down holds one."""
    if type(value).__name__ in STAGES:
        return True
    if depth and isinstance(value, (list, tuple)):
        return any(holds_stage(item, depth - 1) for item in value[:2])
    if depth and isinstance(value, dict):
        return any(holds_stage(item, depth - 1) for item in list(value.values())[:2])
    return False


class Trace:
    """The functions of the package that a run's data goes through, in the order of their first call."""

    def __init__(self, milestones: dict[str, tuple[str, ...]]) -> None:
        self.codes: dict[CodeType, None] = {}
        self.starting = True  # whether the trainer is being built
        self._milestones = milestones

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code.co_filename.startswith(PACKAGE):
                count = code.co_argcount + code.co_kwonlyargcount
                values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
                if any(map(holds_stage, values)):
                    self._add(frame)
            elif code.co_name in self._milestones and code.co_filename.endswith(self._milestones[code.co_name]):
                self._add(frame.f_back)
        elif event == "return" and code.co_filename.startswith(PACKAGE) and holds_stage(argument):
            self._add(frame)

    def _add(self, frame: FrameType | None) -> None:
        """Add a frame and its callers."""
        chain = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                chain.append(frame.f_code)
            frame = frame.f_back
        files = [code.co_filename.removeprefix(PACKAGE) for code in chain]
        observed = any(f.startswith(OBSERVERS) and c.co_name != "run" for f, c in zip(files, chain, strict=True))
        if observed or (self.starting and not any(file.startswith("data/") for file in files)):
            return
        for code in reversed(chain):
            if code.co_name not in SKIPPED:
                self.codes.setdefault(code)


# Calls of other packages that record the stack: function -> ends of its file's name.
MILESTONES: dict[str, tuple[str, ...]] = {
    "apply_chat_template": ("tokenization_utils_base.py",),  # a row of the dataset becomes tokens
    "add_request": ("llm_engine.py",),  # a prompt enters the engine's queue
    "vowels": ("tiny.py",),  # the reward
    "_wrapped_call_impl": ("torch/nn/modules/module.py",),  # the forward
    "backward": ("torch/_tensor.py", "torch/autograd/__init__.py"),
}


def trace_run(folder: Path) -> list[CodeType]:
    """Train one step of a plain run with the real engine, and return the path's functions."""
    import tiny

    model = tiny.make_model(folder / "model")
    trace = Trace(MILESTONES)
    from colograd import GRPOTrainer

    rows = tiny.prompts(8)
    sys.setprofile(trace)
    try:
        trainer = GRPOTrainer(
            model=str(model), reward_funcs=tiny.vowels, args=tiny.config(folder, max_steps=1), train_dataset=rows
        )
        trace.starting = False
        trainer.train()
    finally:
        sys.setprofile(None)
    trainer.close()
    return list(trace.codes)


def option_lines(text: str) -> Iterator[str]:
    """Yield the lines that name an option."""
    return (line for line in text.splitlines() if OPTIONS.search(line))


def measure(codes: list[CodeType]) -> dict[str, float]:
    """Return counts of a path: frames, files, lines of the files, and lines that name an option."""
    files = sorted({code.co_filename for code in codes})
    texts = [Path(file).read_text() for file in files]
    return {
        "frames": len(codes),
        "files": len(files),
        "lines": sum(len(text.splitlines()) for text in texts),
        "option lines": sum(len(list(option_lines(text))) for text in texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the functions in the order of their first call")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        codes = trace_run(Path(folder))
    if listed:
        for code in codes:
            print(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")
    counts = measure(codes)
    share = counts["option lines"] / counts["lines"]
    print(f"{counts['frames']} frames, {counts['files']} files, {counts['lines']} lines, {share:.1%} name an option")


if __name__ == "__main__":
    main()
