"""Harbor's task folders: what becomes a task, and what every error and every refusal says."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
from harbor_support import CONFIG, harbor_folder, loaded, steps_folder, told
from pydantic import ValidationError

from local import ROOT
from turnstile_server.kinds.harbor.toml_lines import key_lines
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import read_files

NO_KEY = "Harbor has no such key, so it would do nothing; mend the name, or put it under [metadata]"
EXAMPLES = ROOT / "examples" / "harbor" / "tasks"


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    more = '[environment.env]\nMODE = "test"\n[verifier.env]\nKEY = "k"\n'
    more += '[metadata]\ndifficulty = "hard"\ntags = ["a"]\n'
    (task,), problems = loaded(harbor_folder(tmp_path / "write-done", {"task.toml": CONFIG + more}))
    assert problems == []
    assert (task.id, task.instruction, task.workdir) == ("write-done", "Write `done.txt`.\n", "image")
    assert task.image is not None
    assert task.image.startswith("turnstile-task:")
    assert task.env == {"MODE": "test"}
    assert task.script is not None
    assert (task.script.env, task.script.timeout_s) == ({"KEY": "k"}, 30.0)
    assert (task.limits.wall_s, task.sandbox.memory_mb) == (120.0, 256)
    assert (task.difficulty, task.tags, task.trust) == ("hard", ("a",), "in_process")
    assert task.gold is not None
    assert task.gold.script is not None
    assert task.graders == ("script",)


def test_the_eleven_examples_load_in_the_order_of_their_names() -> None:
    tasks, problems = loaded(EXAMPLES)
    assert problems == []
    names = [task.id for task in tasks]
    assert len(names) == 11
    assert names == sorted(names)


def test_what_a_folder_becomes_can_be_written_out_without_a_warning(tmp_path: Path) -> None:
    """Validation, certification and graders that are code write tasks out; pydantic warned of layers of files."""
    sources = [str(harbor_folder(tmp_path / "one-step")), str(steps_folder(tmp_path / "steps"))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for task in load_tasks(sources):
            task.model_dump(mode="json")


def test_no_text_names_further_folders_of_files() -> None:
    for name in ("layers", "_layers"):
        with pytest.raises(ValidationError, match=name):
            Files.model_validate({"folder": "tests", name: ["/etc"]})


def test_the_image_has_another_name_when_what_it_is_built_of_changes(tmp_path: Path) -> None:
    def image(name: str, **changes: str) -> str | None:
        files = {path.replace("__", "/"): text for path, text in changes.items()}
        return loaded(harbor_folder(tmp_path / name, files))[0][0].image

    one = image("one", environment__data="1")
    assert one == image("two", environment__data="1")
    assert one != image("three", environment__data="2")
    assert one != image("four", environment__data="1", environment__Dockerfile="FROM other\nWORKDIR /app\n")
    ignoring = {"environment__.dockerignore": "notes\n"}
    assert image("five", **ignoring, environment__notes="1") == image("six", **ignoring, environment__notes="2")


def test_an_image_that_is_named_is_not_built(tmp_path: Path) -> None:
    named = {"task.toml": CONFIG + 'docker_image = "org/image:1"\n'}
    (task,), _ = loaded(harbor_folder(tmp_path / "named", named))
    assert (task.image, task.build) == ("org/image:1", None)
    (task,), _ = loaded(tmp_path / "named", TaskSettings(prefer_builds=True))
    assert task.build is not None


def test_marks_that_keep_a_text_out_of_training_data_are_no_part_of_the_instruction(tmp_path: Path) -> None:
    text = "<!-- canary 1234 -->\n# a CANARY line\n\nDo it.\n"
    (task,), _ = loaded(harbor_folder(tmp_path, {"instruction.md": text}))
    assert task.instruction == "Do it.\n"


@pytest.mark.parametrize(
    ("old", "memory"),
    [('memory = "2G"', 2048), ('memory = "512M"', 512), ('memory = "2G"\nmemory_mb = 2048', 2048)],
)
def test_deprecated_sizes_are_read(tmp_path: Path, old: str, memory: int) -> None:
    config = CONFIG.replace("memory_mb = 256", old).replace("schema_version", "version")
    (task,), problems = loaded(harbor_folder(tmp_path, {"task.toml": config}))
    assert problems == []
    assert task.sandbox.memory_mb == memory


def test_everything_that_is_wrong_is_told_at_once_with_file_line_and_field(tmp_path: Path) -> None:
    config = """\
