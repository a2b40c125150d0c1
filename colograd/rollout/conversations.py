"""Conversations with tools: turns of the model, tools' answers between them, all in the engine's one queue.

Each completion is a conversation of its own. When the model ends a turn with calls, these run while the engine decodes
the other conversations; the tokens of their answers are appended, masked from the loss, and the model goes on. What was
sampled stays as it was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import Experts, FinishReason, Group, ModelInput, Prompt, Rollout
from ..data.prompts import COLUMNS, PromptRules
from ..engine.routed import as_written, one_prompt
from ..engine.sampling import Sampling, request_seed
from ..engine.vllm_engine import Engine, Sampled
from .tool_calls import Answers, text_of
from .tool_format import ToolFormat
from .toolbox import Session, Toolbox

POLL = 0.02  # seconds between two looks at tools while the engine has nothing to do


@dataclass(slots=True)
class Conversation:
    """One completion while it is written."""

    prompt: Prompt
    index: int  # in its group
    session: Session
    input: ModelInput  # the prompt's, with what the environment's `reset` returned
    asked: Any  # the same as messages
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason | None = None  # once it is over
    experts: Experts | None = None  # of all up to the last turn's end

    def add(self, ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        """Take up tokens: the model's, or those of its tools' answers."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.sampled += [sampled] * len(ids)

    def rollout(self, version: int) -> Rollout:
        assert self.finish_reason is not None
        columns: dict[str, Any] = {}
        if (environment := self.session.environment) is not None:
            columns = {"environments": None if environment.stuck else environment.instance, "prompts": self.asked}
        return Rollout(
            input=self.input,
            completion_ids=self.ids,
            sampler_logprobs=torch.frombuffer(self.logprobs, dtype=torch.float32),
            sampled=torch.tensor(self.sampled, dtype=torch.bool),
            finish_reason=self.finish_reason,
            policy_version=version,
            messages=tuple(self.messages),
            columns=columns,
            experts=None if self.experts is None else as_written(self.experts, len(self.input), len(self.ids)),
        )


class Conversations:
    """Writes the groups of some prompts as conversations.

    Args:
        tools: they answer the calls.
        form: how calls and answers are written.
        rules: how a prompt becomes tokens, where an environment changes it.
        max_iterations: rounds of calls in one conversation; None: any number.
    """

    def __init__(
        self, engine: Engine, tools: Toolbox, form: ToolFormat, rules: PromptRules, max_iterations: int | None
    ) -> None:
        self.engine, self.tools, self.form = engine, tools, form
        self.rules, self.max_iterations = rules, max_iterations

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """See `RolloutSource.generate`. A turn's seed depends on the conversation and the number of the turn alone, so
        no tool's timing changes what is sampled."""
        self.engine.require(version)
        self.tools.environments.take_back()
        running = _RunningConversations(self, sampling, seed, purpose)
        try:
            running.open(prompts)
            while running.writing or running.waiting:
                for conversation in running.advance():
                    group = running.finish(conversation, version)
                    if group is not None:
                        yield group
        finally:
            self.engine.abort(running.writing)
            for _, answers in running.waiting:
                answers.abandon()


