"""The control key: where it comes from, and the middleware that checks it.

What must hold: no request but those for ``/health``, ``/ready``, ``/`` (which leads to the viewer) and the
viewer's files (``/ui``, which hold no data) passes without the key, unless the setting ``control.auth`` switches
authentication off; the comparison takes the same time wherever the keys differ; the key is in no log. A request
carries it as ``Authorization: Bearer KEY``, or as the path prefix ``/k/KEY`` for clients that cannot send headers.
A browser that asks for the viewer with such a prefix is sent to the viewer's own address.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.control.viewer_routes import ROOT_PATH, is_viewer_path, key_into_fragment
from turnstile_server.data_dir import SECRET_BYTES, private_file
from turnstile_server.errors import StartupError, Unauthorized, WrongKey
from turnstile_server.http.connections import admit
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.settings import Settings

_LOG = logging.getLogger(__name__)

CONTROL_KEY_FILE = "control.key"
OPEN_PATHS = frozenset({"/health", "/ready"})

_KEY = re.compile(r"[A-Za-z0-9._~+=-]{16,}")
"""Fits both a header and one segment of a path."""

_MISSING = "The request has no control key."
_WRONG = "The control key of the request is not this server's."
_WHERE = (
    "Send it as 'Authorization: Bearer KEY', or put '/k/KEY' before the path. "
    "It is the server's TURNSTILE_CONTROL_KEY or, where that is not set, the file "
    f"'{CONTROL_KEY_FILE}' in the server's data directory."
)


def load_control_key(settings: Settings) -> str:
    """The configured control key, else that of the file in the data directory, made at the first start (mode 600).

    A configured key is written nowhere; the log says so, because the file is then missing or another server's.
    Raises StartupError if the file cannot be read or written, or the key could not be sent in a path.
    """
    path = settings.data_dir / CONTROL_KEY_FILE
    if settings.control.key is not None:
        key = _checked(settings.control.key, "TURNSTILE_CONTROL_KEY")
        _LOG.info("the control key is the configured one (TURNSTILE_CONTROL_KEY); %s is not used", path)
        return key
    raw = private_file(path, lambda: secrets.token_urlsafe(SECRET_BYTES).encode() + b"\n")
    return _checked(raw.decode("utf-8", errors="replace").strip(), str(path))


def _checked(key: str, source: str) -> str:
    if not _KEY.fullmatch(key):
        raise StartupError(
            f"The control key in {source} must be at least 16 characters of letters, digits and . _ ~ + = -"
        )
    return key


class ControlKey:
    """ASGI middleware: passes requests that carry the key, and removes the key from their path.

    The path is changed in the server's own scope, not in a copy, because the access log prints that scope.
    ``key`` None switches authentication off; a key prefix is then still removed. Raises Unauthorized (HTTP) or
    refuses the handshake with code 1008 (WebSocket); where a key was given, as late as ``wrong_keys`` says.
    """

    def __init__(self, app: ASGIApp, key: str | None, wrong_keys: WrongKeys) -> None:
        self._app = app
        self._wrong_keys = wrong_keys
        self._key = key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        offered = _take_from_path(scope)
        if self._passes(scope, offered):
            admit(scope)
            if offered is not None and scope["type"] == "http" and _is_page(scope):
                await key_into_fragment(scope, offered)(scope, receive, send)
            else:
                await self._app(scope, receive, send)
            return
        given = offered is not None or "authorization" in Headers(scope=scope)
        if given:
            is_page = scope["type"] == "http" and _is_page(scope)
            await self._wrong_keys.slow("viewer" if is_page else "control", scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "control key missing or wrong"})
        elif given:
            raise WrongKey(f"{_WRONG} {_WHERE}")
        else:
            raise Unauthorized(f"{_MISSING} {_WHERE}")

    def _passes(self, scope: Scope, offered: str | None) -> bool:
        if self._key is None:
            return True
        if offered is None and scope["type"] == "http" and is_open_path(scope["path"]):
            return True
        if offered is None:
            offered = _bearer(Headers(scope=scope).get("authorization", ""))
        return hmac.compare_digest(offered.encode("utf-8", errors="replace"), self._key)


def _is_page(scope: Scope) -> bool:
    return is_viewer_path(scope["path"]) or (scope["path"] == ROOT_PATH and scope["method"] in ("GET", "HEAD"))


def is_open_path(path: str) -> bool:
    """True if requests for this path pass without the key."""
    return path in OPEN_PATHS or path == ROOT_PATH or is_viewer_path(path)


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
    scope["raw_path"] = raw_slash + raw_rest  # empty without a slash: relative addresses are others there
    return key
