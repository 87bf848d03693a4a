"""Packages whose names are loaded when they are first used: every name is there, and no other."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("turnstile", "turnstile.exporters.openenv", "turnstile.exporters.trl")


@pytest.mark.parametrize("name", PACKAGES)
def test_each_name_has_the_home_that_type_checkers_are_shown(name: str) -> None:
    package = importlib.import_module(name)
    tree = ast.parse((ROOT / "client" / Path(*name.split(".")) / "__init__.py").read_text())
    shown = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("turnstile.")
        for alias in node.names
        if alias.name != "lazy_names"
    }
    homes = {each: module for module, names in package._HOMES.items() for each in names}
    assert homes == shown
    assert sorted(package.__all__) == dir(package) == sorted(homes)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unknown_name_is_no_attribute(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'absent'"):
        importlib.import_module(name).absent  # noqa: B018
