"""`ChatAPI`: reads requests and writes responses of the OpenAI and Anthropic APIs, with vLLM's classes and parsers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....batch import FinishReason
from ....engine.protocol import Sampled
from ....engine.sampling import Sampling
from ....usercode.untrusted import clean, parse_json

# Request parameters that change the sampling. Each has the values that, like None, count as leaving it out.
SHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,), "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,), "logit_bias": ({},), "min_tokens": (0,), "bad_words": ([],), "allowed_token_ids": ([],),
    "ignore_eos": (False,), "thinking_token_budget": (), "repetition_detection": (),
}  # fmt: skip
# Request parameters that this endpoint refuses, unless the value is None or listed here.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,), "echo": (False,), "suffix": ("",), "prompt_logprobs": (0,), "top_logprobs": (0,),
    "logprob_token_ids": ([],), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "chat_template": (), "truncate_prompt_tokens": (), "prompt_embeds": (), "kv_transfer_params": (),
    "ec_transfer_params": (), "vllm_xargs": (), "include_stop_str_in_output": (False,),
}  # fmt: skip
# Arguments of `apply_chat_template` that a request's `chat_template_kwargs` may not contain.
NO_ARGUMENTS = {"chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
# (text, name of vLLM's parser for chat templates that contain the text). The first entry that fits counts.
TOOL_PARSERS = (
    ("<arg_key>", "glm45"), ("<function=", "qwen3_coder"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"), ("<|channel|>", "openai"), ('"parameters": ', "llama3_json"),
)  # fmt: skip
REASONING_PARSERS = (("<|channel|>", "openai_gptoss"), ("enable_thinking", "qwen3"), ("<think>", "deepseek_r1"))


class BadRequest(ValueError):
    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Call:
    api: str  # The API's name: "chat", "completions" or "messages".
    request: Any  # vLLM's request object. A request to "messages" is converted to a chat request.
    sampling: Sampling
    shaping: dict[str, Any]  # The request's temperature and `SHAPING` values that differ from the run's, by name.
    stops: list[str]
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = dataclasses.field(default_factory=list)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # Arguments of the chat template.


@dataclass(frozen=True, slots=True)
class Choice:
    message: dict[str, Any]  # The answer in the form of OpenAI's chat API. For "completions" only its `content`.
    finish_reason: str  # "stop", "length" or "tool_calls".
    stop: str | None  # The stop string that ended the answer, or None.
    ids: Sequence[int]
    logprobs: Sequence[float]


class ChatAPI:
    """Reads requests and writes responses for one model.

    Args:
        model: name of the model in responses.
        template: the model's chat template, used to choose parsers.
        tool_parser, reasoning_parser: names of vLLM's parsers. None: the template decides. "": no parser.
    """

    def __init__(
        self, tokenizer: Any, model: str, template: str, tool_parser: str | None = None,
        reasoning_parser: str | None = None, model_type: str = "",
    ) -> None:  # fmt: skip
        from vllm.parser.parser_manager import ParserManager

        self.tokenizer, self.model = tokenizer, model
        if tool_parser is None:
            tool_parser = next((name for part, name in TOOL_PARSERS if part in template), "")
        if reasoning_parser is None:
            reasoning_parser = next((name for part, name in REASONING_PARSERS if part in template), "")
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        # The model may write malformed tool calls: hide vLLM's tracebacks about them.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            self._parser: Any = ParserManager.get_parser(
                tool_parser_name=tool_parser or None, reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=True, is_harmony=model_type == "gpt_oss",
            )  # fmt: skip
        except (TypeError, KeyError, ImportError) as error:
            raise ValueError(
                f"vLLM has no tool parser {tool_parser!r} or reasoning parser {reasoning_parser!r} ({error}): set "
                "agent_tool_parser and agent_reasoning_parser to names of vLLM's parsers, or to '' for none."
            ) from None

    def read(self, api: str, body: Any, sampling: Sampling) -> Call:
        try:
            return self._read(api, body, sampling)
        except BadRequest:
            raise
        except Exception as error:  # vLLM raises many types of errors for a bad request.
            raise BadRequest(f"{type(error).__name__}: {error}") from None

    def _read(self, api: str, body: Any, sampling: Sampling) -> Call:
        request = self._request(api, body)
        for name, neutral in UNSUPPORTED.items():
            value = getattr(request, name, None)
            if value is not None and value not in neutral:
                raise BadRequest(f"{name} is {value!r}, which this endpoint doesn't support: leave the parameter out.")
        n = 1 if request.n is None else request.n
        if n < 1:
            raise BadRequest(f"`n` is {n}, but must be at least 1.")
        fields = vars(request)  # `getattr` would warn about the deprecated `max_tokens` of a chat request.
        limits = [name for name in ("max_completion_tokens", "max_tokens") if fields.get(name) is not None]
        most = fields[limits[0]] if limits else None
        if most is not None and most < 1:
            raise BadRequest(f"`{limits[0]}` is {most}, but must be at least 1.")
        shaping = {
            name: value
            for name, neutral in SHAPING.items()
            if (value := getattr(request, name, None)) is not None
            and value not in neutral
            and value != sampling.options.get(name)
        }
        options = sampling.options | shaping
        stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
        if stops:
            options["stop"] = stops
        if request.stop_token_ids:
            options["stop_token_ids"] = list(request.stop_token_ids)
        temperature = sampling.temperature if request.temperature is None else request.temperature
        if temperature != sampling.temperature:
            shaping["temperature"] = temperature
        if api == "completions":
            prompt = request.prompt
            if (request.logprobs or 0) > 1:
                rule = "this endpoint returns only the sampled tokens' log-probabilities: set logprobs to 1"
                raise BadRequest(f"`logprobs` is {request.logprobs}, but {rule}.")
            if prompt is None or prompt == []:
                raise BadRequest("`prompt` is missing or empty: set `prompt` to a text or token ids.")
            one = isinstance(prompt, str) or isinstance(prompt[0], int)
            further: dict[str, Any] = {"prompts": [prompt] if one else list(prompt)}
        else:
            arguments = dict(request.chat_template_kwargs or {})
            request = self._with_tools(request, arguments)
            further = {"messages": _texts_only(request.messages), "arguments": arguments}
        try:
            structure = request.extract_structured_outputs()
        except ValueError as error:
            raise BadRequest(f"response_format: {error}") from None
        if structure is not None:
            options["structured_outputs"] = structure
        tokens = min(most or sampling.max_tokens, sampling.max_tokens)
        own = dataclasses.replace(sampling, n=n, max_tokens=tokens, temperature=temperature, options=options)
        return Call(api, request, own, shaping, stops, **further)

    def _with_tools(self, request: Any, arguments: dict[str, Any]) -> Any:
        """Add a request's tools, documents and reasoning effort to ``arguments``, the chat template's arguments.

        Return the request with the output structure that the request's `tool_choice` requires."""
        if others := NO_ARGUMENTS & arguments.keys():
            raise BadRequest(f"chat_template_kwargs has {min(others)}, which this endpoint doesn't support: remove it.")
        if request.reasoning_effort is not None:
            arguments["reasoning_effort"] = request.reasoning_effort
            arguments.setdefault("enable_thinking", request.reasoning_effort != "none")
        if request.documents:
            arguments["documents"] = request.documents
        if not request.tools:
            return request
        if not self.tool_parser:
            raise BadRequest("no parser of this model's tool calls is known: set agent_tool_parser in the recipe.")
        if request.tool_choice is None:
            request.tool_choice = "auto"
        arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if request.tool_choice == "none":
            return request
        try:
            return self._parser_of(request, arguments).adjust_request(request)
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"tools: {error}") from None

    def _request(self, api: str, body: Any) -> Any:
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        if not isinstance(body, dict):
            raise BadRequest("the body isn't a JSON object.")
        if api != "completions" and not isinstance(body.get("messages"), list):
            raise BadRequest("`messages` is missing, or isn't a list.")
        try:
            if api == "messages":
                from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
                from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

                request = AnthropicMessagesRequest.model_validate(body)
                return AnthropicServingMessages.to_chat_completion_request(request)
            kind: Any = CompletionRequest if api == "completions" else ChatCompletionRequest
            return kind.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"][:4])
            raise BadRequest(f"{where}: {first['msg']}" if where else str(first["msg"])) from None

    def _parser_of(self, request: Any, arguments: Mapping[str, Any]) -> Any:
        return self._parser(self.tokenizer, request.tools, chat_template_kwargs=dict(arguments))

    def choice(self, call: Call, sample: Sampled, ends: Any) -> Choice:
        """Convert sampled tokens to an answer. ``ends`` are the tokens that end a message."""
        ids, length = sample.ids, sample.finish_reason is not FinishReason.STOP
        shown = ids[:-1] if not length and len(ids) and ids[-1] in ends else ids
        keeps = call.api != "completions" and bool(call.arguments.get("tools") or self.reasoning_parser)
        text, stop = str(self.tokenizer.decode([*shown], skip_special_tokens=not keeps)), None
        if not length and (places := [(text.find(part), part) for part in call.stops if part in text]):
            at, stop = min(places)
            text = text[:at]
        reason = "length" if length else "stop"
        if call.api == "completions":
            return Choice({"content": text}, reason, stop, ids, sample.logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._parser is not None:
            message = self._parsed(call, text, shown)
            if message.get("tool_calls") and not length:
                reason = "tool_calls"
        return Choice(message, reason, stop, ids, sample.logprobs)

    def _parsed(self, call: Call, text: str, ids: Sequence[int]) -> dict[str, Any]:
        try:
            reasoning, content, calls = self._parser_of(call.request, call.arguments).parse(
                text, call.request, enable_auto_tools=True, model_output_token_ids=[*ids]
            )
        except Exception:  # Parsers raise many types of errors for a malformed text.
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": each.id or f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for each in calls
            ]
        elif content is None:
            message["content"] = ""
        return dict(clean(message))  # Replaces lone surrogates, e.g. from JSON escapes in tool calls.

    def response(self, call: Call, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
        from vllm.entrypoints.openai.completion.protocol import CompletionResponse

        written, parts = sum(len(choice.ids) for choice in choices), list[dict[str, Any]]()
        # `logprobs: 0` (completions) asks for the sampled token's log-probability, but False (chat) for none.
        wants_logprobs = call.request.logprobs is not None and call.request.logprobs is not False
        for index, choice in enumerate(choices):
            tokens = [self.tokenizer.decode([token]) for token in choice.ids] if wants_logprobs else []
            pairs = [*zip(tokens, choice.logprobs, strict=False)]
            part: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason}
            if call.api == "completions":
                part["text"] = choice.message["content"]
                logprobs: dict[str, Any] = {
                    "tokens": tokens,
                    "token_logprobs": [*choice.logprobs],
                    "text_offset": [*itertools.accumulate(map(len, tokens), initial=0)][:-1],
                    "top_logprobs": [{token: logprob} for token, logprob in pairs],
                }
            else:
                part |= {"message": choice.message, "stop_reason": choice.stop}
                content = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in pairs]
                logprobs = {"content": content}
            parts.append(part | {"logprobs": logprobs if wants_logprobs else None})
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}
        kind: Any = CompletionResponse if call.api == "completions" else ChatCompletionResponse
        response = kind.model_validate({"model": self.model, "usage": usage, "choices": parts})
        return _anthropic(response) if call.api == "messages" else dict(response.model_dump(mode="json"))


