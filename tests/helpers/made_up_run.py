"""Made-up folders of runs, with whatever a report has to survive.

python tests/helpers/made_up_run.py FOLDER --steps 60 --tools --alarms --hostile
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colograd.rollout.record_file import Record, RecordFile

BEGUN = 1_795_000_000.0
STEP_SECONDS = 20.0
TEXT = "The answer is 4 2 so we add seven and get 49 . \n First , let us think : multiply both sides , then check"
WORDS = TEXT.split(" ")
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "\u2028\u2029]]>",
    "{{DATA}}",
    "\u202eright to left",
    "\x1b[31mred\x00",
    "<!--",
    "𝕊😀é",
    "&lt;b&gt;",
    "javascript:window.hacked=1",
)

# lines and records that no run writes
WRONG = [
    b"",
    b"\n",
    b"null\n",
    b"[1]\n",
    b"{}\n",
    b'{"kind": 5}\n',
    b"\xff\xfe\x00\n",
    b"[" * 5000 + b"\n",
    b'{"kind": "log"}\n',
    b'{"kind": "log", "step": -1, "metrics": {"reward": 1}}\n',
    b'{"kind": "log", "step": 1e400, "metrics": {"reward": 1}}\n',
    b'{"kind": "log", "step": true, "metrics": {"reward": 1}}\n',
    b'{"kind": "log", "step": 3, "metrics": [1]}\n',
    b'{"kind": "log", "step": 3, "metrics": {"reward": NaN, '
    b'"kl": "x", "loss": Infinity, "entropy": null, "grad_norm": {}}}\n',
    b'{"kind": "start", "step": 0, "run": [], "memory": {"a": 1}, "max_steps": "many"}\n',
    b'{"kind": "start", "step": 0, "run": {"settings": 4, '
    b'"model": {"a": [1]}}, "memory": [1, {"part": 2, "sampling": "x"}]}\n',
    b'{"kind": "start", "step": 0, "run": {"datasets": "x", "reward_names": [1], "reward_weights": {}, "versions": [1],'
    b' "changed": 4, "ranks": "two", "parameters": [], "settings": {"a": {"b": [null]}}}, "memory": "x"}\n',
    b'{"kind": "rollout", "step": 1, "rank": "first"}\n',
    b'{"kind": "rollout", "step": 1, "rank": 99999999}\n',
    b'{"kind": "rollout", "step": 1, "rank": 0, "running": [[1], '
    b'"x", [NaN, 2], [1, 2, 3]], "rewards": [["a"], [1, 2, 3], 5]}\n',
    b'{"kind": "spread", "step": 1, "rewards": {"edges": [0, 1], "counts": [1, 2]}, "lengths": 7}\n',
    b'{"kind": "groups", "step": 1, "groups": [[1, 2], ["k"], ["k", null, null, null, null, null, null], 4]}\n',
    b'{"kind": "alarm", "step": 1, "rule": 4, "severity": [], "seen": {"a": 1}}\n',
    b'{"kind": "calm", "step": 1}\n',
    b'{"kind": "end", "step": 1, "status": "exploded", "error": 5}\n',
    b'{"kind": "unknown", "step": 1}\n',
    b'{"kind": "log", "step": 1, "metrics": {"reward": ' + b"9" * 5000 + b"}}\n",
]
WRONG_SAMPLES = [
    b"",
    b"{}",
    b"[]",
    b'"text"',
    b"[5, null, {}]",
    b"[" * 5000,
    b'[{"tokens": 5}]',
    b'[{"tokens": [1, 2]}]',
    b'[{"tokens": ["a"], "sampler": [], "trainer": "x", "advantage": "y", "mask": [null], "rewards": [1]}]',
    b'[{"tokens": ["a", "b"], "sampler": [NaN, -1e300], "trainer": [1, 2], "advantage": [1], "messages": [1, {}]}]',
    b'[{"position": -4, "index": "x", "prompt": {"a": 1}, "tokens": ["\\ud800"], "purpose": 7, "extra": [1]}]',
    b'[{"tok',
]


@dataclass
class MadeUp:
    """A run to write. A step's completions are drawn from ``variants`` different ones, so that writing is fast."""

    steps: int = 30
    groups: int = 4  # per step
    size: int = 8  # completions of a group
    tokens: int = 60  # maximum of a completion
    recorded: int = 2  # groups per step with samples
    ranks: int = 1
    tools: bool = False
    evaluations: bool = True
    alarms: bool = False
    hostile: bool = False
    ended: str | None = "finished"
    seed: int = 0
    variants: int = 0
    learning_rate: float = 1e-5
    gain: float = 1.0  # speed of the reward's rise

    @property
    def reward_names(self) -> list[str]:
        return ["last_number", "short" + (HOSTILE[1] if self.hostile else "")]

    def write(self, folder: Path) -> Path:
        report = folder / "_report"
        report.mkdir(parents=True, exist_ok=True)
        with (report / "events.jsonl").open("w") as file:
            for event in self.events():
                file.write(json.dumps(event) + "\n")
        cache, records = dict[int, str](), report / "samples.records"
        records.unlink(missing_ok=True)
        samples = RecordFile(records)
        for step in range(1, self.steps + 1):
            samples.append(Record(step, f"[{', '.join(self.samples(step, cache))}]".encode()))
        samples.close()
        return folder

    def events(self) -> Iterator[dict[str, Any]]:
        yield self.start()
        for step in range(1, self.steps + 1):
            yield from self.step_events(step)
        if self.alarms:
            yield {
                "kind": "alarm",
                "time": self.time(self.steps),
                "step": self.steps,
                "rule": "gradient-spike",
                "severity": "warning",
                "seen": "grad_norm was 41 at this step, 12 times its median",
                "why": "One step of this size can undo many.",
                "remedy": "Lower max_grad_norm or learning_rate.",
                "source": "",
            }
            yield {
                "kind": "alarm",
                "time": self.time(self.steps),
                "step": self.steps,
                "rule": "solved",
                "severity": "note",
                "seen": "80% of the groups have no reward difference: the task is nearly solved",
                "why": "These prompts have little left to teach.",
                "remedy": "Stop here.",
                "source": "",
            }
        if self.ended:
            yield {
                "kind": "end",
                "time": self.time(self.steps + 1),
                "step": self.steps,
                "status": self.ended,
                "error": "",
            }

    def time(self, step: int) -> float:
        return BEGUN + STEP_SECONDS * step

    def start(self) -> dict[str, Any]:
        hostile = HOSTILE[0] if self.hostile else ""
        return {
            "kind": "start",
            "time": BEGUN,
            "step": 0,
            "max_steps": self.steps,
            "resumed": False,
            "run": {
                "model": "models/SmolLM2-135M-Instruct" + hostile,
                "datasets": ["colograd.apps.quickstart.quickstart:sums"],
                "reward_names": self.reward_names,
                "reward_weights": [1.0, 0.5],
                "ranks": self.ranks,
                "device": "cpu: 2 threads",
                "versions": {"colograd": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0"},
                "command": "colograd train --config recipes/sums.yaml" + hostile,
                "parameters": 134_515_008,
                "trained_parameters": 134_515_008,
                "layers": 30,
                "hidden": 576,
                "peak_flops": 1.1e11,
                "peak_source": "measured: a bfloat16 product of 2048 x 2048",
                "settings": {
                    "learning_rate": self.learning_rate,
                    "num_generations": self.size,
                    "prompts_per_step": self.groups,
                    "max_completion_length": self.tokens,
                    "temperature": 1.0,
                    "beta": 0.0,
                    "loss_type": "dapo",
                    "epsilon": 0.2,
                    "pass_threshold_eval": 1.0,
                    "reward_funcs": ["last_number", "short"],
                    "seed": self.seed,
                    "output_dir": "runs/made_up",
                    "report_to": [],
                    "chat_template_kwargs": {"thinking": False},
                },
                "changed": ["learning_rate", "num_generations", "prompts_per_step", "max_completion_length"],
            },
            "memory": [
                {"part": "policy and engine's weights", "sampling": 0.25, "training": 0.25},
                {"part": "optimizer state", "sampling": 0.75, "training": 0.75},
                {"part": "KV cache", "sampling": 0.5, "training": 0.5},
                {"part": "activations of a micro-batch", "sampling": 0.0, "training": 1.4},
            ],
        }

    def progress(self, step: int) -> float:
        """A value from 0 to about 1 that rises like rewards."""
        return 1 / (1 + math.exp(-6 * (self.gain * step / max(self.steps, 1) - 0.45)))

    def metrics(self, step: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {step}")
        noise = lambda scale: draw.gauss(0, scale)  # noqa: E731
        part = self.progress(step)
        reward = min(max(0.12 + 0.82 * part + noise(0.06), 0), 1)
        length = max(self.tokens * (0.75 - 0.45 * part) + noise(2), 2)
        difference = 0.03 + 0.01 * part + abs(noise(0.006))
        sampled = length * self.groups * self.size
        phases = {
            "publish": 0.01,
            "generate": 4 + 5 * length / self.tokens + abs(noise(0.5)),
            "reward": 0.2 + abs(noise(0.1)),
            "pack": 0.05,
            "log": 0.1,
            "train": 3 + 8 * length / self.tokens + abs(noise(0.6)),
            "sync": 0.05,
            "optimizer": 0.7 + abs(noise(0.1)),
            "other": 0.05,
        }
        found: dict[str, Any] = {
            "reward": reward,
            "reward_std": max(0.5 * math.sqrt(reward * (1 - reward)) + noise(0.02), 0),
            "frac_reward_zero_std": min(max(0.1 + 0.5 * part**2 + noise(0.05), 0), 1),
            "loss": noise(0.05),
            "grad_norm": abs(1.2 + noise(0.3)) * (12 if self.alarms and step == self.steps else 1),
            "entropy": 2.4 - 1.9 * part + noise(0.05),
            "learning_rate": self.learning_rate * (1 - step / (self.steps + 1)),
            "kl": 0.002 * step / self.steps,
            "completions/mean_length": length,
            "completions/min_length": max(length - 20, 1),
            "completions/max_length": min(length + 22, self.tokens),
            "completions/clipped_ratio": max(0.4 - 0.4 * part + noise(0.03), 0),
            "sampling/sampling_logp_difference/mean": difference,
            "sampling/sampling_logp_difference/max": 9 * difference,
            "sampling/raw_ratio/mean": 1 + noise(0.05),
            "sampling/importance_sampling_ratio/mean": 1 + noise(0.02),
            "sampling/masked_share": abs(noise(0.01)),
            "clip_ratio/low_mean": abs(noise(0.002)),
            "clip_ratio/high_mean": abs(noise(0.003)),
            "clip_ratio/region_mean": abs(noise(0.004)),
            "step_time": sum(phases.values()),
            "num_tokens": 4000.0 * step,
            "train/sampled_tokens": sampled,
            "train/packed_tokens": sampled * 1.05,
            "train/rollout_tokens": sampled * 2.2,
            "mfu": 0.31 + noise(0.02),
            "memory/peak_gib": 2.4 + 0.1 * part,
        }
        for place, name in enumerate(self.reward_names):
            found |= {
                f"rewards/{name}/mean": reward if place == 0 else 1 - length / self.tokens,
                f"rewards/{name}/std": 0.3,
                f"rewards/{name}/abstained": 0.0,
                f"rewards/{name}/seconds": 0.002,
            }
        if self.hostile:
            found |= {HOSTILE[0]: 1.0, "kl": float("nan"), "grad_norm": "high", "entropy": float("inf"), "loss": None}
        return found | {f"time/{name}": seconds for name, seconds in phases.items()}

    def step_events(self, step: int) -> Iterator[dict[str, Any]]:
        time = self.time(step)
        yield from (self.rollout(step, rank) for rank in range(self.ranks))
        edges = [round(0.1 * i, 2) for i in range(11)]
        mean = 0.12 + 0.82 * self.progress(step)
        counts = [
            round(self.groups * self.size * math.exp(-(((i + 0.5) / 10 - mean) ** 2) / 0.05) / 4) for i in range(10)
        ]
        bins = [round(self.tokens * i / 16) for i in range(17)]
        lengths = [
            round(self.groups * self.size * math.exp(-((i / 16 - 0.75 + 0.45 * mean) ** 2) / 0.03) / 5)
            for i in range(16)
        ]
        yield {
            "kind": "spread",
            "time": time,
            "step": step,
            "rewards": {"edges": edges, "counts": counts},
            "lengths": {"edges": bins, "counts": lengths},
        }
        yield {"kind": "groups", "time": time, "step": step, "groups": self.group_rows(step)}
        yield {"kind": "log", "time": time, "step": step, "metrics": self.metrics(step)}
        if self.evaluations and step % max(self.steps // 6, 1) == 0:
            part = self.progress(step)
            passes = {
                f"eval_pass@{k}": min(1.0, (0.2 + 0.6 * part) * (1 + 0.12 * i)) for i, k in enumerate((1, 2, 4, 8))
            }
            evaluated = {
                "eval_reward": 0.15 + 0.7 * part,
                **passes,
                "eval_completions/mean_length": 30.0,
                "eval_loss": 0.1,
            }
            yield {"kind": "log", "time": time + 1, "step": step, "metrics": evaluated}
        if self.alarms and step == max(self.steps // 2, 1):
            hostile = HOSTILE[1] if self.hostile else ""
            yield {
                "kind": "alarm",
                "time": time,
                "step": step,
                "rule": "entropy-collapse",
                "severity": "severe",
                "seen": f"entropy fell from 2.31 to 0.42 nats in {step} steps{hostile}",
                "why": "The policy hardly explores any more: groups whose completions are all alike carry no signal.",
                "remedy": "Raise entropy_coef or epsilon_high, lower learning_rate, or raise temperature.",
                "source": HOSTILE[9] if self.hostile else "https://arxiv.org/abs/2503.14476",
            }
        if self.alarms and step == max(3 * self.steps // 4, 1):
            yield {
                "kind": "alarm",
                "time": time,
                "step": max(step - 2, 0),
                "rule": "all-truncated",
                "severity": "warning",
                "seen": "62 % of the completions reached max_completion_length",
                "why": "What is cut off can't be right.",
                "remedy": "Raise max_completion_length.",
                "source": "",
            }
            yield {"kind": "calm", "time": time, "step": step, "rule": "all-truncated"}

    def rollout(self, step: int, rank: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {step} {rank}")
        seconds = 6 + draw.random() * 4
        peak = self.groups * self.size // self.ranks or 1
        tail = seconds * (0.55 + 0.2 * draw.random())
        times = [round(seconds * i / 60, 3) for i in range(61)]
        left = [
            peak if t < tail * 0.8 else round(peak * max(1 - (t - tail * 0.8) / (seconds - tail * 0.8), 0) ** 1.6)
            for t in times
        ]
        return {
            "kind": "rollout",
            "time": self.time(step),
            "step": step,
            "rank": rank,
            "seconds": seconds,
            "running": [[t, min(n, round(peak * (0.3 + t)))] for t, n in zip(times, left, strict=True)],
            "waiting": [[t, max(0, peak // 3 - round(8 * t))] for t in times],
            "kv": [[t, round(0.9 * n / peak * min(1, 0.3 + t / seconds), 3)] for t, n in zip(times, left, strict=True)],
            "preemptions": draw.randrange(3) if rank else 0,
            "tail": tail,
            "rewards": [
                ["last_number", t, t + 0.05 + 0.2 * draw.random(), self.size]
                for t in sorted(draw.uniform(1, seconds) for _ in range(self.groups))
            ],
            "tools": [["calculator", t, t + 0.08] for t in sorted(draw.uniform(0.5, seconds - 1) for _ in range(9))]
            if self.tools
            else [],
        }

    def group_rows(self, step: int) -> list[list[Any]]:
        part, rows = self.progress(step), []
        for place in range(self.groups):
            position = (step - 1) * self.groups + place
            draw = random.Random(f"{self.seed} group {position}")
            chance = min(max(part + draw.gauss(0, 0.35), 0), 1)
            right = sum(draw.random() < chance for _ in range(self.size))
            mean = right / self.size
            rows.append(
                [
                    self.key(position),
                    position,
                    self.size,
                    mean,
                    math.sqrt(mean * (1 - mean)),
                    0.1,
                    int(0 < mean < 1),
                    f"What is {position} + 0?",
                ]
            )
        return rows

    def key(self, position: int) -> str:
        return f"{position % max(self.steps * self.groups // 3, 1) * 0x9E3779B97F4A7C15 % 2**64:016x}"  # three epochs

    def samples(self, step: int, cache: dict[int, str]) -> Iterator[str]:
        """Yield a step's samples as JSON. Parts that steps share come from ``cache``."""
        for place in range(self.recorded):
            position = (step - 1) * self.groups + place
            for index in range(self.size):
                number = (position * self.size + index) % self.variants if self.variants else -1
                if number not in cache or number < 0:
                    cache[number] = json.dumps(self.completion(step, position, index))[1:]
                head = {"step": step, "position": position, "key": self.key(position), "index": index}
                yield json.dumps(head)[:-1] + ", " + cache[number]

    def completion(self, step: int, position: int, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {position} {index}")
        many = draw.randint(max(self.tokens // 3, 1), max(self.tokens, 1))
        words = [*WORDS, *HOSTILE] if self.hostile else WORDS
        tokens = [(" " if i else "") + draw.choice(words) for i in range(many)]
        sampler = [round(-draw.expovariate(1.2), 3) for _ in tokens]
        reward = float(draw.random() < 0.1 + 0.85 * self.progress(step))
        sampled = [1] * many
        found: dict[str, Any] = {
            "purpose": "train",
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"What is {position} + {index % 1}?"},
            ],
            "tokens": tokens,
            "sampler": sampler,
            "trainer": [round(value + draw.gauss(0, 0.05), 3) for value in sampler],
            "advantage": round(reward - 0.5, 3),
            "rewards": dict(zip(self.reward_names, [reward, 1 - many / self.tokens], strict=True)),
            "reward": reward + 0.5 * (1 - many / self.tokens),
            "finish": "length" if many > 0.9 * self.tokens else "stop",
            "extra": {"parsed": draw.randint(0, 99)},
        }
        if self.tools:
            begin, end = many // 3, many // 3 + 4
            sampled[begin:end] = [0] * len(sampled[begin:end])
            call = {
                "type": "function",
                "function": {"name": "calculator", "arguments": {"expression": f"{position} * 7"}},
            }
            found["messages"] = [
                {"role": "assistant", "content": "".join(tokens[:begin]), "tool_calls": [call]},
                {"role": "tool", "name": "calculator", "content": str(position * 7)},
                {"role": "assistant", "content": "".join(tokens[end:])},
            ]
        return found | {"mask": sampled, "sampled": sampled}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    for flag in ("tools", "alarms", "hostile"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = vars(parser.parse_args())
    MadeUp(**{name: value for name, value in options.items() if name != "folder"}).write(options["folder"])


if __name__ == "__main__":
    main()
