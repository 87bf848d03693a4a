"""Every page over a folder in which all text that is free is hostile: names, messages, tool results, grades.

A server lets no such ids in, but a folder may come from anywhere. Two recorded episodes are written again, with
hostile text in each place and a line of ten million characters in a tool result.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import Page, expect

from control_support import KEY, START_S, Door
from turnstile_server.journal.export import segment_of
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.reading import ReadOnlyJournal
from turnstile_server.testing.server import TOKENIZER_FOLDER
from ui.conftest import RECORDED, Watched, folder_viewer

pytestmark = pytest.mark.browser

HARM = "</script><script>window.taken=1</script><img src=x onerror='window.taken=1'>"
HOSTILE = f"{HARM}\x1b]0;taken\x07\x1b[2J \u202egnp.exe\u2066x\u2069\u200b\x00 end"
IDS = ("ep%2F?<b onclick=1>#\u202e1", "ep & \"2'\u2067\x1b[1m")
GROUP = "strangers"
"""No route takes another kind of id of a group."""
LONG = 10_000_000
WITHIN_MS = 10_000
FREE = frozenset(
    (
        *("run_id", "agent", "tags", "metadata", "instruction", "agent_output", "name", "version"),
        *("content", "reasoning", "arguments", "stop_string", "message", "detail", "output", "reason", "diff"),
        *("text", "left_out", "path", "failures", "failed", "passed"),
    )
)
"""Fields that hold free text, at any depth below them."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    good, bad = tmp_path_factory.mktemp("good"), tmp_path_factory.mktemp("bad")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(good)

    async def spoil() -> None:
        journal = await ReadOnlyJournal.open(good)
        try:
            for number, (source, episode_id) in enumerate(zip(("claude-code-01", "codex-31"), IDS, strict=True)):
                records = [spoilt(record, episode_id) for record in await journal.read(source)]
                lengthen(records)
                (bad / f"{number}.tsj").write_bytes(b"".join(segment_of(records)))
        finally:
            await journal.close()

    with start_blocking_portal() as portal:
        portal.call(spoil)
    with folder_viewer(bad, TOKENIZER_FOLDER) as url:
        yield Door(url, KEY, "", bad)


def spoilt(record: Record, episode_id: str) -> Record:
    meta = poisoned(dict(record.meta), free=False)
    if "episode_id" in meta:
        meta["episode_id"] = episode_id
    if record.type is RecordType.EPISODE:
        meta["group_id"] = GROUP
    return Record(record.type, episode_id, meta, record.arrays)


def lengthen(records: list[Record]) -> None:
    """The first result of a tool gets a line of ten million characters."""
    said = [message for record in records for message in record.meta.get("new_messages", ())]
    next(message for message in said if message["role"] == "tool")["content"] += "x" * LONG


def poisoned(value: Any, *, free: bool) -> Any:
    """``value`` with hostile text behind every string below a field of free text."""
    if isinstance(value, dict):
        return {name: poisoned(one, free=free or name in FREE) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [poisoned(one, free=free) for one in value]
    return value + HOSTILE if free and isinstance(value, str) else value


@pytest.fixture(scope="module")
def api(door: Door) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {door.key}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=START_S) as client:
        yield client


def test_no_page_does_what_the_text_says(watched: Watched, door: Door, api: httpx.Client) -> None:
    found = api.get("/episodes", params={"view": "summary", "offset": 0}).json()["summaries"]
    assert {summary["episode_id"] for summary in found} == set(IDS)
    summary = next(one for one in found if one["episode_id"] == IDS[0])
    run = quote(summary["run_id"], safe="")
    first, second = (quote(episode_id, safe="") for episode_id in IDS)
    turns = api.get(f"/episodes/{first}/turns", params={"arrays": False}).json()["turns"]
    assert any(len(message["content"]) > LONG for turn in turns for message in turn["new_messages"])
    tokens = f"/episodes/{first}/tokens/{turns[-1]['turn_id']}"
    pages = {
        "/runs": "table",
        **{f"/runs/{run}?by={by}": "table" for by in ("step", "task", "tag", "version")},
        f"/episodes?run_id={run}": "grid",
        f"/groups/{GROUP}?node=0": "tree",
        f"/compare/{first}/{second}": "table",
        f"/episodes/{first}": "article",
        f"/episodes/{second}": "article",
        f"{tokens}?colour=version": "listbox",
    }
    watched.page.set_default_timeout(WITHIN_MS)
    for path, shown in pages.items():
        page = watched.open(path, door.key)
        expect(page.get_by_role(shown).first).to_be_visible(timeout=WITHIN_MS)
        unharmed(page)
        watched.check()


def unharmed(page: Page) -> None:
    """Nothing of the text was run or drawn as a mark, and what it would hide is written out."""
    assert page.evaluate("window.taken") is None
    assert page.locator("main script, main img, main b[onclick]").count() == 0
    text, title = page.evaluate("[document.body.textContent, document.title]")
    hidden = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069\ufeff]")
    assert not hidden.search(text)
    assert not hidden.search(title)
    assert "\\u202e" in text
