"""`Conversations`: a rollout source for completions with tool calls, sampled by the engine in one common queue.

When the model ends an assistant message (a turn) with tool calls, the calls run while the engine decodes other
conversations. The tokens of the tools' answers are appended and masked from the loss, and the model continues.
Sampled tokens are never tokenised again.
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
from .environments import Environment
from .tool_calls import Answers, characters, shown_content, text_of
from .tool_format import ToolFormat
from .toolbox import Toolbox

POLL = 0.02  # maximum seconds of a wait for tools while the engine is idle


@dataclass(slots=True)
class Conversation:
    """One unfinished completion: assistant messages (turns) with tools' answers between them."""

    prompt: Prompt
    index: int  # index of the completion in its group
    environment: Environment | None
    input: ModelInput  # Tokens of the prompt, with the text that the environment's `reset` returned.
    asked: Any  # Messages of the prompt, with the content that `reset` returned.
    read: ModelInput  # Tokens that the engine reads for the next turn: the input and all later tokens.
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason | None = None  # None while the conversation goes on.
    riders: list[tuple[tuple[Rider, ...], int]] = field(default_factory=list)  # (Per-token data, number of tokens).
    media: list[Media] = field(default_factory=list)  # Media in tools' answers, with positions in `ids`.

    def add(self, part: ModelInput, turn: Sampled | None = None) -> None:
        """Append the tokens of a sampled ``turn``, or of tools' answers if ``turn`` is None."""
        self.read = self.read.followed_by(part.ids, part.media)
        if part.media is not None:
            self.media.append(part.media.shifted(len(self.ids)))
        self.ids.extend(part.ids)
        self.logprobs.extend([0.0] * len(part) if turn is None else turn.logprobs)
        self.riders.append((() if turn is None else turn.riders, len(part)))
        self.sampled += [turn is not None] * len(part)

    def rollout(self, version: int) -> Rollout:
        assert self.finish_reason is not None
        columns: dict[str, Any] = {}
        if self.environment is not None:
            instance = None if self.environment.stuck else self.environment.instance
            columns = {"environments": instance, "prompts": self.asked}
        riders = (*joined_riders(self.riders, len(self.input)), *self.media)
        values = torch.frombuffer(self.logprobs, dtype=torch.float32), torch.tensor(self.sampled, dtype=torch.bool)
        reason, messages = self.finish_reason, tuple(self.messages)
        return Rollout(self.input, self.ids, *values, reason, version, messages, columns, riders=riders)


class Conversations:
    """A rollout source that samples groups of conversations with tools.

    Args:
        rules: tokenise a prompt that an environment's `reset` has changed.
        max_iterations: maximum number of turns of a conversation that may call tools. None means no limit.
    """

    def __init__(
        self, engine: Engine, tools: Toolbox, form: ToolFormat, rules: PromptRules, max_iterations: int | None
    ) -> None:
        self.engine, self.tools, self.form = engine, tools, form
        self.rules, self.max_iterations, self.take_counts = rules, max_iterations, tools.take_counts

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        """See `RolloutSource.generate`. Seeds depend on the conversation and its turn, not on the tools' timing."""
        self.engine.require(version)
        self.tools.environments.take_back()
        running = _RunningConversations(self, sampling, seed, purpose)
        running.unopened.extend((prompt, index) for prompt in prompts for index in range(sampling.n))
        over: dict[int, list[Conversation]] = {}  # finished conversations of incomplete groups, by prompt position
        try:
            while running.writing or running.waiting or running.unopened:
                for conversation in running.advance():
                    prompt, group = conversation.prompt, over.setdefault(conversation.prompt.position, [])
                    group.append(conversation)
                    if len(group) == sampling.n:
                        group.sort(key=lambda each: each.index)
                        rollouts = with_shared_riders(tuple(each.rollout(version) for each in group))
                        yield Group(prompt.example, rollouts, prompt.position)
        finally:
            self.engine.abort(running.writing)
            for _, answers in running.waiting:
                answers.abandon()


