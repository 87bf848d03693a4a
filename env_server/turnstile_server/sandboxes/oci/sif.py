"""The place of the root file system in a SIF file, the image format of Apptainer and Singularity. Pure.

Layout: https://github.com/apptainer/sif, ``pkg/sif/sif.go`` (``header``) and ``pkg/sif/descriptor.go``
(``rawDescriptor``): little-endian, packed.
"""

from __future__ import annotations

import struct
from typing import IO

_HEADER = struct.Struct("<32s10s3s3s16s8q")
"""Launch line, magic, version, architecture, id, two times, descriptors free and in all, their offset and length,
offset and length of the data."""
_DESCRIPTOR = struct.Struct("<i?III3q4q128sii3s373x")
"""Type, used, id, group, link; offset, size, padded size; times and owner; name; of a partition: file system,
kind, architecture."""
_MAGIC = b"SIF_MAGIC\0"
_PARTITION, _SQUASHFS, _PRIMARY_SYSTEM = 0x4004, 1, 2
_ARCHITECTURES = {b"02": "amd64", b"04": "arm64"}
_MOST = 4096
"""Descriptors that are looked at; a file has 48 by default."""


def system_in(file: IO[bytes]) -> tuple[int, str]:
    """Offset in bytes of the squashfs with the primary system, and its architecture as OCI names it ("": unknown).
    Raises ValueError where there is none."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or _HEADER.unpack(head)[1] != _MAGIC:
        raise ValueError("it is no SIF file")
    total, start = _HEADER.unpack(head)[8:10]
    file.seek(start)
    for _ in range(min(total, _MOST)):
        raw = file.read(_DESCRIPTOR.size)
        if len(raw) < _DESCRIPTOR.size:
            break
        kind, used, _, _, _, offset, *_, system, part, architecture = _DESCRIPTOR.unpack(raw)
        if used and kind == _PARTITION and part == _PRIMARY_SYSTEM:
            if system != _SQUASHFS:
                raise ValueError("its system is no squashfs (encrypted, or of an older format)")
            return int(offset), _ARCHITECTURES.get(architecture[:2], "")
    raise ValueError("it has no system partition")
