"""Journals that a failing test left open are closed: threads end, and disks unmounted under them are freed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import journal_support
import pytest

from turnstile_server.journal import FileJournal
from turnstile_server.journal.file_operations import FileOps
from turnstile_server.settings import JournalSettings


@pytest.fixture(autouse=True)
def no_journal_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not async, so that tests without an event loop, hypothesis' among them, stay as they are."""
    opened: list[FileJournal] = []
    real = FileJournal.open

    async def remembering(directory: Path, settings: JournalSettings, files: FileOps | None = None) -> FileJournal:
        journal = await real(directory, settings, files)
        opened.append(journal)
        return journal

    monkeypatch.setattr(FileJournal, "open", remembering)
    yield
    for journal in opened:
        asyncio.run(journal.close())


@pytest.fixture(params=["thread", "inline"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the records of the test are written: by the journal's thread with an fsync, or where they are small by
    the event loop."""
    if request.param == "inline":
        for name, value in journal_support.INLINE.items():
            monkeypatch.setitem(journal_support.WAY, name, value)
    chosen: str = request.param
    return chosen
