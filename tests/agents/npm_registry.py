"""A registry of npm packages on this machine, as far as `npm install` asks one.

The documents are those of the npm registry API (`GET /NAME`, then the tarball that `dist` names).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class NpmRegistry:
    def __init__(self) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        self.held: set[str] = set()
        """Paths that are not answered before ``close``."""
        self.waiting = threading.Event()
        """Somebody asks for a held path."""
        self._closing = threading.Event()
        self._versions: dict[str, dict[str, Any]] = {}
        self._tarballs: dict[str, bytes] = {}

    def publish(self, name: str, version: str, files: Mapping[str, str], **manifest: Any) -> str:
        """Adds a package, whose files can all be executed; the path of its tarball."""
        manifest = {"name": name, "version": version, **manifest}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path, text in {"package.json": json.dumps(manifest), **files}.items():
                entry = tarfile.TarInfo(f"package/{path}")
                entry.size, entry.mode = len(text.encode()), 0o755
                archive.addfile(entry, io.BytesIO(text.encode()))
        path = f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
        self._tarballs[path] = packed.getvalue()
        self._versions.setdefault(name, {})[version] = manifest
        return path

    def answer(self, path: str) -> bytes | None:
        self.asked[path] += 1
        if path in self.held:
            self.waiting.set()
            self._closing.wait()
        if path in self._tarballs:
            return self._tarballs[path]
        name = path.removeprefix("/")
        if name not in self._versions:
            return None
        versions = {
            version: {**manifest, "dist": self._dist(f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz")}
            for version, manifest in self._versions[name].items()
        }
        return json.dumps({"name": name, "dist-tags": {"latest": max(versions)}, "versions": versions}).encode()

    def _dist(self, path: str) -> dict[str, str]:
        digest = base64.b64encode(hashlib.sha512(self._tarballs[path]).digest()).decode()
        return {"tarball": self.url + path, "integrity": f"sha512-{digest}"}

    def close(self) -> None:
        self._closing.set()


@contextmanager
def npm_registry() -> Iterator[NpmRegistry]:
    registry = NpmRegistry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = registry.answer(unquote(self.path))
            try:
                self.send_response(404 if body is None else 200)
                self.send_header("content-length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")
            except OSError:
                return  # npm was killed

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield registry
    finally:
        registry.close()
        server.shutdown()
        thread.join()
        server.server_close()
