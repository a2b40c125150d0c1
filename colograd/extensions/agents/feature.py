"""`AgentFeature`: takes a run's completions from an agent, the user's program that calls the model over HTTP."""

from __future__ import annotations

import os
import shutil
from typing import Any, Self

from ...config import GRPOConfig
from ...engine.protocol import Engine
from ...policy.loading import Policy
from ...rollout.features import SourceFeature, TrainerArguments
from ...rollout.store import RolloutStore
from ...runtime.importing import find_object, is_import_path
from .context import ChatFormat
from .engine.chat_api import ChatAPI
from .sessions import Agent, AgentSessions, SessionLog, agent_reward
from .turn_rewards import with_turn_rewards

MESSAGES = 4096  # Context tokens that are reserved for an agent's messages and tool descriptions.


class AgentFeature(SourceFeature):
    reserved_tokens = MESSAGES
    writes_prompts = adds_columns = True
    add_advantages = staticmethod(with_turn_rewards)

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.rewards = [agent_reward]

    @classmethod
    def of(cls, arguments: TrainerArguments, config: GRPOConfig) -> Self | None:
        agent = arguments.sources["agent"]
        if agent is None:
            return None
        if others := [name for name, value in arguments.sources.items() if name != "agent" and value]:
            raise ValueError(
                f"`agent` and `{others[0]}` are both set, but an agent's program sends all requests to the model, and "
                "runs tools itself: set only one of the two."
            )
        if config.router_replay:
            raise ValueError("router_replay is true, but agents' sessions record no experts: set it to false.")
        if config.replays_truncation:
            raise ValueError(
                "`top_k` truncates the sampler's distribution, but the truncated distribution isn't recorded for "
                "agents: remove `top_k`, or set `vllm_importance_sampling_correction: false`."
            )
        # `node agent.js` and `./agent.sh` are commands. `agent.sh` is a command if it is on PATH, else an import path.
        if isinstance(agent, str) and not set(agent) & {" ", "/"} and is_import_path(agent) and not shutil.which(agent):
            agent = find_object(agent, "agent", callable)
        return cls(Agent.of(agent))

    def check_policy(self, policy: Policy, config: GRPOConfig) -> None:
        if policy.processor is not None:
            raise ValueError(f"`agent` is set, but {policy.path} reads images: agents need a text-only model.")

    def source(self, engine: Engine, policy: Policy, config: GRPOConfig, trainer: Any) -> AgentSessions:
        tokenizer, arguments = policy.tokenizer, dict(config.chat_template_kwargs or {})  # type: ignore[arg-type]
        form = ChatFormat(tokenizer, arguments, [token for token in policy.end_tokens if token is not None])
        api = ChatAPI(
            tokenizer, os.path.basename(policy.path.rstrip("/")) or "policy", str(tokenizer.chat_template),
            config.agent_tool_parser, config.agent_reasoning_parser, str(policy.model.config.model_type),
        )  # fmt: skip

        def log() -> SessionLog | None:
            journal: RolloutStore | None = trainer.journal if trainer.is_in_train else None
            return journal.open_beside(SessionLog) if journal is not None else None

        return AgentSessions(engine, self.agent, api, form, config, log)

    def digests(self) -> dict[str, str]:
        return {"agent_code": self.agent.digest()}
