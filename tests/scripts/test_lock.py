"""uv.lock: no registry's address in it, and the constraints that pip gets from it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from constraints import constraints
from lock import PLACEHOLDER, without_addresses

LOCK = Path(__file__).resolve().parents[2] / "uv.lock"


def test_the_lock_names_no_host_but_the_placeholder() -> None:
    addresses = re.findall(r"\w+://[^\"]*", LOCK.read_text())
    assert set(addresses) == {PLACEHOLDER}


def test_addresses_become_file_names_and_hashes_stay() -> None:
    lock = (
        'source = { registry = "https://index.example/simple" }\n'
        'wheels = [{ url = "https://files.example/ab/cd/thing-1.0-py3-none-any.whl", hash = "sha256:00" }]\n'
    )
    assert without_addresses(lock) == (
        f'source = {{ registry = "{PLACEHOLDER}" }}\n'
        'wheels = [{ filename = "thing-1.0-py3-none-any.whl", hash = "sha256:00" }]\n'
    )


def test_an_address_in_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="git\\.example"):
        without_addresses('source = { git = "https://git.example/thing" }\n')


def test_every_locked_package_but_ours_is_constrained_and_none_is_for_cuda() -> None:
    lock = tomllib.loads(LOCK.read_text())
    lines = constraints(lock)
    names = {line.split("==")[0] for line in lines}
    assert names == {package["name"] for package in lock["package"]} - {"turnstile-rl"}
    assert "torch==2.13.0" in lines
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]


def test_a_package_with_several_versions_gets_the_marker_of_each() -> None:
    registry = {"registry": PLACEHOLDER}
    lock = {
        "package": [
            {"name": "a", "version": "1", "source": registry, "resolution-markers": ["x == '1'", "x == '2'"]},
            {"name": "a", "version": "2", "source": registry, "resolution-markers": ["x == '3'"]},
            {"name": "us", "version": "0", "source": {"editable": "."}},
        ]
    }
    assert constraints(lock) == ["a==1 ; (x == '1') or (x == '2')", "a==2 ; (x == '3')"]