class _RunningConversations:
    """The unfinished conversations of one call of `Conversations.generate`."""

    def __init__(self, parent: Conversations, sampling: Sampling, seed: int, purpose: str) -> None:
        self.engine, self.tools, self.form, self.rules = parent.engine, parent.tools, parent.form, parent.rules
        self.max_iterations, self.sampling, self.seed, self.purpose = parent.max_iterations, sampling, seed, purpose
        self.writing: dict[str, Conversation] = {}  # Conversations that the engine decodes, by request id.
        self.waiting: list[tuple[Conversation, Answers]] = []  # Conversations that wait for tools.
        self.unopened: deque[tuple[Prompt, int]] = deque()  # (Prompt, index in its group) of conversations not begun.
        self.shows_images = self.form.reader is not None  # Whether tools' answers may have images.
        self._is_limited = True  # Whether the number of environments in use at once is limited.

    def _open_next(self) -> None:
        """Begin further conversations until the limit of environments in use is reached."""
        environments = self.tools.environments
        while self.unopened and (not self._is_limited or environments.has_room(self.sampling.n)):
            prompt, index = self.unopened.popleft()
            environment, beginning = self.tools.open(prompt.example)
            asked = prompt.example.get("prompt")
            conversation = Conversation(prompt, index, environment, prompt.input, asked, read=prompt.input)
            if beginning is None:
                self._submit(conversation)
            else:
                self.waiting.append((conversation, beginning))
        if self.unopened and not (self.writing or self.waiting):
            if environments.in_scoring:  # wait for async reward functions, which make environments free
                time.sleep(POLL)
            else:  # nothing makes environments free, e.g. in a subclass that scores only when all are sampled
                self._is_limited = False
                self._open_next()

    def advance(self) -> list[Conversation]:
        """Run one engine step, then continue conversations with finished calls. Return the conversations that ended."""
        over = []
        self._open_next()
        if self.writing:
            for request, (turn,) in self.engine.advance():
                conversation = self.writing.pop(request)
                shown = (*conversation.input.ids, *conversation.ids)
                message, calls = self.form.read(turn.ids, shown, self.tools.schemas(conversation.prompt.example))
                conversation.add(ModelInput(tuple(turn.ids)), turn)
                conversation.messages.append(message)
                conversation.turns += 1
                conversation.finish_reason = turn.finish_reason
                is_last = self.max_iterations is not None and conversation.turns > self.max_iterations
                if calls and turn.finish_reason is FinishReason.STOP and not is_last:
                    self.waiting.append((conversation, self.tools.call(conversation.environment, calls)))
                else:
                    over.append(conversation)
        elif not any(answers.done() for _, answers in self.waiting):
            running = [call.future for _, answers in self.waiting for call in answers.calls if not call.done()]
            wait(running, POLL, FIRST_COMPLETED)
        for pair in [pair for pair in self.waiting if pair[1].done()]:
            self.waiting = [other for other in self.waiting if other is not pair]
            if not self._continue(*pair):
                over.append(pair[0])
        return over

    def _submit(self, conversation: Conversation) -> None:
        position, index, turn = conversation.prompt.position, conversation.index, conversation.turns
        if turn:
            seed = request_seed(self.seed, position, f"{self.purpose}/{index}/{turn}")
        else:  # the same seed as in one request for n completions
            seed = request_seed(self.seed, position, self.purpose) + index
        request = self.engine.submit(conversation.read, self.sampling, seed, n=1, spent=len(conversation.ids))
        self.writing[request] = conversation

    def _continue(self, conversation: Conversation, answers: Answers) -> bool:
        """Append the tools' answers and request the next turn. Return False if the answers are too long."""
        if not conversation.turns:
            self._begin(conversation, answers)
            return True
        own, images = conversation.prompt.example.get("chat_template_kwargs"), self.shows_images
        room = min(self.sampling.max_tokens, self.engine.context - len(conversation.input)) - len(conversation.ids)
        messages = self.tools.told(answers, images)

        def tokens() -> ModelInput:
            shown = [{**message, "content": shown_content(message["content"], images)} for message in messages]
            return self.form.answer(shown, own, conversation.ids[-1])

        conversation.finish_reason = FinishReason.LENGTH
        if sum(characters(message["content"]) for message in messages) > CHARACTERS * room:
            return False
        try:
            answer = tokens()
        except FAILURES as error:  # e.g. a picture that the processor doesn't accept
            if not images:
                raise
            messages = self.tools.refused(messages, error)
            answer = tokens()
        if len(answer) >= room:
            return False
        conversation.add(answer)
        conversation.messages += messages
        self._submit(conversation)
        return True

    def _begin(self, conversation: Conversation, answers: Answers) -> None:
        """Append the value that the environment's `reset` returned to the prompt, and request the first turn.

        Raises:
            RuntimeError: ``reset`` raised or timed out.
            ValueError: the prompt with the returned value is too long.
        """
        ((_, outcome),) = answers.outcomes()
        assert conversation.environment is not None
        name, prompt = type(conversation.environment.instance).__name__, conversation.prompt
        where = f"environment {name}, prompt {prompt.position}"
        if outcome.kind != "value":
            problem = outcome.value[1] if outcome.kind == "raised" else f"it took longer than {outcome.seconds:g} s"
            raise RuntimeError(f"{where}: reset failed: {problem}")
        if outcome.value is not None:
            conversation.asked = self._with_observation(conversation, outcome.value, where)
            columns = {**prompt.example, "prompt": conversation.asked}
            asked = None
            if characters(outcome.value) <= CHARACTERS * self.rules.max_prompt_tokens:
                asked = self.rules.changed({name: columns[name] for name in COLUMNS if name in columns}, where)
            if asked is None:
                raise ValueError(
                    f"{where}: with the text that reset returned the prompt has more than "
                    f"{self.rules.max_prompt_tokens} tokens: raise vllm_max_model_length, or return less text."
                )
            conversation.input = conversation.read = asked
        self._submit(conversation)

    def _with_observation(self, conversation: Conversation, value: Any, where: str) -> list[dict[str, Any]]:
        """Return the prompt's messages with the value of `reset` appended to the last message's content."""
        (*earlier, last), shown = conversation.asked, shown_content(value, self.shows_images)
        own, has_images = None, False
        if self.shows_images:
            own, has_images = self.form.reader.own_messages(conversation.prompt.example, where)
        texts = isinstance(last["content"], str) and isinstance(shown, str)
        if own is None or (texts and not has_images):
            return [*earlier, {**last, "content": text_of(last["content"] or "") + shown}]
        *earlier, last = own
        parts = shown if isinstance(shown, list) else [{"type": "text", "text": shown}]
        return [*earlier, {**last, "content": [*last["content"], *parts]}]
