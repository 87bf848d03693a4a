"""Bodies, cursors and JSON that come in and go out over HTTP at the control API.

What must hold: never more than ``max_body_bytes`` of one body are in memory, with or without a declared length,
and never more than ``max_body_bytes_total`` of all; an integer keeps its value however many digits it has (readers
that turn wide integers into floats are not used).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import orjson
from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.control.errors import unprocessable
from turnstile_server.errors import BodyTooLarge, InvalidRequest, TurnstileError
from turnstile_server.http.exchange import header_count
from turnstile_server.http.intake import BodyReader, Intake, too_large
from turnstile_server.http.json_values import count_values, has_few_values
from turnstile_server.settings import ControlSettings

JSON = "application/json"

_CURSOR = re.compile(r"[0-9]{1,18}")
"""ASCII digits, few enough for 64 bits: ``str.isdigit`` accepts more than ``int`` does."""

ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")


_COMPLETIONS = "/completions"
_MORE_VALUES = 10
"""Times as many values may come where the training loop sends a completion's token ids and logprobs: flat arrays
of numbers, which are read in a tenth of the time."""


_PIECE = "/engine/weights/bucket"
"""The end of the path for a piece of new weights."""


class BodyLimit:
    """ASGI middleware: bodies are received within the settings' limits of size, time, rate and JSON values.

    A body of more than ``control.max_body_bytes`` is 413, by its declared length or while it arrives, and so is
    one of more than ``control.max_body_values``; one that finds no room beside the others
    (``control.max_body_bytes_total``) is 429, one that comes too slowly 408. Pieces of new weights have a bound of
    their own (``control.max_piece_bytes``).
    """

    def __init__(self, app: ASGIApp, settings: ControlSettings) -> None:
        self._app = app
        most = settings.max_piece_bytes
        pieces = settings.model_copy(update={"max_body_bytes": most, "max_body_bytes_total": most})
        self._bodies = (settings, Intake("control", settings))
        self._pieces = (pieces, Intake("control", pieces))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings, intake = self._pieces if scope["path"].endswith(_PIECE) else self._bodies
        declared = header_count(Headers(scope=scope), "content-length") or 0
        if declared > settings.max_body_bytes:
            raise too_large(settings, "control")
        with intake.reserving(f"request {id(scope)}", declared, "control") as reservation:
            reader: BodyReader | None = None
            whole = False
            counted = _Values(settings.max_body_values, scope["path"])

            async def measured_receive() -> Message:
                nonlocal reader, whole
                if whole:
                    return await receive()
                if reader is None:  # from the first read on: a handler may do something else before
                    reader = BodyReader(receive, reservation, intake, settings, "control")
                try:
                    message = await reader.next()
                    await counted.add(message)
                except TurnstileError as error:
                    # FastAPI's own parsing of bodies passes on this class only; ``errors`` answers with the cause.
                    raise HTTPException(error.status, error.message) from error
                whole = not message.get("more_body", False)
                return message

            await self._app(scope, measured_receive, send)


class _Values:
    """Counts the JSON values of one body: reading takes a microsecond of the event loop or more for each."""

    def __init__(self, most: int, path: str) -> None:
        self._most = most * _MORE_VALUES if path.endswith(_COMPLETIONS) else most
        self._parts: list[bytes] = []

    async def add(self, message: Message) -> None:
        """Raises BodyTooLarge, with the last message of a body."""
        self._parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            parts, self._parts = self._parts, []
            body = b"".join(parts)
            if has_few_values(body, self._most):
                return
            if await anyio.to_thread.run_sync(count_values, body, self._most) > self._most:
                raise BodyTooLarge(too_many_values(self._most))


def too_many_values(most: int) -> str:
    return f"the body has more than {most} JSON values (control.max_body_values)"


def parse_json(raw: str | bytes) -> Any:
    """Parse JSON by RFC 8259 (no NaN), integers exactly. Raises ValueError, also for more than 200 levels."""
    return from_json(raw, allow_inf_nan=False)


def json_bytes(value: Any) -> bytes:
    """Write JSON. orjson is fast and refuses integers of more than 64 bits; those take the slower way."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_response(value: Any) -> Response:
    return Response(json_bytes(value), media_type=JSON)


async def read_json(request: Request) -> Any:
    """The body's JSON, whatever its content type says; an empty body is ``{}``. Raises InvalidRequest."""
    raw = await request.body()
    try:
        return parse_json(raw) if raw else {}
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error


async def read_model(request: Request, model: type[ModelT]) -> ModelT:
    """The body as ``model``. Raises InvalidRequest where it is not JSON and Unprocessable, naming the fields,
    where it is not this model."""
    value = await read_json(request)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise unprocessable(error.errors()) from error


def cursor_position(cursor: str | None) -> int | None:
    """The number that a page gave as its cursor; None for the first page. Raises InvalidRequest."""
    if cursor is None:
        return None
    if not _CURSOR.fullmatch(cursor):
        raise InvalidRequest("cursor: not one that a page of this list gave; leave it out for the first page")
    return int(cursor)


def long_json(found: BaseModel, name: str, items: Iterable[BaseModel]) -> bytes:
    """The JSON of ``found``, of which ``items`` are the field ``name``, one of several; for a thread. They are
    written one by one: no other thread runs while pydantic writes a model, and some megabytes take it a third of a
    second."""
    rest = found.model_dump_json(exclude={name}).encode()
    listed = b",".join(item.model_dump_json().encode() for item in items)
    return b'{"%b":[%b],%b' % (name.encode(), listed, rest[1:])


async def while_connected(
    request: Request, work: Callable[[], Awaitable[T]], closing: anyio.Event | None = None
) -> T | None:
    """The result of ``work``, which may take long; None if the caller hung up or ``closing`` was set first."""
    await request.body()  # so that the next message from the caller is its disconnect
    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_disconnect, request.receive, tasks.cancel_scope)
        if closing is not None:
            tasks.start_soon(until_set, closing, tasks.cancel_scope)
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001 - raised below, outside the task group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


async def until_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when the caller hangs up, or sends a body that ``BodyLimit`` refuses."""
    with contextlib.suppress(HTTPException):
        while (await receive())["type"] != "http.disconnect":
            pass
    scope.cancel()


async def until_set(event: anyio.Event, scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when ``event`` is set."""
    await event.wait()
    scope.cancel()
