"""Files in and out of a sandbox, on every backend, against code inside that wants more than its own."""

from __future__ import annotations

import asyncio
import io
import os
import re
import tarfile
from pathlib import Path

import pytest

from turnstile_server.errors import FileProblem
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, User

pytestmark = pytest.mark.anyio


async def sh(sandbox: HelperSandbox, script: str, *, user: User = User.AGENT) -> str:
    result = await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=30))
    assert result.exit_code == 0, result
    return result.stdout.decode(errors="surrogateescape")


def entry(name: str, data: bytes | None = b"planted", **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    if data is not None and info.isreg():
        info.size = len(data)
    return info, data if info.isreg() else None


def tar(*entries: tuple[tarfile.TarInfo, bytes | None]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, data in entries:
            archive.addfile(info, None if data is None else io.BytesIO(data))
    return buffer.getvalue()


def names(archive: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return {member.name: member for member in opened}


async def test_what_is_written_is_read(sandbox: HelperSandbox) -> None:
    path = f"{sandbox.workdir}/new/folders/file"
    data = os.urandom(1 << 20)
    await sandbox.write(path, data)
    assert await sandbox.read(path, 1 << 20) == data
    await sandbox.write(path, b"")
    assert await sandbox.read(path, 0) == b""
    # By number: an image need not have a name for it.
    assert await sh(sandbox, f"stat -c '%a %u' {path}") == f"644 {await sh(sandbox, 'id -u')}"


async def test_a_replaced_file_keeps_its_mode_and_its_link_unless_told(sandbox: HelperSandbox) -> None:
    await sh(sandbox, "echo a > tool; chmod 755 tool; ln -s tool link")
    await sandbox.write(f"{sandbox.workdir}/link", b"b")
    assert await sh(sandbox, "stat -c %a tool; cat tool; test -L link") == "755\nb"
    await sandbox.write(f"{sandbox.workdir}/tool", b"c", mode=0o600)
    assert await sh(sandbox, "stat -c %a tool; ls -A") == "600\nlink\ntool\n"


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        ("true", "missing", "no such file"),
        ("mkdir there", "there", "a folder"),
        ("mkfifo there", "there", "not a regular file"),
        ("true", "/dev/zero", "not a regular file"),
        ("echo 1234567890 > there", "there", "more than the 10"),
        ("echo x > there; chmod 0 there", "there", "permission denied"),
        ("ln -s there there", "there", "symbolic link"),
        ("true", "/proc/1/environ", "permission denied"),
        ("ln -s /proc/1/environ there", "there", "permission denied"),
        ("true", "nul\0", "not an absolute path"),
        ("true", "x" * 5000, "too long"),
        ("true", "\ud800", "UnicodeEncodeError"),
    ],
)
async def test_what_cannot_be_read_says_why(sandbox: HelperSandbox, make: str, path: str, reason: str) -> None:
    await sh(sandbox, make)
    with pytest.raises(FileProblem, match=reason):
        await sandbox.read(path if path.startswith("/") else f"{sandbox.workdir}/{path}", 10)


async def test_a_path_longer_than_a_frame_is_only_a_bad_path(sandbox: HelperSandbox) -> None:
    with pytest.raises(FileProblem, match="too long"):
        await sandbox.read("/" + "x" * (9 << 20), 10)
    assert await sh(sandbox, "echo well") == "well\n"


async def test_paths_are_absolute(sandbox: HelperSandbox) -> None:
    with pytest.raises(FileProblem, match="absolute"):
        await sandbox.read("file", 10)
    with pytest.raises(FileProblem, match="absolute"):
        await sandbox.upload(tar(), "folder")


async def test_a_file_without_end_is_read_no_further_than_allowed(sandbox: HelperSandbox) -> None:
    # Says size 0 and has contents, as much of /proc does.
    with pytest.raises(FileProblem, match="more than the 10"):
        await sandbox.read("/proc/self/status", 10)


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        ("mkdir there", "there", "a folder"),
        ("mkfifo there", "there", "not a regular file"),
        ("true", "/usr/planted", "read-only|permission denied"),
        ("ln -s /usr/planted there", "there", "read-only|permission denied"),
        ("ln -s /etc/passwd there", "there", "read-only|permission denied"),
        ("echo x > there", "there/below", "not a directory|file exists"),
    ],
)
async def test_what_cannot_be_written_says_why(sandbox: HelperSandbox, make: str, path: str, reason: str) -> None:
    await sh(sandbox, make)
    with pytest.raises(FileProblem, match=reason):
        await sandbox.write(path if path.startswith("/") else f"{sandbox.workdir}/{path}", b"x")


async def test_more_than_the_sandbox_has_room_for_is_refused_and_leaves_nothing(sandbox: HelperSandbox) -> None:
    # In Docker the work folder has a share of the disk, elsewhere all of it.
    await sh(sandbox, "set -- $(df -k . | tail -1); head -c $((($4 - 2000) * 1024)) /dev/zero > most")
    with pytest.raises(FileProblem, match=r"no space|too large"):
        await sandbox.write(f"{sandbox.workdir}/more", bytes(4 << 20))
    assert await sh(sandbox, "ls -A") == "most\n"


