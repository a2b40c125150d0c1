"""What the agents' endpoint costs: sessions that each ask once, beside plain generation with the same engine.

    python tests/benchmarks/agents.py [--model M] [--sessions 64] [--trials 5] [--out F.json]

One engine, in turns: `Engine.generate` with a prompt per session, and `AgentSessions` whose program asks for as many
tokens through the `openai` package. Both sample `--tokens` tokens per request. The programs run in this process, so
that the client's own work counts against the endpoint; they share one pool of connections.

- `ratio.tokens_per_second`, `ratio.tokens_per_processor_second`: the endpoint's over plain generation's, medians over
  the pairs. The second hardly depends on the machine's other work.

Trees, too: `trees.ratio` is the tokens of made-up sessions' branches as rows of their own over those of the packed
trees, for a group of 16 sessions of depth 12 with two compactions and three branches behind a long system prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # OpenMP reads how to wait when torch is imported: spinning, it would time the neighbours

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import ROOT, versions  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
WARM_UP = 8  # tokens


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agents.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub id; default: SmolLM2")
    parser.add_argument("--sessions", type=int, default=64, help="at once (64)")
    parser.add_argument("--tokens", type=int, default=128, help="that each request samples (128)")
    parser.add_argument("--trials", type=int, default=5, help="pairs of runs (5)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


def timed(run: Callable[[], int]) -> tuple[float, float]:
    """Tokens per second, and per processor second."""
    wall, busy = time.perf_counter(), time.process_time()
    tokens = run()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - busy)


def pairs(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Both in turns."""
    from openai import OpenAI
    from transformers import AutoTokenizer

    from colograd import GRPOConfig
    from colograd.agents.context import ChatFormat
    from colograd.agents.session import Limits
    from colograd.agents.sessions import Agent, AgentSessions, AgentSettings
    from colograd.batch import Prompt
    from colograd.engine.chat_api import ChatAPI
    from colograd.engine.sampling import Sampling
    from colograd.engine.vllm_engine import Needs, VLLMEngine

    config = GRPOConfig(output_dir=folder, num_generations=2, report_to="none")
    config.per_device_train_batch_size = options.sessions
    engine = VLLMEngine(
        options.model, config, torch.bfloat16, options.tokens + 128, 2**28, Needs(sequences=options.sessions)
    )
    engine.stamp(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    sampling = Sampling(1, options.tokens, 1.0, {"ignore_eos": True})
    asked = [[{"role": "user", "content": f"Tell me a story about {i} friends."}] for i in range(options.sessions)]
    prompts = [
        Prompt(
            {"prompt": ask},
            tuple(tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_dict=False)),
            position,
        )
        for position, ask in enumerate(asked)
    ]

    # One for all sessions: a client of its own would load certificates for each, which takes longer than its request.
    shared = OpenAI(base_url="http://127.0.0.1", api_key="none")

    def ask_once(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
        client = shared.with_options(base_url=base_url, api_key=api_key)
        reply = client.chat.completions.create(model=model, messages=row["prompt"])
        return float(reply.usage.completion_tokens)

    api = ChatAPI(tokenizer, "policy", "", "", "")
    settings = AgentSettings(None, options.sessions, Limits(8, 8), refuses=True, raises=True)
    source = AgentSessions(
        engine, Agent.of(ask_once), api, ChatFormat(tokenizer, {}, [tokenizer.eos_token_id]), settings
    )

    def run(writer: Any, tokens: int = options.tokens) -> int:
        groups = writer.generate(prompts, dataclasses.replace(sampling, max_tokens=tokens), version=0, seed=0)
        return sum(int(rollout.sampled.sum()) for group in groups for rollout in group.rollouts)

    found: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for writer in (engine, source):
        run(writer, WARM_UP)
    for _ in range(options.trials):
        found.append((timed(lambda: run(engine)), timed(lambda: run(source))))
    shared.close()
    engine.close()
    names = ("tokens_per_second", "tokens_per_processor_second")
    figures: dict[str, Any] = {"plain": {}, "endpoint": {}, "ratio": {}}
    for at, name in enumerate(names):
        figures["plain"][name] = statistics.median(pair[0][at] for pair in found)
        figures["endpoint"][name] = statistics.median(pair[1][at] for pair in found)
        figures["ratio"][name] = statistics.median(pair[1][at] / pair[0][at] for pair in found)
    return figures


def trees(sessions: int = 16, depth: int = 12) -> dict[str, float]:
    """Tokens of made-up sessions through the model: of packed trees, and of their branches as rows of their own."""
    from colograd.agents.tree import TokenTree
    from colograd.batch import FinishReason

    draw = random.Random(0)

    def text(low: int, high: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(draw.randint(low, high))]

    packed = requested = branches = 0
    system = text(3000, 3000)  # policies and tools, as τ²-bench has them
    for _ in range(sessions):
        first = [*system, *text(60, 120)]
        tree, requests, context = TokenTree(first), [], first

        def turn(read: list[int], into: list[tuple[list[int], list[int]]] = requests) -> list[int]:
            wrote = text(40, 120)
            into.append((read, wrote))
            return [*read, *wrote]

        for number in range(depth):
            context = [*turn(context), *text(40, 200)]
            if number in (depth // 3, 2 * depth // 3):  # compacted
                turn(context)  # the summary
                context = [*system, *text(150, 300)]
            if number in (2, 5, 8):  # tried another way, from here
                turn([*turn(context), *text(40, 200)])
        for read, wrote in sorted(requests, key=lambda request: len(request[0])):
            tree.add(read, wrote, [0.0] * len(wrote))
        rollout = tree.rollout(0, FinishReason.STOP)
        assert rollout is not None
        packed += len(rollout.completion_ids) + len(first) - len(system)
        branches += rollout.sequence_tokens
        requested += sum(len(read) + len(wrote) for read, wrote in requests)
    packed += len(system)  # of the group, once: its sessions begin with it
    return {"packed": packed, "branches": branches, "requests": requested, "ratio": branches / packed}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    process.prepare_ranks()
    with tempfile.TemporaryDirectory() as folder:
        figures = pairs(options, folder) | {"trees": trees()}
    figures |= {"machine": machine(), "versions": versions(), "sessions": options.sessions, "tokens": options.tokens}
    rows = [
        [name, *(f"{figures[kind][name]:.3f}" for kind in ("plain", "endpoint", "ratio"))] for name in figures["ratio"]
    ]
    print(table(["", "plain", "endpoint", "ratio"], rows))
    tokens = figures["trees"]
    print(
        f"trees: {tokens['packed']:,.0f} tokens; {tokens['branches']:,.0f} of their branches as rows "
        f"({tokens['ratio']:.1f} times as many), {tokens['requests']:,.0f} of a row per request"
    )
    if options.out is not None:
        write(options.out, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
