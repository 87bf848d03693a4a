"""The ``turnstile`` command against a real server: results, exit codes, one sentence per error."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from typer.testing import CliRunner

from client.trainer_types import outline, rollout
from control_support import Door, EngineProcess, OpenDoor, running_door
from turnstile import Client
from turnstile.cli.app import COMMANDS, app
from turnstile.cli.transcript import show_episode_facts, show_turns
from turnstile.exporters.parquet import read_parquet
from turnstile.models import AuditReport, EpisodeFilter, summary_of
from turnstile.models.messages import Message, ToolCall
from turnstile.models.samples_encoding import decode_forest, decode_samples, sample_as_json
from turnstile_server import commands as server_commands

DONE, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def turnstile(*arguments: str | Path, **environment: str) -> Done:
    """Runs the command in this process, with no TURNSTILE_* variables but those given."""
    cleared = {name: None for name in os.environ if name.startswith("TURNSTILE_")}
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={**cleared, "COLUMNS": "200", **environment}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def turnstile_process(*arguments: str, **environment: str) -> Done:
    """Runs the command as a person would."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    done = subprocess.run(
        [sys.executable, "-m", "turnstile", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def on(door: Door) -> dict[str, str]:
    return {"TURNSTILE_URL": door.url, "TURNSTILE_CONTROL_KEY": door.key}


def one_sentence(done: Done, code: int) -> str:
    """The error of a command that failed with ``code``: one line, nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("turnstile: ")
    return line


@pytest.fixture(scope="module")
def recorded(door: Door) -> tuple[str, str]:
    """Two ended episodes of a group of their own: one with two turns, one with none."""
    with Client(door.url, key=door.key) as client:
        options: dict[str, Any] = {"group_id": "cli", "run_id": "cli-run", "train_step": 3}
        first, second = (client.create_episode("say hello", **options) for _ in range(2))
        for _ in range(2):
            door.add_turn(first.episode_id)
        first.finish()
        second.cancel()
    return first.episode_id, second.episode_id


def rows_of(done: Done) -> list[dict[str, Any]]:
    assert done.returncode == DONE, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("words", [("up", "--ray"), ("down", "--ray"), ("episodes", "list", "--url", "ray:fleet")])
def test_without_ray_its_commands_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "turnstile.ray", raising=False)
    assert "pip install 'turnstile-rl[ray]'" in one_sentence(turnstile(*words), USAGE)


def test_a_command_for_a_cluster_asks_which_kind() -> None:
    assert "--ray" in one_sentence(turnstile("up"), USAGE)


# episodes


@pytest.mark.slow
def test_list_is_a_table_for_people_and_json_lines_for_scripts(door: Door, recorded: tuple[str, str]) -> None:
    shown = turnstile("episodes", "list", "--group-id", "cli", **on(door))
    assert shown.returncode == DONE
    assert all(episode_id in shown.stdout for episode_id in recorded)
    header, *lines = [line for line in shown.stdout.splitlines() if line.strip(" ─")]
    heads = ["episode", "status", "task", "agent", "run", "step", "group", "reward", "turns", "trained"]
    assert header.split() == heads
    assert len(lines) == len(recorded)
    (told,) = [line.split() for line in lines if recorded[0] in line]
    assert told[1:2] + told[3:9] == ["completed", "external", "cli-run", "3", "cli", "-", "2"]
    narrow = turnstile("episodes", "list", "--group-id", "cli", **{**on(door), "COLUMNS": "80"}).stdout
    header, first, second, *left_out = [line for line in narrow.splitlines() if line.strip(" ─")]
    assert header.split() == ["episode", "status", "task", "reward", "trained"]
    assert {first.split()[0], second.split()[0]} == {*recorded}, "an episode is one line, also of 80 characters"
    said = "no room for: agent, run, step, group, turns; a wider terminal and a pipe have them"
    assert " ".join(left_out) == said
    rows = rows_of(turnstile("episodes", "list", "--group-id", "cli", "--json", **on(door)))
    assert [row["episode_id"] for row in rows] == [*recorded][::-1]


@pytest.mark.slow
def test_list_filters_by_status_and_bounds_the_number(door: Door, recorded: tuple[str, str]) -> None:
    of_group = ("episodes", "list", "--json", "--group-id", "cli")
    assert [r["episode_id"] for r in rows_of(turnstile(*of_group, "--status", "cancelled", **on(door)))] == [
        recorded[1]
    ]
    assert len(rows_of(turnstile(*of_group, "--limit", "1", **on(door)))) == 1


@pytest.mark.slow
def test_list_has_an_option_for_every_condition_of_the_api(door: Door, recorded: tuple[str, str]) -> None:
    """Each leaves both, one, or none of the two episodes, as it says."""
    first, second = recorded
    with Client(door.url, key=door.key) as client:
        task = client.episode(first).status()
    both, none = {first, second}, set[str]()
    wanted: dict[str, tuple[list[str], set[str]]] = {
        "status": (["--status", "completed"], {first}),
        "group_id": (["--group-id", "cli"], both),
        "run_id": (["--run-id", "cli-run"], both),
        "in_run": (["--no-in-run"], none),
        "train_step": (["--train-step", "3"], both),
        "task": (["--task", summary_of(task).task], both),
        "tag": (["--tag", "no-such"], none),
        "agent": (["--agent", "external"], both),
        "error_type": (["--error-type", "no-such"], none),
        "fault": (["--fault", "agent"], none),
        "version": (["--version", "no-such"], none),
        "graded": (["--no-graded"], both),
        "reward_min": (["--reward-min", "0.5"], none),
        "reward_max": (["--reward-max", "0.5"], none),
        "breaks": (["--breaks", "reply_edited"], none),
        "min_turns": (["--min-turns", "2"], {first}),
        "stale": (["--no-stale"], both),
        "created_after": (["--created-after", "1e12"], none),
        "created_before": (["--created-before", "1e12"], both),
        "text": (["--text", "CLI-RUN"], both),
        "metadata": (["--metadata", "a=1", "--metadata", "b=2"], none),
    }
    assert wanted.keys() == EpisodeFilter.model_fields.keys()
    for name, (given, left) in wanted.items():
        found = rows_of(turnstile("episodes", "list", "--json", "--limit", "0", *given, **on(door)))
        assert {row["episode_id"] for row in found} & both == left, name
    exported = turnstile("episodes", "export", "--run-id", "cli-run", "--min-turns", "2", **on(door))
    assert {row["episode_id"] for row in rows_of(exported)} == {first}


def test_show_gives_the_accounting_and_the_turns(door: Door, recorded: tuple[str, str]) -> None:
    shown = turnstile("episodes", "show", recorded[0], "--turns", **on(door))
    assert shown.returncode == DONE
    why = "not graded: its task has no grader; its caller finished it after 2 turns"
    assert shown.stdout.splitlines()[0] == why
    assert "stats.sampled_tokens" in shown.stdout
    assert "(root)" in shown.stdout
    assert "call 0" in shown.stdout
    assert "call 1" in shown.stdout
    episode, *turns = rows_of(turnstile("episodes", "show", recorded[0], "--turns", "--json", **on(door)))
    assert episode["stats"]["turns"] == len(turns) == 2
    assert episode["why"] == why


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_ids_numbers_and_heads_are_whole_at_every_width(
    door: Door, recorded: tuple[str, str], columns: int
) -> None:
    at = {**on(door), "COLUMNS": str(columns)}
    shown = turnstile("episodes", "list", "--group-id", "cli", **at).stdout
    assert all(episode_id in shown for episode_id in recorded)
    assert all(word in shown for word in ("cancelled", "completed", "reward", "trained"))
    audited = turnstile("audit", *recorded, **at).stdout
    assert all(episode_id in audited for episode_id in recorded)
    assert all(word in audited for word in ("turns", "scored", "tokens", "max |Δ", "passed"))
    if columns >= 80:
        assert max(map(len, (shown + audited).splitlines())) <= columns
    turns = turnstile("episodes", "show", recorded[0], "--turns", **at).stdout
    with Client(door.url, key=door.key) as client:
        assert all(turn.turn_id in turns for turn in client.episode(recorded[0]).turns())


@pytest.mark.slow
def test_a_pipe_has_no_width(door: Door) -> None:
    """Long ids, as a client may give them: whole on one line in a pipe, whole at the head of a block in 80."""
    long = {"episode_id": "e" * 64, "group_id": "g" * 64, "metadata": {"note": "word " * 40}}
    with Client(door.url, key=door.key) as client:
        client.create_episode("say hello", **long).cancel()
    listed = ("episodes", "list", "--group-id", long["group_id"])
    header, _, line = turnstile_process(*listed, **on(door), COLUMNS="").stdout.splitlines()
    assert line.split()[:2] == ["e" * 64, "cancelled"]
    assert "g" * 64 in line.split()
    block = turnstile(*listed, **on(door), COLUMNS="80").stdout.splitlines()
    assert block[0] == "e" * 64
    assert ["status", "cancelled"] in [line.split() for line in block]
    shown = turnstile_process("episodes", "show", "e" * 64, **on(door), COLUMNS="").stdout
    assert "word " * 39 + "word" in shown
    assert header


def test_texts_of_turns_are_bounded_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    calls = (ToolCall("bash", '{"command": "ls"}'),)
    shown = outline(
        Message("user", "\n".join(f"line {n}" for n in range(40))),
        Message("assistant", "Done.", reasoning="I list them.", tool_calls=calls),
        **{"break": {"reason": "history_edited", "at": {"message": 2, "path": "content"}}},
    )
    show_turns([shown], full=False)
    short = capsys.readouterr().out
    assert "line 11\n" in short
    assert "line 12" not in short
    assert "more characters (--full shows all)" in short
    for words in ("v7", "history_edited at message 2, content", "I list them.", "Done.", "calls bash", '"ls"'):
        assert words in short
    show_turns([shown], full=True)
    assert "line 39" in capsys.readouterr().out


def test_failed_tests_are_lines_not_json(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [
        {"id": "test_a.T.test_one", "status": "failed", "message": "AssertionError: 1 != 2\n\nDetails"},
        {"id": "test_a.T.test_two", "status": "error", "message": "NotImplementedError"},
    ]
    grading = {"tests": {"passed": 3, "failed": failed}, "summary": ["test_a.T.test_one failed: …"]}
    episode = rollout(0.0, grading=grading).episode
    assert episode is not None
    show_episode_facts(episode, full=False)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("failed tests: 2")
    assert lines[at + 1 : at + 3] == ["test_a.T.test_one: failed", "    AssertionError: 1 != 2"]
    assert lines[-2:] == ["test_a.T.test_two: error", "    NotImplementedError"]
    assert not any("{" in line for line in lines)


def test_export_writes_a_json_line_per_sample(door: Door, recorded: tuple[str, str], tmp_path: Path) -> None:
    to_stdout = rows_of(turnstile("episodes", "export", "--group-id", "cli", **on(door)))
    assert {row["episode_id"] for row in to_stdout} == {recorded[0]}
    done = turnstile("episodes", "export", recorded[0], "--out", tmp_path / "rows.jsonl", **on(door))
    assert done.returncode == DONE
    assert f"{len(to_stdout)} samples exported" in done.stderr
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == to_stdout
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_export_writes_safetensors_files(door: Door, recorded: tuple[str, str], tmp_path: Path) -> None:
    done = turnstile(
        "episodes", "export", "--format", "safetensors", "--group-id", "cli", "--out", tmp_path, **on(door)
    )
    assert done.returncode == DONE, done.stderr
    assert {path.stem for path in tmp_path.iterdir()} == set(recorded)
    data = (tmp_path / f"{recorded[0]}.safetensors").read_bytes()
    assert safetensors.numpy.load(data)["input_ids"].dtype.name == "int32"
    assert decode_samples(data).stats.turns == 2


def test_export_writes_one_parquet_file_of_all_episodes(
    door: Door, recorded: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    done = turnstile("episodes", "export", "--format", "parquet", "--group-id", "cli", "--out", path, **on(door))
    assert done.returncode == DONE, done.stderr
    lines = rows_of(turnstile("episodes", "export", "--group-id", "cli", **on(door)))
    assert [sample_as_json(row) for row in read_parquet(path)] == lines
    assert f"{len(lines)} samples exported" in done.stderr
    missing = turnstile(
        "episodes", "export", recorded[0], "--format", "parquet", "--out", tmp_path / "no" / "a", **on(door)
    )
    assert "no" in one_sentence(missing, FAILED)
    assert os.listdir(tmp_path) == ["rows.parquet"]


def test_export_writes_trees_that_give_the_samples(door: Door, recorded: tuple[str, str], tmp_path: Path) -> None:
    done = turnstile("episodes", "export", recorded[0], "--format", "tree", "--out", tmp_path, **on(door))
    assert done.returncode == DONE, done.stderr
    forest = decode_forest((tmp_path / f"{recorded[0]}.tree.safetensors").read_bytes())
    lines = rows_of(turnstile("episodes", "export", recorded[0], **on(door)))
    assert [sample_as_json(row) for row in forest.to_samples().samples] == lines
    assert f"{len(lines)} samples exported" in done.stderr


def test_a_failed_export_leaves_no_file(door: Door, tmp_path: Path) -> None:
    done = turnstile("episodes", "export", "ep_unknown", "--out", tmp_path / "rows.jsonl", **on(door))
    assert "ep_unknown" in one_sentence(done, FAILED)
    assert os.listdir(tmp_path) == []


def test_an_export_that_cannot_be_written_names_its_file(
    door: Door, recorded: tuple[str, str], tmp_path: Path
) -> None:
    done = turnstile("episodes", "export", recorded[0], "--out", tmp_path / "no" / "rows.jsonl", **on(door))
    assert "rows.jsonl" in one_sentence(done, FAILED)


@pytest.mark.parametrize(("format_", "what"), [("safetensors", "FOLDER"), ("tree", "FOLDER"), ("parquet", "FILE")])
def test_binary_formats_are_not_for_stdout(door: Door, format_: str, what: str) -> None:
    said = one_sentence(turnstile("episodes", "export", "--format", format_, **on(door)), USAGE)
    assert f"--out {what}" in said


def test_an_unknown_format_and_one_whose_extra_is_missing_are_usage_errors(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "jsonl, parquet, safetensors" in one_sentence(
        turnstile("episodes", "export", "--format", "csv", **on(door)), USAGE
    )
    monkeypatch.delitem(sys.modules, "turnstile.exporters.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = one_sentence(turnstile("episodes", "export", "--format", "parquet", "--out", "x", **on(door)), USAGE)
    assert "needs pyarrow: pip install 'turnstile-rl[parquet]'" in said


TOY = """
from turnstile.exporters.formats import ExportFormat

def write(episodes, file):
    count = 0
    for found in episodes:
        for sample in found.samples:
            file.write(f"{sample.episode_id} {sample.loss_mask.sum()}\\n".encode())
            count += 1
    return count

TOY = ExportFormat(write, "a line per sample", ".txt", text=True)
"""


def test_an_exporter_of_any_module_is_named_by_its_place(
    door: Door, recorded: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_exporter.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    done = turnstile("episodes", "export", recorded[0], "--format", "toy_exporter:TOY", **on(door))
    assert done.returncode == DONE, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [recorded[0]] * len(done.stdout.splitlines())
    assert f"{len(done.stdout.splitlines())} samples exported" in done.stderr


# audit


def test_an_audit_that_passes_prints_the_distance_and_exits_0(door: Door, recorded: tuple[str, str]) -> None:
    done = turnstile("audit", *recorded, **on(door))
    assert done.returncode == DONE, done.stdout + done.stderr
    assert re.search(
        r"^2 of 2 episodes passed; 1 re-scored; 1 without a turn; (\d+) of \1 tokens re-scored; max \|Δlog",
        done.stdout,
        re.MULTILINE,
    )
    assert turnstile("audit", *recorded, "--require-rescored", **on(door)).returncode == DONE
    as_json = turnstile("audit", *recorded, "--json", **on(door))
    assert as_json.stderr.startswith("2 of 2 episodes passed; 1 re-scored")
    first, second = rows_of(as_json)
    assert first["passed"]
    assert first["max_abs_delta"] < 1e-4
    assert second["turns"] == []


def test_an_audit_counts_what_the_engine_did_not_score(
    door: Door, recorded: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang leaves the end of a turn that fills the context."""
    audit = Client.audit

    def unscored_end(client: Client, episode_id: str) -> AuditReport:
        report = audit(client, episode_id)
        turn = report.turns[0]
        return report.model_copy(update={"turns": (turn.model_copy(update={"tokens": 90, "unscored": 7}),)})

    monkeypatch.setattr(Client, "audit", unscored_end)
    shown = turnstile("audit", recorded[0], **on(door)).stdout
    assert " 83 " in shown
    assert "7 tokens at the end of the context were not re-scored" in shown


@pytest.mark.slow
def test_an_audit_that_does_not_pass_exits_1(engine: EngineProcess, tmp_path: Path) -> None:
    """Weights that were overwritten in their folder and loaded again under the name that the turns carry."""
    folder = tmp_path / "weights"
    shutil.copytree(engine.model, folder)
    with running_door(engine, tmp_path) as door, Client(door.url, key=door.key) as client:
        client.update_weights(str(folder), "step-1")
        episode = client.create_episode("say hello")
        door.add_turn(episode.episode_id)
        try:
            shutil.copy(door.other_model / "model.safetensors", folder)
            client.update_weights(str(folder), "step-1")
            failed = turnstile("audit", "--all", **on(door))
        finally:
            client.update_weights(str(engine.model), "audit-end")
        other_weights = turnstile("audit", "--all", **on(door))
        required = turnstile("audit", "--all", "--require-rescored", **on(door))
    assert failed.returncode == FAILED, failed.stdout + failed.stderr
    assert "0 of 1 episodes passed" in failed.stdout
    # With other weights loaded nothing can be re-scored, and the table does not call that a pass.
    assert other_weights.returncode == DONE
    assert "records only" in other_weights.stdout
    assert (
        "1 of 1 episodes passed; 0 re-scored; 1 could not be re-scored: their records alone were checked; "
        "0 of 4 tokens re-scored; max |Δlogprob| = -"
    ) in other_weights.stdout
    assert "turns that were not re-scored: 1 other_weights" in other_weights.stdout
    assert (required.returncode, required.stdout) == (FAILED, other_weights.stdout)
    # What may explain the distance is said, and which weights sampled what.
    assert "weights that were loaded" in failed.stdout
    [version] = [line for line in other_weights.stdout.splitlines() if "step-1" in line]
    assert version.split()[1:] == ["step-1", "4", "0", "-", "-", "-"]


@pytest.mark.parametrize("arguments", [["audit"], ["audit", "ep_1", "--all"]])
def test_an_audit_of_nothing_or_both_is_a_usage_error(arguments: list[str]) -> None:
    assert "--all" in one_sentence(turnstile(*arguments), USAGE)


# Finding the server


@pytest.mark.slow
def test_an_unreachable_server_is_exit_code_3() -> None:
    done = turnstile_process("episodes", "list", "--url", "http://127.0.0.1:9")
    said = one_sentence(done, UNREACHABLE)
    assert "http://127.0.0.1:9 could not be asked" in said
    assert "turnstile serve" in said
    assert "--url" in said


def test_a_wrong_key_is_exit_code_2_and_says_where_the_key_is(door: Door) -> None:
    done = turnstile("episodes", "list", "--url", door.url, "--key", "wrong")
    assert "control.key" in one_sentence(done, USAGE)


def test_a_url_that_is_none_is_exit_code_2() -> None:
    assert "no server URL" in one_sentence(turnstile("episodes", "list", "--url", "localhost"), USAGE)


def test_an_unknown_episode_is_exit_code_1(door: Door) -> None:
    assert "ep_unknown" in one_sentence(turnstile("episodes", "show", "ep_unknown", **on(door)), FAILED)


def test_the_key_is_read_from_the_data_directory(door: Door, tmp_path: Path) -> None:
    (tmp_path / "control.key").write_text(door.key + "\n")
    done = turnstile("episodes", "list", "--json", "--url", door.url, "--data-dir", tmp_path)
    assert done.returncode == DONE, done.stderr
    missing = turnstile("episodes", "list", "--url", door.url, "--data-dir", tmp_path / "none")
    assert "control.key" in one_sentence(missing, USAGE)


@pytest.mark.slow
def test_several_urls_are_several_servers(door: Door, open_door: OpenDoor, recorded: tuple[str, str]) -> None:
    with open_door() as other, Client(other.url, key=other.key) as client:
        elsewhere = client.create_episode("say hello", group_id="cli").episode_id
        urls = ("--url", other.url, "--url", door.url)
        rows = rows_of(turnstile("episodes", "list", "--json", "--group-id", "cli", *urls, "--key", door.key))
    assert {row["episode_id"] for row in rows} == {elsewhere, *recorded}


# The command tree


def test_the_version_is_that_of_the_package() -> None:
    done = turnstile("--version")
    assert (done.returncode, done.stdout) == (DONE, f"turnstile {version('turnstile-rl')}\n")


def test_an_editable_installation_says_where_its_code_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its version is of the day of the installation, its code of today."""
    info = tmp_path / "turnstile_rl-7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turnstile-rl\nVersion: 7\n")
    (info / "direct_url.json").write_text('{"url": "file:///src/turnstile", "dir_info": {"editable": true}}')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit):
        app(["--version"])
    shown = capsys.readouterr()
    assert shown.out == "turnstile 7\n"
    assert "file:///src/turnstile" in shown.err


@pytest.mark.slow
def test_help_lists_own_commands_and_those_of_the_server() -> None:
    done = turnstile("--help")
    assert done.returncode == DONE
    first_words = {row.strip("│ ").partition(" ")[0] for row in done.stdout.splitlines()}
    assert {"agents", "audit", "episodes", "run", "serve", "tasks"} <= first_words


MODULES = """
import sys
from turnstile.cli import main
sys.argv = ["turnstile", *{arguments!r}]
try:
    main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["--help"], ["run", "agents", "episodes", "audit", "serve", "tasks"]),
        (["agents", "--help"], ["list", "doctor", "install"]),
        (["episodes", "--help"], ["list", "show", "export"]),
        (["tasks", "--help"], ["list", "show", "validate"]),
        (["--version"], []),
    ],
)
def test_commands_are_listed_without_importing_what_they_run(arguments: list[str], listed: list[str]) -> None:
    code = MODULES.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = [line.strip("│ ").split("  ")[0] for line in done.stdout.splitlines()]
    assert [row for row in rows if row in listed] == listed
    imported = set(done.stderr.split())
    assert imported & {"turnstile.models", "turnstile.client", "turnstile.sync", "turnstile.rollout"} == set()
    assert imported & {"numpy", "httpx", "anyio", "yaml", "docker", "torch"} == set()
    of_the_server = {name for name in imported if name.startswith("turnstile_server")}
    assert of_the_server <= {"turnstile_server", "turnstile_server.commands"}


