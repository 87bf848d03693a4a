"""Process groups in which an SGLang server gets weights from a trainer.

What must hold: a group that never forms ends as EngineTimeout within ``engine.group_timeout_s``, and where the
server reaches the trainer through our relay (``group_relay``) it serves on.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from turnstile_server.engines.group_relay import GroupRelay, wait_for_store
from turnstile_server.engines.sglang.control import SGLangControl
from turnstile_server.engines.weights import WeightGroup
from turnstile_server.errors import Conflict, EngineRefused, EngineTimeout, TurnstileError
from turnstile_server.settings import EngineSettings

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")

NO_GROUP: Final = "does not exist"
"""In SGLang's answer to leaving a group that it is not in (0.5.23, weight_updater.py)."""


class SGLangGroups:
    """The groups that one server is in. ``url``: the server's."""

    def __init__(self, url: str, control: SGLangControl, settings: EngineSettings) -> None:
        self._control = control
        self._settings = settings
        self._relays: dict[str, GroupRelay | None] = {}
        local = urlsplit(url).hostname in LOOPBACK
        self._relay_host = settings.group_relay_host or ("127.0.0.1" if local else None)

    def joined(self, name: str) -> bool:
        return name in self._relays

    async def join(self, group: WeightGroup) -> None:
        if group.name in self._relays:
            raise Conflict(f"The engine is in a group {group.name!r} already; leave it first.")
        limit_s = self._settings.group_timeout_s
        await wait_for_store(group.address, group.port, limit_s)
        address, port, relay = group.address, group.port, None
        if self._relay_host is not None:
            relay = GroupRelay(self._relay_host, group.address, group.port)
            address, port = self._relay_host, await relay.start()
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        joined = False
        try:
            await self._control.post("/init_weights_update_group", body, limit_s)
            joined = True
        except EngineTimeout as error:
            raise await self._never_formed(group, relay) from error
        except EngineRefused as error:
            raise EngineRefused(f"The engine could not join {group.name!r}: {error.message}") from error
        finally:
            if joined:
                self._relays[group.name] = relay
            elif relay is not None:
                relay.close()

    async def _never_formed(self, group: WeightGroup, relay: GroupRelay | None) -> EngineTimeout:
        """Frees the server where we can; the error says whether it serves on."""
        said = (
            f"The process group {group.name!r} ({group.world_size} ranks at {group.address}:{group.port}, "
            f"{group.backend}) did not form within engine.group_timeout_s ({self._settings.group_timeout_s:g} s): "
            "check that every rank joins it, with the same name, world size and backend."
        )
        if relay is not None:
            relay.close()
        try:
            # Its scheduler answers this, so it has come out of its wait.
            await self._control.get("/server_info")
        except TurnstileError:
            return EngineTimeout(
                f"{said} The engine still waits for it and serves nothing until torch gives up (30 minutes): "
                "restart it."
            )
        return EngineTimeout(f"{said} The engine has given it up and serves on.")

    async def leave(self, name: str) -> None:
        try:
            await self._control.post(
                "/destroy_weights_update_group", {"group_name": name}, self._settings.group_timeout_s
            )
        except EngineRefused as error:
            if NO_GROUP not in error.message:
                raise
        finally:
            relay = self._relays.pop(name, None)
            if relay is not None:
                relay.close()

    def close(self) -> None:
        """Closes the relays."""
        for relay in self._relays.values():
            if relay is not None:
                relay.close()
        self._relays.clear()
