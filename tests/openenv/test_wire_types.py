"""Our types of OpenEnv's wire are those of both packages that have them: ``openenv-core`` and ``openenv``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from published_types import MODELS, shapes

from turnstile_server.control.openenv import openenv_types, openenv_wire
from turnstile_server.control.openenv.openenv_wire import JsonRpcErrorCode, rpc_error, rpc_result

RECORDED = sorted((Path(__file__).parent / "published").glob("types-*.json"))
PYTHONS = {"openenv-core": sys.executable, "openenv": os.environ.get("TURNSTILE_OPENENV_PYTHON", "")}


def known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_ours_are_those_of_the_package(path: Path) -> None:
    ours = shapes({name.removeprefix("OpenEnv"): each for name, each in vars(openenv_wire).items()})
    for name, theirs in known(path)["types"].items():
        assert ours[name] == theirs, name


def test_two_packages_are_recorded() -> None:
    assert [known(path)["package"] for path in RECORDED] == ["openenv 0.10.0", "openenv-core 0.3.0"]


def test_our_action_observation_and_state_keep_the_fields_and_the_strictness_of_theirs() -> None:
    for ours, base in (("TurnstileAction", "OpenEnvAction"), ("TurnstileObservation", "OpenEnvObservation")):
        made, theirs = vars(openenv_types)[ours].model_json_schema(), vars(openenv_wire)[base].model_json_schema()
        assert made["additionalProperties"] is False
        assert theirs["properties"].items() <= made["properties"].items()
    assert openenv_types.TurnstileState.model_json_schema()["additionalProperties"] is True


def test_json_rpc_has_a_result_or_an_error_and_no_id_that_is_none() -> None:
    assert rpc_result(None, 3) == {"jsonrpc": "2.0", "id": 3, "result": None}
    refused = rpc_error(JsonRpcErrorCode.PARSE_ERROR, "no", {"not": "an id"})
    assert refused == {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "no", "data": None}}
    assert json.loads(json.dumps(refused)) == refused


@pytest.mark.agents
@pytest.mark.parametrize("package", PYTHONS)
def test_the_records_are_what_the_installed_packages_have(package: str) -> None:
    if not PYTHONS[package]:
        pytest.skip("set TURNSTILE_OPENENV_PYTHON (scripts/ci_installs.sh)")
    program = Path(__file__).with_name("published_types.py")
    done = subprocess.run([PYTHONS[package], program], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["package"].split()[0] == package
    assert set(MODELS) < set(found["types"])
    version = found["package"].split()[1]
    assert known(Path(__file__).parent / "published" / f"types-{version}.json") == found
