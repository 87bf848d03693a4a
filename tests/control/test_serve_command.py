"""``turnstile serve``: a configuration that cannot be is told by name; a good one serves until it is stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from turnstile_server.commands.serve import nested, serve
from turnstile_server.settings import Settings
from turnstile_server.settings.moved import CONSTANTS, MOVED, bounds_class

USAGE = 2
READY_S = 100

command = typer.Typer()
command.command()(serve)


def environment(**extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return {**inherited, **extra}


def refused(*arguments: str | Path, **extra: str) -> str:
    """What ``turnstile serve`` says when it refuses to start."""
    done = subprocess.run(
        [sys.executable, "-m", "turnstile", "serve", *map(str, arguments)],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )
    assert done.returncode == USAGE, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def refused_in_process(*arguments: str | Path, **extra: str) -> str:
    """The same for what is refused before anything is started."""
    cleared = {name: None for name in os.environ if name.startswith("TURNSTILE_")}
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], env={**cleared, **extra})
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (USAGE, "")
    return result.stderr


def test_each_wrong_setting_is_named_with_its_value_and_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "turnstile.toml"
    config.write_text('[gate]\nmax_calls = 0\n[control]\nprot = 1\n[journal]\ndurability = "eternal"\n')
    said = refused_in_process("--config", config, "--control-port", "70000")
    assert "setting gate.max_calls = 0: Input should be greater than or equal to 1" in said
    assert "setting control.prot: there is no such setting" in said
    assert "setting journal.durability = 'eternal'" in said
    assert "setting control.port = 70000" in said


def test_a_setting_of_an_earlier_name_is_refused_with_the_new_one(tmp_path: Path) -> None:
    config = tmp_path / "turnstile.toml"
    config.write_text("[processes]\ncount = 2\n[workers]\nhang_s = 9\nmax_restarts = 3\n")
    assert sorted(refused_in_process("--config", config).splitlines()) == [
        "turnstile: setting processes.count: it is workers.count since this version",
        "turnstile: setting workers.hang_s: it is fleet.hang_s since this version",
    ]
    said = refused_in_process(TURNSTILE_PROCESSES__COUNT="2", TURNSTILE_WORKERS__HANG_S="9")
    assert "processes.count: it is workers.count" in said
    assert "workers.hang_s: it is fleet.hang_s" in said


def test_a_setting_that_is_a_constant_now_is_refused_with_its_value_and_place(tmp_path: Path) -> None:
    config = tmp_path / "turnstile.toml"
    config.write_text("[gate]\ntrim_s = 1\n[processes]\npoll_s = 1\n[workers]\nstart_calls = 1\n")
    assert sorted(refused_in_process("--config", config).splitlines()) == [
        "turnstile: setting gate.trim_s: it is a constant since this version, GateBounds.trim_s = 10.0 in "
        "turnstile_server.gate.bounds; leave it out, and ask if you need another value",
        "turnstile: setting processes.poll_s: it is a constant since this version, WorkerBounds.poll_s = 0.5 in "
        "turnstile_server.workers.bounds; leave it out, and ask if you need another value",
        "turnstile: setting workers.start_calls: it is a constant since this version, FleetBounds.start_calls = "
        "16 in turnstile_server.engines.fleet.bounds; leave it out, and ask if you need another value",
    ]
    said = refused_in_process(TURNSTILE_JOURNAL__INDEX_LAG_S="1")
    assert "setting journal.index_lag_s: it is a constant since this version" in said


def test_no_file_and_no_variable_gives_bounds(tmp_path: Path) -> None:
    config = tmp_path / "turnstile.toml"
    config.write_text("[gate]\nbounds = [{trim_s = 1}]\n")
    assert "setting gate.bounds: there is no such setting" in refused_in_process("--config", config)
    assert "setting gate.bounds: there is no such setting" in refused_in_process(TURNSTILE_GATE__BOUNDS="[1]")


def test_each_moved_setting_leads_to_one_that_there_is_or_to_a_constant() -> None:
    for name in {*MOVED.values(), *CONSTANTS}:
        section, _, field = name.partition(".")
        kind = type(getattr(Settings(), section))
        if name in CONSTANTS:
            assert field in {each.name for each in fields(bounds_class(CONSTANTS[name]))}, name
        assert (field in kind.model_fields) is (name not in CONSTANTS), name


def test_a_wrong_environment_variable_is_named(tmp_path: Path) -> None:
    assert "setting gate.port" in refused_in_process(TURNSTILE_GATE__PORT="many")
    said = refused_in_process(TURNSTILE_TASKS__SOURCES="a.yaml")
    assert 'value for field "tasks"' in said
    assert "are JSON in the environment" in said


def test_a_wrong_key_is_not_printed() -> None:
    said = refused_in_process(TURNSTILE_CONTROL_KEY="tooshort")
    assert "control.key" in said
    assert "tooshort" not in said


def test_a_config_file_that_is_absent_or_no_toml_is_named(tmp_path: Path) -> None:
    assert "no such file" in refused_in_process("--config", tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[gate\n")
    assert "not TOML" in refused_in_process("--config", tmp_path / "bad.toml")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    assert "--model" in refused("--data-dir", tmp_path)
    ports = ("--control-port", "0", "--agent-port", "0")
    assert "nowhere" in refused("--data-dir", tmp_path / "d", "--model", tmp_path / "nowhere", *ports)


@pytest.mark.slow
def test_a_port_in_use_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("--data-dir", tmp_path, "--model", tiny_model, "--control-port", str(port))
    assert str(port) in said


@pytest.mark.parametrize("option", ["--engine", "--sandbox", "--durability", "--call-format", "--log-level"])
def test_an_unknown_choice_is_refused_in_process(option: str) -> None:
    assert option in refused_in_process(option, "nonsense")


PUBLIC = "http://agents.example:8001"


@pytest.mark.slow
def test_flags_beat_the_file_and_a_started_server_stops_when_asked(tmp_path: Path, tiny_model: Path) -> None:
    config = tmp_path / "turnstile.toml"
    config.write_text(
        'log_level = "warning"\n[control]\nport = 1\n[gate]\nport = 0\n[journal]\ndurability = "process"\n'
    )
    flags = ["--config", str(config), "--model", str(tiny_model), "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(
        [sys.executable, "-m", "turnstile", "serve", *flags, "--control-port", "0", "--public-url", PUBLIC],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        key = (tmp_path / "data" / "control.key").read_text().strip()
        assert httpx.get(f"{ready['control_url']}/health").status_code == 200
        assert httpx.get(f"{ready['control_url']}/episodes").status_code == 401
        assert httpx.get(f"{ready['control_url']}/k/{key}/engine").json()["ok"] is True
        created = httpx.post(
            f"{ready['control_url']}/k/{key}/episodes", json={"task": {"instruction": "t"}}
        ).json()
        assert created["model_url"].startswith(f"{PUBLIC}/e/")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_flags_that_are_not_given_set_nothing() -> None:
    assert nested({"model": None, "gate.port": 0, "gate.host": None, "log_level": "info"}) == {
        "gate": {"port": 0},
        "log_level": "info",
    }
