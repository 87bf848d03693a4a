"""The folders of a check and of the work: whatever the work's side sends, the check's own files stay its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.grading.inside.apart import folders as folders_module
from turnstile_server.grading.inside.apart.folders import SharedFolders
from turnstile_server.grading.inside.apart.wire import WireBroken


class Told:
    """Takes what a side sends, and hands it to the other."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], bytes]] = []

    def send(self, do: str, payload: bytes = b"", **fields: Any) -> None:
        self.sent.append(({"do": do, **fields}, payload))

    def send_paid(self, stream: tuple[int, int], do: str, payload: bytes, **fields: Any) -> None:
        self.send(do, payload, **fields)

    def took(self, stream: tuple[int, int], size: int) -> None:
        """Nobody waits for it."""


@contextmanager
def places() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


NAMES = st.sampled_from(
    [
        "a",
        "b",
        "sub",
        "sub/c",
        "sub/d",
        "kept",
        "own",
        "late",
        "deep/e",
        "..",
        "../out",
        "sub/../kept",
        "ways/x",
        "",
    ]
)
TARGETS = st.sampled_from(
    [
        "a",
        "b",
        "sub",
        "kept",
        "own",
        "late",
        "../out/secret",
        "{out}/secret",
        "{root}/kept",
        "{root}/a",
        "{root}/own",
        "/proc/self/fd/0",
        "sub/c",
        "../kept",
        ".",
        "..",
        "sub/../own",
        "a/../kept",
        "/proc/self/cwd/kept",
    ]
)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("file"), NAMES, st.sampled_from([b"", b"the work's", b"x" * 10])),
        st.tuples(st.just("dir"), NAMES, st.just(b"")),
        st.tuples(st.just("link"), NAMES, TARGETS),
        st.tuples(st.just("gone"), NAMES, st.just(b"")),
        st.tuples(st.just("changed"), NAMES, st.just(b"")),
        st.tuples(st.just("check writes"), st.sampled_from(["late", "own"]), st.just(b"")),
    ),
    max_size=12,
)
SECRET = "only the check has this"


@given(CHANGES)
def test_nothing_that_the_check_keeps_is_read_replaced_or_removed(changes: list[tuple[str, str, Any]]) -> None:
    with places() as place:
        root, out = place / "root", place / "out"
        for folder in (root / "sub", out):
            folder.mkdir(parents=True)
        (out / "secret").write_text(SECRET)
        (root / "a").write_text("both have this")
        (root / "ways").symlink_to(out)
        told = Told()
        folders = SharedFolders([str(root)], told, own=True)  # type: ignore[arg-type]
        kept = root / "kept"
        kept.write_text(SECRET)
        kept.chmod(0o600)
        written: set[Path] = set()
        for do, name, what in changes:
            path = f"{root}/{name}"
            if do == "check writes":
                # A new file, as a shell makes one: what is there by that name was replaced before.
                late = root / name
                if late.is_symlink() or not late.exists():
                    late.unlink(missing_ok=True)
                    late.write_text(SECRET)
                    late.chmod(0o600)
                    written.add(late)
            elif do == "link":
                folders.take({"do": do, "path": path, "target": what.format(root=root, out=out)}, b"")
            elif do == "file":
                header = {"do": do, "path": path, "last": True, "mode": 0o644, "mtime_ns": 0}
                folders.take(header, what)
            else:
                folders.take({"do": do, "path": path, "mode": 0o755}, b"")
        folders.take({"do": "changed"}, b"")
        folders.send_changes()
        assert kept.read_text() == SECRET
        assert (out / "secret").read_text() == SECRET
        assert sorted(each.name for each in place.iterdir()) == ["out", "root"]
        assert [each.name for each in out.iterdir()] == ["secret"]
        for late in written:
            assert late.read_text() == SECRET
        assert all(SECRET.encode() not in payload for _, payload in told.sent)
        assert not [each for each in root.rglob("*") if each.is_symlink() and each.name != "ways"]


@st.composite
def trees(draw: st.DrawFn) -> Mapping[str, str]:
    """Files by path, and links: ``-> target``."""
    names = draw(st.lists(st.sampled_from(["a", "b", "c", "d/e", "d/f", "d/g/h"]), unique=True))
    return {name: draw(st.sampled_from(["", "one", "two" * 100_000, "-> a", "-> d/e", "-> d"])) for name in names}