async def test_bounds_on_what_is_sent_are_kept(sandbox: HelperSandbox) -> None:
    with pytest.raises(FileProblem, match="more than may be written"):
        await sandbox.write(f"{sandbox.workdir}/x", bytes((4 << 20) + 1))
    with pytest.raises(FileProblem, match="larger than may be uploaded"):
        await sandbox.upload(bytes((8 << 20) + 1), sandbox.workdir)


async def test_an_archive_is_unpacked_as_it_was_made(sandbox: HelperSandbox) -> None:
    await sandbox.upload(
        tar(
            entry("./folder", type=tarfile.DIRTYPE, mode=0o555),
            entry("folder/tool", b"run", mode=0o4755),
            entry("deep/er/file", b"deep", mode=0o640, mtime=1_000_000_000),
            entry("link", type=tarfile.SYMTYPE, linkname="/anywhere/at/all"),
            entry("same", type=tarfile.LNKTYPE, linkname="deep/er/file"),
        ),
        f"{sandbox.workdir}/target",
    )
    shown = await sh(
        sandbox,
        "cd target; stat -c '%n %a %F' folder folder/tool deep/er/file; readlink link; cat same; stat -c %Y same",
    )
    assert shown.splitlines() == [
        "folder 555 directory",
        "folder/tool 755 regular file",
        "deep/er/file 640 regular file",
        "/anywhere/at/all",
        "deep1000000000",
    ]


async def test_unpacking_replaces_files_and_links_but_never_follows_them(sandbox: HelperSandbox) -> None:
    await sh(sandbox, "echo safe > outside; mkdir target; ln -s ../outside target/file; echo old > target/other")
    await sandbox.upload(tar(entry("file", b"new"), entry("other", b"new")), f"{sandbox.workdir}/target")
    assert await sh(sandbox, "cat outside target/file target/other") == "safe\nnewnew"


LINK_OUT = entry("out", type=tarfile.SYMTYPE, linkname="/tmp")


@pytest.mark.parametrize(
    ("archive", "named"),
    [
        (tar(entry("/tmp/planted")), "/tmp/planted"),
        (tar(entry("../planted")), "../planted"),
        (tar(entry("a/../../planted")), "a/../../planted"),
        (tar(LINK_OUT, entry("out/planted")), "out/planted"),
        (tar(LINK_OUT, entry("out/planted", type=tarfile.DIRTYPE)), "out/planted"),
        (tar(LINK_OUT, entry("out", type=tarfile.DIRTYPE), entry("out/planted")), "out"),
        (tar(LINK_OUT, entry("hard", type=tarfile.LNKTYPE, linkname="out/planted")), "hard"),
        (tar(entry("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd")), "hard"),
        (tar(entry("hard", type=tarfile.LNKTYPE, linkname="../outside")), "hard"),
        (tar(entry("before/planted")), "before/planted"),
        (tar(entry("disk", type=tarfile.BLKTYPE, devmajor=7)), "disk"),
        (tar(entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)), "null"),
        (tar(entry("pipe", type=tarfile.FIFOTYPE)), "pipe"),
        (tar(entry("odd", type=b"Z")), "odd"),
        (tar(entry(".", b"planted")), "name"),
        (tar(entry("file", b"x"), entry("file/below")), "file/below"),
        (tar(entry("full", type=tarfile.DIRTYPE), entry("full/x", b""), entry("full", b"x")), "full"),
    ],
)
async def test_an_entry_that_would_leave_the_target_is_refused_by_name(
    sandbox: HelperSandbox, archive: bytes, named: str
) -> None:
    await sh(sandbox, "mkdir target; echo x > outside; ln -s /tmp target/before; echo kept > /tmp/kept")
    with pytest.raises(FileProblem, match=re.escape(named)):
        await sandbox.upload(archive, f"{sandbox.workdir}/target")
    assert await sh(sandbox, "ls -A /tmp; ls -A; cat outside") == "kept\noutside\ntarget\nx\n"


@pytest.mark.parametrize(
    "archive",
    [b"", b"no tar at all" * 100, tar(entry("whole", b"x" * 5000))[:2000], b"\x1f\x8b" + bytes(500)],
    ids=["empty", "junk", "cut", "compressed"],
)
async def test_what_is_not_a_whole_tar_is_refused(sandbox: HelperSandbox, archive: bytes) -> None:
    with pytest.raises(FileProblem, match="tar"):
        await sandbox.upload(archive, sandbox.workdir)


async def test_a_sparse_entry_is_refused_before_it_fills_the_disk(sandbox: HelperSandbox, tmp_path: Path) -> None:
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 30)
    packing = await asyncio.create_subprocess_exec(
        "tar", "-S", "-C", str(tmp_path), "-cf", "-", "hole", stdout=asyncio.subprocess.PIPE
    )
    packed, _ = await packing.communicate()
    with pytest.raises(FileProblem, match="hole"):
        await sandbox.upload(packed, sandbox.workdir)


