"""`make upstream` reads our pins, and a row says what fails: without an index, on output made for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import suite_results
import upstream
from bounded_commands import Completed
from suite_results import SuiteResult
from test_sources import ROOT, modules_of_tests
from upstream import PEERS, Agent, CannotPlay, Environment, Overlay, Peer, ReplacedPin, Row

MODULES = {path: path.read_text() for path in modules_of_tests()}
PYTEST = """\
..F.                                                                     [100%]
========================= rerun test summary info =========================
FAILED tests/agents/test_one.py::test_path
=========================== short test summary info ============================
FAILED tests/agents/test_one.py::test_shape[local-codex] - AssertionError: assert {'breaks': {}} == {'breaks': 1}
FAILED tests/agents/test_one.py::test_path - OSError: no /usr/lib/of/this/machine.so at https://index.example/simple/x
  in the second line
ERROR tests/agents/test_one.py::test_slow
SKIPPED [1] tests/agents/test_one.py:3: no engine
==== 2 failed, 4 passed, 1 skipped, 1 error in 3.21s ====
"""


def pinned_play(peer: Peer, version: str, work: Path, only: object) -> SuiteResult:
    """Of the failures above, the pinned version has one too."""
    if version == "1":
        return SuiteResult(failures={"tests/agents/test_one.py::test_slow": "no reason"})
    return suite_results.result_of_pytest(Completed(1, PYTEST))


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_a_pin_in_our_files(name: str) -> None:
    assert re.match(r"\d+\.\d+", PEERS[name].pinned())
    Version(PEERS[name].pinned())


def test_the_pins_of_agents_are_the_versions_of_their_specs() -> None:
    agents = {play.name: peer for peer in PEERS.values() for play in peer.plays if isinstance(play, Agent)}
    for name, peer in agents.items():
        spec = yaml.safe_load((upstream.SPECS / f"{name}.yaml").read_text())
        assert spec["version"] == peer.pinned(), name
    specs = {path.stem: yaml.safe_load(path.read_text()) for path in upstream.SPECS.glob("*.yaml")}
    installed = {name for name, spec in specs.items() if {"npm", "pip"} & spec.get("install", {}).keys()}
    assert agents.keys() == installed


def test_a_pin_is_that_of_the_very_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "ROOT", tmp_path)
    (tmp_path / "pins.txt").write_text("# mcp==9\nmcp-types==8\nInspect_AI==0.3.1\nmcp==2.3.0\nother-mcp==7\n")
    assert upstream.pinned("pins.txt", "mcp") == "2.3.0"
    assert upstream.pinned("pins.txt", "inspect-ai") == "0.3.1"
    (tmp_path / "install.sh").write_text("  @scope/one@1.2.0\n  @scope/one-linux-{arch}@1.2.0-linux-{arch}\n")
    assert upstream.pinned("install.sh", "@scope/one") == "1.2.0"
    with pytest.raises(CannotPlay, match="names no version of absent"):
        upstream.pinned("pins.txt", "absent")


def test_every_module_that_asks_for_a_python_of_its_own_is_played_by_a_peer() -> None:
    plays = [play for peer in PEERS.values() for play in peer.plays]
    for play in plays:
        for test in () if isinstance(play, Agent) else getattr(play, "tests", ()):
            assert (ROOT / test).exists(), test
    for variable in ("OPENENV", "SWEBENCH", "MINI_SWE", "MCP_CLIENTS"):
        wanted = f"TURNSTILE_{variable}" + ("" if variable == "MCP_CLIENTS" else "_PYTHON")
        played: set[str] = set()
        for play in plays:
            match play:
                case Environment(recipe=recipe, tests=tests) | ReplacedPin(recipe=recipe, tests=tests):
                    played |= set(tests) if wanted in recipe.variables else set()
                case Overlay():
                    pass
        names = {path.relative_to(ROOT).as_posix() for path, text in MODULES.items() if wanted in text}
        assert names
        assert [name for name in names if not any(name.startswith(test) for test in played)] == [], variable


def test_a_row_names_what_fails_with_the_newest_version_alone() -> None:
    result, drift = upstream.verdict(Peer("x", "uv.lock", (pinned_play,)), "1", "2")
    assert result == "fails: 2 of 7"
    first, second, before = drift.split("<br>")
    assert first == (
        "`agents/test_one.py::test_shape[local-codex]`: AssertionError: assert {'breaks': {}} == {'breaks': 1}"
    )
    assert second == "`agents/test_one.py::test_path`: OSError: no …/machine.so at URL in the second line"
    assert before == "not counted, for the pinned version fails too: `agents/test_one.py::test_slow`"


def test_what_ends_without_a_test_does_not_pass() -> None:
    late = suite_results.result_of_pytest(Completed(None, "..."))
    assert late.failures == {"the suite": "it did not end in time"}
    broken = suite_results.result_of_pytest(Completed(4, "ERROR: file or directory not found: tests/absent\n"))
    assert broken.failures == {"the suite": "ERROR: file or directory not found: tests/absent"}
    skipped = suite_results.result_of_pytest(Completed(0, "==== 3 skipped in 0.10s ===="))
    assert suite_results.cells_of(skipped, {}, {}) == ("not played", "3 tests were skipped")


def test_of_a_traceback_the_reason_is_its_end() -> None:
    traceback = "Traceback (most recent call last):\n    File 'x', line 1\n  a.BError: gone\n  \n"
    quoted = f"AssertionError: {traceback}assert 1 == 0"
    assert suite_results.cause_of(quoted) == "a.BError: gone"
    assert suite_results.cause_of("ValueError: x\n  y") == "ValueError: x\n  y"


def test_what_the_doctor_finds_wrong_is_the_reason() -> None:
    findings = [
        {"name": "tokens", "passed": True, "text": ""},
        {"name": "ended", "passed": False, "text": "code 1"},
    ]
    report = json.dumps({"passed": False, "findings": findings})
    found = suite_results.result_of_doctor("pi", Completed(1, f"a warning\n{report}\n"))
    assert found.failures == {"turnstile agents doctor pi": "ended: code 1"}
    assert suite_results.result_of_doctor("pi", Completed(None, "")).passed == 0


def test_rows_of_peers_that_are_not_asked_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "upstream.md"
    page.write_text(f"before\n{upstream.BEGIN}{upstream.END}after\n")
    monkeypatch.setattr(upstream, "PAGE", page)
    upstream.write({"pi": Row("pi", "1", "2", "fails: 1 of 2", "a \\| b", "2026-01-02")})
    upstream.write({"codex": Row("codex", "3", "3", "same as pinned", "", "2026-01-03")})
    lines = page.read_text().splitlines()
    assert "| pi | 1 | 2 | fails: 1 of 2 | a \\| b | 2026-01-02 |" in lines
    assert "| codex | 3 | 3 | same as pinned |  | 2026-01-03 |" in lines
    assert f"| mcp | {PEERS['mcp'].pinned()} |  | not played |  |  |" in lines
    assert (lines[0], lines[-1]) == ("before", "after")


def test_the_page_of_the_repository_has_a_row_for_each_peer() -> None:
    assert list(upstream.rows_on_page()) == list(PEERS)
