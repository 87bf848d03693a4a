"""Fills a folder with a runtime: the interpreter, its standard library, every library that either is linked with,
and a loader that looks for libraries there and nowhere else.

What must hold: no file names a folder of this machine in which it would look for libraries; every module is
compiled, because the folder is mounted read-only; other users can read it all. No compiler or tool is needed;
`strip` is used where there is one, for the size.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.runtimes import elf
from turnstile_server.runtimes.layout import (
    CA_FILE,
    HOST_LOADER,
    LOADER,
    LOADER_EDITS,
    LOADER_FALLBACKS,
    TARGET,
)
from turnstile_server.runtimes.source import RuntimeNotMade, Source, libraries_of, system_libraries

_SYSTEM_LIBRARIES = (
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libresolv.so.2",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
)
"""System libraries that agents' programs and wheels (manylinux) may be linked with, beside those they bring."""
_LEFT_OUT = (
    "__pycache__",
    "config-*",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
    "_ctypes_test*",
    "_test*",
    "_tkinter*",
    "_xxtestfuzz*",
    "xxlimited*",
    "*.a",
)
"""Parts of the standard library that are left out: those that need a screen or a compiler, and Python's own tests.
Site packages do not belong to it."""
_CA_FILE = "/etc/ssl/certs/ca-certificates.crt"
_COMPILE = ("-I", "-S", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")
_TAIL = 2000
_STRIP_S = 120.0
"""No setting: it takes a second; a machine on which it hangs has no runtime, and nothing waits for it for ever."""


async def build_runtime(source: Source, target: Path) -> None:
    """Fill ``target``, which exists and is empty. Raises RuntimeNotMade."""
    try:
        await anyio.to_thread.run_sync(_copy, source, target)
    except (OSError, elf.FormatError, subprocess.SubprocessError) as error:
        raise RuntimeNotMade(
            f"the runtime for containers cannot be made of {source.executable}: {error}"
        ) from error
    stdlib = target / "lib" / f"python{source.minor}"
    inside = f"{TARGET}/lib/{stdlib.name}"
    done = await anyio.run_process(
        # In tracebacks the modules have the paths that they have inside.
        (str(source.executable), *_COMPILE, "-s", str(stdlib), "-p", inside, str(stdlib)),
        check=False,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        said = done.stdout[-_TAIL:].decode(errors="replace").strip()
        raise RuntimeNotMade(f"the standard library of the runtime for containers cannot be compiled: {said}")
    await anyio.to_thread.run_sync(_open_to_all, target)


def _copy(source: Source, target: Path) -> None:
    libraries, programs = target / "lib", target / "bin"
    stdlib = libraries / f"python{source.minor}"
    shutil.copytree(source.stdlib, stdlib, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    programs.mkdir()
    python = programs / "python3"
    shutil.copyfile(source.executable, python)
    needed = libraries_of(source.executable) | system_libraries(_SYSTEM_LIBRARIES)
    for extension in sorted(source.extensions.glob("*.so")):
        copied = stdlib / source.extensions.name / extension.name
        if copied.exists():
            try:
                needed |= libraries_of(extension)
            except RuntimeNotMade:  # it cannot be imported here either
                copied.unlink()
    for path in list(needed.values()):
        needed |= libraries_of(path)
    for name, path in needed.items():
        if path.resolve() != Path(HOST_LOADER).resolve():
            shutil.copyfile(path, libraries / name)
    files = [python, *(path for path in libraries.rglob("*.so*") if path.is_file())]
    _strip(files)
    for path in files:
        path.chmod(0o755)
        elf.drop_search_paths(path)
        elf.set_loader(path, HOST_LOADER, LOADER)  # libc names one, too: it is a program that tells its version
    certificates = ssl.get_default_verify_paths().cafile or _CA_FILE
    if Path(certificates).is_file():
        copied = target / Path(CA_FILE).relative_to(TARGET)
        copied.parent.mkdir()
        shutil.copyfile(certificates, copied)
    loader = target / Path(LOADER).relative_to(TARGET)
    loader.write_bytes(private_loader(Path(HOST_LOADER).read_bytes()))


def private_loader(data: bytes) -> bytes:
    """A loader that knows only the runtime's own folder of libraries. Raises FormatError for one of another
    kind."""
    for old, new in LOADER_EDITS:
        data = elf.replaced(data, old, new)
    return data.replace(*LOADER_FALLBACKS)


def _strip(files: list[Path]) -> None:
    """Without their symbols for debuggers they have half the size."""
    if (program := shutil.which("strip")) is not None:
        subprocess.run(
            [program, "--strip-debug", *map(str, files)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_STRIP_S,
        )


def _open_to_all(target: Path) -> None:
    """Whatever the server's umask is."""
    for path in target.rglob("*"):
        if not path.is_symlink():
            program = path.is_dir() or path.parent.name == "bin" or ".so" in path.name
            path.chmod(0o755 if program else 0o644)