schema_version = "1.4"
[agent]
timeout = 120
[verifier]
timeout_sec = "30"
[environment]
memory = "2T"
workdir = "app"
[environment.healthcheck]
comand = "true"
"""
    files = {"task.toml": config, "instruction.md": None, "tests/test.sh": None}
    assert told(harbor_folder(tmp_path, files)) == [
        f"task.toml:3: agent.timeout: {NO_KEY}",
        "task.toml:5: verifier.timeout_sec: Input should be a valid number",
        "task.toml:7: environment.memory: '2T' is not a size like 2G, 512M or 900K; write the key with _mb",
        "task.toml:8: environment.workdir: 'app' is no folder below /, by its whole path",
        "task.toml:9: environment.healthcheck.command: it is missing",
        f"task.toml:10: environment.healthcheck.comand: {NO_KEY}",
        "instruction.md: No such file or directory",
        "tests/test.sh: there is no such script; it judges the work",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task.toml": "a = 1\nx = \n"}, "task.toml:2: not TOML"),
        ({"instruction.md": " \n"}, "instruction.md: the instruction is empty"),
        ({"tests/test.sh": None, "tests/run.py": ""}, "tests/test.sh: there is no such script"),
        (
            {"environment/Dockerfile": None, "environment/x": ""},
            "environment/Dockerfile: environment: there is no",
        ),
        ({"environment/Dockerfile": "RUN true\n"}, "environment/Dockerfile:1: it has no FROM"),
        ({"solution/solve.sh": None, "solution/other.sh": ""}, "solution: the folder has no solve.sh"),
        (
            {"task.toml": CONFIG + 'workdir = "/"\n'},
            "environment.workdir: '/' is no folder below /",
        ),
        (
            {"task.toml": CONFIG + 'memory = "1G"\n'},
            "environment: memory = '1G' (1024 MiB) contradicts memory_mb = 256",
        ),
        ({"task.toml": CONFIG + 'allowed_hosts = ["a.b"]\n'}, '`allowed_hosts` needs network_mode = "allowlist"'),
        ({"task.toml": CONFIG + '[environment.env]\nK = "${SECRET}"\n'}, "tasks.host_env does not name it"),
        (
            {"task.toml": 'multi_step_reward_strategy = "mean"\n' + CONFIG},
            "`multi_step_reward_strategy` needs [[steps]]",
        ),
    ],
)
def test_a_malformed_folder_is_told(tmp_path: Path, changes: dict[str, str | None], said: str) -> None:
    found = told(harbor_folder(tmp_path, changes))
    assert len(found) == 1
    assert said in found[0]


COMPOSE = "services:\n  main:\n    build: .\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"task.toml": CONFIG + 'network_mode = "allowlist"\nallowed_hosts = ["10.0.0.0/8"]\n'},
            "environment.allowed_hosts: allowed_hosts: '10.0.0.0/8' is no host",
        ),
        ({"task.toml": CONFIG + "gpus = 1\n"}, "no GPUs"),
        ({"task.toml": CONFIG + 'os = "windows"\n'}, "sandboxes run Linux"),
        ({"task.toml": CONFIG + 'skills_dir = "/s"\n'}, "environment.skills_dir"),
        ({"task.toml": CONFIG + '[environment.healthcheck]\ncommand = "true"\n'}, "environment.healthcheck"),
        ({"task.toml": CONFIG + '[[environment.mcp_servers]]\nname = "s"\n'}, "environment.mcp_servers"),
        ({"task.toml": CONFIG + '[[verifier.collect]]\ncommand = "dump"\n'}, "verifier.collect"),
        ({"task.toml": CONFIG + '[verifier.environment]\ndocker_image = "x"\n'}, "tests in an image of their own"),
        (
            {"task.toml": CONFIG.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')},
            "declare that alone",
        ),
        ({"trajectory.json": "[]"}, "trajectory.json"),
        (
            {"environment/docker-compose.yaml": COMPOSE + "  db:\n    image: x\n"},
            "yaml:4: services.db: the service 'db'",
        ),
        ({"environment/docker-compose.yaml": COMPOSE + "    privileged: true\n"}, "`privileged` of a service"),
        ({"environment/docker-compose.yaml": COMPOSE + "    command: redis\n"}, "'redis'"),
        ({"tests/test.sh": "apt-get update\n"}, "tests/test.sh:1: `apt-get update` needs a network"),
        ({"tests/test.sh": "curl -LsSf https://a.b/uv.sh | sh\n"}, "needs a network"),
        ({"tests/test.sh": "# curl https://a.b\nuvx pytest\n"}, "tests/test.sh:2: `uvx` needs a network"),
        ({"tests/test.sh": "curl -s localhost:8080\n"}, "asks a service that the agent left running"),
        (
            {"tests/test.sh": "grep x /etc/nginx/nginx.conf\n"},
            "/etc/nginx/nginx.conf lies outside the work folder /app",
        ),
        ({"instruction.md": "Write /out/a.txt.", "tests/test.sh": "cat /out/a.txt\n"}, "/out/a.txt lies outside"),
    ],
)
def test_what_cannot_be_played_is_refused_by_its_name(
    tmp_path: Path, changes: dict[str, str | None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = harbor_folder(tmp_path, changes)
    found = told(folder)
    assert len(found) == 1, found
    assert said in found[0]
    with caplog.at_level(logging.WARNING):
        assert loaded(folder, TaskSettings(skip_unsupported=True)) == ([], [])
    assert said in caplog.text.replace(f"{folder}/", "")


@pytest.mark.parametrize(
    "text",
    [
        "UV_OFFLINE=1 uvx pytest\n",
        "curl http://127.0.0.1:1/ \npython3 -m http.server &\n",
        "cat /app/x /tests/y /tmp/z /logs/verifier/w /usr/share/dict\n",
        "pip install --no-index /wheels/a.whl\n",
    ],
)
def test_tests_that_need_nothing_more_are_taken(tmp_path: Path, text: str) -> None:
    assert told(harbor_folder(tmp_path, {"tests/test.sh": text})) == []


def test_the_text_of_tests_counts_only_where_the_operator_wants_it(tmp_path: Path) -> None:
    folder = harbor_folder(tmp_path, {"tests/test.sh": "apt-get update\n"})
    assert told(folder, TaskSettings(inspect_scripts=False)) == []


def test_judged_apart_with_the_work_folder_as_its_artifact_is_what_is_done_anyway(tmp_path: Path) -> None:
    config = 'artifacts = ["/app"]\n' + CONFIG.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    assert told(harbor_folder(tmp_path, {"task.toml": config})) == []


def test_a_task_takes_only_those_variables_of_the_server_that_the_operator_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    config = CONFIG + '[verifier.env]\nKEY = "${JUDGE_KEY}"\nURL = "${JUDGE_URL:-none}"\nTEXT = "a ${JUDGE_KEY}"\n'
    folder = harbor_folder(tmp_path, {"task.toml": config})
    assert len(told(folder)) == 1
    (task,), _ = loaded(folder, TaskSettings(host_env=("JUDGE_KEY", "JUDGE_URL")))
    assert task.script is not None
    assert task.script.env == {"KEY": "secret", "URL": "none", "TEXT": "a ${JUDGE_KEY}"}


def test_a_compose_file_with_one_service_says_how_the_image_is_made(tmp_path: Path) -> None:
    text = """\
