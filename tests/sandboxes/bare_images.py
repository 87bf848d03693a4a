"""Images that have nothing of what Turnstile's programs need, made in a second each out of the test image's
BusyBox.

``BUSYBOX``: a static BusyBox on scratch, started as another user than root. ``MUSL``: the same with Debian's musl
in the places in which Alpine has it, and traps: under the names of glibc's libraries, in every folder that a
loader might look into, and in a loader's settings, lie files that no program could start with.
"""

from __future__ import annotations

import fcntl
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from docker_support import engine, python_image

BUSYBOX = "turnstile-test:any-busybox"
MUSL = "turnstile-test:any-musl"
IMAGES = (BUSYBOX, MUSL)
_LOCK = Path(tempfile.gettempdir()) / "turnstile-test-bare-images.lock"
_FOLDERS = ("bin", "dev", "etc", "lib", "lib64", "proc", "root", "sys", "tmp", "usr", "usr/lib")
_NAMES = (
    "libc.so.6",
    "libm.so.6",
    "libssl.so.3",
    "libcrypto.so.3",
    "libstdc++.so.6",
    "libz.so.1",
    "libpthread.so.0",
)
_LOOKED_INTO = ("lib", "lib64", "usr/lib", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
_TRAP = b"not a library\n"


def image_of(name: str) -> str:
    """The image, made where it is missing."""
    with _LOCK.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # suites run side by side; one makes it
        if not engine().images.list(name):
            files = busybox() | (_musl() if name == MUSL else {})
            changes = ["ENV PATH=/bin", "ENV LD_LIBRARY_PATH=/usr/lib:/lib", "USER 1234:1234", "CMD /bin/sh"]
            import_image(name, files, changes)
    return name


def import_image(name: str, files: Mapping[str, bytes | str], changes: Iterable[str]) -> None:
    """Files are programs by path, links where they are texts."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as root:
        folders = {str(above) for path in files for above in Path(path).parents} - {"."}
        for folder in sorted(folders | set(_FOLDERS)):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            root.addfile(member)
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                root.addfile(member)
            else:
                member.size, member.mode = len(content), 0o755
                root.addfile(member, io.BytesIO(content))
    repository, tag = name.split(":")
    engine().api.import_image_from_data(made.getvalue(), repository=repository, tag=tag, changes=list(changes))


def busybox() -> dict[str, bytes | str]:
    """The program and a link for each of its names."""
    source = engine().containers.create(python_image())
    try:
        packed = b"".join(source.get_archive("/usr/bin/busybox")[0])
    finally:
        source.remove()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile("busybox")
        assert member is not None
        program = member.read()
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "busybox"
        there.write_bytes(program)
        there.chmod(0o755)
        applets = subprocess.run([there, "--list"], check=True, capture_output=True, text=True).stdout.split()
    return {"bin/busybox": program, **{f"bin/{name}": "busybox" for name in applets if name != "busybox"}}


def _musl() -> dict[str, bytes | str]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", "musl"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, "root"], cwd=folder, check=True)
        (libc,) = (path.read_bytes() for path in Path(folder).rglob("x86_64-linux-musl/libc.so"))
    traps: dict[str, bytes | str] = {f"{place}/{name}": _TRAP for place in _LOOKED_INTO for name in _NAMES}
    return {
        **traps,
        "lib/ld-musl-x86_64.so.1": libc,
        "lib/libc.musl-x86_64.so.1": "ld-musl-x86_64.so.1",
        "lib64/ld-linux-x86-64.so.2": _TRAP,
        "etc/ld.so.preload": b"/usr/lib/libc.so.6\n",
        "etc/ld.so.cache": _TRAP,
    }
