"""Cost of the agents' endpoint: sessions with one request each, compared with plain generation with the same engine.

    python tests/benchmarks/agents.py [--model M] [--sessions 64] [--trials 5] [--clients light openai] [--out F.json]

One engine runs, in turns, `Engine.generate` with a prompt per session, and `AgentSessions` whose program requests as
many tokens. Both sample `--tokens` tokens per request. Two clients:

- `light`: a separate process sends the requests over plain sockets. Its processor seconds don't count.
- `openai`: the programs use the `openai` package in this process with one pool of connections. Its time counts.

The figures are medians over the trials:

- `ratio`: the endpoint's tokens per second, and per second of this process's processor time, over plain generation's
  in the same trial. The second hardly depends on the machine's other work.
- `steps`, `step_seconds`: of the engine. `other_seconds`: of the clock, outside its steps. Both sides' steps do the
  same work. If one side's steps take longer, the machine was slower meanwhile.

`trees.ratio` divides the tokens of made-up sessions, each branch in a row of its own, by the tokens of the packed
trees. A group has 16 sessions of depth 12 with two compactions and three branches behind a long system prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from colograd.runtime import process

process.prepare_threads()  # before torch is imported

import torch  # noqa: E402
from figures import machine, table, write  # noqa: E402
from phases import ROOT, versions  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
WARM_UP = 8  # tokens
PLAIN = "plain"
CLIENTS = ("light", "openai")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agents.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="folder or Hub id; default: SmolLM2")
    parser.add_argument("--sessions", type=int, default=64, help="at once (64)")
    parser.add_argument("--tokens", type=int, default=128, help="that each request samples (128)")
    parser.add_argument("--trials", type=int, default=5, help="pairs of runs (5)")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS, help="of the programs (both)")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the figures as JSON")
    return parser.parse_args(argv)


# source of the client process
ASK = r"""
import asyncio, json, sys, time

