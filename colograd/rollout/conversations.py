"""Conversations with tools: turns of the model, tools' answers between them, all in the engine's one queue.

Each completion is a conversation of its own. When the model ends a turn with calls, these run while the engine decodes
the other conversations; the tokens of their answers are appended, masked from the loss, and the model goes on. What was
sampled stays as it was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import FinishReason, Group, Prompt, Rollout
from ..data.prompts import COLUMNS, PromptRules
from ..engine.sampling import Sampling, request_seed
from ..engine.vllm_engine import Engine, Sampled
from .tool_format import ToolFormat
from .toolbox import Answers, Session, Toolbox, text_of

POLL = 0.02  # seconds between two looks at tools while the engine has nothing to do


@dataclass(slots=True)
class Conversation:
    """One completion while it is written."""

    prompt: Prompt
    index: int  # in its group
    session: Session
    prompt_ids: tuple[int, ...]
    asked: Any  # the prompt's messages, with what the environment began with
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason | None = None  # once it is over

    def wrote(self, turn: Sampled) -> None:
        """The model's turn."""
        self.ids += turn.ids
        self.logprobs += turn.logprobs
        self.sampled += [True] * len(turn.ids)
        self.turns += 1

    def was_told(self, ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> None:
        """Tools' answers."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.sampled += [False] * len(ids)
        self.messages += messages

    def rollout(self, version: int) -> Rollout:
        assert self.finish_reason is not None
        columns: dict[str, Any] = {}
        if self.session.environment is not None:
            columns = {"environments": None if self.session.stuck else self.session.environment, "prompts": self.asked}
        return Rollout(
            prompt_ids=self.prompt_ids,
            completion_ids=tuple(self.ids),
            sampler_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            sampled=torch.tensor(self.sampled, dtype=torch.bool),
            finish_reason=self.finish_reason,
            policy_version=version,
            messages=tuple(self.messages),
            columns=columns,
        )


class Conversations:
    """Writes the groups of some prompts as conversations.

    Args:
        tools: who answers.
        form: how calls and answers are written.
        rules: how a prompt becomes tokens, where an environment changes it.
        max_iterations: rounds of calls in one conversation; None: any number.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Toolbox,
        form: ToolFormat,
        rules: PromptRules,
        max_iterations: int | None,
    ) -> None:
        self.engine, self.tools, self.form = engine, tools, form
        self.rules, self.max_iterations = rules, max_iterations

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """As `Engine.generate`. A turn's seed depends on the conversation and the number of the turn alone, so no
        tool's timing changes what is sampled."""
        self.engine.require(version)
        self.tools.release()
        begun = _Begun(self, sampling, seed, purpose)
        try:
            begun.open(prompts)
            while begun.writing or begun.waiting:
                for conversation in begun.advance():
                    group = begun.finished(conversation, version)
                    if group is not None:
                        yield group
        finally:
            self.engine.abort(begun.writing)
            for _, answers in begun.waiting:
                answers.abandon()


