"""A server that is killed leaves its folder of sockets behind; the next one on its data directory removes it."""

from __future__ import annotations

import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from turnstile_server.workers.socket_folder import PREFIX, private_folder, unix_socket


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is noted; the temporary folder is the test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "sockets"


def test_the_folder_is_private_and_goes_with_the_server(note: Path) -> None:
    with ExitStack() as sockets:
        folder = private_folder(sockets, note)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        unix_socket(folder / "w0", sockets)
        assert note.read_text() == str(folder)
    assert not folder.exists()
    assert not note.exists()


def test_the_folder_of_a_killed_server_is_removed_by_the_next_one(note: Path) -> None:
    killed = ExitStack()
    left = private_folder(killed, note)
    unix_socket(left / "w0", killed)
    killed.pop_all()
    with ExitStack() as sockets:
        folder = private_folder(sockets, note)
        assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["somebody-s", f"{PREFIX}a-link", "", "../outside"])
def test_nothing_else_is_removed(note: Path, name: str) -> None:
    temporary = note.parent / "tmp"
    kept = note.parent / "kept"
    kept.mkdir()
    (temporary / "somebody-s").mkdir()
    (temporary / f"{PREFIX}a-link").symlink_to(kept)
    note.write_text(str(temporary / name))
    with ExitStack() as sockets:
        private_folder(sockets, note)
    assert kept.is_dir()
    assert sorted(path.name for path in temporary.iterdir()) == ["somebody-s", f"{PREFIX}a-link"]


def test_a_note_that_cannot_be_written_keeps_no_server_from_starting(note: Path) -> None:
    note.mkdir()
    with ExitStack() as sockets:
        assert private_folder(sockets, note).is_dir()
        note.rmdir()
