"""Paths of the carried runtime in a container, and the bytes that are written into its files. The mount target is
part of the format: its length is that of what it replaces, so no byte of a file moves."""

from __future__ import annotations

from typing import Final

TARGET: Final = "/turnstile/python"
"""Its mount point in containers."""
PYTHON: Final = f"{TARGET}/bin/python3"
LOADER: Final = f"{TARGET}/lib/ld.so"
LIBRARIES: Final = f"{TARGET}/lib/"
CA_FILE: Final = f"{TARGET}/etc/ca-certificates.crt"
"""The certificates of the machine that made the runtime, where it had some."""
_IMAGE_CA_FILE: Final = "/etc/ssl/certs/ca-certificates.crt"

HOST_LOADER: Final = "/lib64/ld-linux-x86-64.so.2"
"""The loader that programs of x86-64 glibc machines name (the System V ABI fixes it)."""
HOST_LIBRARIES: Final = "/lib/x86_64-linux-gnu/"
"""Debian's folder of libraries, which Debian's and Ubuntu's loader has built in."""

LOADER_EDITS: Final[tuple[tuple[bytes, bytes], ...]] = (
    # /usr/lib/x86_64-linux-gnu/ contains it, and becomes a folder that no image has.
    (HOST_LIBRARIES.encode(), LIBRARIES.encode()),
    (b"/etc/ld.so.cache\0", b"/turnstile/.none\0"),
    (b"/etc/ld.so.preload\0", b"/turnstile/.nopred\0"),
)
"""Edits of a private loader (old, new). It then knows neither the image's libraries nor its settings."""
LOADER_FALLBACKS: Final = (b"\0/lib/\0/usr/lib/\0", b"\0/.no/\0/.no/lib/\0")
"""The last folders that a loader looks into. A musl image's are there."""


def ca_file_of(python: str) -> str:
    """The CA file for programs that insist on one, beside this interpreter."""
    return CA_FILE if python == PYTHON else _IMAGE_CA_FILE
