"""Replies of judges on disk, by what they were asked, in bounded space: a folder of the data directory.

Only replies that hold a verdict are kept. A file that cannot be read or written costs a call, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.kinds.judge.client import JudgeReply

FOLDER = "judge-cache"


class VerdictCache:
    """``folder`` None: nothing is kept. Written by one server, from one task at a time."""

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._folder = folder if max_bytes > 0 else None
        self._max_bytes = max_bytes
        self._bytes: int | None = None
        """Bytes of all files; None: not counted yet."""
        self._lock = anyio.Lock()

    async def get(self, key: str) -> JudgeReply | None:
        if self._folder is None:
            return None
        return await anyio.to_thread.run_sync(_read, self._path(self._folder, key))

    async def put(self, key: str, reply: JudgeReply) -> None:
        if self._folder is None:
            return
        data = json.dumps({"text": reply.text, "model": reply.model}).encode()
        async with self._lock:
            with contextlib.suppress(OSError):
                await anyio.to_thread.run_sync(self._write, self._folder, self._path(self._folder, key), data)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"

    def _write(self, folder: Path, path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._bytes is None:
            for left in folder.rglob("*.new"):  # of a server that was killed while it wrote
                left.unlink(missing_ok=True)
        partial = path.with_suffix(".new")
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._bytes = len(data) + (_size(folder) - len(data) if self._bytes is None else self._bytes)
        if self._bytes > self._max_bytes:
            self._bytes = _shrink(folder, self._max_bytes * 3 // 4)


def _read(path: Path) -> JudgeReply | None:
    try:
        found = json.loads(path.read_bytes())
        reply = JudgeReply(str(found["text"]), 0, str(found["model"]))
        os.utime(path)  # the latest used stay
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reply


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.json"))


def _shrink(folder: Path, most: int) -> int:
    """Removes the files that were not used for longest; returns the bytes that are left."""
    found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.rglob("*.json"))
    left = sum(size for _, size, _ in found)
    for _, size, path in found:
        if left <= most:
            break
        path.unlink(missing_ok=True)
        left -= size
    return left
