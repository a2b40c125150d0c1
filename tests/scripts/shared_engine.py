"""Let one rank lead an engine that all ranks share, where a clock or a rank's own state decides.

    torchrun --nproc-per-node 2 shared_engine.py MODEL OUT_DIR [FAULT]

Started by tests/engine/test_shared_engine.py. For every case each rank writes the result, the steps of its engine, and
samples that both ranks draw afterwards without a leader, which shows that their engines agree. FAULT `leader` or
`follower`: the engine of the first or of the last rank fails in its third step.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import tool_cases
import torch

from colograd.batch import Group, Prompt
from colograd.data import PromptRules
from colograd.engine.sampling import Sampling
from colograd.engine.vllm_engine import VLLMEngine
from colograd.extensions.custom_rollouts.source import CustomRollouts
from colograd.extensions.tools.conversations import Conversations
from colograd.extensions.tools.tool_format import ToolCall, ToolFormat
from colograd.extensions.tools.toolbox import Toolbox
from colograd.parallel import faults
from colograd.parallel.ranks import on_all_ranks
from colograd.reporting.metrics import PhaseTimes
from colograd.rewards import Scorer, resolve_rewards
from colograd.rollout.stages import Stages
from colograd.runtime import process, registry

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# Completions of very different lengths.
SAMPLING = Sampling(n=4, max_tokens=40, temperature=1.0, options={"stop_token_ids": list(range(0, 256, 16))})
Groups = Sequence[Group]


class Cases:
    """Cases that one rank leads; each returns groups."""

    def __init__(self, engine: VLLMEngine, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.called = 0  # rewards on this rank

    def prompts(self, first: int = 0, count: int = 4) -> list[Prompt]:
        asked = [
            {"prompt": [{"role": "user", "content": f"{'so ' * (i % 3)}{i}"}], "start": i}
            for i in range(first, first + count)
        ]
        return [Prompt(row, tuple(self.tokenizer(str(row["prompt"])).input_ids), row["start"]) for row in asked]

    def write(self, prompts: Sequence[Prompt] | None = None) -> Any:
        return self.engine.generate(prompts or self.prompts(), SAMPLING, version=0, seed=7)

    def plain(self) -> Groups:
        return [*self.write()]

    def closed_early(self) -> Groups:
        groups = self.write()
        found = [next(groups)]
        groups.close()
        return found

    def closed_by_the_clock(self) -> Groups:
        groups, started, found = self.write(self.prompts(0, 32)), time.monotonic(), []
        for group in groups:
            found.append(group)
            if time.monotonic() > started + 0.05:
                break
        groups.close()
        return found

    def left_open(self) -> Groups:
        self.open = self.write()
        next(self.open)
        raise RuntimeError("the judge is out")

    def late_reward(self) -> Groups:
        """Dynamic sampling with rewards that arrive when they like: what is in flight is aborted by the clock."""

        async def late(completions: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
            self.called += 1
            await asyncio.sleep((hash(str(prompts)) % 5) / 20)
            return tiny.vowels(completions) if len(str(prompts[0])) % 2 else [0.0] * len(completions)

        scorer = Scorer(resolve_rewards([late], None))

        def begin(groups: Sequence[Group]) -> Any:
            texts = [self.tokenizer.batch_decode([list(r.completion_ids) for r in g.rollouts]) for g in groups]
            return scorer.submit(groups, texts)

        def judge(group: Group, rewards: torch.Tensor) -> torch.Tensor:
            return rewards[:, 0] - rewards[:, 0].mean()

        stages = Stages(self.write, begin, judge)
        from colograd.extensions.dynamic_sampling.rounds import DynamicRound

        own = DynamicRound(PhaseTimes(), False, 6, lambda drawn, count: self.prompts(100 + drawn, count))
        (step,) = own.draw([self.prompts()], stages)
        return [scored.group for scored in step.kept]

    def tools(self) -> Groups:
        return self._conversations("slow_add", None)

    def late_tools(self) -> Groups:
        return self._conversations("hangs", 0.2)

    def _conversations(self, name: str, timeout: float | None) -> Groups:
        from colograd.extensions.tools.tool_format import ToolCall

        class EachTurnCalls(ToolFormat):
            """Reads a call out of whatever a random model writes."""

            def __init__(self, tokenizer: Any, name: str) -> None:
                super().__init__(tokenizer, {})
                self.name = name

            def read(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Any) -> tuple[dict, list[ToolCall]]:
                return {"role": "assistant", "content": ""}, [ToolCall(self.name, {"a": ids[0] % 10, "b": len(ids)})]

        box = Toolbox([getattr(tool_cases, name)], tool_cases.Counter, workers=2, timeout=timeout)
        rules = PromptRules(self.tokenizer, 200, "drop", {}, "rows")
        talks = Conversations(self.engine, box, EachTurnCalls(self.tokenizer, name), rules, 2)
        sampling = Sampling(2, 200, 1.0, {"stop_token_ids": list(range(40))})
        try:
            return [*talks.generate(self.prompts(0, 2), sampling, version=0, seed=1)]
        finally:
            box.close()

    def vllm_itself(self) -> Groups:
        """A user's function that calls vLLM's own method. Its clock decides how often."""
        from vllm import SamplingParams

        def rollout(prompts: list[Any]) -> dict[str, Any]:
            ids = [list(self.tokenizer(str(prompt)).input_ids) for prompt in prompts]
            asked = SamplingParams(max_tokens=6, temperature=1.0, seed=5)
            outputs = self.engine.llm.generate([{"prompt_token_ids": p} for p in ids], asked, use_tqdm=False)
            written = [output.outputs[0] for output in outputs]
            return {
                "prompt_ids": ids,
                "completion_ids": [list(one.token_ids) for one in written],
                "logprobs": [[-1.0] * len(one.token_ids) for one in written],
            }

        return [*CustomRollouts(self.engine, rollout, ()).generate(self.prompts(), SAMPLING, version=0, seed=0)]


CASES = (
    "plain", "closed_early", "closed_by_the_clock", "left_open", "late_reward", "tools", "late_tools", "vllm_itself",
)  # fmt: skip


def tokens(groups: Groups) -> list[Any]:
    ordered = sorted(groups, key=lambda group: group.position)
    return [[group.position, *(list(rollout.completion_ids) for rollout in group.rollouts)] for group in ordered]


def main() -> None:
    model, out_dir, *fault = sys.argv[1:]
    if fault:
        faults.GRACE = 2.0  # the other rank waits for it in vain
    process.prepare_ranks()
    process.quiet_logs(verbose=False)
    config = tiny.config(Path(out_dir) / "run", vllm_tensor_parallel_size=RANKS, prompts_per_step=4)
    engine = VLLMEngine(model, config, torch.float32, context=512, kv_bytes=2**24)
    engine.stamp(0)
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = tiny.TOOL_TEMPLATE
    cases, steps, result = Cases(engine, tokenizer), 0, {}
    step = engine.core.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        if fault and steps == 3 and int(fault[0] == "follower") == RANK:
            raise torch.OutOfMemoryError(f"no room on rank {RANK}")
        return step()

    engine.core.step = counted
    tooled = () if "tools" in registry.installed() else ("tools", "late_tools")
    for name in (case for case in CASES if case not in tooled):
        before, found = steps, {}
        work: Callable[[], Groups | None] = getattr(cases, name)
        try:
            with on_all_ranks(f"the case {name}"):
                led = engine.on_engine_leader(work, others=None)
            found["tokens"] = None if led is None else tokens(led)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if fault:
                raise
            found["error"] = f"{type(error).__name__}: {error}"
        found["steps"] = steps - before
        found["after"] = tokens([*cases.write(cases.prompts(50, 2))])
        result[name] = found
    result["called"] = cases.called
    Path(out_dir, f"rank{RANK}-of-{RANKS}.json").write_text(json.dumps(result))
    engine.close()


if __name__ == "__main__":
    main()
