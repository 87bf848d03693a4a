"""Dependencies are as pyproject.toml says: what is imported is declared, what is declared is imported, and each
lower bound is a version that the quick tests were played with.

deptry looks for the first two as well, but takes the base install and the extras for one: the thin client could
import what only a server has, and ask for what only a server imports.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from typing import Any

import grimp
import pytest
from test_rooms import PACKAGES

from lowest import NOT_PLAYED, PLAYED, environments, lower_bounds, project, recorded, requirements

COME_WITH = {"mcp_types": "mcp", "pydantic_core": "pydantic"}
"""Packages that another one pins to the one version that fits it."""
IN_SANDBOXES = frozenset({"turnstile_helper"})
"""Ours, and put there by the server."""
IN_OTHER_PYTHONS = frozenset({"agentlightning", "areal", "openenv", "ray", "verifiers", "verl"})
"""Imported by programs that a setting gives a Python of its own, and by what runs in a trainer."""
SERVER_EXTRAS = frozenset({"server", "embedded"})
ENVIRONMENTS = environments(project())


@cache
def imports(package: str) -> dict[str, set[str]]:
    """What ``package`` imports of others: the name, and the distributions that it may be of."""
    graph = grimp.build_graph(package, cache_dir=None, include_external_packages=True)
    others = {module for module in graph.modules if graph.is_module_squashed(module)} - PACKAGES.keys()
    elsewhere = IN_SANDBOXES | IN_OTHER_PYTHONS
    return {name: distributions(name) for name in others - sys.stdlib_module_names - elsewhere}


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(name: str) -> set[str]:
    return {found.lower().replace("_", "-") for found in installed().get(COME_WITH.get(name, name), ())}


def declared(extras: frozenset[str], *, base: bool = True) -> set[str]:
    return {one.name.lower() for one in requirements(project(), extras, base=base)}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package: str) -> None:
    extras = frozenset(project()["project"]["optional-dependencies"]) - NOT_PLAYED
    if package == "turnstile":
        extras -= SERVER_EXTRAS
    at_hand = declared(extras)
    assert [name for name, found in imports(package).items() if not found & at_hand] == []


def test_what_is_declared_is_imported() -> None:
    """The base's by the client."""
    client, server = (set().union(*imports(package).values()) for package in PACKAGES)
    assert declared(frozenset()) - client == set()
    extras: Any = project()["project"]["optional-dependencies"]
    for extra in extras.keys() - NOT_PLAYED:
        assert declared(frozenset({extra}), base=False) - client - server == set(), extra


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_make_lowest_was_played_with_the_bounds_of_today(name: str) -> None:
    """torch with the version that the project constrains it to."""
    bounds, played = lower_bounds(project(), ENVIRONMENTS[name]), recorded()[name]
    other = {one: (str(bound), str(played.get(one))) for one, bound in bounds.items() if played.get(one) != bound}
    assert other == {}, f"(bound, version in {PLAYED.name}): run `make lowest`, and commit what it writes"


def test_every_bound_is_played_by_some_environment() -> None:
    played = {name for environment in ENVIRONMENTS.values() for name in lower_bounds(project(), environment)}
    extras = frozenset(project()["project"]["optional-dependencies"]) - NOT_PLAYED
    assert declared(extras) <= {name.lower() for name in played}
