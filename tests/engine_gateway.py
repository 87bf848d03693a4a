"""This machine as the containers of a Docker engine on it see it, and a folder of files that they can fetch."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker


def engine_gateway() -> str:
    """This machine's address in the network of the engine's containers.

    An engine that had to make its bridge at this start does not name it (Docker 20.10): then it is the
    first address of the bridge's subnet.
    """
    engine = docker.from_env(timeout=60)
    try:
        (addresses,) = engine.networks.get("bridge").attrs["IPAM"]["Config"]
    finally:
        engine.close()
    return addresses.get("Gateway") or str(next(ipaddress.ip_network(addresses["Subnet"]).hosts()))


class FileServer(ThreadingHTTPServer):
    """Serves a folder there; ``asked`` are the paths of the requests."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.host = engine_gateway()
        super().__init__((self.host, 0), functools.partial(_Request, directory=str(folder)))

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[FileServer]:
        thread = threading.Thread(target=self.serve_forever, name="files for containers")
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Request(SimpleHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""
