"""The HTTP endpoint that agents call: OpenAI's chat completions, completions and models, Anthropic's messages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...engine.sampling import Sampling, request_seed
from ...usercode.untrusted import CHARACTERS, parse_json
from .context import Context, TooLong
from .engine.chat_api import BadRequest, Call, ChatAPI, Choice, events
from .session import Session, Work, WorkQueue

APIS = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/messages": "messages"}
LARGEST = 32 * 2**20  # Maximum bytes of a request's body.
GRACE_SECONDS = 1
STOP_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 600  # An idle connection stays open as long. A tool may run for minutes between requests.


class Endpoint:
    """Answers the HTTP requests of agents' sessions. ``context``: maximum tokens of a prompt and its answer."""

    def __init__(
        self, api: ChatAPI, queue: WorkQueue, sampling: Sampling, seed: int, purpose: str, context: int
    ) -> None:
        self.api, self.queue, self.sampling, self.context = api, queue, sampling, context
        self._seed, self._purpose = seed, purpose
        self.sessions: dict[str, Session] = {}  # Running and ended sessions by API key.
        routes = [Route(path, partial(self._respond, api_name), methods=["POST"]) for path, api_name in APIS.items()]
        routes.append(Route("/v1/models", partial(self._respond, "models"), methods=["GET"]))
        handlers: Mapping[Any, Callable[..., Any]] = {404: self._no_such_path, 405: self._no_such_path}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def _no_such_path(self, request: Request, error: Exception) -> Response:
        there = f"there are POST {', '.join(APIS)} and GET /v1/models."
        missing = f"{request.method} {request.url.path} isn't served here: {there}"
        return self._failed("chat", BadRequest(missing, 404, "not_found"))

    async def _respond(self, api: str, request: Request) -> Response:
        try:
            bearer = request.headers.get("authorization", "")
            has_bearer = bearer.lower().startswith("bearer ")
            key = bearer[7:].strip() if has_bearer else request.headers.get("x-api-key", "")
            if (session := self.sessions.get(key)) is None:
                raise BadRequest(
                    "no session has this API key: use the agent's argument `api_key`, or OPENAI_API_KEY.", 401, "no_key"
                )
            if api != "models":
                return await self._answer(api, session, request)
            card = {"id": self.api.model, "object": "model", "created": 0, "owned_by": "colograd"}
            return JSONResponse({"object": "list", "data": [card | {"max_model_len": self.context}]})
        except BadRequest as error:
            return self._failed(api, error)
        except Exception as error:
            return self._failed(api, BadRequest(f"{type(error).__name__}: {error}", 500, "internal_error"))

    def _failed(self, api: str, error: BadRequest) -> Response:
        message = {"message": str(error)}
        if api == "messages":
            kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
            message["type"] = kinds.get(error.status, "invalid_request_error")
            return JSONResponse({"type": "error", "error": message}, error.status)
        return JSONResponse({"error": message | {"type": error.code, "param": None, "code": error.code}}, error.status)

    async def _call(self, api: str, session: Session, request: Request) -> Call:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                raise BadRequest(f"the request has more than {LARGEST} bytes: shorten it.", 413, "too_large")
        try:
            content = parse_json(bytes(body), finite=True)
        except ValueError as error:
            raise BadRequest(f"the request's body isn't JSON: {error}") from None
        call = self.api.read(api, content, self.sampling)
        if call.shaping and session.config.agent_sampling == "refuse":
            name, value = next(iter(call.shaping.items()))
            of_run = self.sampling.temperature if name == "temperature" else self.sampling.options.get(name, "not set")
            raise BadRequest(
                f"{name} is {value!r} in the request, but {of_run} in this run: tokens sampled with other settings "
                "would bias the update. Leave the parameter out, or set `agent_sampling: untrained` in the recipe. "
                "Then the endpoint answers the request, and the run doesn't train on the answer.",
                code="sampling_settings",
            )
        return call

    async def _answer(self, api: str, session: Session, request: Request) -> Response:
        began, call = time.perf_counter(), await self._call(api, session, request)
        count = call.sampling.n * max(len(call.prompts), 1)
        works: list[Work] = []
        session.begin(count)
        try:
            contexts = self._contexts(session, call)
            for ids, _ in contexts:
                text = f"{self._purpose}/{session.seed_text(ids)}"
                works.append(Work(ids, call.sampling, request_seed(self._seed, session.prompt.position, text)))
            session.working.update(works)
            for work in works:
                self.queue.put(work)
            if session.why_closed:  # The engine's thread may have closed the session before `working` had these works.
                self.close(session, session.why_closed)
            done = asyncio.gather(*(asyncio.wrap_future(work.future) for work in works))

            async def disconnected() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass

            leaving = asyncio.ensure_future(disconnected())
            either: set[asyncio.Future[Any]] = {done, leaving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return Response(status_code=499)
            leaving.cancel()
            choices: list[Choice] = []
            for (ids, context), samples in zip(contexts, await done, strict=True):
                answers = [self.api.choice(call, sample, session.form.ends) for sample in samples]
                session.record(call, context, ids, samples, answers, began)
                choices += answers
            answer = self.api.response(call, choices, sum(len(ids) for ids, _ in contexts))
            if call.request.stream:
                return Response("".join(events(call, answer)), media_type="text/event-stream")
            return JSONResponse(answer)
        finally:
            session.end(count)
            session.working.difference_update(works)
            for work in works:
                work.future.cancel()
            self.queue.wake()

    def _contexts(self, session: Session, call: Call) -> list[tuple[list[int], Context | None]]:
        tokenizer, most = session.form.tokenizer, CHARACTERS * self.context
        pairs: list[tuple[list[int], Context | None]] = []
        try:
            if call.messages is not None:
                context = session.contexts.context(call.messages, call.arguments, most)
                pairs = [(context.ids, context)]
            for prompt in call.prompts:
                if isinstance(prompt, str):
                    if len(prompt) > most:
                        raise TooLong(f"{len(prompt)} characters")
                    prompt = tokenizer.encode(prompt)
                elif strange := [token for token in prompt if not 0 <= token < len(tokenizer)]:
                    size = len(tokenizer)
                    raise BadRequest(f"the prompt has the token {strange[0]}, but the tokenizer has {size} tokens.")
                pairs.append((prompt, None))
            for ids, _ in pairs:
                if not ids:
                    raise BadRequest("the prompt has no tokens.")
                if len(ids) >= self.context:
                    raise TooLong(f"{len(ids)} tokens")
        except TooLong as error:
            raise BadRequest(
                f"the prompt has {error}, but the context of {self.context} tokens also needs room for one new token: "
                "shorten the prompt (or raise vllm_max_model_length).",
                code="context_length_exceeded",
            ) from None
        except BadRequest:
            raise
        except Exception as error:  # Malformed messages may cause any type of error.
            raise BadRequest(f"the messages can't be read: {type(error).__name__}: {error}") from None
        return pairs

    def close(self, session: Session, why: str) -> None:
        """End a session and fail its open requests. Any thread may call this."""
        session.close(why)
        for work in session.working.copy():  # A copy, because the endpoint's thread may change the set.
            work.finish(session.over())
        self.queue.wake()


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application in a thread. Yield its address, such as ``http://127.0.0.1:41234``."""
    config = uvicorn.Config(
        app, port=0, log_level="critical", access_log=False, lifespan="off", ws="none", date_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=GRACE_SECONDS,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="colograd-endpoint", daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.005)
        if not thread.is_alive():
            raise RuntimeError("the agents' endpoint didn't start: see the error above.")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS)
