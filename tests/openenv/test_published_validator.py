"""The newest ``openenv validate`` on the repository, on a layout, and on a running server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from openenv_support import base_url

from control_support import OpenDoor
from published_validator import ROOT, needs_openenv, validated
from turnstile_server.commands.openenv_layout import write_layout

pytestmark = [pytest.mark.agents, needs_openenv]


@pytest.mark.thorough  # CI holds the built image to the running level
def test_the_manifests_of_the_repository_and_of_a_layout_pass(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "checkout"], check=True)
    write_layout(tmp_path / "space", ROOT, "space")
    for folder in ("checkout", "space"):
        code, report = validated(tmp_path / folder, "--level", "static")
        assert (code, report["verdict"]) == (0, "pass"), report
        assert report["manifest"]["capabilities"]["task_api"] is True


def test_a_manifest_with_a_wrong_block_is_told(tmp_path: Path) -> None:
    write_layout(tmp_path / "space", ROOT, "space")
    manifest = tmp_path / "space" / "openenv.yaml"
    manifest.write_text(manifest.read_text().replace("floor_margin: 0.5", "floor_margin: none"))
    code, report = validated(tmp_path / "space", "--level", "static")
    assert (code, report["verdict"]) == (1, "fail")


@pytest.mark.parametrize("mode", ["simulation", "production"])
@pytest.mark.thorough
def test_a_running_server_passes(open_door: OpenDoor, mode: str) -> None:
    with open_door(openenv={"mode": mode}) as door:
        code, report = validated(base_url(door))
    assert code == 0, report
    assert (report["passed"], report["mode"]) == (True, mode)
