"""Conversations with tools: turns of the model with the tools' answers between them, all in the engine's one queue.

When the model ends a turn with calls, the calls run while the engine decodes other conversations. The answers' tokens
are appended and masked from the loss, and the model continues. Sampled tokens are never tokenised again.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from ...batch import FinishReason, Group, ModelInput, Prompt, Rollout
from ...data.messages import FAILURES
from ...data.prompts import COLUMNS, PromptRules
from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling, request_seed
from ...riders import Media, Rider, joined_riders, with_shared_riders
from ...usercode.untrusted import CHARACTERS
from .tool_calls import Answers, characters, shown_content, text_of
from .tool_format import ToolFormat
from .toolbox import ConversationTools, Toolbox

POLL = 0.02  # seconds between two looks at tools while the engine has nothing to do


@dataclass(slots=True)
class Conversation:
    """One unfinished completion."""

    prompt: Prompt
    index: int  # index of the completion in its group
    session: ConversationTools
    input: ModelInput  # the prompt's tokens, with the text that the environment's `reset` returned
    asked: Any  # the prompt's messages, with the content that `reset` returned
    read: ModelInput  # the input and all later tokens: the engine reads it for the next turn
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason | None = None  # None: the conversation goes on
    riders: list[tuple[tuple[Rider, ...], int]] = field(default_factory=list)  # of parts of the ids, with lengths
    media: list[Media] = field(default_factory=list)  # media in tools' answers, with places among the ids

    def begin(self, asked: ModelInput) -> None:
        self.input = self.read = asked

    def add(self, turn: Sampled) -> None:
        """Append the tokens of a turn."""
        self.read = self.read.followed_by(turn.ids)
        self.ids.extend(turn.ids)
        self.logprobs.extend(turn.logprobs)
        self.riders.append((turn.riders, len(turn.ids)))
        self.sampled += [True] * len(turn.ids)

    def add_answer(self, answer: ModelInput) -> None:
        """Append the tokens of tools' answers."""
        self.read = self.read.followed_by(answer.ids, answer.media)
        if answer.media is not None:
            self.media.append(answer.media.shifted(len(self.ids)))
        self.ids.extend(answer.ids)
        self.logprobs.extend([0.0] * len(answer))
        self.riders.append(((), len(answer)))
        self.sampled += [False] * len(answer)

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
            riders=(*joined_riders(self.riders, len(self.input)), *self.media),
        )


