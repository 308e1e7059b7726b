"""Bodies of requests as rows to predict; whatever is wrong with one is said in a sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from smallbert.serving.kinds import Kind


class Refusal(Exception):
    """A request that is not answered: the status and the sentence that the client gets."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None):
        super().__init__(sentence)
        self.status, self.headers = status, headers or {}


async def read_body(request: Request, most: int, seconds: float, take: Callable[[int], None]) -> bytes:
    """The body, unless it is too big (said as soon as that is known, whatever its headers say) or too slow.

    `take` is told of every byte that is kept from now on, and may refuse.
    """
    too_big = Refusal(413, f"the body is larger than {most:,} bytes; send fewer or shorter texts at a time")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:18]) > most:
        raise too_big
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                if len(body) + len(chunk) > most:
                    raise too_big
                take(len(chunk))
                body += chunk
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {seconds:g} seconds", {"Connection": "close"}) from None
    except ClientDisconnect:
        raise Refusal(400, "the connection was closed before the body was whole") from None
    return bytes(body)


def read_rows(body: bytes, kind: Kind, most: int) -> list[Any]:
    """The rows of a body.

    {"texts": ["good", "bad"]}          ->  ["good", "bad"]
    {"text": "good"}                    ->  ["good"]
    {"texts": [["a man", "a boy"]]}     ->  [("a man", "a boy")]
    {"question": "…", "context": "…"}   ->  [("…", "…")], where the model answers questions
    """
    given = _values(_parse(body), kind)
    if not given:
        raise Refusal(422, '"texts" is empty; give at least one text')
    if len(given) > most:
        raise Refusal(413, f"{len(given):,} texts were given; at most {most:,} are accepted at a time")
    rows = []
    for number, value in enumerate(given):
        row = kind.read(value)
        if row is None:
            raise Refusal(422, f"text {number} is not {kind.wants}; nothing else is accepted")
        if not _is_text(row):
            raise Refusal(422, f"text {number} holds half a character (a lone surrogate), which is not text")
        rows.append(row)
    return rows


def _parse(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        raise Refusal(400, f'the body is not JSON ({why}); send something like {{"text": "good"}}') from None
    if not isinstance(found, dict):
        raise Refusal(422, 'the body must be a JSON object, such as {"texts": ["good", "bad"]}')
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The names and values of an object; of a name that is there twice nobody knows which value is meant."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Refusal(422, f"{name[:40]!r} was given more than once; give it once")
        found[name] = value
    return found


def _values(found: dict[str, Any], kind: Kind) -> list[Any]:
    if kind.named and found.keys() == kind.named:
        return [found]
    if found.keys() == {"text"}:
        return [found["text"]]
    if found.keys() != {"texts"}:
        names = ", ".join(repr(name[:40]) for name in found) or "nothing"
        other = ', or "question" and "context"' if kind.named else ""
        raise Refusal(422, f'{names[:200]} was given; give either "text" or "texts"{other}, and nothing else')
    if not isinstance(found["texts"], list):
        raise Refusal(422, '"texts" must be a list; for one text write "text"')
    return found["texts"]


def _is_text(row: Any) -> bool:
    try:
        return "".join([row] if isinstance(row, str) else row).encode("utf-8") is not None
    except UnicodeEncodeError:
        return False
