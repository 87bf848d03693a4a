"""Request bodies of the control door: bounded before they are read, parsed once, refused by name.

Holds: never more than ``max_body_bytes`` of one body are in memory, with or without a declared length.
"""

from __future__ import annotations

from typing import TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.control.errors import unprocessable
from turnstile_server.errors import BodyTooLarge, InvalidRequest

ModelT = TypeVar("ModelT", bound=BaseModel)


class BodyLimit:
    """ASGI middleware: a body over ``max_bytes`` is 413, by its declared length or while it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"The body is larger than {max_bytes} bytes (control.max_body_bytes)."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise BodyTooLarge(self._message)
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    # The one class that FastAPI's own body parsing lets through unchanged.
                    raise HTTPException(413, self._message)
            return message

        await self._app(scope, counted_receive, send)


async def read_model(request: Request, model: type[ModelT]) -> ModelT:
    """The body as ``model``, whatever its content type says; an empty body is ``{}``.

    Raises InvalidRequest for what is not JSON (RFC 8259: no NaN) and Unprocessable, naming the fields, for
    JSON that is not this model.
    """
    raw = await request.body()
    try:
        value = from_json(raw, allow_inf_nan=False) if raw else {}
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise unprocessable(error.errors()) from error
