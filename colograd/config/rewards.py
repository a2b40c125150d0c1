"""The user's code in a run: reward functions and tools, where they run, and the handling of their failures."""

from __future__ import annotations

from dataclasses import dataclass

from .knob import at_least, knob, one_of


@dataclass
class RewardKnobs:
    """Rewards and tools."""

    reward_weights: list[float] | None = knob(None, "One weight per reward function; default 1 each.")
    reward_workers: int | None = knob(
        None,
        "Processes per rank that call reward functions while the engine decodes. 0: they run in the trainer's process, "
        "between two engine steps. `async` functions always run beside the engine. Unset: 0 on a CPU; on a GPU as many "
        "as there are cores for, at most 4, and for functions of modules only: closures, objects and functions of a "
        "script may keep a state, and stay in the trainer's process.",
    )
    reward_timeout: float | None = knob(
        None,
        "Seconds that one call of a reward function may take. A late one is an abstention, and its worker is replaced; "
        "one that runs in the trainer's process ends the run.",
    )
    reward_on_error: str = knob(
        "raise", "A reward function that fails ends the run (`raise`), or has no opinion (`abstain`)."
    )
    reward_call: str = knob(
        "group",
        "What one call of a reward function gets: the completions of a prompt (`group`), or all of the rank's "
        "generation (`all`), for functions that compare across prompts.",
    )
    tool_workers: int = knob(
        0,
        "Processes per rank that run tools. 0: each runs in a thread of the trainer's process. An environment's "
        "methods always do, and `async` tools on an event loop.",
    )
    tool_timeout: float | None = knob(
        None,
        "Seconds that one call of a tool may take. The answer to a late one is an error, which the model sees; its "
        "worker is replaced, its thread left to itself.",
    )
    max_tool_calling_iterations: int | None = knob(
        None, "Rounds of tool calls in one completion; default: as many as its tokens allow."
    )
    main_thread_tools: list[str] | None = knob(
        None,
        "Names of tools, and of environment classes or factories, that only work in the main thread (a `signal.alarm`, "
        "a connection opened there): they run there, between two steps of the engine.",
    )

    agent_timeout: float | None = knob(
        1800.0, "Seconds that one session of an agent may take. A command is killed then; a function's thread is left."
    )
    agent_sessions: int | None = knob(
        None, "Sessions of an agent that run at once on a rank; default: as many as the engine decodes at once."
    )
    agent_requests: int = knob(256, "Requests that one session of an agent may make.")
    agent_parallel: int = knob(64, "Completions that one session of an agent may have open at once.")
    agent_sampling: str = knob(
        "refuse",
        "What becomes of an agent's requests with another temperature, top_p or the like, whose tokens would bias the "
        "update: HTTP 400 (`refuse`), or an answer that isn't trained on (`untrained`).",
    )
    agent_on_error: str = knob(
        "raise",
        "A session that raises, dies or is late ends the run (`raise`), or its group isn't trained on (`abstain`).",
    )
    agent_tool_parser: str | None = knob(
        None, "vLLM's parser of tool calls for an agent; default: by the chat template; empty: none."
    )
    agent_reasoning_parser: str | None = knob(
        None, "vLLM's parser of reasoning for an agent; default: by the chat template; empty: none."
    )

    def _check_rewards(self) -> None:
        one_of(self, "reward_on_error", ("raise", "abstain"))
        one_of(self, "reward_call", ("group", "all"))
        at_least(self, 0, "reward_workers", "tool_workers")
        at_least(self, 1, "max_tool_calling_iterations", "agent_sessions", "agent_requests", "agent_parallel")
        one_of(self, "agent_sampling", ("refuse", "untrained"))
        one_of(self, "agent_on_error", ("raise", "abstain"))
        for name in ("reward_timeout", "tool_timeout", "agent_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"{name} is {seconds}, but must be a positive number of seconds: leave it out for no limit."
                )
