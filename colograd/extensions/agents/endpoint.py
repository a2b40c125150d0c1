"""The HTTP endpoint that agents' programs call: OpenAI's chat completions, completions, models; Anthropic's messages.

`served` runs the endpoint on loopback, in a thread, during a generation. A request's API key identifies its session.
Streamed tokens are sent while they are sampled. A streamed request for several answers gets all answers at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...batch import FinishReason
from ...engine.sampling import Sampling, request_seed
from ...usercode.untrusted import CHARACTERS, parse_json
from .context import Context, TooLong, UnreadableMessages
from .decoding import Work, WorkQueue
from .engine.chat_api import BadRequest, Call, ChatAPI, Choice
from .engine.chat_stream import Stream
from .session import Session

T = TypeVar("T")
APIS = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/messages": "messages"}
GRACE_SECONDS = 1  # Seconds for the server to finish sending answers when it ends.
STOP_SECONDS = 10.0  # Maximum seconds to wait for the server's thread to end.
KEEP_ALIVE_SECONDS = 600  # Seconds to keep an idle connection, because a tool may run for long between two requests.


class ClientGone(Exception):
    """The agent's program has closed the connection before its answer was complete."""


class _Events(StreamingResponse):
    """A response of server-sent events. ``closing`` is closed at the end, even if sending fails."""

    def __init__(self, events: Iterable[str] | AsyncIterator[str], closing: contextlib.ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._closing:
            await super().__call__(scope, receive, send)


class Endpoint:
    """Answers the HTTP requests of all agent sessions of one generation.

    Args:
        seeds: the run's seed, and the purpose (`train` or `eval`).
        context: maximum number of tokens in a sequence.
        refuses: whether a request with sampling settings other than the run's is an error, not an untrained answer.
    """

    def __init__(
        self, api: ChatAPI, queue: WorkQueue, sampling: Sampling, seeds: tuple[int, str], context: int, refuses: bool
    ) -> None:  # fmt: skip
        self.api, self.queue, self.sampling, self.context, self.refuses = api, queue, sampling, context, refuses
        self._seed, self._purpose = seeds
        self.sessions: dict[str, Session] = {}  # sessions by API key, including ended sessions
        routes = [Route(path, self._answering(api_name), methods=["POST"]) for path, api_name in APIS.items()]
        routes.append(Route("/v1/models", self._models, methods=["GET"]))
        handlers: Mapping[Any, Callable[..., Any]] = {404: self._no_such_path, 405: self._no_such_path}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    async def _models(self, request: Request) -> Response:
        try:
            self._session_of(request)
        except BadRequest as error:
            return self._failed("chat", error)
        card = {"id": self.api.model, "object": "model", "created": 0, "owned_by": "colograd"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self.context}]})

    async def _no_such_path(self, request: Request, error: Exception) -> Response:
        there = f"there are POST {', '.join(APIS)} and GET /v1/models."
        missing = f"{request.method} {request.url.path} isn't served here: {there}"
        return self._failed("chat", BadRequest(missing, 404, "not_found"))

    def _answering(self, api: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await self._answer(api, request)
            except BadRequest as error:
                return self._failed(api, error)
            except ClientGone:
                return Response(status_code=499)
            except Exception as error:  # an error of the endpoint must not end the session
                return self._failed(api, BadRequest(f"{type(error).__name__}: {error}", 500, "internal_error"))

        return answer

    def _failed(self, api: str, error: BadRequest) -> Response:
        return JSONResponse(self.api.error(api, error.status, error.code, str(error)), error.status)

    def _session_of(self, request: Request) -> Session:
        key = request.headers.get("x-api-key", "")
        bearer = request.headers.get("authorization", "")
        if bearer.lower().startswith("bearer "):
            key = bearer[7:].strip()
        session = self.sessions.get(key)
        if session is None:
            raise BadRequest("no session has this API key: use the api_key that the program was given.", 401, "no_key")
        return session

    async def _answer(self, api: str, request: Request) -> Response:
        began = time.perf_counter()
        session = self._session_of(request)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > session.limits.body:
                raise BadRequest(f"the request has more than {session.limits.body} bytes.", 413, "too_large")
        try:
            content = parse_json(bytes(body), finite=True)
        except ValueError as error:
            raise BadRequest(f"the request's body isn't JSON: {error}") from None
        call = self.api.read(api, content, self.sampling)
        if call.shaping and self.refuses:
            name, value = next(iter(call.shaping.items()))
            own = self.sampling.temperature if name == "temperature" else self.sampling.options.get(name, "not set")
            raise BadRequest(
                f"{name} is {value!r}, but this run samples with {own!r}: tokens sampled with other settings would "
                "bias the update. Leave it out, or set agent_sampling: untrained in the run, which answers such "
                "requests without training on them.",
                400,
                "sampling_settings",
            )
        count = call.n * max(len(call.prompts), 1)
        session.begin(count)
        with contextlib.ExitStack() as closing:
            closing.callback(session.end, count)
            contexts = self._contexts(session, call)
            works = [self._work(session, call, ids) for ids, _ in contexts]
            news: asyncio.Queue[list[int] | None] = asyncio.Queue()  # all tokens so far; None at the end
            if call.stream and count == 1:
                works[0].more = news.put_nowait
            closing.enter_context(self._in_the_queue(session, works))
            done = asyncio.gather(*(work.future for work in works))
            done.add_done_callback(lambda _: news.put_nowait(None))
            first = await _unless_gone(request, news.get())
            read = sum(len(ids) for ids, _ in contexts)

            def choices() -> list[Choice]:
                answers: list[Choice] = []
                for (ids, context), samples in zip(contexts, done.result(), strict=True):
                    own = [
                        self.api.choice(
                            call, sample.ids, sample.logprobs, sample.finish_reason is not FinishReason.STOP,
                            session.form.ends,
                        )
                        for sample in samples
                    ]  # fmt: skip
                    session.record(call, context, ids, samples, own, began)
                    answers += own
                return answers

            if first is None and not call.stream:
                return JSONResponse(self.api.response(call, choices(), read))
            if first is None:
                stream = Stream(self.api, call, read)
                return _Events([*stream.begin(), *stream.end(choices())], closing.pop_all())
            return _Events(self._streamed(Stream(self.api, call, read), first, news, choices), closing.pop_all())

    async def _streamed(
        self, stream: Stream, first: list[int], news: asyncio.Queue[list[int] | None],
        choices: Callable[[], list[Choice]],
    ) -> AsyncIterator[str]:  # fmt: skip
        """Yield the server-sent events of one answer while its tokens are sampled."""
        ids: list[int] | None = first
        for event in stream.begin():
            yield event
        while ids is not None:
            for event in stream.more(ids):
                yield event
            ids = await news.get()
        try:
            for event in stream.end(choices()):
                yield event
        except BadRequest as error:  # the session ended while this answer was streamed
            told = self.api.error(stream.call.api, error.status, error.code, str(error))
            yield f"event: error\ndata: {json.dumps(told)}\n\n"

    def _contexts(self, session: Session, call: Call) -> list[tuple[list[int], Context | None]]:
        """Return (token ids, context) per prompt of a request. The context is None for a request without messages."""
        pairs: list[tuple[list[int], Context | None]]
        try:
            if call.messages is None:
                pairs = [(self._prompt_ids(session, prompt), None) for prompt in call.prompts]
            else:
                context = session.contexts.context(call.messages, call.arguments, CHARACTERS * self.context)
                pairs = [(context.ids, context)]
            for ids, _ in pairs:
                if not ids:
                    raise BadRequest("the prompt has no tokens.")
                if len(ids) >= self.context:
                    raise TooLong(f"{len(ids)} tokens")
        except TooLong as error:
            raise BadRequest(
                f"the prompt has {error}, but the context of {self.context} tokens also needs room for one new token: "
                "shorten the prompt (or raise vllm_max_model_length).",
                400,
                "context_length_exceeded",
            ) from None
        except (BadRequest, UnreadableMessages) as error:
            raise BadRequest(str(error)) from None
        except Exception as error:  # malformed messages may cause any type of error
            raise BadRequest(f"the messages can't be read: {type(error).__name__}: {error}") from None
        return pairs

    def _prompt_ids(self, session: Session, prompt: str | list[int]) -> list[int]:
        tokenizer = session.form.tokenizer
        if isinstance(prompt, str):
            if len(prompt) > CHARACTERS * self.context:
                raise TooLong(f"{len(prompt)} characters")
            ids: list[int] = tokenizer.encode(prompt)
            return ids
        if strange := [token for token in prompt if not 0 <= token < len(tokenizer)]:
            raise BadRequest(f"the prompt has the token {strange[0]}, but the tokenizer has {len(tokenizer)} tokens.")
        return prompt

    def _work(self, session: Session, call: Call, ids: list[int]) -> Work:
        seed = request_seed(self._seed, session.prompt.position, f"{self._purpose}/{session.seed_text(ids)}")
        sampling = dataclasses.replace(
            self.sampling,
            n=call.n,
            max_tokens=min(call.max_tokens or self.sampling.max_tokens, self.sampling.max_tokens),
            temperature=self.sampling.temperature if call.temperature is None else call.temperature,
            options=self.sampling.options | call.options,
        )
        return Work(ids, sampling, seed)

    @contextlib.contextmanager
    def _in_the_queue(self, session: Session, works: list[Work]) -> Iterator[None]:
        """Queue requests for the engine, and drop the unfinished requests when the context manager ends."""
        session.working.update(works)
        for work in works:
            self.queue.put(work)
        if not session.is_open:  # a thread that didn't see these requests has closed the session
            self.close(session, session.why_closed)
        try:
            yield
        finally:
            session.working.difference_update(works)
            for work in works:
                if not work.future.done():
                    work.future.cancel()
                    self.queue.drop(work)

    def close(self, session: Session, why: str) -> None:
        """End a session and fail its open requests. Any thread may call this method."""
        session.close(why)
        for work in session.working.copy():  # a copy, because the endpoint's thread changes the set
            self.queue.drop(work)
            work.fail(BadRequest(f"this session is over: {why}.", 410, "session_over"))


async def _unless_gone(request: Request, result: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result. Raise ClientGone if the program disconnects before the result."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone, coming = asyncio.ensure_future(disconnected()), asyncio.ensure_future(result)
    both: list[asyncio.Future[Any]] = [gone, coming]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise ClientGone
        return coming.result()
    finally:
        gone.cancel()
        coming.cancel()


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application on loopback, in a thread. Yield its address, such as ``http://127.0.0.1:41234``."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, lifespan="off", ws="none", date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="colograd-endpoint", daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.005)
            if not thread.is_alive():
                raise RuntimeError("the agents' endpoint didn't start: see the error above.")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(STOP_SECONDS)
