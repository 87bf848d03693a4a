"""The control key: where it comes from, and the middleware that asks for it.

Holds: no request but ``/health`` and ``/ready`` passes without the key (unless authentication is switched off
by name); the comparison takes the same time wherever the keys differ; the key is in no log. The key comes as
``Authorization: Bearer KEY`` or as the path prefix ``/k/KEY`` (for clients that cannot send headers).

A secret is made once per data directory, readable by its owner only, and never written anywhere else.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.errors import StartupError, Unauthorized
from turnstile_server.settings import Settings

CONTROL_KEY_FILE = "control.key"
SECRET_FILE = "server.secret"
SECRET_BYTES = 32
OPEN_PATHS = frozenset({"/health", "/ready"})

_KEY = re.compile(r"[A-Za-z0-9._~+=-]{16,}")
"""What fits both a header and one segment of a path."""

_MISSING = "The request has no control key."
_WRONG = "The control key of the request is not this server's."
_WHERE = (
    "Send it as 'Authorization: Bearer KEY', or put '/k/KEY' before the path. "
    "It is the server's TURNSTILE_CONTROL_KEY or, where that is not set, the file "
    f"'{CONTROL_KEY_FILE}' in the server's data directory."
)


def load_control_key(settings: Settings) -> str:
    """The configured control key, or the one in the data directory, made at first start (mode 600).

    Raises StartupError when it cannot be read or written, or could not be sent in a path.
    """
    if settings.control.key is not None:
        return _checked(settings.control.key, "TURNSTILE_CONTROL_KEY")
    path = settings.data_dir / CONTROL_KEY_FILE
    raw = _load_or_make(path, lambda: secrets.token_urlsafe(SECRET_BYTES).encode() + b"\n")
    return _checked(raw.decode("utf-8", errors="replace").strip(), str(path))


def load_secret(data_dir: Path) -> bytes:
    """The 32 random bytes that episode keys are derived from, made at first start (mode 600).

    Raises StartupError when the file cannot be read or written or is damaged.
    """
    path = data_dir / SECRET_FILE
    secret = _load_or_make(path, lambda: secrets.token_bytes(SECRET_BYTES))
    if len(secret) != SECRET_BYTES:
        raise StartupError(
            f"{path} holds {len(secret)} bytes instead of {SECRET_BYTES}. Restore it, or delete it to get a new "
            "one (keys of running episodes die)."
        )
    return secret


def _checked(key: str, source: str) -> str:
    if not _KEY.fullmatch(key):
        raise StartupError(
            f"The control key in {source} must be at least 16 characters of letters, digits and . _ ~ + = -"
        )
    return key


def _load_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_private(path, make())
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot keep a secret in {path}: {error.strerror or error}.") from error


def _write_private(path: Path, data: bytes) -> None:
    """Writes a whole file of mode 600 or none, and never over one that another process was faster to make."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            return
    finally:
        partial.unlink(missing_ok=True)


class ControlKey:
    """ASGI middleware: lets a request through when it carries the key, and takes the key out of its path.

    The path is changed in the server's own scope, not in a copy, because the access log prints that scope.
    ``key`` None switches authentication off; a key prefix is then still removed. Raises Unauthorized (HTTP) or
    refuses the handshake with code 1008 (WebSocket).
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        offered = _take_from_path(scope)
        if self._passes(scope, offered):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "control key missing or wrong"})
        else:
            given = offered is not None or "authorization" in Headers(scope=scope)
            raise Unauthorized(f"{_WRONG if given else _MISSING} {_WHERE}")

    def _passes(self, scope: Scope, offered: str | None) -> bool:
        if self._key is None:
            return True
        if offered is None and scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        if offered is None:
            offered = _bearer(Headers(scope=scope).get("authorization", ""))
        return hmac.compare_digest(offered.encode("utf-8", errors="replace"), self._key)


def _bearer(header: str) -> str:
    scheme, _, credentials = header.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else ""


def _take_from_path(scope: Scope) -> str | None:
    """Removes ``/k/KEY`` from the scope's path and gives KEY; None when the path has no such prefix."""
    path: str = scope["path"]
    if not path.startswith("/k/"):
        return None
    key, slash, rest = path.removeprefix("/k/").partition("/")
    scope["path"] = slash + rest or "/"
    # The raw path is percent-encoded; a key needs no encoding, so its segment ends at the same slash.
    _, raw_slash, raw_rest = scope.get("raw_path", b"").removeprefix(b"/k/").partition(b"/")
    scope["raw_path"] = raw_slash + raw_rest or b"/"
    return key
