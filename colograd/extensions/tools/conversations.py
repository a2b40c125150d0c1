"""`Conversations`: a rollout source for completions with tool calls.

Tools outside the main thread run while the engine decodes other conversations. The tokens of tools' answers are masked
from the loss. Sampled tokens are never tokenised again.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from ...batch import FinishReason, Group, ModelInput, Prompt, Rollout
from ...data.messages import FAILURES
from ...data.prompts import PromptRules
from ...engine.protocol import Engine, Sampled
from ...engine.sampling import Sampling, request_seed
from ...riders import Media, Rider, joined_riders, with_shared_riders
from ...usercode.calls import Outcome
from ...usercode.untrusted import CHARACTERS
from .environments import Environment
from .tool_format import ToolFormat
from .toolbox import RunningCall, Toolbox, shown_content

POLL = 0.02  # Maximum seconds of one wait for tools or free environments while the engine is idle.
# One conversation's generator. It yields an engine request's name to get its sample, or running calls to await them.
Talk = Generator["str | list[RunningCall]", Any, "Conversation"]


@dataclass(slots=True)
class Conversation:
    prompt: Prompt
    index: int  # Index of the completion in its group.
    environment: Environment | None
    input: ModelInput  # The prompt's tokens, including tokens that an environment's `reset` adds.
    asked: Any  # The prompt as in the dataset, with the content that an environment's `reset` adds.
    read: ModelInput  # Input of the engine for the next turn: `input` and all later tokens.
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # The last turn's reason. LENGTH if its tools' answers don't fit.
    riders: list[tuple[tuple[Rider, ...], int]] = field(default_factory=list)  # Each `add`'s riders and token count.
    media: list[Media] = field(default_factory=list)  # Images, with their positions in `ids`.

    def add(self, part: ModelInput, turn: Sampled | None = None) -> None:
        """Append the tokens of ``part``. ``turn`` is the engine's sample of the tokens, or None for tools' answers."""
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
    def __init__(
        self, engine: Engine, tools: Toolbox, form: ToolFormat, rules: PromptRules, max_iterations: int | None
    ) -> None:
        self.engine, self.tools, self.form = engine, tools, form
        self.rules = rules  # Used to tokenise a prompt that an environment's `reset` has changed.
        self.max_iterations, self.take_counts = max_iterations, tools.take_counts
        self.shows_images = form.reader is not None

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, seed: int, purpose: str = "train"
    ) -> Iterator[Group]:
        self.engine.require(version)
        environments = self.tools.environments
        environments.take_back()
        unopened = deque((prompt, index) for prompt in prompts for index in range(sampling.n))
        writing: dict[str, Talk] = {}  # Conversations that the engine decodes, by request.
        waiting: list[tuple[list[RunningCall], Talk]] = []
        over: dict[int, list[Conversation]] = {}  # Ended conversations by prompt position.
        is_limited = True

        def resume(talk: Talk, turn: Sampled | None = None) -> None:
            try:
                awaited = talk.send(turn)
            except StopIteration as end:
                over.setdefault(end.value.prompt.position, []).append(end.value)
                return
            if isinstance(awaited, str):
                writing[awaited] = talk
            else:
                waiting.append((awaited, talk))

        try:
            while writing or waiting or unopened:
                while unopened and (not is_limited or environments.has_room(sampling.n)):
                    resume(self._talk(*unopened.popleft(), sampling, seed, purpose))
                if unopened and not (writing or waiting):
                    if environments.in_scoring:  # Async reward functions free environments when they end.
                        time.sleep(POLL)
                    else:  # No environment will become free: go on without the limit.
                        is_limited = False
                elif writing:
                    for request, (turn,) in self.engine.advance():
                        resume(writing.pop(request), turn)
                elif all(any(not call.done() for call in calls) for calls, _ in waiting):
                    running = [call.future for calls, _ in waiting for call in calls if not call.done()]
                    wait(running, POLL, FIRST_COMPLETED)
                for pair in [pair for pair in waiting if all(call.done() for call in pair[0])]:
                    waiting.remove(pair)
                    resume(pair[1])
                for position in [position for position, group in over.items() if len(group) == sampling.n]:
                    group = sorted(over.pop(position), key=lambda each: each.index)
                    rollouts = with_shared_riders(tuple(each.rollout(version) for each in group))
                    yield Group(group[0].prompt.example, rollouts, position)
        finally:
            self.engine.abort(writing)
            for call in (call for calls, _ in waiting for call in calls):
                call.abandon()

    def _talk(self, prompt: Prompt, index: int, sampling: Sampling, seed: int, purpose: str) -> Talk:
        environment, beginning = self.tools.open(prompt.example)
        asked = prompt.example.get("prompt")
        conversation = Conversation(prompt, index, environment, prompt.input, asked, read=prompt.input)
        if environment is not None:
            yield beginning
            self._begin(conversation, environment, self.tools.outcome(beginning[0]))
        for number in itertools.count():
            # The first turn has the seed that this completion would have in one request for n completions.
            of_turn = request_seed(seed, prompt.position, purpose) + index
            if number:
                of_turn = request_seed(seed, prompt.position, f"{purpose}/{index}/{number}")
            spent = len(conversation.ids)
            turn: Sampled = yield self.engine.submit(conversation.read, sampling, of_turn, n=1, spent=spent)
            shown = (*conversation.input.ids, *conversation.ids)
            message, calls = self.form.read(turn.ids, shown, self.tools.schemas(prompt.example))
            conversation.add(ModelInput(tuple(turn.ids)), turn)
            conversation.messages.append(message)
            conversation.finish_reason = turn.finish_reason
            is_last = self.max_iterations is not None and number >= self.max_iterations
            if not calls or turn.finish_reason is not FinishReason.STOP or is_last:
                break
            running = self.tools.call(environment, calls)
            yield running
            if not self._add_answers(conversation, self.tools.told(running, self.shows_images), sampling.max_tokens):
                conversation.finish_reason = FinishReason.LENGTH
                break
        return conversation

    def _add_answers(self, conversation: Conversation, messages: list[dict[str, Any]], max_tokens: int) -> bool:
        """Append the tools' answers if they leave room for one more token. Return whether they were appended."""
        own, images = conversation.prompt.example.get("chat_template_kwargs"), self.shows_images
        room = min(max_tokens, self.engine.context - len(conversation.input)) - len(conversation.ids)

        def shown() -> list[dict[str, Any]]:
            return [{**each, "content": shown_content(each["content"], images)} for each in messages]

        answers = shown()
        if sum(len(str(message["content"])) for message in answers) > CHARACTERS * room:
            return False
        try:
            answer = self.form.answer(answers, own, conversation.ids[-1])
        except FAILURES as error:
            if not images:
                raise
            messages = self.tools.refused(messages, error)
            answer = self.form.answer(shown(), own, conversation.ids[-1])
        if len(answer) < room:
            conversation.add(answer)
            conversation.messages += messages
        return len(answer) < room

    def _begin(self, conversation: Conversation, environment: Environment, outcome: Outcome) -> None:
        """Append to the prompt the content that the environment's `reset` returned."""
        prompt = conversation.prompt
        where = f"environment {type(environment.instance).__name__}, prompt {prompt.position}"
        if outcome.kind != "value":
            problem = outcome.value[1] if outcome.kind == "raised" else f"it took longer than {outcome.seconds:g} s"
            raise RuntimeError(f"{where}: reset failed: {problem}")
        if outcome.value is not None:
            shown, asked = shown_content(outcome.value, self.shows_images), None
            conversation.asked = self._with_observation(conversation, shown, where)
            if len(str(shown)) <= CHARACTERS * self.rules.max_prompt_tokens:
                asked = self.rules.changed({**prompt.example, "prompt": conversation.asked}, where)
            if asked is None:
                raise ValueError(
                    f"{where}: with the text that `reset` returned, the prompt has more than "
                    f"{self.rules.max_prompt_tokens} tokens: raise vllm_max_model_length, or return less text."
                )
            conversation.input = conversation.read = asked

    def _with_observation(self, conversation: Conversation, shown: Any, where: str) -> list[dict[str, Any]]:
        *earlier, last = conversation.asked
        messages, has_images = None, False
        if self.shows_images:
            messages, has_images = self.form.reader.own_messages(conversation.prompt.example, where)
        texts = isinstance(last["content"], str) and isinstance(shown, str)
        if messages is None or (texts and not has_images):
            return [*earlier, {**last, "content": shown_content(last["content"] or "") + shown}]
        *earlier, last = messages
        parts = shown if isinstance(shown, list) else [{"type": "text", "text": shown}]
        return [*earlier, {**last, "content": [*last["content"], *parts]}]