async def test_unpacking_for_the_tests_makes_files_that_the_agent_cannot_touch(
    sandbox: HelperSandbox,
) -> None:
    target = "/home/tests/hidden"
    await sandbox.upload(tar(entry("test.py", b"secret", mode=0o600)), target, user=User.TESTS)
    assert await sh(sandbox, f"cat {target}/test.py", user=User.TESTS) == "secret"
    as_agent = await sandbox.exec(Command(("cat", f"{target}/test.py")))
    assert as_agent.exit_code != 0


async def test_a_folder_comes_out_and_goes_in_again_unchanged(sandbox: HelperSandbox) -> None:
    make = r"""
    mkdir -p it/deep/empty; cd it
    echo text > plain; echo run > tool; chmod 750 tool; head -c 300000 /dev/urandom > deep/data
    ln -s plain link; ln -s /etc/shadow outside; ln -s deep folder-link
    printf x > "$(printf 'odd \n \377 name')"; printf long > "$(printf 'n%.0s' $(seq 200))"
    mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
    """
    show = "find . -printf '%P %y %m %s %l\\n' | sort; find . -type f -print0 | sort -z | xargs -0 md5sum"
    await sh(sandbox, make)
    packed = await sandbox.download(f"{sandbox.workdir}/it", 4 << 20)
    assert names(packed)["outside"].issym()
    assert not {"pipe", "socket"} & set(names(packed))
    await sandbox.upload(packed, f"{sandbox.workdir}/again")
    await sh(sandbox, "rm it/pipe it/socket")
    before, after = await sh(sandbox, f"cd it; {show}"), await sh(sandbox, f"cd again; {show}")
    # The size of a folder is the file system's own affair.
    assert _without_folder_sizes(before) == _without_folder_sizes(after)


def _without_folder_sizes(shown: str) -> list[str]:
    return [line.rsplit(" ", 2)[0] if " d " in line else line for line in shown.splitlines()]


async def test_packing_follows_no_link(sandbox: HelperSandbox) -> None:
    await sh(sandbox, "mkdir it; ln -s / it/root; ln -s /etc/passwd it/passwd")
    packed = names(await sandbox.download(f"{sandbox.workdir}/it", 1 << 20))
    assert {name: member.linkname for name, member in packed.items()} == {"root": "/", "passwd": "/etc/passwd"}


@pytest.mark.parametrize(
    "fill",
    ["head -c 2000000 /dev/urandom > big", "truncate -s 100G hole 2>/dev/null || truncate -s 15M hole",
     "for n in $(seq 3000); do : > $n; done"],
    ids=["one file", "a file of holes", "many files"],
)  # fmt: skip
async def test_a_folder_larger_than_the_bound_is_refused(sandbox: HelperSandbox, fill: str) -> None:
    await sh(sandbox, f"mkdir it; cd it; {fill}")
    with pytest.raises(FileProblem, match="larger than the 1048576 bytes"):
        await sandbox.download(f"{sandbox.workdir}/it", 1 << 20)


@pytest.mark.slow
async def test_a_folder_that_changes_while_it_is_packed_is_still_a_tar(sandbox: HelperSandbox) -> None:
    script = """
    while :; do for n in 1 2 3 4 5; do head -c ${n}0000 /dev/zero > f$n; done; rm -rf d; mkdir -p d/e; : > f3; done
    """
    busy = await sandbox.start(Command(("sh", "-c", script)))
    for _ in range(20):
        names(await sandbox.download(sandbox.workdir, 4 << 20))
    await busy.kill()


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        ("echo > file", "file", "not a directory"),
        ("true", "missing", "no such file"),
        ("mkdir -p it/closed; chmod 0 it/closed", "it", "permission denied"),
        ("mkdir it; echo > it/closed; chmod 0 it/closed", "it", "closed: permission denied"),
        (
            'mkdir it; cd it; python3 -c \'\nimport os\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\'',
            "it",
            ".",
        ),
    ],
    ids=["a file", "missing", "closed folder", "closed file", "very deep"],
)
async def test_a_folder_that_cannot_be_packed_says_why(
    sandbox: HelperSandbox, make: str, path: str, reason: str
) -> None:
    await sh(sandbox, make)
    with pytest.raises(FileProblem, match=reason):
        await sandbox.download(f"{sandbox.workdir}/{path}", 1 << 20)
    assert await sh(sandbox, "echo well") == "well\n"


@pytest.mark.slow
async def test_file_operations_stop_with_everything_else(sandbox: HelperSandbox) -> None:
    reading = asyncio.gather(
        *(sandbox.upload(tar(entry("f", bytes(4 << 20))), f"{sandbox.workdir}/t{n}") for n in range(2)),
        return_exceptions=True,
    )
    await sandbox.stop_all()
    for outcome in await reading:
        assert outcome is None or isinstance(outcome, FileProblem)
    assert await sh(sandbox, "echo well") == "well\n"
