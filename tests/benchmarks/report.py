"""Makes the report of a long, made-up run, and clicks through it in a headless browser: seconds, bytes, a click's time.

    python tests/benchmarks/report.py                                  1,000 steps x 512 completions
    python tests/benchmarks/report.py --steps 200 --tokens 200 --logged 20

``--logged`` is how many of the steps also have a parquet file of all their completions.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import browser
import pyarrow as pa
import pyarrow.parquet as pq
from made_up_run import WORDS, MadeUp

from colograd.apps.report import write_report

# seconds from a click until `done` holds and a frame was shown
TIMED = """(async () => {{
  const start = performance.now();
  {act};
  while (!({done})) await new Promise((next) => setTimeout(next, 1));
  await new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
  return (performance.now() - start) / 1000;
}})()"""
MAIN = "document.querySelector('#main')"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a long run's report.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=64, help="per step")
    parser.add_argument("--size", type=int, default=8, help="completions of a group")
    parser.add_argument("--tokens", type=int, default=500, help="of a completion, at most")
    parser.add_argument("--recorded", type=int, default=2, help="groups per step that are recorded by token")
    parser.add_argument("--logged", type=int, default=100, help="steps with a parquet file of all completions")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="colograd-report-"))
    try:
        make(folder, options)
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        began, used = time.perf_counter(), time.process_time()
        path = write_report(folder)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"the run's files    {written / 1e6:9.1f} MB")
        print(f"report made in     {seconds:9.1f} s ({used:.1f} processor seconds)")
        print(f"its size           {path.stat().st_size / 1e6:9.2f} MB")
        print(f"at most            {peak:9.2f} GiB of memory")
        if browser.found() is None:
            print("clicks             no browser is installed")
        else:
            clicks(path.as_uri(), options.steps)
    finally:
        shutil.rmtree(folder)


def make(folder: Path, options: argparse.Namespace) -> None:
    """Write the made-up run. Its completions are drawn from a few hundred texts."""
    given = {name: getattr(options, name) for name in ("steps", "groups", "size", "tokens", "recorded")}
    MadeUp(**given, variants=400, ranks=2, tools=True, alarms=True).write(folder)
    (folder / "completions").mkdir()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=options.tokens)) for _ in range(400)]
    many = options.groups * options.size
    for number in range(options.logged):
        step = 1 + number * options.steps // max(options.logged, 1)
        columns = {
            "step": [step] * many,
            "position": [step * options.groups + row // options.size for row in range(many)],
            "prompt": [f"Question {row // options.size} of step {step}" for row in range(many)],
            "completion": draw.choices(texts, k=many),
            "completion_tokens": [options.tokens] * many,
            "finish_reason": ["stop"] * many,
            "advantage": [draw.gauss(0, 1) for _ in range(many)],
        }
        pq.write_table(pa.table(columns), folder / "completions" / f"completions_{step:05d}.parquet")


def clicks(address: str, steps: int) -> None:
    """Time a person's clicks in the page, five times each."""
    tab = "document.querySelector('[data-view={}]').click()"
    with browser.Browser() as page:
        began = time.perf_counter()
        page.open(address)
        page.wait("document.querySelectorAll('.u-over').length > 2")
        print(f"opened in          {time.perf_counter() - began:9.2f} s")
        step = lambda turn: f"location.hash = 'view=completions&step={1 + (turn * 197) % steps}'"  # noqa: E731
        listed = f"{MAIN}.querySelectorAll('table.list tbody tr').length > 0"
        acts = {
            "overview": [(tab.format("overview"), f"{MAIN}.dataset.view === 'overview'")],
            "next step": [("document.querySelector('[aria-label=\"Next step\"]').click()", "true")],
            "smoothing": [(slide("#smoothing", "0.6"), "true"), (slide("#smoothing", "0"), "true")],
            "time": [(tab.format("time"), f"{MAIN}.querySelectorAll('.lane').length > 0")],
            "groups": [(tab.format("groups"), f"{MAIN}.querySelector('table.prompts')")],
            "completions": [(tab.format("completions"), listed)],
            "a step's completions": [(step(turn), listed) for turn in range(1, 6)],
            "a completion's tokens": [
                (f"document.querySelectorAll('button.open')[{turn}].click()", f"{MAIN}.querySelector('.tokens')")
                for turn in range(5)
            ],
            "colours": [("document.querySelector('[data-mode=difference]').click()", "true")],
            "search": [(slide("input[type=search]", "seven and"), "true")],
            "settings": [(tab.format("settings"), f"{MAIN}.querySelector('table.settings')")],
        }
        for name, ways in acts.items():
            took = [page.run(TIMED.format(act=act, done=done)) for act, done in (ways * 5)[:5]]
            if len(ways) == 1 and "data-view" in ways[0][0]:  # an open view isn't built again
                took = []
                for _ in range(5):
                    page.run(tab.format("advisor"))
                    took.append(page.run(TIMED.format(act=ways[0][0], done=ways[0][1])))
            print(f"{name:<22} {statistics.median(took):5.3f} s (longest {max(took):.3f})")
        if page.problems:
            print("on the console:", page.problems)


def slide(selector: str, value: str) -> str:
    """Set an input field's value, with the events of a person's change."""
    element = f"document.querySelector('{selector}')"
    return f"((e) => {{ e.value = '{value}'; e.dispatchEvent(new Event('input')); }})({element})"


if __name__ == "__main__":
    main()
