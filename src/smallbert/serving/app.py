"""The routes of a server, and what it answers when something is wrong: always a sentence, never a traceback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smallbert import __version__
from smallbert.serving.batching import Batcher
from smallbert.serving.kinds import kind_of
from smallbert.serving.metrics import TYPE, Metrics
from smallbert.serving.model import Model
from smallbert.serving.requests import Refusal, read_body, read_rows

ROUTES = {"/": "GET", "/health": "GET", "/metrics": "GET", "/predict": "POST"}
TOKENISERS = 2  # threads, so that one huge text does not hold up all others


@dataclass(frozen=True)
class Limits:
    """What a server takes, and how long it waits."""

    batch: int = 32  # texts that run together
    wait: float = 0.002  # seconds that a text waits for company
    queue: int = 1024  # texts under way; beyond that requests are turned away
    texts: int = 64  # in one request; a long context counts once for each of its windows
    body: int = 1_000_000  # bytes
    seconds: float = 30.0  # for a body to arrive, and then for its predictions
    strict: bool = False  # refuse what is too long instead of cutting it
    bodies: int = 256_000_000  # bytes of all that are being read


class Service:
    """One model behind the routes: who is let in, and what is done with it."""

    def __init__(self, model: Model, limits: Limits):
        self.model, self.limits, self.metrics = model, limits, Metrics()
        self.kind = kind_of(model)
        self.held = 0  # texts under way, known only once a body was read
        self.reading = 0  # bytes of bodies that are not read to their end
        self.batcher: Batcher | None = None
        self.tokenisers = ThreadPoolExecutor(TOKENISERS, "tokeniser")

    @asynccontextmanager
    async def life(self, app: FastAPI) -> AsyncIterator[None]:
        """Work from start to shutdown; uvicorn has waited for all requests by then, or cancelled them."""
        limits = self.limits
        self.batcher = Batcher(self.model.score, limits.batch, limits.wait, self.metrics.batches.add)
        yield
        # In a thread: requests that were cancelled just now get their answers from the event loop.
        await asyncio.to_thread(self.batcher.close, 1.0)
        self.tokenisers.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """Whether predictions are made."""
        return self.batcher is not None and self.batcher.thread.is_alive() and not self.batcher.closing

    async def predict(self, request: Request) -> Response:
        """POST /predict."""
        try:
            return await self._answer(request)
        except asyncio.CancelledError:  # uvicorn cancels what outlasts its patience at shutdown, and nobody else does
            raise Refusal(503, "this server is stopping; try again in a second", {"Retry-After": "1"}) from None

    async def _answer(self, request: Request) -> Response:
        with self._room(1):  # so that bodies of the many who are turned away are not even read
            pass
        rows = read_rows(await self._read(request), self.kind, self.limits.texts)
        try:
            with self._room(len(rows)):
                async with asyncio.timeout(self.limits.seconds):
                    predictions = await self._predict_rows(rows)
        except TimeoutError:
            raise Refusal(504, f"there was no answer within {self.limits.seconds:g} seconds; try again") from None
        return JSONResponse({"predictions": predictions})

    async def _read(self, request: Request) -> bytes:
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.reading + size > self.limits.bodies:
                raise _full()
            self.reading, mine = self.reading + size, mine + size

        try:
            return await read_body(request, self.limits.body, self.limits.seconds, take)
        finally:
            self.reading -= mine

    async def _predict_rows(self, rows: list[Any]) -> list[dict[str, Any]]:
        assert self.batcher is not None
        loop, limits = asyncio.get_running_loop(), self.limits
        encoded = await loop.run_in_executor(self.tokenisers, self.kind.encode, self.model, rows)
        cut = [number for number, one in enumerate(encoded) if one.cut]
        if cut and limits.strict:
            raise Refusal(422, f"text {cut[0]} is longer than the {self.model.length} tokens that this model reads")
        pieces = [piece for one in encoded for piece in one.pieces]
        if len(pieces) > limits.texts:
            raise Refusal(413, f"these contexts fill {len(pieces):,} windows; at most {limits.texts:,} are accepted")
        with self._room(len(pieces) - len(rows)):
            scores = iter(await asyncio.gather(*self.batcher.put(pieces)))
        self.metrics.texts += len(rows)
        self.metrics.cut += len(cut)
        return [
            {**self.kind.tell(self.model, one, [next(scores) for _ in one.pieces]), "cut": one.cut} for one in encoded
        ]

    @contextmanager
    def _room(self, texts: int) -> Iterator[None]:
        """Count texts as under way, or turn them away."""
        if self.held + texts > self.limits.queue:
            raise _full()
        self.held += texts
        try:
            yield
        finally:
            self.held -= texts

    async def health(self) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ready" if self.ready else "not ready"}, 200 if self.ready else 503)

    async def tell_metrics(self) -> Response:
        """GET /metrics."""
        waiting = self.batcher.waiting if self.batcher else 0
        return PlainTextResponse(self.metrics.render(waiting, self.ready), media_type=TYPE)

    async def about(self) -> Response:
        """GET /."""
        routes = [f"{method} {path}" for path, method in ROUTES.items()]
        asked = f'{{"texts": [...]}}, each {self.kind.wants}'
        return JSONResponse({**self.model.facts(), "routes": routes, "predict": asked, "smallbert": __version__})


class Counting:
    """Counts every answer by its path and status, those of unknown paths together."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and watch what is answered."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, status = time.perf_counter(), 500  # of what raises, and is answered further out

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            path = scope["path"] if scope["path"] in ROUTES else "other"
            self.metrics.answered(path, status, time.perf_counter() - begun)


def make_app(model: Model, limits: Limits | None = None) -> FastAPI:
    """The server as an ASGI application."""
    service = Service(model, limits or Limits())
    app = FastAPI(lifespan=service.life, openapi_url=None, redirect_slashes=False)
    does: dict[str, Callable[..., Any]] = {
        "/": service.about,
        "/health": service.health,
        "/metrics": service.tell_metrics,
        "/predict": service.predict,
    }
    for path, method in ROUTES.items():
        app.add_api_route(path, does[path], methods=["GET", "HEAD"] if method == "GET" else [method])
    app.state.metrics = service.metrics  # for what is refused before it comes here
    app.add_middleware(Counting, metrics=service.metrics)
    app.add_exception_handler(Refusal, _refuse)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(Exception, _broken)
    return app


def _full() -> Refusal:
    return Refusal(503, "too many texts are waiting already; try again in a second", {"Retry-After": "1"})


async def _refuse(request: Request, error: Any) -> Response:
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _unknown(request: Request, error: Any) -> Response:
    """Paths and methods that do not exist."""
    known = ", ".join(f"{method} {path}" for path, method in ROUTES.items())
    asked = f"{request.method} {request.url.path[:100]}"
    return JSONResponse({"error": f"there is no {asked}; there is: {known}"}, error.status_code, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    """What went wrong is on the server's own stderr."""
    return JSONResponse({"error": "internal error of the server, not of your request"}, 500)
