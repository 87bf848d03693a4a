"""The runtime level of the newest ``openenv validate`` passes on what ``turnstile openenv layout`` writes.

It builds the layout's image for the validator, and plays its plan in a container without a key, a variable, a
sandbox or a place to write but /tmp. The validator's own provider starts and removes the container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_builds import ROOT, base_image, run

from published_validator import needs_openenv, validated
from turnstile_server.commands.openenv_layout import VALIDATED, write_layout

pytestmark = [pytest.mark.docker, pytest.mark.container, pytest.mark.timeout(1500), needs_openenv]

GRADED = ("static.manifest", "runtime.startup", "runtime.observation_schema", "runtime.reward_well_formed")
GRADED += ("runtime.state_contract",)


def images() -> set[str]:
    return set(run("docker", "images", "--no-trunc", "-q").split())


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Path]:
    write_layout(tmp_path / "space", ROOT, "space")
    dockerfile = tmp_path / "space" / VALIDATED
    # The validator gives no build arguments, and here no registry has the usual base.
    base = f"ARG BASE_IMAGE={base_image()}"
    dockerfile.write_text(re.sub(r"(?m)^ARG BASE_IMAGE=.*$", base, dockerfile.read_text()))
    before = images()
    yield tmp_path / "space"
    for image in images() - before:
        run("docker", "rmi", image)


def test_the_runtime_level_passes(space: Path) -> None:
    code, report = validated(space, "--level", "runtime")
    assert code == 0, report
    found = {check["check_id"]: check["status"] for check in report["results"]}
    assert {name: found[name] for name in GRADED} == dict.fromkeys(GRADED, "pass"), report
    assert "fail" not in found.values()
    assert run("docker", "ps", "-aq", "--filter", "name=openenv-validation") == ""
