"""`ChatAPI`: reads requests and writes responses of the OpenAI and Anthropic APIs, with vLLM's classes.

vLLM's parsers extract tool calls and reasoning from sampled tokens. This module doesn't sample.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....engine.sampling import Sampling
from ....usercode.untrusted import clean, parse_json

# Request parameters that change the sampling, each with the neutral values (in addition to None) that change nothing.
SHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,), "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,), "logit_bias": ({},), "min_tokens": (0,), "bad_words": ([],), "allowed_token_ids": ([],),
    "ignore_eos": (False,), "thinking_token_budget": (), "repetition_detection": (),
}  # fmt: skip
# Request parameters that aren't supported, each with the values (in addition to None) that are accepted nevertheless.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,), "echo": (False,), "suffix": ("",), "prompt_logprobs": (0,), "top_logprobs": (0,),
    "logprob_token_ids": ([],), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "chat_template": (), "truncate_prompt_tokens": (), "prompt_embeds": (), "kv_transfer_params": (),
    "ec_transfer_params": (), "vllm_xargs": (), "include_stop_str_in_output": (False,),
}  # fmt: skip
# Arguments of a tokenizer's `apply_chat_template` that requests may not set, because the template doesn't get them.
NO_ARGUMENTS = {
    "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors",
    "padding", "truncation", "max_length",
}  # fmt: skip
# Pairs: a text in the chat template, and the name of vLLM's parser for such tool calls. The first match is used.
TOOL_PARSERS = (
    ("<arg_key>", "glm45"), ("<function=", "qwen3_coder"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"), ("<|channel|>", "openai"), ('"parameters": ', "llama3_json"),
)  # fmt: skip
MARKERS = "<[{|"  # First characters of tool calls and of special tokens.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # Stands for a last character that lacks some of its tokens.
REASONING_PARSERS = (("<|channel|>", "openai_gptoss"), ("enable_thinking", "qwen3"), ("<think>", "deepseek_r1"))


class BadRequest(ValueError):
    """A request that the endpoint rejects, with the HTTP status and the API's error code."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Call:
    """A request after its body was parsed and checked."""

    api: str  # "chat", "completions" or "messages".
    request: Any  # vLLM's request object. For "messages" it is the equivalent chat request.
    n: int
    max_tokens: int | None
    options: dict[str, Any]  # Arguments of vllm.SamplingParams: stop, structured_outputs, names in `SHAPING`.
    shaping: dict[str, Any]  # Sampling settings by name that differ from the run's settings.
    temperature: float | None
    stream: bool
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = dataclasses.field(default_factory=list)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # chat template's arguments


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers to a request, parsed from sampled tokens."""

    message: dict[str, Any]  # Assistant message in the API's form. With `completions` it has only the content.
    finish_reason: str  # "stop", "length" or "tool_calls".
    stop: str | None  # Stop string that ended the answer, or None.
    ids: Sequence[int]
    logprobs: Sequence[float]
    tokens: Sequence[str]  # decoded text of each id; empty if the request wants no log-probabilities


class ChatAPI:
    """Reads requests and writes responses for one model.

    Args:
        model: name of the model in requests and responses.
        template: the model's chat template, used to choose parsers.
        tool_parser, reasoning_parser: names of vLLM's parsers. None means a choice by the template, "" no parser.
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
        # The model should unlearn malformed tool calls, so they are no errors. vLLM's tracebacks for them are hidden.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            self._parser: Any = ParserManager.get_parser(
                tool_parser_name=tool_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=True,
                is_harmony=model_type == "gpt_oss",
            )
        except (TypeError, KeyError, ImportError) as error:
            raise ValueError(
                f"vLLM has no tool parser {tool_parser!r} or reasoning parser {reasoning_parser!r} ({error}): set "
                "agent_tool_parser and agent_reasoning_parser to names of vLLM's parsers, or to '' for none."
            ) from None

    def read(self, api: str, body: Any, sampling: Sampling) -> Call:
        """Parse a request's body. Raise BadRequest if the body is malformed or sets an unsupported parameter."""
        try:
            return self._read(api, body, sampling)
        except BadRequest:
            raise
        except Exception as error:  # vLLM's models and parsers raise many types for a malformed request
            raise BadRequest(f"{type(error).__name__}: {error}") from None

    def _read(self, api: str, body: Any, sampling: Sampling) -> Call:
        request = self._request(api, body)
        for name, neutral in UNSUPPORTED.items():
            value = getattr(request, name, None)
            if value is not None and value not in neutral:
                raise BadRequest(f"{name} is {value!r}, which this endpoint doesn't support: leave the parameter out.")
        n = 1 if (n := getattr(request, "n", None)) is None else n
        if n < 1:
            raise BadRequest(f"n is {n}, but `n` must be at least 1.")
        fields = vars(request)  # because getattr of a deprecated field would warn
        most = fields.get("max_completion_tokens") or fields.get("max_tokens")
        if most is not None and most < 1:
            raise BadRequest(f"max_tokens is {most}, but `max_tokens` must be at least 1.")
        shaping = {
            name: value
            for name, neutral in SHAPING.items()
            if (value := getattr(request, name, None)) is not None
            and value not in neutral
            and value != sampling.options.get(name)
        }
        if request.temperature is not None and request.temperature != sampling.temperature:
            shaping["temperature"] = request.temperature
        options = {name: value for name, value in shaping.items() if name != "temperature"}
        if stop := request.stop:
            options["stop"] = [stop] if isinstance(stop, str) else list(stop)
        if request.stop_token_ids:
            options["stop_token_ids"] = list(request.stop_token_ids)
        given: dict[str, Any] = {"n": n, "max_tokens": most, "shaping": shaping, "stream": bool(request.stream)}
        given |= {"temperature": request.temperature, "options": options}
        if api == "completions":
            if (request.logprobs or 0) > 1:
                raise BadRequest(f"logprobs is {request.logprobs}, but only the sampled token's is available: use 1.")
            prompt = request.prompt
            if prompt is None or prompt == []:
                raise BadRequest("prompt is missing.")
            self._add_structure(request, options)
            one = isinstance(prompt, str) or isinstance(prompt[0], int)
            return Call(api, request, prompts=[prompt] if one else list(prompt), **given)
        arguments = dict(request.chat_template_kwargs or {})
        if others := NO_ARGUMENTS & arguments.keys():
            raise BadRequest(f"chat_template_kwargs has {min(others)}, which this endpoint doesn't support: remove it.")
        if request.reasoning_effort is not None:
            arguments["reasoning_effort"] = request.reasoning_effort
            arguments.setdefault("enable_thinking", request.reasoning_effort != "none")
        if request.tools:
            if not self.tool_parser:
                raise BadRequest(
                    "tools were given, but no parser of this model's tool calls is known: the run must set "
                    "agent_tool_parser."
                )
            if request.tool_choice is None:
                request.tool_choice = "auto"
            arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if request.documents:
            arguments["documents"] = request.documents
        if self._parser is not None and request.tools and request.tool_choice != "none":
            try:  # adds the output structure that the request's tool_choice requires
                request = self._parser_of(request, arguments).adjust_request(request)
            except (ValueError, TypeError, KeyError) as error:
                raise BadRequest(f"tools: {error}") from None
        self._add_structure(request, options)
        return Call(api, request, messages=_texts_only(request.messages), arguments=arguments, **given)

    def _request(self, api: str, body: Any) -> Any:
        from pydantic import ValidationError

        if not isinstance(body, dict):
            raise BadRequest("the body isn't a JSON object.")
        if api != "completions" and not isinstance(body.get("messages"), list):
            raise BadRequest("messages is missing, or isn't a list.")
        try:
            if api == "completions":
                from vllm.entrypoints.openai.completion.protocol import CompletionRequest

                return CompletionRequest.model_validate(body)
            if api == "messages":
                from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
                from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

                return AnthropicServingMessages.to_chat_completion_request(
                    AnthropicMessagesRequest.model_validate(body)
                )
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            return ChatCompletionRequest.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"][:4])
            raise BadRequest(f"{where}: {first['msg']}" if where else str(first["msg"])) from None

    def _parser_of(self, request: Any, arguments: Mapping[str, Any]) -> Any:
        return self._parser(self.tokenizer, request.tools, chat_template_kwargs=dict(arguments))

    def _add_structure(self, request: Any, options: dict[str, Any]) -> None:
        try:
            structure = request.extract_structured_outputs()
        except ValueError as error:
            raise BadRequest(f"response_format: {error}") from None
        if structure is not None:
            options["structured_outputs"] = structure

    def choice(self, call: Call, ids: Sequence[int], logprobs: Sequence[float], length: bool, ends: Any) -> Choice:
        """Convert sampled tokens to an answer. It ended by the token limit (``length``) or by a token in ``ends``."""
        own = ids[:-1] if not length and len(ids) and ids[-1] in ends else ids
        text, stop = self._text(call, own), None
        if not length:
            found = [(text.find(part), part) for part in call.options.get("stop", ()) if part in text]
            if found:
                at, stop = min(found)
                text = text[:at]
        reason = "length" if length else "stop"
        # With logprobs 0 a request gets the log-probability of the sampled token, with False none.
        asked = call.request.logprobs is not None and call.request.logprobs is not False
        tokens = [self.tokenizer.decode([token]) for token in ids] if asked else []
        if call.api == "completions":
            return Choice({"content": text}, reason, stop, ids, logprobs, tokens)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._parser is not None:
            message = self._parsed(call, text, own)
            if message.get("tool_calls") and not length:
                reason = "tool_calls"
        return Choice(message, reason, stop, ids, logprobs, tokens)

    def readable(self, call: Call, ids: Sequence[int]) -> dict[str, str]:
        """Return the beginnings of ``reasoning`` and ``content`` that further tokens can't change."""
        text = self._text(call, ids)
        if stops := call.options.get("stop"):
            text = text[: max(0, len(text) - max(map(len, stops)) + 1)]
        if call.api == "completions" or self._parser is None:
            return {"content": text.rstrip(REPLACEMENT)}
        message = self._parsed(call, text.rstrip(REPLACEMENT), ids)  # some parsers decode the ids and ignore the text
        found = {name: str(message.get(name) or "").rstrip(REPLACEMENT) for name in ("reasoning", "content")}
        last = "content" if found["content"] else "reasoning"
        # Later tokens may make the parser remove a tool call, a special token, or outer whitespace.
        at = min((place for mark in MARKERS if (place := found[last].find(mark)) >= 0), default=len(found[last]))
        return found | {last: "" if found[last][:1].isspace() else found[last][:at].rstrip()}

    def _text(self, call: Call, ids: Sequence[int]) -> str:
        keeps = bool(call.arguments.get("tools")) or bool(self.reasoning_parser)
        return str(self.tokenizer.decode([*ids], skip_special_tokens=not keeps or call.api == "completions"))

    def _parsed(self, call: Call, text: str, ids: Sequence[int]) -> dict[str, Any]:
        try:
            reasoning, content, calls = self._parser_of(call.request, call.arguments).parse(
                text, call.request, enable_auto_tools=True, model_output_token_ids=[*ids]
            )
        except Exception:  # parsers raise many types for a malformed text
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
        return dict(clean(message))  # e.g. surrogates, written as JSON escapes in a call's arguments

    def response(self, call: Call, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Return the body of a response that isn't streamed."""
        written = sum(len(choice.ids) for choice in choices)
        body: dict[str, Any] = {
            "model": self.model,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": written,
                "total_tokens": prompt_tokens + written,
            },
        }
        if call.api == "completions":
            from vllm.entrypoints.openai.completion.protocol import CompletionResponse

            body["choices"] = [
                {
                    "index": index,
                    "text": choice.message["content"],
                    "finish_reason": choice.finish_reason,
                    "logprobs": None if call.request.logprobs is None else _flat_logprobs(choice),
                }
                for index, choice in enumerate(choices)
            ]
            return dict(CompletionResponse.model_validate(body).model_dump(mode="json"))
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

        body["choices"] = [
            {
                "index": index,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop,
                "logprobs": None,
            }
            for index, choice in enumerate(choices)
        ]
        if call.request.logprobs:
            for own, choice in zip(body["choices"], choices, strict=True):
                own["logprobs"] = {
                    "content": [
                        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
                    ]
                }
        whole: dict[str, Any] = ChatCompletionResponse.model_validate(body).model_dump(mode="json")
        return _anthropic(whole) if call.api == "messages" else whole

    @staticmethod
    def error(api: str, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error response."""
        if api == "messages":
            kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
            return {"type": "error", "error": {"type": kind or "invalid_request_error", "message": message}}
        return {"error": {"message": message, "type": code, "param": None, "code": code}}


def _texts_only(messages: Sequence[Any]) -> list[dict[str, Any]]:
    found = [dict(message) for message in messages]
    if not found:
        raise BadRequest("messages is empty, but must have at least one message.")
    for index, message in enumerate(found):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            message["content"] = parts = [dict(part) for part in content]
            for part in parts:
                if part.get("type", "text") not in ("text", "refusal"):
                    raise BadRequest(
                        f"messages.{index} has a part of type {part.get('type')!r}, but only text is supported."
                    )
        if message.get("tool_calls") is not None:
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
    return found


def _flat_logprobs(choice: Choice) -> dict[str, Any]:
    tokens, offsets = list(choice.tokens), [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    tops = [{token: logprob} for token, logprob in zip(tokens, choice.logprobs, strict=True)]
    return {
        "tokens": tokens,
        "token_logprobs": [*choice.logprobs],
        "text_offset": offsets[: len(tokens)],
        "top_logprobs": tops,
    }


def _anthropic(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of an OpenAI response into Anthropic's form."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse

    choice, usage = whole["choices"][0], whole["usage"]
    message, stopped = choice["message"], choice.get("stop_reason")
    content: list[dict[str, Any]] = []
    if message.get("reasoning"):
        content.append({"type": "thinking", "thinking": message["reasoning"], "signature": uuid.uuid4().hex})
    calls = message.get("tool_calls") or ()
    if message.get("content") or not (content or calls):
        content.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        try:
            arguments = parse_json(call["function"]["arguments"] or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": call["function"]["arguments"]}
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    found = AnthropicMessagesResponse.model_validate(
        {
            "id": f"msg_{whole['id']}",
            "model": whole["model"],
            "content": content,
            "stop_reason": "stop_sequence" if isinstance(stopped, str) else reasons[choice["finish_reason"]],
            "stop_sequence": stopped if isinstance(stopped, str) else None,
            "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
        }
    )
    plain: dict[str, Any] = found.model_dump(mode="json", exclude_none=True)
    return plain | {"stop_sequence": plain.get("stop_sequence")}
