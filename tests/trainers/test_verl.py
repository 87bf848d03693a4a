"""verl 0.9.1 and ``turnstile.exporters.verl``: the claims of ``verl_claims.py``, played in verl's own Python
(``TURNSTILE_VERL_PYTHON``) with the recorded run and a server to play on."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from client.conftest import launching_door
from control_support import Door, engine, open_door
from local import ROOT
from trainers import compared
from turnstile.exporters.trained_rows import trained_rows
from turnstile.rollout import Rollout

__all__ = ["engine", "launching_door", "open_door"]

pytestmark = pytest.mark.trainers
CLAIMS = Path(__file__).with_name("verl_claims.py")


@pytest.fixture(scope="module")
def failures(
    recorded_door: Door, launching_door: Door, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What each claim that was played failed with; nothing where it held."""
    report = tmp_path_factory.mktemp("verl") / "report.xml"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": f"{ROOT / 'client'}:{ROOT / 'tests'}",
        "RECORDED_URL": recorded_door.url,
        "PLAY_URL": launching_door.url,
        "KEY": launching_door.key,
        "MODEL": str(tiny_model),
        "PAGE": str(ROOT / "docs" / "trainers" / "verl.md"),
        "HF_HUB_OFFLINE": "1",
    }
    options = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", str(CLAIMS.parent), "-p", "no:cacheprovider"]
    command = [os.environ["TURNSTILE_VERL_PYTHON"], "-m", "pytest", *options, f"--junitxml={report}", str(CLAIMS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    cases = ElementTree.parse(report).iter("testcase")
    return {case.get("name", ""): "\n".join(bad.text or "" for bad in case) for case in cases}


@pytest.mark.parametrize("claim", re.findall(r"^def (test_\w+)", CLAIMS.read_text("utf-8"), re.MULTILINE))
def test_with_verls_own_code(claim: str, failures: dict[str, str]) -> None:
    if failures[claim]:
        pytest.fail(failures[claim], pytrace=False)


def test_what_was_compared(failures: dict[str, str], rollouts: list[Rollout]) -> None:
    bit_by_bit = "test_every_sampled_token_of_the_recorded_run_is_in_one_row_or_listed"
    stepped = "test_a_step_with_verls_own_loss_moves_the_recorded_tokens_as_their_advantages_say"
    assert not failures[bit_by_bit] + failures[stepped]
    rows = [row for one in rollouts for row in trained_rows(one)]
    types = "`AgentLoopOutput`, its postprocess and advantages"
    step = "its policy loss, one step of a tiny Qwen3"
    compared.say("verl 0.9.1", types, step, len(rows), sum(int(row.loss_mask.sum()) for row in rows))
