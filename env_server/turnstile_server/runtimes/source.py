"""The interpreter that a runtime is made of, as this machine has it, and the libraries that programs need.

A runtime is made where the loader's folders have the length of the runtime's own: Debian's and Ubuntu's x86-64
glibc, so also Docker's own Python images. Whoever lacks that is told why, and images then need a Python of their
own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from turnstile.models import Fault
from turnstile_server.errors import TurnstileError
from turnstile_server.runtimes import elf
from turnstile_server.runtimes.layout import HOST_LIBRARIES, HOST_LOADER

FORMAT = 1
"""Format number of what ``build`` makes. Another number makes every runtime anew."""
MACHINE = "x86_64"
_LIST_S = 30.0
_RESOLVED = re.compile(r"^\s*(\S+) => (/\S+) \(0x")
_MISSING = re.compile(r"^\s*(\S+) => not found", re.M)


class RuntimeNotMade(TurnstileError):
    """The Python that containers are given cannot be made on this server's machine."""

    status = 503
    type = "runtime_not_made"
    fault = Fault.INFRASTRUCTURE


@dataclass(frozen=True, slots=True)
class Source:
    """An installed CPython. ``version``: ``3.11.7``. ``build``: what it says of its own build
    (``sys.version``)."""

    executable: Path
    stdlib: Path
    version: str
    build: str

    @classmethod
    def own(cls) -> Source:
        """The one that runs this; of a virtual environment, the one that it was made of."""
        return cls(
            Path(os.path.realpath(sys.executable)),
            Path(os.__file__).parent,
            platform.python_version(),
            sys.version,
        )

    @property
    def minor(self) -> str:
        """``3.11``"""
        return ".".join(self.version.split(".")[:2])

    @property
    def extensions(self) -> Path:
        """The folder of the modules that are libraries."""
        return self.stdlib / "lib-dynload"

    def check(self) -> None:
        """Raises RuntimeNotMade where no runtime can be made of it."""
        why = self._problem()
        if why is not None:
            raise RuntimeNotMade(
                f"no runtime for containers can be made of {self.executable}: {why}. Without one, images need a "
                "Python of their own (sandboxes.docker_python)"
            )

    def _problem(self) -> str | None:
        if sys.platform != "linux" or platform.machine().lower() not in (MACHINE, "amd64"):
            return f"this machine is {sys.platform} on {platform.machine()}; only Linux on x86-64 is known"
        try:
            loader = elf.loader_of(self.executable)
            known = HOST_LIBRARIES.encode() in Path(HOST_LOADER).read_bytes()
        except (OSError, elf.FormatError) as error:
            return str(error)
        if loader != HOST_LOADER:
            return f"its loader is {loader}, not glibc's {HOST_LOADER}"
        if not known:
            return (
                f"this machine's loader does not look into {HOST_LIBRARIES}, as Debian's and Ubuntu's do: run the "
                "server in its own image, or on such a system"
            )
        if not self.stdlib.joinpath("os.py").is_file() or not self.extensions.is_dir():
            return f"{self.stdlib} is not a whole standard library"
        return None

    def digest(self) -> str:
        """Digest of the interpreter and what it is linked with. An update of any of them makes another runtime."""
        content = hashlib.sha256(f"{FORMAT}\0{self.build}\0".encode())
        linked = libraries_of(self.executable, *self.extensions.glob("_ssl.*"), *self.extensions.glob("_ctypes.*"))
        for path in (self.executable, *sorted(linked.values()), Path(HOST_LOADER)):
            content.update(path.read_bytes())
        return content.hexdigest()[:12]


def libraries_of(*programs: Path) -> dict[str, Path]:
    """The libraries that programs and libraries are linked with, directly or not: file by name. Raises
    RuntimeNotMade where one is missing."""
    found: dict[str, Path] = {}
    for program in programs:
        said = _listed(program)
        missing = _MISSING.findall(said)
        if missing:
            raise RuntimeNotMade(f"{program} needs {', '.join(missing)}, which this machine does not have")
        for line in said.splitlines():
            if (match := _RESOLVED.match(line)) is not None:
                found.setdefault(match[1], Path(match[2]))
    return found


def system_libraries(names: Iterable[str]) -> dict[str, Path]:
    """Libraries of Debian's folder by name. Raises RuntimeNotMade, naming all that are missing."""
    places = [Path(HOST_LIBRARIES), Path(f"/usr{HOST_LIBRARIES}")]
    found = {name: next((place / name for place in places if (place / name).is_file()), None) for name in names}
    missing = sorted(name for name, path in found.items() if path is None)
    if missing:
        raise RuntimeNotMade(
            f"this machine has no {', '.join(missing)} in {HOST_LIBRARIES}: install the Debian packages "
            "libstdc++6 and libgcc-s1"
        )
    return {name: path for name, path in found.items() if path is not None}


def _listed(program: Path) -> str:
    """The loader's list of what it would load; nothing is run. The loader's own line has no ``=>``."""
    done = subprocess.run(
        [HOST_LOADER, "--list", str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_LIST_S,
        env={"LC_ALL": "C"},
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0 and not _MISSING.search(said):
        raise RuntimeNotMade(f"{program} cannot be looked at by {HOST_LOADER}: {said.strip()}")
    return said
