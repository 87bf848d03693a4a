"""What many episodes need: by hand, of a kind that was measured, and as the command says it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from turnstile.cli import app
from turnstile.models import EpisodeSummary, PartSeconds
from turnstile.sizing import Capacities, EpisodeKind, kind_of, plan

SWE = EpisodeKind(setup_s=10, model_s=400, agent_s=120, grading_s=30, turns=40, sampled_tokens=16_000)
TIMES = {"--model-s": 400, "--agent-s": 120, "--setup-s": 10, "--grading-s": 30}
SWE_WORDS = {"--turns": 40, "--tokens": 16000, **TIMES}
DOCS = Path(__file__).parents[2] / "docs" / "cluster.md"


def said(episodes: int, words: dict[str, int], *more: str) -> Result:
    options = [f"{name}={value}" for name, value in words.items()]
    as_to_a_file = {"COLUMNS": None}  # nothing is cut
    return CliRunner().invoke(app, ["plan", str(episodes), *options, *more], env=as_to_a_file)


def row(ended_s: float | None, **seconds: float) -> EpisodeSummary:
    return EpisodeSummary.model_construct(
        ended_s=ended_s, seconds=PartSeconds(**seconds), turns=4, sampled_tokens=1000
    )


def test_ten_thousand_episodes_by_hand() -> None:
    found = plan(10_000, SWE, Capacities())
    assert found.episodes_s == pytest.approx(10_000 / 560)
    assert found.turns_s == pytest.approx(714, abs=1)
    assert found.tokens_s == pytest.approx(285_714, abs=1)
    assert found.gradings == pytest.approx(536, abs=1)
    assert found.sandboxes == pytest.approx(10_536, abs=1)
    assert (found.servers, found.engines) == (40, 58)
    assert found.image_gib_s == pytest.approx(10_000 / 560 / 8 * 2)
    assert found.gate_share < 0.01
    assert found.hosts == 24, "by cores; memory alone asks for 17"


def test_what_is_open_adds_up_and_grows_with_it() -> None:
    few, many = plan(100, SWE, Capacities()), plan(200, SWE, Capacities())
    assert few.working + few.gradings == pytest.approx(100)
    assert many.tokens_s == pytest.approx(2 * few.tokens_s)
    assert plan(100, SWE, Capacities(image_gib=0)).image_gib_s == 0


def test_the_kind_is_the_mean_of_those_that_ended_without_their_waiting() -> None:
    rows = [
        row(20.0, queue=5, setup=1, agent=2, model=3, tools=4, grading_queue=3, grading=2),
        row(30.0, queue=9, setup=3, agent=4, model=5, tools=6, grading_queue=0, grading=4),
        row(None, setup=100),
    ]
    assert kind_of(rows) == EpisodeKind(2, 4, 8, 3, 4, 1000)
    with pytest.raises(ValueError, match="none of these episodes has ended"):
        kind_of(rows[2:])


def test_episodes_that_take_no_time_are_refused() -> None:
    with pytest.raises(ValueError, match="take no time"):
        plan(1, EpisodeKind(0, 0, 0, 0, 1, 1), Capacities())
    refused = said(1, SWE_WORDS | dict.fromkeys(TIMES, 0))
    assert refused.exit_code == 2
    assert "take no time" in refused.output


def test_with_all_numbers_no_server_is_asked_and_the_page_has_what_it_says() -> None:
    printed = said(10_000, SWE_WORDS)
    assert printed.exit_code == 0, printed.output
    block = re.search(r"\$ turnstile plan 10000.*?\n(An episode.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    assert block[1].strip() == printed.output.strip()
    as_json = said(10_000, SWE_WORDS, "--json")
    assert json.loads(as_json.output)["servers"] == 40
