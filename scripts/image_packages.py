"""Installs what a server imports, from uv.lock, into a virtual environment: for the image and for `make demo`.

    python scripts/image_packages.py ENVIRONMENT server
    python scripts/image_packages.py ENVIRONMENT server,embedded [INDEX]     torch is taken from INDEX
    python scripts/image_packages.py --whole ENVIRONMENT server,embedded     keeps every file of each package
    python scripts/image_packages.py --list server                           prints the requirements

These are the packages that the extras need, at the lock's versions, less the ones in ``LEFT_OUT``: what a
package asks for and no server imports. It is said edge by edge, so a package that another one needs as well
stays. Then the files in ``TRIMMED`` go, and of shared libraries what only debuggers read, unless the environment
is one that more is installed into later (``--whole``). `pip check` in the image names the packages that are left
out.

No bytecode is written here; scripts/image_first_start.py writes it for what is imported. This runs in the image's
build with the interpreter that the image has, and with `packaging`, which hatchling brings.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker

LOCK: Final = Path(__file__).resolve().parent.parent / "uv.lock"
PROJECT: Final = "turnstile-rl"

LEFT_OUT: Final[dict[tuple[str, str], str]] = {
    ("huggingface-hub", "hf-xet"): "downloads from the Hub: a server reads a model from a folder",
    ("torch", "setuptools"): "compiles extensions of torch",
    ("uvicorn[standard]", "watchfiles"): "uvicorn --reload",
}
"""(package or package[extra], its dependency or ``*`` for all of them): what the dependency is for."""

TRIMMED: Final[dict[str, tuple[str, ...]]] = {
    # C++ tests, headers and what compiles them; the rest of bin/ runs.
    "torch": ("test", "include", "share/cmake", "bin/*test*", "bin/*Test*", "bin/protoc*"),
    # Tests; numpy.testing imports a module that lies among them.
    "numpy": ("**/tests/data", "**/tests/test_*.py"),
    # What its authors generate the files of models from.
    "transformers": ("models/*/modular_*.py",),
}
"""Package: patterns of files and folders in it that nothing at run time reads."""

TRIMMED_WITHOUT_TORCH: Final[dict[str, tuple[str, ...]]] = {
    # Models in torch. Tokenizers and configurations, which a server loads, stay.
    "transformers": ("models/*/modeling_*.py",),
}

ELF_HEADER: Final = 64
"""Bytes of the header of a 64-bit ELF file."""

NOT_NEEDED: Final = ("setuptools",)
"""What a new environment has and nothing imports. pip stays: agents are installed with it."""

Package = dict[str, Any]


class Lock:
    """The packages of uv.lock that are meant for this interpreter, by name."""

    def __init__(self, lock: dict[str, Any]) -> None:
        self._packages: dict[str, Package] = {}
        for package in lock["package"]:
            markers = package.get("resolution-markers", [])
            if not markers or any(Marker(marker).evaluate() for marker in markers):
                self._packages[package["name"]] = package

    def version(self, name: str) -> str:
        version: str = self._packages[name]["version"]
        return version

    def needs(self, name: str, extra: str | None) -> Iterator[tuple[str, str | None]]:
        """The dependencies of a package, or those of one of its extras, as (name, extra); without ``LEFT_OUT``."""
        package = self._packages[name]
        asking = name if extra is None else f"{name}[{extra}]"
        needs = (
            package.get("dependencies", []) if extra is None else package.get("optional-dependencies", {})[extra]
        )
        for need in needs:
            if (asking, need["name"]) in LEFT_OUT or (asking, "*") in LEFT_OUT:
                continue
            if "marker" in need and not Marker(need["marker"]).evaluate():
                continue
            yield need["name"], None
            for one in need.get("extra", []):
                yield need["name"], one


def image_packages(lock: dict[str, Any], extras: list[str]) -> list[str]:
    """``name==version`` of every package that ``extras`` of this project need, sorted."""
    packages = Lock(lock)
    found: set[tuple[str, str | None]] = set()
    wanted: list[tuple[str, str | None]] = [(PROJECT, None), *((PROJECT, extra) for extra in extras)]
    while wanted:
        one = wanted.pop()
        if one not in found:
            found.add(one)
            wanted.extend(packages.needs(*one))
    names = {name for name, _ in found} - {PROJECT}
    return [f"{name}=={packages.version(name)}" for name in sorted(names)]


def install(environment: Path, extras: list[str], torch_index: str) -> bool:
    """Fill a virtual environment; return whether torch is in it. Raises CalledProcessError after pip said why."""
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    packages = image_packages(tomllib.loads(LOCK.read_text()), extras)
    torch = [package for package in packages if package.startswith("torch==")]
    # An index of torch's builds has few other packages, or other versions of them.
    for some, index in ((torch, torch_index), ([one for one in packages if one not in torch], "")):
        if some:
            flags = ["--no-deps", "--no-compile", *(["--index-url", index] if index else [])]
            subprocess.run([*pip, "install", *flags, *some], check=True)
    return bool(torch)


def trim(environment: Path, *, torch: bool) -> None:
    """Remove what nothing at run time reads."""
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "--yes", *NOT_NEEDED], check=True)
    (folder,) = environment.glob("lib/python3*/site-packages")
    for package, patterns in (*TRIMMED.items(), *(() if torch else TRIMMED_WITHOUT_TORCH.items())):
        for path in [path for pattern in patterns for path in (folder / package).glob(pattern)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for cache in [*folder.rglob("__pycache__")]:
        shutil.rmtree(cache)
    for library in folder.rglob("*.so*"):
        if library.is_file() and not library.is_symlink():
            strip(library)


def strip(library: Path) -> int:
    """Cut off what follows the loaded parts of an ELF file; return how many bytes that was.

    These are the section headers, the local symbols and debugging information: a fifth of torch, most of uvloop.
    The loader goes by the program headers and the dynamic symbols, which are loaded (System V ABI, chapters 4, 5).
    `strip` of the binutils does the same but for the headers; a base image need not have it. Files of another kind
    than 64-bit little-endian stay as they are.
    """
    with library.open("r+b") as file:
        header = bytearray(file.read(ELF_HEADER))
        if header[:6] != b"\x7fELF\x02\x01":
            return 0
        table: int = struct.unpack_from("<Q", header, 32)[0]
        each, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        programs = file.read(each * count)
        end: int = table + each * count
        for start in range(0, each * count, each):
            offset, _, _, length = struct.unpack_from("<QQQQ", programs, start + 8)
            end = max(end, int(offset + length))
        size: int = library.stat().st_size
        if end >= size:
            return 0
        header[40:48] = bytes(8)  # where the section headers begin: nowhere
        header[58:64] = bytes(6)  # their size, their number, the one with their names
        file.seek(0)
        file.write(header)
        file.truncate(end)
        return size - end


def main() -> None:
    arguments = sys.argv[1:]
    whole = arguments[0] == "--whole"
    where, wanted, *index = arguments[1:] if whole else arguments
    if where == "--list":
        print("\n".join(image_packages(tomllib.loads(LOCK.read_text()), wanted.split(","))))
        return
    torch = install(Path(where), wanted.split(","), index[0] if index else "")
    if not whole:
        trim(Path(where), torch=torch)


if __name__ == "__main__":
    main()