class _RunningConversations:
    """The conversations of one call of `Conversations.generate`."""

    def __init__(self, parent: Conversations, sampling: Sampling, seed: int, purpose: str) -> None:
        self.engine, self.tools, self.form, self.rules = parent.engine, parent.tools, parent.form, parent.rules
        self.max_iterations, self.sampling, self.seed, self.purpose = parent.max_iterations, sampling, seed, purpose
        self.writing: dict[str, Conversation] = {}  # by request
        self.waiting: list[tuple[Conversation, Answers]] = []  # for tools
        self._over: dict[int, list[Conversation]] = {}  # by the prompt's position

    def open(self, prompts: Sequence[Prompt]) -> None:
        """Begin ``sampling.n`` conversations of each prompt."""
        for prompt in prompts:
            for index in range(self.sampling.n):
                session, beginning = self.tools.open(prompt.example)
                conversation = Conversation(prompt, index, session, prompt.input, prompt.example.get("prompt"))
                if beginning is None:
                    self._submit(conversation)
                else:
                    self.waiting.append((conversation, beginning))

    def advance(self) -> list[Conversation]:
        """One step of the engine, and what tools have answered meanwhile: the conversations that are over."""
        over = []
        if self.writing:
            for request, (turn,) in self.engine.advance():
                conversation = self.writing.pop(request)
                conversation.add(turn.ids, turn.logprobs, sampled=True)
                conversation.turns += 1
                conversation.experts = turn.experts
                if not self._start_calls(conversation, turn):
                    over.append(conversation)
        elif not any(answers.done() for _, answers in self.waiting):
            running = [call.future for _, answers in self.waiting for call in answers.calls if not call.done()]
            wait(running, POLL, FIRST_COMPLETED)
        for pair in [pair for pair in self.waiting if pair[1].done()]:
            self.waiting = [other for other in self.waiting if other is not pair]
            if not self._continue(*pair):
                over.append(pair[0])
        return over

    def finish(self, conversation: Conversation, version: int) -> Group | None:
        """The conversation's group, if it was the last of it."""
        prompt, others = conversation.prompt, self._over.setdefault(conversation.prompt.position, [])
        others.append(conversation)
        if len(others) < self.sampling.n:
            return None
        rollouts = one_prompt(tuple(c.rollout(version) for c in sorted(others, key=lambda c: c.index)))
        return Group(prompt.example, rollouts, prompt.position)

    def _submit(self, conversation: Conversation) -> None:
        position, index, turn = conversation.prompt.position, conversation.index, conversation.turns
        if turn:
            seed = request_seed(self.seed, position, f"{self.purpose}/{index}/{turn}")
        else:  # as the index-th of n completions has it
            seed = request_seed(self.seed, position, self.purpose) + index
        asked = conversation.input.followed_by(conversation.ids)
        request = self.engine.submit(asked, self.sampling, seed, n=1, spent=len(conversation.ids))
        self.writing[request] = conversation

    def _start_calls(self, conversation: Conversation, turn: Sampled) -> bool:
        """Begin the calls of a turn. False: it has none, or the conversation may have no more."""
        shown = (*conversation.input.ids, *conversation.ids[: len(conversation.ids) - len(turn.ids)])
        message, calls = self.form.read(turn.ids, shown, conversation.session.schemas)
        conversation.messages.append(message)
        conversation.finish_reason = turn.finish_reason
        most = self.max_iterations
        if not calls or turn.finish_reason is not FinishReason.STOP or (most is not None and conversation.turns > most):
            return False
        self.waiting.append((conversation, self.tools.call(conversation.session, calls)))
        return True

    def _continue(self, conversation: Conversation, answers: Answers) -> bool:
        """Let the model go on with what its tools returned. False: there is no room for it."""
        if not conversation.turns:
            self._begin(conversation, answers)
            return True
        messages = self.tools.told(answers)
        ended = conversation.ids[-1] == self.form.end_of_turn
        own = conversation.prompt.example.get("chat_template_kwargs")
        shown = [{**message, "content": text_of(message["content"])} for message in messages]
        ids = self.form.answer_ids(shown, own, ended=ended)
        total = len(conversation.ids) + len(ids)
        if total >= self.sampling.max_tokens or len(conversation.input) + total >= self.engine.context:
            conversation.finish_reason = FinishReason.LENGTH
            return False
        conversation.add(ids, [0.0] * len(ids), sampled=False)
        conversation.messages += messages
        self._submit(conversation)
        return True

    def _begin(self, conversation: Conversation, answers: Answers) -> None:
        """Put what the environment's `reset` returned at the prompt's end, and let the model write.

        Raises:
            RuntimeError: ``reset`` raised or is late.
            ValueError: there is no room for what it returned.
        """
        ((_, outcome),) = answers.outcomes()
        assert conversation.session.environment is not None
        name, prompt = type(conversation.session.environment.instance).__name__, conversation.prompt
        if outcome.kind != "value":
            problem = outcome.value[1] if outcome.kind == "raised" else f"it took longer than {outcome.seconds:g} s"
            raise RuntimeError(f"environment {name}, prompt {prompt.position}: reset failed: {problem}")
        if outcome.value is not None:
            *earlier, last = conversation.asked
            content = text_of(last["content"] or "") + text_of(outcome.value)
            conversation.asked = [*earlier, {**last, "content": content}]
            columns = {**prompt.example, "prompt": conversation.asked}
            (ids,) = self.rules.encode({name: [columns[name]] for name in COLUMNS if name in columns}, 0)
            if ids is None:
                raise ValueError(
                    f"environment {name}, prompt {prompt.position}: with what reset returned the prompt has more than "
                    f"{self.rules.max_prompt_tokens} tokens: raise vllm_max_model_length, or return less."
                )
            conversation.input = ModelInput(ids)
        self._submit(conversation)