services:
  main:
    image: ${MAIN_IMAGE_NAME}
    build:
      context: .
      args: {VERSION: "2"}
    command: [sh, -c, sleep infinity]
    working_dir: /srv/app
    environment:
      - MODE=test
"""
    (task,), problems = loaded(harbor_folder(tmp_path, {"environment/docker-compose.yaml": text}))
    assert problems == []
    assert (task.workdir, task.env) == ("/srv/app", {"MODE": "test"})
    assert task.build is not None
    assert task.build.args == (("VERSION", "2"),)


@pytest.mark.parametrize(
    ("config", "public", "agent", "tests"),
    [
        (
            'network_mode = "allowlist"\nallowed_hosts = ["PyPI.org", "*.a.b"]\n',
            False,
            ("pypi.org", "*.a.b"),
            None,
        ),
        ('network_mode = "no-network"\n', True, (), ()),
        ('network_mode = "public"\n', False, (), ()),
        ("", True, ("*",), ("*",)),
    ],
)
def test_a_network_is_the_hosts_that_each_phase_may_reach(
    tmp_path: Path, config: str, public: bool, agent: tuple[str, ...], tests: tuple[str, ...] | None
) -> None:
    folder = harbor_folder(tmp_path, {"task.toml": CONFIG + config})
    (task,) = load_tasks([folder], TaskSettings(public_network=public))
    found = task.network
    assert (found.setup, found.agent, found.tests) == ((), agent, agent if tests is None else tests)


def test_agent_and_verifier_may_have_networks_of_their_own(tmp_path: Path) -> None:
    own = CONFIG.replace("[verifier]", '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["c.d"]')
    folder = harbor_folder(
        tmp_path, {"task.toml": own + 'network_mode = "no-network"\n', "tests/test.sh": "curl c.d\n"}
    )
    (task,) = load_tasks([folder], TaskSettings())
    assert (task.network.agent, task.network.tests) == ((), ("c.d",))


def test_tasks_that_say_that_they_want_a_network_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harbor_folder(tmp_path / "set" / "says-nothing")
    harbor_folder(tmp_path / "set" / "wants-it", {"task.toml": CONFIG + "allow_internet = true\n"})
    harbor_folder(tmp_path / "set" / "wants-none", {"task.toml": CONFIG + 'network_mode = "no-network"\n'})
    with caplog.at_level(logging.WARNING):
        tasks, problems = loaded(tmp_path / "set")
    assert (len(tasks), problems) == (3, [])
    assert [record.getMessage() for record in caplog.records] == [
        "these tasks ask for a network and are played without one: wants-it"
    ]
    assert [task.metadata["harbor"]["network"] for task in tasks] == ["public", "public", "no-network"]


@pytest.mark.parametrize(("options", "named"), [("?limit=1", "a"), ("?where=id=b", "b"), ("?where=id=c", None)])
def test_of_the_tasks_that_want_a_network_those_that_are_chosen_are_named(
    options: str, named: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        harbor_folder(tmp_path / name, {"task.toml": CONFIG + "allow_internet = true\n"})
    harbor_folder(tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        assert list(load_tasks([f"{tmp_path}{options}"]).ids) == [named or "c"]
    wanted = f"these tasks ask for a network and are played without one: {named}"
    assert [record.getMessage() for record in caplog.records] == ([wanted] if named else [])


def test_folders_of_folders_are_searched_and_other_formats_are_told(tmp_path: Path) -> None:
    harbor_folder(tmp_path / "set" / "b")
    harbor_folder(tmp_path / "set" / "deeper" / "a")
    old = tmp_path / "set" / "old"
    old.mkdir()
    (old / "task.yaml").write_text("instruction: x\n")
    (old / "run-tests.sh").write_text("")
    (tmp_path / "set" / "more.jsonl").write_text("{}\n")
    (tmp_path / "set" / "dataset.toml").write_text('[[tasks]]\nname = "org/b"\n[[tasks]]\nname = "org/gone"\n')
    tasks, problems = loaded(tmp_path / "set")
    assert [task.id for task in tasks] == ["b", "a"]
    said = "\n".join(map(str, problems))
    assert "old/task.yaml: a task of Terminal-Bench 1; convert it" in said
    assert "more.jsonl: the folder holds Harbor's tasks" in said
    assert "dataset.toml: tasks.1.name: the folder of org/gone is not here" in said
    assert len(problems) == 3


def test_a_link_out_of_the_tests_is_refused(tmp_path: Path) -> None:
    folder = harbor_folder(tmp_path)
    (folder / "tests" / "passwd").symlink_to("/etc/passwd")
    assert ["tests/passwd is a link" in each for each in told(folder)] == [True]


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 20_000 + "]" * 20_000])
def test_toml_that_cannot_be_read_is_told_with_its_file(tmp_path: Path, value: str) -> None:
    (said,) = told(harbor_folder(tmp_path / "a", {"task.toml": f"{CONFIG}a = {value}\n"}))
    assert said.startswith("task.toml: not TOML that can be read: ")


@pytest.mark.parametrize(
    ("tags", "expected"), [('"one"', ("one",)), ("5", ("5",)), ("[]", ()), ("[1, 2]", ("1", "2"))]
)
def test_tags_that_are_no_list_are_one_tag(tmp_path: Path, tags: str, expected: tuple[str, ...]) -> None:
    folder = harbor_folder(tmp_path / "a", {"task.toml": f"{CONFIG}[metadata]\ntags = {tags}\n"})
    assert loaded(folder)[0][0].tags == expected


@pytest.mark.parametrize(
    "part",
    ["task.toml", "instruction.md", "environment", "tests", "solution", "environment/docker-compose.yaml"],
)
def test_a_part_that_is_a_link_is_refused(tmp_path: Path, part: str) -> None:
    folder = harbor_folder(tmp_path / "a", {"environment/docker-compose.yaml": "services: {main: {build: .}}\n"})
    (folder / part).rename(tmp_path / "elsewhere")
    (folder / part).symlink_to(tmp_path / "elsewhere")
    assert told(folder) == [f"{part}: it is a link; put what it leads to into the folder"]


@pytest.mark.parametrize("part", ["task.toml", "instruction.md", "environment/docker-compose.yaml"])
def test_a_text_is_read_up_to_a_bound(tmp_path: Path, part: str) -> None:
    folder = harbor_folder(tmp_path / "a", {part: "#" * 1025})
    said = told(folder, TaskSettings(max_source_bytes=1024))
    assert said == [f"{part}: larger than 1024 bytes (tasks.max_source_bytes)"]


def test_lines_of_keys_are_found_through_tables_lists_and_long_texts() -> None:
    text = 'a = """\n[b]\nc = 1\n"""\n[t."q.r"]\nx.y = 2\n[[l]]\nn = 1\n[[l]]\nn = 2\n[l.sub]\nm = 3\n'
    lines = key_lines(text)
    assert lines[("t", "q.r", "x", "y")] == 6
    assert lines[("l", 1, "n")] == 10
    assert lines[("l", 1, "sub", "m")] == 12
    assert ("b", "c") not in lines


# Steps


def test_a_folder_with_steps_becomes_one_task_whose_steps_share_what_harbor_shares(tmp_path: Path) -> None:
    changes = {"two": "agent = {timeout_sec = 60}\n[steps.verifier]\ntimeout_sec = 9\nenv = {KEY = 'own'}"}
    folder = steps_folder(tmp_path / "three", changes)
    config = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(
        config.replace("[environment]", '[verifier.env]\nKEY = "k"\nB = "b"\n[environment]')
    )
    (folder / "steps" / "three" / "workdir").mkdir()
    (folder / "steps" / "three" / "workdir" / "last.txt").write_text("")
    (task,), problems = loaded(folder)
    assert problems == []
    assert (task.instruction, task.step_reward, task.graders) == ("Do step one.\n", "mean", ("script",))
    assert task.limits.wall_s == 120 + 60 + 120
    assert [(step.name, step.timeout_s, step.min_reward, step.setup) for step in task.steps] == [
        ("one", 120.0, 0.5, ()),
        ("two", 60.0, None, ("bash setup.sh",)),
        ("three", 120.0, None, ()),
    ]
    assert [(step.script.timeout_s, step.script.env) for step in task.steps] == [
        (600.0, {"KEY": "k", "B": "b"}),  # as in Harbor: the task's own time is not that of its steps
        (9.0, {"KEY": "own", "B": "b"}),
        (600.0, {"KEY": "k", "B": "b"}),
    ]
    tests = [read_files(step.script.files, TaskSettings()) for step in task.steps]
    assert [(sorted(files), files["step"]) for files in tests] == [
        (["step", "test.sh"], f"{name}\n".encode()) for name in ("one", "two", "three")
    ]
    starts = [step.start for step in task.steps]
    assert [None if one is None else sorted(read_files(one, TaskSettings())) for one in starts] == [
        None,
        ["more.txt", "setup.sh"],
        ["last.txt", "more.txt", "setup.sh"],
    ]
    assert task.gold is not None
    assert task.at_step(1).gold is not None
    assert (task.at_step(1).instruction, task.at_step(1).steps) == ("Do step two.\n", ())


@pytest.mark.parametrize(
    ("changes", "files", "said"),
    [
        ({"one": "min_rewards = 1"}, {}, f"task.toml:14: steps.0.min_rewards: {NO_KEY}"),
        ({"one": 'min_reward = "1"'}, {}, "task.toml:14: steps.0.min_reward"),
        ({"one": "min_reward = nan"}, {}, "task.toml:14: steps.0.min_reward"),
        ({"two": "agent = {timeout_sec = -1}"}, {}, "task.toml:17: steps.1.agent.timeout_sec"),
        ({"strategy": "best"}, {}, "task.toml:1: multi_step_reward_strategy"),
        ({}, {"steps/two/instruction.md": None}, "steps/two/instruction.md: No such file"),
        ({}, {"steps/two/instruction.md": "\n"}, "steps/two/instruction.md: the instruction is empty"),
        ({}, {"tests/test.sh": None}, "steps/one/tests/test.sh: there is no such script"),
        (
            {},
            {"steps/two/solution/solve.sh": None, "steps/two/solution/x": ""},
            "steps/two/solution: the folder has",
        ),
        ({"three": "[[steps]]\nname = 'ONE'"}, {}, "two steps are called 'one'"),
        ({"three": "[[steps]]\nname = 'a/b'"}, {}, "steps.3.name: 'a/b' is no name of a folder"),
        ({"three": "[[steps]]\nname = '..'"}, {}, "steps.3.name: '..' is no name of a folder"),
        (
            {"three": "[[steps]]\nname = 'four'"},
            {},
            "task.toml:21: steps.3.name: the folder steps/four is missing",
        ),
    ],
)
def test_a_step_that_is_malformed_is_told(
    tmp_path: Path, changes: dict[str, str], files: dict[str, str | None], said: str
) -> None:
    found = told(spoilt(tmp_path, changes, files))
    assert said in found[0], found


@pytest.mark.parametrize(
    ("changes", "files", "said"),
    [
        (
            {"two": '[steps.healthcheck]\ncommand = "true"'},
            {},
            "task.toml:17: steps.1.healthcheck: a health check",
        ),
        ({"two": '[[steps.verifier.collect]]\ncommand = "x"'}, {}, "steps.1.verifier.collect: commands that"),
        (
            {"two": '[steps.verifier.environment]\ndocker_image = "x"'},
            {},
            "steps.1.verifier.environment: tests in",
        ),
        (
            {"two": 'verifier = {environment_mode = "separate"}'},
            {},
            "task.toml:17: steps.1.verifier.environment_mode",
        ),
        ({"two": 'agent = {network_mode = "allowlist", allowed_hosts = ["a.b"]}'}, {}, "have one network"),
        ({}, {"steps/two/trajectory.json": "[]"}, "steps/two/trajectory.json: a conversation"),
        ({}, {"steps/two/tests/test.sh": "apt-get update\n"}, "steps/two/tests/test.sh:1: `apt-get update` needs"),
        ({}, {"tests/more.sh": "apt-get update\n"}, "tests/more.sh:1: `apt-get update` needs a network"),
        (
            {},
            {"steps/two/workdir/setup.sh": "touch /opt/state\n", "steps/two/tests/test.sh": "cat /opt/state\n"},
            "steps/two/tests/test.sh:1: /opt/state lies outside the work folder /app",
        ),
    ],
)
def test_what_cannot_be_played_of_a_step_is_refused_by_its_name(
    tmp_path: Path, changes: dict[str, str], files: dict[str, str | None], said: str
) -> None:
    folder = spoilt(tmp_path, changes, files)
    found = told(folder)
    assert said in found[0], found
    assert loaded(folder, TaskSettings(skip_unsupported=True)) == ([], [])


def spoilt(folder: Path, changes: dict[str, str], files: dict[str, str | None]) -> Path:
    made = steps_folder(folder, changes)
    for path, text in files.items():
        if text is None:
            (made / path).unlink()
        else:
            (made / path).write_text(text)
    return made


def test_a_step_judged_apart_with_the_work_folder_as_its_artifact_is_what_is_done_anyway(tmp_path: Path) -> None:
    separate = 'artifacts = ["/app"]\nverifier = {environment_mode = "separate"}'
    assert told(steps_folder(tmp_path, {"two": separate})) == []


@pytest.mark.parametrize("part", ["", "/instruction.md", "/tests", "/solution", "/workdir"])
def test_a_part_of_a_step_that_is_a_link_is_refused(tmp_path: Path, part: str) -> None:
    folder = steps_folder(tmp_path / "a")
    (folder / f"steps/two{part}").rename(tmp_path / "elsewhere")
    (folder / f"steps/two{part}").symlink_to(tmp_path / "elsewhere")
    assert told(folder) == [f"steps/two{part}: it is a link; put what it leads to into the folder"]


def test_steps_without_a_solution_have_the_tasks(tmp_path: Path) -> None:
    folder = steps_folder(tmp_path / "a")
    (folder / "steps/two/solution/solve.sh").unlink()
    (folder / "steps/two/solution").rmdir()
    assert loaded(folder)[0][0].gold is None, "one of its steps has none"
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text("true\n")
    gold = loaded(folder)[0][0].at_step(1).gold
    assert gold is not None
    assert gold.script is not None
    assert gold.script.files.folder == folder / "solution"


def test_text_from_outside_has_no_steps() -> None:
    for steps in ([{"name": "a"}], 5):
        with pytest.raises(ValueError, match="only Harbor's task folders have steps"):
            Task.model_validate({"id": "a", "instruction": "x", "steps": steps})
