"""ELF files edited in place: made by hand here, so that every byte of them is known."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.runtimes import elf
from turnstile_server.runtimes.build import private_loader
from turnstile_server.runtimes.layout import HOST_LIBRARIES, HOST_LOADER, LOADER, LOADER_EDITS, LOADER_FALLBACKS

LOADER_AT, DYNAMIC_AT = 64 + 2 * 56, 256
RUNPATH, NEEDED, NULL = (29, 7), (1, 3), (0, 0)
PAYLOAD = b"appended by whoever made the program"


def program(*entries: tuple[int, int], loader: str = HOST_LOADER) -> bytes:
    """A header, two program headers (loader, dynamic section), what they lead to, and a payload."""
    name = loader.encode() + b"\0"
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    head = struct.pack("<16xHHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + head[16:]
    headers = struct.pack("<IIQQQQQQ", 3, 4, LOADER_AT, 0, 0, len(name), len(name), 1)
    headers += struct.pack("<IIQQQQQQ", 2, 6, DYNAMIC_AT, 0, 0, len(dynamic), len(dynamic), 8)
    return ((head + headers + name).ljust(DYNAMIC_AT, b"\0") + dynamic) + PAYLOAD


def written(folder: Path, data: bytes) -> Path:
    path = folder / "program"
    path.write_bytes(data)
    return path


def read_and_edit(path: Path) -> None:
    elf.loader_of(path)
    elf.drop_search_paths(path)


def test_another_loader_takes_the_place_of_the_first_and_nothing_else_changes(tmp_path: Path) -> None:
    path = written(tmp_path, program(NEEDED, NULL))
    before = path.read_bytes()
    assert elf.loader_of(path) == HOST_LOADER
    assert elf.set_loader(path, HOST_LOADER, LOADER)
    assert elf.loader_of(path) == LOADER
    assert path.read_bytes() == before.replace(HOST_LOADER.encode(), LOADER.encode())
    assert not elf.set_loader(path, HOST_LOADER, LOADER)


def test_a_program_of_another_c_library_is_left_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, program(NULL, loader="/lib/ld-musl-x86_64.so.1"))
    before = path.read_bytes()
    assert not elf.set_loader(path, HOST_LOADER, LOADER)
    assert path.read_bytes() == before


def test_what_has_another_length_is_never_written(tmp_path: Path) -> None:
    path = written(tmp_path, program(NULL))
    with pytest.raises(ValueError, match="differ in length"):
        elf.set_loader(path, HOST_LOADER, f"{LOADER}/")
    with pytest.raises(ValueError, match="differ in length"):
        elf.replaced(b"abc", b"a", b"ab")
    assert all(len(old) == len(new) for old, new in (*LOADER_EDITS, LOADER_FALLBACKS))


def test_search_paths_go_and_what_follows_moves_up(tmp_path: Path) -> None:
    path = written(tmp_path, program(NEEDED, RUNPATH, (15, 9), (5, 1), NULL))
    elf.drop_search_paths(path)
    assert path.read_bytes() == program(NEEDED, (5, 1), NULL, NULL, NULL)
    elf.drop_search_paths(path)
    assert path.read_bytes() == program(NEEDED, (5, 1), NULL, NULL, NULL)


@given(st.integers(0, len(program(NEEDED, NULL)) - len(PAYLOAD) - 1))
def test_a_file_that_ends_too_early_is_no_elf_file(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    path = written(tmp_path_factory.mktemp("elf"), program(NEEDED, NULL)[:size])
    before = path.read_bytes()
    with pytest.raises(elf.FormatError, match="program: "):
        read_and_edit(path)
    assert path.read_bytes() == before


@given(st.binary(max_size=400))
def test_no_content_of_a_file_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = written(tmp_path_factory.mktemp("elf"), b"\x7fELF\x02\x01" + tail)
    with suppress(elf.FormatError):
        read_and_edit(path)
    assert path.stat().st_size == 6 + len(tail)


def test_a_private_loader_knows_no_folder_and_no_setting_of_the_image() -> None:
    settings = b"\0/etc/ld.so.cache\0/etc/ld.so.preload\0"
    folders = f"\0{HOST_LIBRARIES}\0/usr{HOST_LIBRARIES}\0/lib/\0/usr/lib/\0".encode()
    made = private_loader(b"head" + folders + settings + b"tail")
    assert made == (
        b"head\0/turnstile/python/lib/\0/usr/turnstile/python/lib/\0/.no/\0/.no/lib/\0"
        b"\0/turnstile/.none\0/turnstile/.nopred\0tail"
    )


def test_a_loader_of_another_kind_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(elf.FormatError, match="/lib/x86_64-linux-gnu/ is not in it"):
        private_loader(b"\0/lib64/\0/usr/lib64/\0/etc/ld.so.cache\0")
