"""The Docker engine as the campaign needs it: which containers are a server's, their processes, kill and pause."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

OWNER_LABEL = "turnstile.owner"
SOURCE_LABEL = "turnstile.source"


class DockerEngine:
    """Speaks to the engine directly, not through the proxy that is spoiled."""

    def __init__(self, address: str, data: Path) -> None:
        self.socket = urlsplit(address).path
        self._data = data

    def owner(self) -> str:
        """The label's value, as docs/sandboxes.md has it: from the secret of the data directory."""
        secret = (self._data / "server.secret").read_bytes()
        return hashlib.sha256(b"owner" + secret).hexdigest()[:12]

    async def containers(self, *, running: bool = True) -> list[str]:
        filters = json.dumps({"label": [f"{OWNER_LABEL}={self.owner()}"]})
        found = await self._get("/containers/json", {"all": str(not running).lower(), "filters": filters})
        return [each["Id"] for each in found]

    async def volumes(self) -> dict[str, str]:
        """By their names the server's folders that they are copies of."""
        filters = json.dumps({"label": [f"{OWNER_LABEL}={self.owner()}"]})
        found = await self._get("/volumes", {"filters": filters})
        return {each["Name"]: each["Labels"][SOURCE_LABEL] for each in found["Volumes"] or ()}

    async def pids(self, container: str) -> list[tuple[int, str]]:
        """(pid, command) of its processes, as this machine counts them."""
        found = await self._get(f"/containers/{container}/top", {"ps_args": "-eo pid,args"})
        return [(int(row[0]), row[1]) for row in found.get("Processes") or ()]

    async def act(self, container: str, what: str) -> bool:
        """``kill``, ``pause``, ``unpause``; whether it was done."""
        async with self._client() as client:
            return (await client.post(f"/containers/{container}/{what}")).status_code == 204

    async def clear(self) -> None:
        """Removes all that bears the label: what stays by design, and what a cut-off campaign left."""
        async with self._client() as client:
            for container in await self.containers(running=False):
                await client.delete(f"/containers/{container}", params={"force": "true"})
            for volume in await self.volumes():
                await client.delete(f"/volumes/{volume}")

    async def _get(self, path: str, params: dict[str, str]) -> Any:
        async with self._client() as client:
            answer = await client.get(path, params=params)
            return answer.json() if answer.status_code == 200 else {}

    def _client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self.socket)
        return httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=30)
