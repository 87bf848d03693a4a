"""The viewer's files at ``/ui``: a page, its script and its style, the same for everybody.

They are served without the key, because they hold no data: the page asks for the key and sends it with its own
requests. What must hold: every answer carries ``SECURITY_HEADERS``; an address of the script or the style names
its content, so that browsers keep it for good and never mix two versions; the page names them relative to its own
address, so that a reverse proxy may serve the viewer under any prefix.

The files themselves have fixed names, so that a new build is a change of the same files to git.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from turnstile_server.errors import NotFound

VIEWER_PATH = "/ui"
ROOT_PATH = "/"
"""Leads to the viewer."""
INDEX = "index.html"
ASSETS = {"app.js": "text/javascript; charset=utf-8", "app.css": "text/css; charset=utf-8"}
"""Media types of what the page loads. ``make ui`` builds them into the package ``turnstile_server.viewer``."""

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SECURITY_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_GREETING = "This is a Turnstile server. Its viewer is at /ui; the API asks for the control key.\n"
_FOREVER = "public, max-age=31536000, immutable"
_FOLDER = "{assets}"
"""Stands in ``index.html`` for the folder of the script and the style."""
_SERVED = "{served}"
"""Stands there for what is looked at."""


@dataclass(frozen=True, slots=True)
class ViewerFile:
    """A file as it is sent, whole and compressed."""

    media_type: str
    content: bytes
    compressed: bytes
    etag: str

    @classmethod
    def of(cls, content: bytes, media_type: str) -> ViewerFile:
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(media_type, content, gzip.compress(content, mtime=0), f'"{digest}"')


def is_viewer_path(path: str) -> bool:
    """True if a path of the control API belongs to the viewer."""
    return path == VIEWER_PATH or path.startswith(f"{VIEWER_PATH}/")


def key_into_fragment(scope: Scope, key: str) -> Response:
    """Sends a browser that named the key in the path (``/k/KEY/ui``, ``/k/KEY``) to the page's own address.

    The key travels in the fragment, which is in no log and no ``Referer``, and which the page removes at once. The
    address is relative, for proxies with a prefix.
    """
    path = scope["raw_path"].decode("ascii")
    up, below = "../" * (1 + path.count("/")), path[len(VIEWER_PATH) :]
    query = scope["query_string"].decode("ascii")
    address = f"{up}ui{below}{'?' if query else ''}{query}#key={quote(key, safe='', errors='replace')}"
    return Response(
        status_code=303, headers={**SECURITY_HEADERS, "location": address, "cache-control": "no-store"}
    )


def build_viewer_router(*, served: Literal["server", "directory"] = "server") -> APIRouter:
    """All routes of this module. Reads and compresses the files once, some 100 KB.

    ``served``: a page of a ``directory`` asks for nothing that only a server has."""
    folder = files("turnstile_server.viewer")
    assets = {name: ViewerFile.of(folder.joinpath(name).read_bytes(), kind) for name, kind in ASSETS.items()}
    index = folder.joinpath(INDEX).read_text("utf-8").replace(_SERVED, served)
    version = hashlib.sha256("".join(asset.etag for asset in assets.values()).encode()).hexdigest()[:16]
    router = APIRouter()

    @router.api_route(ROOT_PATH, methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> Response:
        """People who open the server's address look for a page. Relative, for proxies with a prefix."""
        headers = {**SECURITY_HEADERS, "location": VIEWER_PATH.removeprefix("/"), "cache-control": "no-store"}
        return PlainTextResponse(_GREETING, 303, headers)

    @router.api_route(VIEWER_PATH, methods=["GET", "HEAD"], include_in_schema=False)
    async def start(request: Request) -> Response:
        return page(request, f"ui/assets/{version}")

    @router.api_route(VIEWER_PATH + "/assets/{digest}/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def asset(request: Request, digest: str, name: str) -> Response:
        """An address of another version gets this version's file, which is not kept: the page is newer by then."""
        if name not in assets:
            raise NotFound(f"the viewer has no file {name[:100]!r}")
        return _answer(request, assets[name], _FOREVER if digest == version else "no-cache")

    @router.api_route(VIEWER_PATH + "/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def any_page(request: Request, path: str) -> Response:
        """Every other address is a page, which the script makes."""
        below = request.scope["raw_path"].decode("ascii").removeprefix(f"{VIEWER_PATH}/")
        return page(request, "../" * below.count("/") + f"assets/{version}")

    def page(request: Request, folder: str) -> Response:
        content = index.replace(_FOLDER, folder).encode()
        return _answer(request, ViewerFile.of(content, "text/html; charset=utf-8"), "no-cache")

    return router


def _answer(request: Request, file: ViewerFile, caching: str) -> Response:
    headers = {**SECURITY_HEADERS, "etag": file.etag, "cache-control": caching, "vary": "accept-encoding"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = file.compressed, "gzip"
    return Response(content, headers=headers, media_type=file.media_type)
