"""A data directory that cannot be used: one line says what is wrong, for which user, and what to run."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import AS_A_USER, mounted, refusal

from turnstile_server import data_dir
from turnstile_server.errors import StartupError

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def test_a_read_only_data_directory(tiny_model: Path, tmp_path: Path) -> None:
    line = refusal("--model", tiny_model, "--data-dir", tmp_path, under=mounted(tmp_path, "ro"))
    assert f"the data directory {tmp_path} cannot be written: it is on a read-only file system" in line
    assert "-v turnstile-data:/data" in line
    assert "TURNSTILE_DATA_DIR" in line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_read_only_data_directory_of_a_server_without_a_model(tmp_path: Path) -> None:
    line = refusal("--engine", "none", "--data-dir", tmp_path, under=mounted(tmp_path, "ro"))
    assert "read-only file system" in line


@pytest.mark.slow
@AS_ROOT
def test_a_data_directory_of_another_user(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    os.chown(folder, 12345, 12346)
    line = refusal("--model", tiny_model, "--data-dir", folder, under=AS_A_USER)
    assert f"{folder} belongs to uid 12345 (mode 755), and the server runs as uid {os.geteuid()}" in line
    assert f"chown -R {os.geteuid()}:{os.getegid()} {folder}" in line
    assert "--user 12345:12346" in line


@pytest.mark.cases(1)
@pytest.mark.slow
@AS_ROOT
@pytest.mark.parametrize("left", ["journal/lock", "journal", "server.secret"])
def test_files_of_an_earlier_server_under_another_user(tiny_model: Path, tmp_path: Path, left: str) -> None:
    path = tmp_path / left
    if left == "journal":
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(32))
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    line = refusal("--model", tiny_model, "--data-dir", tmp_path, under=AS_A_USER)
    assert f"the data directory {tmp_path} cannot be used: {path} belongs to uid 12345 (mode 600)" in line


def _nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def _circle(path: Path) -> None:
    path.symlink_to(path)


STRANGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a file for the journal": ("journal", Path.touch, "is not a folder"),
    "a link to nothing for the journal": ("journal", _nowhere, "is a link that leads nowhere"),
    "a link to itself for the journal": ("journal", _circle, "is a link that leads nowhere"),
    "a folder for the secret": ("server.secret", Path.mkdir, "is not a file"),
    "a link to nothing for the secret": ("server.secret", _nowhere, "is a link that leads nowhere"),
    "a pipe for the secret": ("server.secret", os.mkfifo, "is not a file"),
    "a pipe for the control key": ("control.key", os.mkfifo, "is not a file"),
    "a link to nothing for the lock": ("journal/lock", _nowhere, "is a link that leads nowhere"),
    "a folder for a segment": ("journal/segment-0000000001.tsj", Path.mkdir, "is not a file"),
    "a pipe for a segment": ("journal/segment-0000000001.tsj", os.mkfifo, "is not a file"),
    "a link to nothing for a segment": (
        "journal/segment-0000000001.tsj",
        _nowhere,
        "is a link that leads nowhere",
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_something_else_in_the_place_of_a_file_is_named(tmp_path: Path, what: str) -> None:
    name, make, why = STRANGE[what]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    with pytest.raises(StartupError, match=rf"{tmp_path} cannot be used: {path} {why}\. .*--data-dir"):
        data_dir.prepare_data_dir(tmp_path, 0)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_on_a_journal_that_leads_nowhere_says_so_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    _nowhere(tmp_path / "journal")
    line = refusal("--model", tiny_model, "--data-dir", tmp_path)
    assert f"{tmp_path / 'journal'} is a link that leads nowhere" in line


def test_a_data_directory_of_the_servers_own_user_that_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    asked = "import pathlib, turnstile_server.data_dir as d; d.prepare_data_dir(pathlib.Path.cwd(), 0)"
    command = [*AS_A_USER, sys.executable, "-c", asked]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    tmp_path.chmod(0o700)
    assert done.returncode == 1
    assert f"chmod -R u+rwX {tmp_path}" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    line = refusal("--model", tiny_model, "--data-dir", tmp_path, under=mounted(tmp_path, "size=32k"))
    assert f"the data directory {tmp_path} cannot be written: its disk, or the quota on it, is full" in line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_disk_whose_last_inodes_the_journal_takes(tiny_model: Path, tmp_path: Path) -> None:
    line = refusal("--model", tiny_model, "--data-dir", tmp_path, under=mounted(tmp_path, "size=1m,nr_inodes=4"))
    assert "full" in line
    assert str(tmp_path) in line


def test_little_free_space_is_a_warning_because_deleting_needs_a_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        data_dir.prepare_data_dir(tmp_path / "new", 1 << 60)
    [record] = caplog.records
    assert "less than journal.min_free_bytes" in record.getMessage()
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_disk_that_refuses_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StartupError, match="quota" if number == errno.EDQUOT else "Input/output error"):
        data_dir.prepare_data_dir(tmp_path, 0)
    assert os.listdir(tmp_path) == []