def _texts_only(messages: Sequence[Any]) -> list[dict[str, Any]]:
    copies = [dict(message) for message in messages]
    if not copies:
        raise BadRequest("`messages` is empty, but must have at least one message.")
    for index, message in enumerate(copies):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            message["content"] = parts = [dict(part) for part in content]
            if others := [kind for part in parts if (kind := part.get("type", "text")) not in ("text", "refusal")]:
                raise BadRequest(f"messages.{index} has a part of type {others[0]!r}, but only text is supported.")
        if message.get("tool_calls") is not None:
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
    return copies


def _anthropic(response: Any) -> dict[str, Any]:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    choice = response.choices[0]
    for function in (call.function for call in choice.message.tool_calls or ()):
        arguments: Any = None
        with contextlib.suppress(ValueError):
            arguments = parse_json(function.arguments or "{}")
        function.arguments = json.dumps(arguments if isinstance(arguments, dict) else {"arguments": function.arguments})
    converter: Any = AnthropicServingMessages.messages_full_converter
    body: dict[str, Any] = converter(None, response).model_dump(mode="json", exclude_none=True)
    body |= {"id": f"msg_{response.id}", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):  # vLLM 0.25's converter ignores stop strings.
        body |= {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return body


def events(call: Call, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield a response's body as server-sent events, which a streaming request expects."""
    if call.api == "messages":
        yield from _message_events(body)
        return
    kind = "text_completion" if call.api == "completions" else "chat.completion.chunk"
    shared = {"id": body["id"], "created": body["created"], "model": body["model"], "object": kind}
    chunks: list[dict[str, Any]] = []
    for choice in body["choices"]:
        if call.api == "completions":
            chunks.append({"choices": [choice]})
            continue
        delta = {name: value for name in ("role", "content", "reasoning") if (value := choice["message"].get(name))}
        if calls := choice["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **each} for number, each in enumerate(calls)]
        end = {name: choice[name] for name in ("index", "finish_reason", "stop_reason", "logprobs")}
        chunks.append({"choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]})
        chunks.append({"choices": [{**end, "delta": {}}]})
    options = call.request.stream_options
    if options is not None and options.include_usage:
        chunks.append({"choices": [], "usage": body["usage"]})
    for chunk in chunks:
        yield f"data: {json.dumps({**shared, **chunk})}\n\n"
    yield "data: [DONE]\n\n"


def _message_events(body: Mapping[str, Any]) -> Iterator[str]:
    def event(kind: str, **content: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"

    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    nothing = {"content": [], **dict.fromkeys(end), "usage": body["usage"] | {"output_tokens": 0}}
    yield event("message_start", message={**body, **nothing})
    for index, block in enumerate(body["content"]):
        empty: dict[str, Any] = {"input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block.get("input"))}]
        if block["type"] != "tool_use":
            names = ("thinking", "signature") if block["type"] == "thinking" else ("text",)
            empty, deltas = dict.fromkeys(names, ""), [{"type": f"{name}_delta", name: block[name]} for name in names]
        yield event("content_block_start", index=index, content_block={**block, **empty})
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=end, usage=body["usage"])
    yield event("message_stop")
