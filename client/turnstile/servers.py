"""The source of a client's servers: a list, a file or folder, or a name in the DNS; asked again while it runs.

    Client(["http://a:8000", "http://b:8000"], key=KEY)
    Client(FileServers("/shared/job-17/servers"), key=KEY)      # or "file:/shared/job-17/servers"
    Client(DnsServers("turnstile.rl.svc", 8000), key=KEY)      # or "dns://turnstile.rl.svc:8000"

``turnstile.ray`` has the servers in a Ray cluster.

A class of your own needs ``addresses``, and must not block the event loop.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import httpx

from turnstile import errors

MAX_FILE_BYTES = 1 << 20
"""Of one file of addresses."""
FILE_SCHEME = "file:"
DNS_SCHEME = "dns://"


class ServerSource(Protocol):
    """Names the servers that there are now. ``changes`` False: they are always the same."""

    @property
    def changes(self) -> bool: ...

    async def addresses(self) -> Sequence[str]:
        """The URL of each server; a control key may be in it (``/k/KEY``). Raises SourceUnavailable where that
        cannot be told now."""
        ...


@dataclass(frozen=True, slots=True)
class ListedServers:
    """Servers that are given once. ``urls``: checked."""

    urls: tuple[str, ...]
    changes = False

    async def addresses(self) -> Sequence[str]:
        return self.urls


@dataclass(frozen=True, slots=True)
class FileServers:
    """Addresses in a file, or in the files of a folder: one URL a line; ``#`` begins a comment. Hidden files are
    left out. For Slurm, systemd, and whatever can write a file: each server its own, or one for all."""

    path: str | Path
    changes = True

    async def addresses(self) -> Sequence[str]:
        return await anyio.to_thread.run_sync(self._read, abandon_on_cancel=True)

    def _read(self) -> list[str]:
        path, found = Path(self.path), list[str]()
        try:
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                if file == path or (file.is_file() and not file.name.startswith(".")):
                    found += self._lines(file)
        except (OSError, UnicodeDecodeError) as error:
            raise errors.SourceUnavailable(f"the servers in {path} cannot be read: {error}") from error
        return found

    def _lines(self, file: Path) -> list[str]:
        try:
            with file.open("rb") as stream:
                text = stream.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            if file == Path(self.path):
                raise
            return []  # a server has just removed its own
        if len(text) > MAX_FILE_BYTES:
            raise errors.SourceUnavailable(f"{file} is larger than {MAX_FILE_BYTES} bytes: is it a list of URLs?")
        lines = (line.partition("#")[0].strip() for line in text.decode().splitlines())
        return [line for line in lines if line]


@dataclass(frozen=True, slots=True)
class DnsServers:
    """Every address of a name in the DNS, such as a headless service of Kubernetes, at one port. A name that does
    not exist has no servers."""

    host: str
    port: int
    changes = True

    async def addresses(self) -> Sequence[str]:
        try:
            found = await anyio.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                return ()
            raise errors.SourceUnavailable(f"{self.host} cannot be looked up: {error.strerror}") from error
        hosts = dict.fromkeys(str(address[4][0]) for address in found)
        return [f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}" for host in hosts]


def checked_urls(urls: str | Sequence[str]) -> list[str]:
    """The servers' URLs without trailing slashes, each once, in order. Raises InvalidRequest."""
    asked = [urls] if isinstance(urls, str) else list(urls)
    if not asked:
        raise errors.InvalidRequest("no server URL given")
    for url in asked:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise errors.InvalidRequest(f"{url!r} is no URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise errors.InvalidRequest(f"{url!r} is no server URL; expected e.g. http://127.0.0.1:8000")
    return list(dict.fromkeys(url.rstrip("/") for url in asked))


def checked_source(servers: str | Sequence[str] | ServerSource) -> ServerSource:
    """The source that is meant: a URL, several, ``file:PATH``, ``dns://HOST:PORT``, or a source itself. Raises
    InvalidRequest."""
    if isinstance(servers, Sequence):
        texts = [servers] if isinstance(servers, str) else list(servers)
        if len(texts) == 1 and isinstance(texts[0], str):
            if texts[0].startswith(FILE_SCHEME):
                return FileServers(texts[0].removeprefix(FILE_SCHEME))
            if texts[0].startswith(DNS_SCHEME):
                return _dns(texts[0])
        return ListedServers(tuple(checked_urls(texts)))
    return servers


def _dns(text: str) -> DnsServers:
    host, _, port = text.removeprefix(DNS_SCHEME).rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise errors.InvalidRequest(f"{text!r} names no host and port; expected e.g. dns://turnstile.rl.svc:8000")
    return DnsServers(host, int(port))