class _Begun:
    """The conversations of one call of `Conversations.generate`."""

    def __init__(self, of: Conversations, sampling: Sampling, seed: int, purpose: str) -> None:
        self.of, self.sampling, self.seed, self.purpose = of, sampling, seed, purpose
        self.writing: dict[str, Conversation] = {}  # by request
        self.waiting: list[tuple[Conversation, Answers]] = []  # for tools
        self._over: dict[int, list[Conversation]] = {}  # by the prompt's position

    def open(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            for index in range(self.sampling.n):
                session, beginning = self.of.tools.open(prompt.example)
                conversation = Conversation(prompt, index, session, prompt.prompt_ids, prompt.example.get("prompt"))
                if beginning is None:
                    self._submit(conversation)
                else:
                    self.waiting.append((conversation, beginning))

    def advance(self) -> list[Conversation]:
        """One step of the engine, and what tools have answered meanwhile: the conversations that are over."""
        over = []
        if self.writing:
            for request, (turn,) in self.of.engine.advance():
                conversation = self.writing.pop(request)
                conversation.wrote(turn)
                if not self._call(conversation, turn):
                    over.append(conversation)
        elif self.waiting:
            wait([c.future for _, a in self.waiting for c in a.calls if not c.future.done()], POLL, FIRST_COMPLETED)
        for pair in [pair for pair in self.waiting if pair[1].done()]:
            self.waiting = [other for other in self.waiting if other is not pair]
            if not self._answer(*pair):
                over.append(pair[0])
        return over

    def finished(self, conversation: Conversation, version: int) -> Group | None:
        """The conversation's group, if it was the last of it."""
        prompt, others = conversation.prompt, self._over.setdefault(conversation.prompt.position, [])
        others.append(conversation)
        if len(others) < self.sampling.n:
            return None
        rollouts = tuple(c.rollout(version) for c in sorted(others, key=lambda c: c.index))
        return Group(prompt.example, rollouts, prompt.position)

    def _submit(self, conversation: Conversation) -> None:
        position, index, turn = conversation.prompt.position, conversation.index, conversation.turns
        if turn:
            seed = request_seed(self.seed, position, f"{self.purpose}/{index}/{turn}")
        else:  # as the index-th of n completions has it
            seed = request_seed(self.seed, position, self.purpose) + index
        ids = (*conversation.prompt_ids, *conversation.ids)
        request = self.of.engine.submit(ids, self.sampling, seed, n=1, spent=len(conversation.ids))
        self.writing[request] = conversation

    def _call(self, conversation: Conversation, turn: Sampled) -> bool:
        """Begin the calls of a turn. False: it has none, or the conversation may have no more."""
        shown = (*conversation.prompt_ids, *conversation.ids[: -len(turn.ids) or None])
        message, calls = self.of.form.read(turn.ids, shown, conversation.session.schemas)
        conversation.messages.append(message)
        conversation.finish_reason = turn.finish_reason
        most = self.of.max_iterations
        if not calls or turn.finish_reason is not FinishReason.STOP or (most is not None and conversation.turns > most):
            return False
        self.waiting.append((conversation, self.of.tools.call(conversation.session, calls)))
        return True

    def _answer(self, conversation: Conversation, answers: Answers) -> bool:
        """Let the model go on with what its tools said. False: there is no room for it."""
        if not conversation.turns:
            return self._begin(conversation, answers)
        messages = self.of.tools.told(answers)
        ended = conversation.ids[-1] == self.of.form.end_of_turn
        own = conversation.prompt.example.get("chat_template_kwargs")
        shown = [{**message, "content": text_of(message["content"])} for message in messages]
        ids = self.of.form.answer_ids(shown, own, ended=ended)
        total = len(conversation.ids) + len(ids)
        if total >= self.sampling.max_tokens or len(conversation.prompt_ids) + total >= self.of.engine.context:
            conversation.finish_reason = FinishReason.LENGTH  # it asked, and there is no room for the answer
            return False
        conversation.was_told(ids, messages)
        self._submit(conversation)
        return True

    def _begin(self, conversation: Conversation, answers: Answers) -> bool:
        """Put what the environment begins with at the prompt's end.

        Raises:
            RuntimeError: ``reset`` raised or is late.
            ValueError: there is no room for what it returned.
        """
        ((_, outcome),) = answers.outcomes()
        name = type(conversation.session.environment).__name__
        if outcome.kind != "value":
            problem = outcome.value[1] if outcome.kind == "raised" else f"it took longer than {outcome.seconds:g} s"
            raise RuntimeError(f"environment {name}, prompt {conversation.prompt.position}: reset failed: {problem}")
        if outcome.value is not None:
            *earlier, last = conversation.asked
            content = text_of(last["content"] or "") + text_of(outcome.value)
            conversation.asked = [*earlier, {**last, "content": content}]
            columns = {**conversation.prompt.example, "prompt": conversation.asked}
            (ids,) = self.of.rules.encode({name: [columns[name]] for name in COLUMNS if name in columns}, 0)
            if ids is None:
                raise ValueError(
                    f"environment {name}, prompt {conversation.prompt.position}: with what reset returned the prompt "
                    f"has more than {self.of.rules.max_prompt_tokens} tokens: raise vllm_max_model_length, or return "
                    "less."
                )
            conversation.prompt_ids = ids
        self._submit(conversation)
        return True
