"""Settings of reward functions, tools and agents: where they run, time limits, and what happens when they fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .knob import agents, knob, tools

SECONDS: dict[str, Any] = {"above": 0, "remedy": "leave it out for no limit"}


@dataclass
class RewardKnobs:
    """Settings of rewards and tools."""

    reward_weights: list[float] | None = knob(None, "One weight per reward function; default 1 each.")
    reward_workers: int | None = knob(None, at_least=0)
    """Processes per rank that call reward functions while the engine decodes; `async` functions always run during
    decoding. 0: the trainer's process, between two engine steps. Unset: 0 on a CPU; on a GPU up to 4, for functions of
    modules only, because closures and functions of a script may keep state."""
    reward_timeout: float | None = knob(None, **SECONDS)
    """Seconds that one call of a reward function may take. A late call abstains and its worker is replaced; in the
    trainer's process it ends the run."""
    reward_on_error: str = knob("raise", one_of=("raise", "abstain"))
    """A failing reward function ends the run (`raise`) or abstains (`abstain`)."""
    reward_call: str = knob("group", one_of=("group", "all"))
    """Arguments of one call of a reward function: the completions of a prompt (`group`), or the rank's whole generation
    (`all`)."""
    tool_workers: int = tools(0, at_least=0)
    """Processes per rank that run tools. 0: threads of the trainer's process. Environments' methods always run in
    threads, `async` tools on an event loop."""
    tool_timeout: float | None = tools(None, **SECONDS)
    """Seconds that one call of a tool may take. The model reads a late call's answer as an error; its worker is
    replaced, or its thread abandoned."""
    max_tool_calling_iterations: int | None = tools(None, at_least=1)
    """Rounds of tool calls in one completion; default: limited by its tokens only."""
    main_thread_tools: list[str] | None = tools(None)
    """Names of tools, environment classes or factories that only work in the main thread (e.g. with `signal.alarm`):
    they run between two steps of the engine."""

    agent_timeout: float | None = agents(1800.0, **SECONDS)
    """Seconds that one session of an agent may take. A late command is killed; a late function's thread is
    abandoned."""
    agent_sessions: int | None = agents(None, at_least=1)
    """Sessions of an agent at once on a rank; default: as many as the engine decodes at once."""
    agent_requests: int = agents(256, "Requests of one session of an agent, at most.", at_least=1)
    agent_parallel: int = agents(64, "Open completions of one session of an agent, at most.", at_least=1)
    agent_sampling: str = agents("refuse", one_of=("refuse", "untrained"))
    """Requests of an agent with another temperature, top_p or the like would bias the update: answer HTTP 400
    (`refuse`), or answer without training on it (`untrained`)."""
    agent_on_error: str = agents("raise", one_of=("raise", "abstain"))
    """A session that raises, dies or is late: end the run (`raise`), or don't train on its group (`abstain`)."""
    agent_tool_parser: str | None = agents(None)
    """vLLM's parser of an agent's tool calls; default: from the chat template; empty: none."""
    agent_reasoning_parser: str | None = agents(None)
    """vLLM's parser of an agent's reasoning; default: from the chat template; empty: none."""