class Conversations:
    """A rollout source that writes groups as conversations.

    Args:
        form: reads calls and writes answers.
        rules: tokenises a prompt that an environment has changed.
        max_iterations: rounds of calls in one conversation; None: no limit.
    """

    def __init__(
        self, engine: Engine, tools: Toolbox, form: ToolFormat, rules: PromptRules, max_iterations: int | None
    ) -> None:
        self.engine, self.tools, self.form = engine, tools, form
        self.rules, self.max_iterations = rules, max_iterations

    def take_counts(self) -> dict[str, float]:
        """Return the sums of ``tools/...`` since the last call."""
        return self.tools.take_counts()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """See `RolloutSource.generate`. A seed depends on the conversation and its turn, not on the tools' timing."""
        self.engine.require(version)
        self.tools.environments.take_back()
        running = _RunningConversations(self, sampling, seed, purpose)
        try:
            running.open(prompts)
            while running.writing or running.waiting or running.unopened:
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
        self.writing: dict[str, Conversation] = {}  # conversations that the engine decodes, by request
        self.waiting: list[tuple[Conversation, Answers]] = []  # conversations that wait for tools
        self.unopened: deque[tuple[Prompt, int]] = deque()  # prompt, index in its group
        self._is_limited = True  # whether the number of environments in use at once is limited
        self._over: dict[int, list[Conversation]] = {}  # finished conversations, by the prompt's position

    def open(self, prompts: Sequence[Prompt]) -> None:
        """Begin ``sampling.n`` conversations of each prompt, as many as there are environments for."""
        self.unopened.extend((prompt, index) for prompt in prompts for index in range(self.sampling.n))
        self._open_next()

    def _open_next(self) -> None:
        environments = self.tools.environments
        while self.unopened and (not self._is_limited or environments.has_room(self.sampling.n)):
            prompt, index = self.unopened.popleft()
            session, beginning = self.tools.open(prompt.example)
            asked = prompt.example.get("prompt")
            conversation = Conversation(prompt, index, session, prompt.input, asked, read=prompt.input)
            if beginning is None:
                self._submit(conversation)
            else:
                self.waiting.append((conversation, beginning))
        if self.unopened and not (self.writing or self.waiting):
            if environments.are_scored:  # async reward functions still run
                time.sleep(POLL)
            else:  # no group is scored before all are sampled, as in a subclass that collects them
                self._is_limited = False
                self._open_next()

    def advance(self) -> list[Conversation]:
        """Run one step of the engine, then continue behind finished tools. Return the conversations that ended."""
        over = []
        self._open_next()
        if self.writing:
            for request, (turn,) in self.engine.advance():
                conversation = self.writing.pop(request)
                conversation.add(turn)
                conversation.turns += 1
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
        """Return the conversation's group if this conversation completes it, else None."""
        prompt, others = conversation.prompt, self._over.setdefault(conversation.prompt.position, [])
        others.append(conversation)
        if len(others) < self.sampling.n:
            return None
        rollouts = with_shared_riders(tuple(c.rollout(version) for c in sorted(others, key=lambda c: c.index)))
        return Group(prompt.example, rollouts, prompt.position)

    def _submit(self, conversation: Conversation) -> None:
        position, index, turn = conversation.prompt.position, conversation.index, conversation.turns
        if turn:
            seed = request_seed(self.seed, position, f"{self.purpose}/{index}/{turn}")
        else:  # the same seed as in one request of n completions
            seed = request_seed(self.seed, position, self.purpose) + index
        request = self.engine.submit(conversation.read, self.sampling, seed, n=1, spent=len(conversation.ids))
        self.writing[request] = conversation

    def _start_calls(self, conversation: Conversation, turn: Sampled) -> bool:
        """Begin the calls of a turn. Return False if there are none, or if the conversation may have no more."""
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
        """Continue behind the tools' answers. Return False if there is no room for them."""
        if not conversation.turns:
            self._begin(conversation, answers)
            return True
        room = min(self.sampling.max_tokens, self.engine.context - len(conversation.input)) - len(conversation.ids)
        messages = self.tools.told(answers, self.form.shows_images)
        if sum(characters(message["content"]) for message in messages) > CHARACTERS * room:
            conversation.finish_reason = FinishReason.LENGTH
            return False
        messages, answer = self._answer(conversation, messages)
        if len(answer) >= room:
            conversation.finish_reason = FinishReason.LENGTH
            return False
        conversation.add_answer(answer)
        conversation.messages += messages
        self._submit(conversation)
        return True

    def _answer(
        self, conversation: Conversation, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], ModelInput]:
        """Return the tools' messages and their tokens."""
        own, images = conversation.prompt.example.get("chat_template_kwargs"), self.form.shows_images

        def read(messages: list[dict[str, Any]]) -> ModelInput:
            shown = [{**message, "content": shown_content(message["content"], images)} for message in messages]
            return self.form.answer(shown, own, conversation.ids[-1])

        if not images:
            return messages, read(messages)
        try:
            return messages, read(messages)
        except FAILURES as error:  # e.g. a picture that the processor doesn't take
            messages = self.tools.refused(messages, error)
            return messages, read(messages)

    def _begin(self, conversation: Conversation, answers: Answers) -> None:
        """Append the value that the environment's `reset` returned to the prompt, and let the model write.

        Raises:
            RuntimeError: ``reset`` raised or is late.
            ValueError: the prompt is too long with that value.
        """
        ((_, outcome),) = answers.outcomes()
        assert conversation.session.environment is not None
        name, prompt = type(conversation.session.environment.instance).__name__, conversation.prompt
        if outcome.kind != "value":
            problem = outcome.value[1] if outcome.kind == "raised" else f"it took longer than {outcome.seconds:g} s"
            raise RuntimeError(f"environment {name}, prompt {prompt.position}: reset failed: {problem}")
        if outcome.value is not None:
            where = f"environment {name}, prompt {prompt.position}"
            conversation.asked = self._with_observation(conversation, outcome.value, where)
            columns = {**prompt.example, "prompt": conversation.asked}
            asked = None
            if characters(outcome.value) <= CHARACTERS * self.rules.max_prompt_tokens:
                asked = self.rules.changed({name: columns[name] for name in COLUMNS if name in columns}, where)
            if asked is None:
                raise ValueError(
                    f"{where}: with what reset returned the prompt has more than "
                    f"{self.rules.max_prompt_tokens} tokens: raise vllm_max_model_length, or return less."
                )
            conversation.begin(asked)
        self._submit(conversation)

    def _with_observation(self, conversation: Conversation, value: Any, where: str) -> list[dict[str, Any]]:
        """Return the prompt's messages with the value of `reset` at the end of the last message."""

        example, (*earlier, last) = conversation.prompt.example, conversation.asked
        shown = shown_content(value, self.form.shows_images)
        own, has_images = self.form.reader.own_messages(example, where) if self.form.shows_images else (None, False)
        texts = isinstance(last["content"], str) and isinstance(shown, str)
        if own is None or (texts and not has_images):
            return [*earlier, {**last, "content": text_of(last["content"] or "") + shown}]
        *earlier, last = own
        parts = shown if isinstance(shown, list) else [{"type": "text", "text": shown}]
        return [*earlier, {**last, "content": [*last["content"], *parts]}]
