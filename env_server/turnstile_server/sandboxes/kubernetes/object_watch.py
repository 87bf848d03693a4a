"""Objects of one label as they change: a list, then a watch, and a list again where the watch cannot go on.

Owns the task that watches. What must hold (Kubernetes API Concepts, "Efficient detection of changes"): no change
is missed, also when the API server was away or has forgotten where this watch was (410 Gone); an object
that is missing in a list is gone, unless it was made after the list was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.kubernetes.cluster_api import ApiRefused, ClusterApi, Object

log = logging.getLogger(__name__)

T = TypeVar("T")
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0


class ObjectWatch:
    """``path``: of a collection of the API. ``selector``: a label selector. ``names`` after ``start``: the objects
    that are there."""

    def __init__(self, api: ClusterApi, path: str, selector: str) -> None:
        self._api = api
        self._path = path
        self._kind = path.rpartition("/")[2]
        self._selector = selector
        self._objects: dict[str, Object] = {}
        self._changed: dict[str, anyio.Event] = {}
        self._version = ""
        self._watching: BackgroundTask[None] | None = None

    @property
    def names(self) -> list[str]:
        return list(self._objects)

    async def start(self, tasks: BackgroundTasks) -> None:
        """Raises ApiRefused, SandboxUnavailable."""
        await self._list()
        self._watching = tasks.start(self._watch, name=f"watch {self._kind}", shielded=False)

    async def stop(self) -> None:
        if self._watching is not None:
            await self._watching.stop()

    def add(self, made: Object) -> None:
        """One that was just made: the watch may tell it later, or have told it."""
        self._objects.setdefault(made["metadata"]["name"], made)

    async def until(self, name: str, found: Callable[[Object | None], T | None]) -> T:
        """What ``found`` makes of the object, or of None where it is gone, as soon as that is not None."""
        while (result := found(self._objects.get(name))) is None:
            await self._changed.setdefault(name, anyio.Event()).wait()
        return result

    def latest(self, name: str) -> Object | None:
        return self._objects.get(name)

    async def _watch(self) -> None:
        pause = 0.0
        while True:
            try:
                if not self._version:
                    await self._list()
                query = {"labelSelector": self._selector, "resourceVersion": self._version}
                async for event in self._api.watch(self._path, **query):
                    self._take(event["type"], event["object"])
                    pause = 0.0
            except ApiRefused as error:
                log.info("%s are listed again: the watch ended with %s (%d)", self._kind, error, error.code)
                self._version = ""
            except SandboxUnavailable as error:
                log.warning("%s are not watched: %s", self._kind, error)
            # A watch that ends at once, again and again, is not begun anew without a pause.
            await anyio.sleep(pause)
            pause = min(max(_PAUSE_S, 2 * pause), _LONGEST_PAUSE_S)

    async def _list(self) -> None:
        before = set(self._objects)
        found = await self._api.request("GET", self._path, labelSelector=self._selector)
        self._version = found["metadata"]["resourceVersion"]
        there = {each["metadata"]["name"]: each for each in found["items"]}
        for name in before - set(there):
            self._change(name, None)
        for name, each in there.items():
            self._change(name, each)

    def _take(self, kind: str, thing: dict[str, Any]) -> None:
        self._version = thing["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._change(thing["metadata"]["name"], None if kind == "DELETED" else thing)

    def _change(self, name: str, thing: Object | None) -> None:
        if thing is None:
            self._objects.pop(name, None)
        else:
            self._objects[name] = thing
        if (changed := self._changed.pop(name, None)) is not None:
            changed.set()
