"""A solution that an agent could find is found first: in files, archives and Git's objects, by a real search in a
sandbox."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from grading_support import spec_of

from bounded import rebounded
from turnstile_server.grading.leaks import (
    HIDDEN_TESTS,
    LEAST_LINE,
    SOLUTION,
    SecretText,
    find_leaks,
    secret_texts,
    telling_lines,
)
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.model import Task

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BASE = "def parse(text):\n    return text.split(',')\n"
FIX = "    cleaned = [part.strip() for part in text.split(',')]\n    return [part for part in cleaned if part]\n"
GOLD = f"def parse(text):\n{FIX}"
TEXTS = secret_texts({"lib.py": BASE.encode()}, {"lib.py": GOLD.encode()}, {})
TASK = Task.model_validate({"id": "t", "instruction": "x", "base": {"inline": {"lib.py": BASE}}})


def in_zip(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/lib.py", data)
    return out.getvalue()


def in_tar_gz(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("pkg/lib.py")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


HIDING_PLACES: dict[str, Callable[[bytes], bytes]] = {
    "old/lib.py.orig": lambda data: data,
    "lib.py.gz": gzip.compress,
    "wheels/lib-2.0-py3-none-any.whl": in_zip,
    "dist/lib-2.0.tar.gz": in_tar_gz,
}


async def leaks_of(provider: SandboxProvider, files: dict[str, bytes], **changes: object) -> list[str]:
    sandbox = await provider.create(spec_of(TASK))
    try:
        await sandbox.write(f"{sandbox.workdir}/lib.py", BASE.encode())
        for path, data in files.items():
            await sandbox.write(f"{sandbox.workdir}/{path}", data)
        settings = rebounded(GradingSettings(), **changes)
        report = await find_leaks(sandbox, TEXTS, settings, own_image=await provider.image_facts(None) is not None)
        assert report.note is None
        return list(report.leaks)
    finally:
        await sandbox.destroy()


async def test_a_clean_start_leaks_nothing(provider: SandboxProvider) -> None:
    assert await leaks_of(provider, {"notes.md": b"text.split(',')\n"}) == []


async def test_the_solution_is_found_wherever_it_is_packed(provider: SandboxProvider) -> None:
    found = await leaks_of(provider, {path: pack(GOLD.encode()) for path, pack in HIDING_PLACES.items()})
    assert len(found) == len(HIDING_PLACES)
    for path in HIDING_PLACES:
        assert any(f"/{path}" in line and SOLUTION in line for line in found), (path, found)


async def test_broken_archives_end_no_search(provider: SandboxProvider) -> None:
    broken = {path: pack(GOLD.encode() * 50)[:60] for path, pack in HIDING_PLACES.items()}
    objects = {".git/objects/pack/p.pack": b"PACK\0\0\0\2", ".git/objects/ab/cd": b"\x78\x01broken"}
    found = await leaks_of(provider, {**broken, **objects, "z.py": GOLD.encode()})
    assert any("/z.py" in line for line in found)


@pytest.mark.parametrize("packed", [False, True])
async def test_a_later_commit_is_found_in_gits_objects(
    provider: SandboxProvider, tmp_path: Path, packed: bool
) -> None:
    def git(*words: str) -> None:
        names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env={**os.environ, **names}, capture_output=True)

    git("init", "-q", "-b", "main")
    long = "".join(f"VALUE_{number} = {number}\n" for number in range(300))
    for text in (BASE, GOLD):
        (tmp_path / "lib.py").write_text(long + text)
        git("add", ".")
        git("commit", "-qm", "x")
    git("branch", "future")
    git("reset", "-q", "--hard", "HEAD~1")
    if packed:
        git("repack", "-adfq", "--depth=50")
        assert list((tmp_path / ".git/objects/pack").glob("*.pack"))
    held = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in (tmp_path / ".git/objects").rglob("*")
        if path.is_file()
    }
    found = await leaks_of(provider, held)
    assert found
    assert all(".git/objects" in line for line in found)


async def test_a_search_that_runs_out_of_time_says_so(provider: SandboxProvider) -> None:
    sandbox = await provider.create(spec_of(TASK))
    try:
        await sandbox.write(f"{sandbox.workdir}/lib.py", BASE.encode())
        settings = GradingSettings().model_copy(update={"leak_search_s": 1e-9})
        report = await find_leaks(sandbox, TEXTS, settings, own_image=await provider.image_facts(None) is not None)
        assert report.note is not None
        assert "grading.leak_search_s" in report.note
    finally:
        await sandbox.destroy()


async def test_a_larger_file_than_the_bound_is_not_read(provider: SandboxProvider) -> None:
    data = GOLD.encode() + b"#" * 5000
    assert await leaks_of(provider, {"big.py": data})
    assert await leaks_of(provider, {"big.py": data}, leak_search_max_file_bytes=4096) == []


def test_only_lines_that_tell_are_looked_for() -> None:
    text = f"x = 1\n    return [part for part in cleaned]\n{'-' * 40}\nimport os\n"
    assert telling_lines(text.splitlines()) == ("return [part for part in cleaned]",)
    assert telling_lines(text.splitlines(), ["return [part for part in cleaned]"]) == ()
    assert LEAST_LINE == 20


def test_hidden_tests_are_secret_too_and_what_the_base_has_is_not() -> None:
    shared = "    self.assertEqual(parse('a,b'), ['a', 'b'])\n"
    texts = secret_texts(
        {"test_lib.py": shared.encode()},
        {},
        {"test_hidden.py": f"{shared}    self.assertEqual(parse(' a'), 1)\n".encode()},
    )
    assert texts == (SecretText(HIDDEN_TESTS, "test_hidden.py", ("self.assertEqual(parse(' a'), 1)",)),)