def made(root: Path, tree: Mapping[str, str]) -> None:
    """The folder becomes this tree."""
    for folder, folders, names in os.walk(root, topdown=False):
        for name in names:
            Path(folder, name).unlink()
        for name in folders:
            below = Path(folder, name)
            below.unlink() if below.is_symlink() else below.rmdir()
    for name, text in tree.items():
        path = root / name
        if path.parent.is_dir() or not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(os.path.relpath(root / text[3:], path.parent))
            else:
                path.write_text(text)


def found(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}"
        if path.is_symlink()
        else path.read_text()
        if path.is_file()
        else "/"
        for path in sorted(root.rglob("*"))
    }


@given(st.lists(st.tuples(st.booleans(), trees()), max_size=4))
def test_what_one_side_changes_is_on_the_other(steps: list[tuple[bool, Mapping[str, str]]]) -> None:
    """But for the work's links, which are what they lead to."""
    with places() as place:
        sides = {}
        for name in ("check", "work"):
            # Each side has its folder at the same path; here a path stands for the other.
            (place / name).mkdir()
            told = Told()
            sides[name] = (place / name, told, SharedFolders([str(place / name)], told, own=name == "check"))  # type: ignore[arg-type]
        for by_check, tree in steps:
            here, there = ("check", "work") if by_check else ("work", "check")
            root, told, folders = sides[here]
            made(root, tree)
            folders.send_changes()
            other, _, receiving = sides[there]
            for header, payload in told.sent:
                if "path" in header:
                    header["path"] = header["path"].replace(str(root), str(other), 1)
                receiving.take(header, payload)
            told.sent.clear()
            mine, theirs = found(root), found(other)
            if by_check:
                assert mine == theirs
            else:
                assert {name: text for name, text in mine.items() if text[:3] != "-> "}.items() <= theirs.items()
                behind = {name: text for name, text in theirs.items() if name not in mine or mine[name] != text}
                assert all(
                    (root / name).is_dir() or (root / name).read_text() == text for name, text in behind.items()
                )
            made(other, {})
            made(root, {})
            for one in sides.values():
                one[2].send_changes()
                one[1].sent.clear()


def test_a_part_of_a_file_that_never_comes_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    folders = SharedFolders([str(tmp_path)], Told(), own=True)  # type: ignore[arg-type]
    header = {"do": "file", "path": str(tmp_path / "a"), "mode": 0o644, "mtime_ns": 0}
    folders.take({**header, "last": False}, b"af")
    assert (tmp_path / "a").read_text() == "before"
    folders.take({**header, "last": True}, b"ter")
    assert (tmp_path / "a").read_text() == "after"


@pytest.mark.parametrize(
    "header", [{"do": "file"}, {"do": "link", "path": "x"}, {"do": "dir", "path": 3, "mode": "x"}]
)
def test_what_is_no_change_is_an_error_or_nothing(tmp_path: Path, header: dict[str, Any]) -> None:
    folders = SharedFolders([str(tmp_path)], Told(), own=True)  # type: ignore[arg-type]
    with suppress(KeyError, TypeError, ValueError, WireBroken):
        folders.take(header, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_still_coming_is_not_told_back(tmp_path: Path) -> None:
    told = Told()
    folders = SharedFolders([str(tmp_path)], told, own=False)  # type: ignore[arg-type]
    folders.take({"do": "file", "path": str(tmp_path / "a"), "mode": 0o644, "mtime_ns": 0, "last": False}, b"a")
    folders.send_changes()
    assert [header["do"] for header, _ in told.sent] == ["changed"]


def test_links_in_a_circle_end_and_many_paths_behind_links_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders_module, "_MOST_BEHIND_LINKS", 20)
    told = Told()
    folders = SharedFolders([str(tmp_path)], told, own=False)  # type: ignore[arg-type]
    (tmp_path / "many").mkdir()
    for number in range(50):
        (tmp_path / "many" / str(number)).write_text("")
    (tmp_path / "many" / "circle").symlink_to(".")
    (tmp_path / "way").symlink_to("many")
    folders.send_changes()
    paths = [header.get("path", "") for header, _ in told.sent]
    assert sum("/way" in path or "/circle" in path for path in paths) == 20
    assert sum("/many/" in path and "/circle" not in path for path in paths) == 50