def commands_in(table: Mapping[str, Any]) -> Iterator[str]:
    for target, summary in table.values():
        assert summary.endswith(".")
        yield from [target] if isinstance(target, str) else commands_in(target)


def test_every_command_of_the_tables_is_there_and_has_help() -> None:
    added = {name: pair for name, pair in vars(server_commands).items() if name.isupper()}
    for target in [*commands_in(COMMANDS), *commands_in(added)]:
        module, _, name = target.partition(":")
        assert getattr(import_module(module), name).__doc__


@pytest.mark.slow
def test_a_package_adds_commands_by_entry_points(tmp_path: Path) -> None:
    """A pair is listed without its code; a function and a Typer are listed by their own help."""
    (tmp_path / "added.py").write_text(
        "import typer\n"
        "def hello(name: str) -> None:\n    'Say hello.'\n    print('hello', name)\n"
        "group = typer.Typer(help='A group.')\n"
        "group.command()(hello)\ngroup.command('again')(hello)\n"
        "LATE = ('absent_module:hello', 'Known by its summary.')\n"
    )
    metadata = tmp_path / "added-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[turnstile.commands]\nhello = added:hello\ngroup = added:group\nlate = added:LATE\n"
        "[turnstile.commands.episodes]\nhello = added:hello\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    shown = turnstile_process("--help", **path).stdout
    assert all(words in shown for words in ("Say hello.", "A group.", "Known by its summary."))
    assert turnstile_process("hello", "Ada", **path).stdout == "hello Ada\n"
    assert turnstile_process("group", "again", "Ada", **path).stdout == "hello Ada\n"
    assert turnstile_process("episodes", "hello", "Ada", **path).stdout == "hello Ada\n"
    assert "absent_module" in one_sentence(turnstile_process("late", **path), USAGE)


@pytest.mark.parametrize("arguments", [["nonsense"], ["episodes", "list", "--nonsense"], ["episodes", "show"]])
def test_a_wrong_command_is_exit_code_2(arguments: list[str]) -> None:
    done = turnstile(*arguments)
    assert done.returncode == USAGE
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.slow
def test_without_the_server_serve_says_what_to_install(tmp_path: Path) -> None:
    """A package of the server that fails to import, as when its dependencies are absent, shadows the real one."""
    (tmp_path / "turnstile_server").mkdir()
    (tmp_path / "turnstile_server" / "__init__.py").write_text("import a_dependency_that_is_absent\n")
    done = turnstile_process("serve", "--model", "somewhere", PYTHONPATH=str(tmp_path))
    sentence = one_sentence(done, USAGE)
    assert "pip install 'turnstile-rl[embedded]'" in sentence
    assert "a_dependency_that_is_absent" in sentence
    assert turnstile_process("--help", PYTHONPATH=str(tmp_path)).returncode == DONE