async def ask(number, port, key, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    writer.close()
    print(json.dumps([number, answer, time.process_time()]), flush=True)

async def main():
    lines, tasks = asyncio.StreamReader(), []
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        number, port, key, body = json.loads(line)
        tasks.append(asyncio.create_task(ask(number, port, key, json.dumps(body).encode())))
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


class LightClient:
    """A client process that sends requests for the programs of this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._asked: list[Future[Any]] = []
        self._lock = threading.Lock()
        self.seconds = 0.0  # processor seconds of the process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, base_url: str, key: str, body: dict[str, Any]) -> Any:
        port = int(base_url.split(":")[2].partition("/")[0])
        assert self._process.stdin is not None
        with self._lock:
            self._asked.append(answer := Future())
            self._process.stdin.write(json.dumps([len(self._asked) - 1, port, key, body]) + "\n")
            self._process.stdin.flush()
        return json.loads(answer.result())

    def _read(self) -> None:
        for line in self._process.stdout or ():
            number, answer, self.seconds = json.loads(line)
            self._asked[number].set_result(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()


class Measured:
    def __init__(self, engine: Any) -> None:
        self._steps: list[float] = []
        self._advance, engine.advance = engine.advance, self._step

    def _step(self) -> Any:
        began = time.perf_counter()
        found = self._advance()
        self._steps.append(time.perf_counter() - began)
        return found

    def run(self, work: Callable[[], int]) -> dict[str, float]:
        self._steps.clear()
        wall, busy = time.perf_counter(), time.process_time()
        tokens = work()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        return {
            "tokens_per_second": tokens / wall,
            "tokens_per_processor_second": tokens / busy,
            "steps": float(len(self._steps)),
            "step_seconds": sum(self._steps),
            "other_seconds": wall - sum(self._steps),
        }


def sides(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run all sides in turns."""
    from openai import OpenAI
    from transformers import AutoTokenizer

    from colograd import GRPOConfig
    from colograd.batch import Group, Prompt
    from colograd.engine.protocol import EngineUse
    from colograd.engine.sampling import Sampling
    from colograd.engine.vllm_engine import VLLMEngine
    from colograd.extensions.agents.context import ChatFormat
    from colograd.extensions.agents.engine.chat_api import ChatAPI
    from colograd.extensions.agents.sessions import Agent, AgentSessions

    config = GRPOConfig(output_dir=folder, num_generations=2, report_to="none")
    config.per_device_train_batch_size = options.sessions
    engine = VLLMEngine(
        options.model, config, torch.bfloat16, options.tokens + 128, 2**30, EngineUse(sequences=options.sessions)
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

    # Loading certificates takes longer than a request, so all sessions share a client.
    shared, light = OpenAI(base_url="http://127.0.0.1", api_key="none"), LightClient()

    def by_openai(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
        client = shared.with_options(base_url=base_url, api_key=api_key)
        reply = client.chat.completions.create(model=model, messages=row["prompt"])
        return float(reply.usage.completion_tokens)

    def by_light(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
        reply = light.ask(base_url, api_key, {"model": model, "messages": row["prompt"]})
        return float(reply["usage"]["completion_tokens"])

    api, form = ChatAPI(tokenizer, "policy", "", "", ""), ChatFormat(tokenizer, {}, [tokenizer.eos_token_id])
    programs = {"light": by_light, "openai": by_openai}
    writers: dict[str, Any] = {PLAIN: engine}
    writers |= {name: AgentSessions(engine, Agent.of(programs[name]), api, form, config) for name in options.clients}

    def run(writer: Any, tokens: int = options.tokens) -> int:
        drawn = dataclasses.replace(sampling, max_tokens=tokens)
        none: list[Group] = []
        # as in the trainer: no garbage collection
        groups = engine.on_engine_leader(lambda: [*writer.generate(prompts, drawn, version=0, seed=0)], none)
        read = [rollout for group in groups for rollout in group.rollouts]
        assert sorted(each.prompt_ids for each in read) == sorted(each.input.ids for each in prompts)
        return sum(int(rollout.sampled.sum()) for rollout in read)

    measured = Measured(engine)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in writers}
    for writer in writers.values():
        run(writer, WARM_UP)
    before = light.seconds
    names = [*writers]
    for trial in range(options.trials):
        for name in names[trial % len(names) :] + names[: trial % len(names)]:
            found[name].append(own := measured.run(lambda writer=writers[name]: run(writer)))  # type: ignore[misc]
            shown = ", ".join(f"{each.replace('_', ' ')} {value:.2f}" for each, value in own.items())
            print(f"trial {trial + 1}, {name}: {shown}", file=sys.stderr, flush=True)
    light_seconds = (light.seconds - before) / options.trials
    shared.close()
    light.close()
    engine.close()
    figures: dict[str, Any] = {name: medians(each) for name, each in found.items()}
    figures["ratio"] = {
        name: medians(
            {key: own[key] / plain[key] for key in own} for own, plain in zip(found[name], found[PLAIN], strict=True)
        )
        for name in options.clients
    }
    return figures | {"light_client_seconds": light_seconds, "runs": found}


def medians(runs: Iterable[dict[str, float]]) -> dict[str, float]:
    given = [*runs]
    return {name: statistics.median(run[name] for run in given) for name in given[0]}


def trees(sessions: int = 16, depth: int = 12) -> dict[str, float]:
    """Count the tokens of made-up sessions: in packed trees, and with each branch in a row of its own."""
    from colograd.batch import FinishReason
    from colograd.extensions.agents.branches import TokenTree

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
            if number in (2, 5, 8):  # another branch from here
                turn([*turn(context), *text(40, 200)])
        for read, wrote in sorted(requests, key=lambda request: len(request[0])):
            tree.add(read, wrote, [0.0] * len(wrote))
        rollout = tree.rollout(0, FinishReason.STOP)
        assert rollout is not None
        packed += len(rollout.completion_ids) + len(first) - len(system)
        branches += rollout.sequence_tokens
        requested += sum(len(read) + len(wrote) for read, wrote in requests)
    packed += len(system)  # once per group
    return {"packed": packed, "branches": branches, "requests": requested, "ratio": branches / packed}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    process.quiet_logs(verbose=False)
    process.prepare_ranks()
    with tempfile.TemporaryDirectory() as folder:
        figures = sides(options, folder) | {"trees": trees()}
    figures |= {"machine": machine(), "versions": versions(), "sessions": options.sessions, "tokens": options.tokens}
    columns = [PLAIN, *options.clients]
    rows = [[name, *(f"{figures[column][name]:.2f}" for column in columns)] for name in figures[PLAIN]]
    for name in ("tokens_per_second", "tokens_per_processor_second"):
        rows.append([f"ratio of {name}", "", *(f"{figures['ratio'][each][name]:.3f}" for each in options.clients)])
    print(table(["", *columns], rows))
    if "light" in options.clients:
        print(f"the light client's process: {figures['light_client_seconds']:.2f} processor seconds a run")
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
