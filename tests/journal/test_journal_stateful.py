"""The journal against a plain list: any order of appends, deletions, retention, reopenings and crashes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from journal_support import FaultyFiles, pieces, small, state, summaries

from products import examples
from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal import FileJournal, Record, RecordType
from turnstile_server.journal.segments import DamagedBytes

EPISODES = st.sampled_from(["a", "b", "c"])
SIZES = st.sampled_from([0, 10, 20_000, 40_000, 70_000])


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="journal-machine-"))
        self.directory = self.root / "0"
        self.files = FaultyFiles()
        self.number = 0
        self.stored: list[tuple[str, int, str | None]] = []
        """The model: (episode, number, status or None) of every record that must be read."""
        self.waiting: list[tuple[str, int, str | None]] = []
        """Given to append_soon and not yet known to be stored."""

    @initialize()
    def start(self) -> None:
        self.open()

    def open(self) -> None:
        self.files = FaultyFiles()
        limits = small(soon_window_s=10, retention_bytes=1 << 20, retention_days=1)
        self.journal = self.runner.run(FileJournal.open(self.directory, limits, self.files))

    def record(self, episode: str, size: int, status: str | None) -> tuple[Record, tuple[str, int, str | None]]:
        self.number += 1
        meta = {"n": self.number, "pad": "x" * size}
        if status is not None:
            timings = {"created_at": 0.0, "ended_s": 0.0}
            return state(episode, status, timings=timings, **meta), (episode, self.number, status)
        return Record(RecordType.TURN, episode, meta), (episode, self.number, None)

    def settle(self) -> None:
        self.stored += self.waiting
        self.waiting = []

    @rule(episode=EPISODES, size=SIZES, status=st.sampled_from([None, None, "running", "completed"]))
    def append(self, episode: str, size: int, status: str | None) -> None:
        record, item = self.record(episode, size, status)
        self.runner.run(self.journal.append(record))
        self.settle()
        self.stored.append(item)

    @rule(episodes=st.lists(EPISODES, min_size=2, max_size=12), size=SIZES)
    def append_many_at_once(self, episodes: list[str], size: int) -> None:
        made = [self.record(episode, size, None) for episode in episodes]

        async def together() -> None:
            await asyncio.gather(*(self.journal.append(record) for record, _ in made))

        self.runner.run(together())
        self.settle()
        self.stored += [item for _, item in made]

    @rule(episode=EPISODES)
    def append_soon(self, episode: str) -> None:
        record, item = self.record(episode, 10, None)

        async def give() -> None:
            self.journal.append_soon(record)

        self.runner.run(give())
        self.waiting.append(item)

    @rule(episode=EPISODES, operation=st.sampled_from(["write", "sync"]), taken=st.integers(0, 200))
    def append_refused_by_the_disk(self, episode: str, operation: str, taken: int) -> None:
        self.runner.run(self.journal.flush())
        self.settle()
        self.files.faults[operation] = [OSError(28, "No space left on device")]
        self.files.short_write = taken if operation == "write" else None
        try:
            self.runner.run(self.journal.append(self.record(episode, 300, None)[0]))
        except JournalUnavailable:
            self.files.faults.clear()
            self.files.short_write = None
            return
        raise AssertionError("the append was acknowledged")

    @rule(episode=EPISODES)
    def delete(self, episode: str) -> None:
        self.runner.run(self.journal.delete(episode))
        self.settle()
        self.forget(episode)

    @rule()
    def apply_retention(self) -> None:
        self.runner.run(self.journal.flush())
        self.settle()
        deleted = self.runner.run(self.journal.apply_retention(10 * 86_400.0))
        ended = {episode for episode, status in self.states().items() if status == "completed"}
        assert set(deleted) == ended
        for episode in deleted:
            self.forget(episode)

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.journal.close())
        self.settle()
        self.open()

    @rule(index=st.sampled_from(["kept", "lost", "stale", "swapped"]))
    def lose_the_summaries(self, index: str) -> None:
        stale = {path: path.read_bytes() for path in summaries(self.directory)}
        self.runner.run(self.journal.close())
        self.settle()
        there = summaries(self.directory)
        if index == "lost":
            for path in there:
                path.unlink()
        elif index == "stale":
            for path, data in stale.items():
                path.write_bytes(data)
        elif index == "swapped":
            contents = [path.read_bytes() for path in there]
            for path, data in zip(there, contents[1:] + contents[:1], strict=True):
                path.write_bytes(data)
        self.open()

    @rule()
    def press(self) -> None:
        """Every segment with dead records in it is removed or rewritten."""
        self.runner.run(self.journal.flush())
        self.settle()
        self.runner.run(self.journal._space._collect(pressed=True))

    @rule(torn=st.binary(max_size=40))
    def crash(self, torn: bytes) -> None:
        """What lies in the directory now, plus the beginning of a record, is all that the next life has."""
        old = self.journal
        after = self.root / str(self.number) / "crashed"
        self.number += 1
        shutil.copytree(self.directory, after)
        self.runner.run(old.close())
        last = max(after.glob("segment-*.tsj"), default=None)
        if last is not None:
            with last.open("ab") as file:
                file.write(torn)
        self.waiting = []
        self.directory = after
        self.open()

    def forget(self, episode: str) -> None:
        self.stored = [item for item in self.stored if item[0] != episode]

    def states(self) -> dict[str, str]:
        return {episode: status for episode, _, status in self.stored if status is not None}

    @invariant()
    def reads_are_the_list(self) -> None:
        if not hasattr(self, "journal"):
            return

        async def look() -> None:
            for episode in ("a", "b", "c"):
                found = [record.meta["n"] for record in await self.journal.read(episode)]
                assert found == [number for name, number, _ in self.stored if name == episode]
            found_states = [record async for record in self.journal.episodes()]
            states = {record.episode_id: record.meta["status"] for record in found_states if record.damage is None}
            alone = {episode for episode, _, _ in self.stored} - set(self.states())
            assert {record.episode_id for record in found_states if record.damage is not None} == alone
            assert list(states.items()) == list(self.states().items())

        self.runner.run(look())

    def teardown(self) -> None:
        try:
            if hasattr(self, "journal"):
                self.runner.run(self.journal.close())
                assert not any(isinstance(piece, DamagedBytes) for piece in pieces(self.directory))
        finally:
            self.runner.close()
            shutil.rmtree(self.root)


JournalMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestJournalAgainstAPlainList = JournalMachine.TestCase
