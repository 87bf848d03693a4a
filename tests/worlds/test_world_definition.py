"""What is wrong with a world is told when it is loaded, with file and line, and nothing else of it is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bounded import bounded
from turnstile.models import TaskRef
from turnstile_server.backends import build_backends
from turnstile_server.errors import StartupError, TaskFailed
from turnstile_server.settings import Settings, TaskSettings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.environment import EpisodeStart
from turnstile_server.tasks.episode_task import started
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.inline import task_from_ref
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import host_paths, load_tasks

HEAD = "from turnstile_server.worlds import Start, ToolError, World, WorldTask, tool\n"
GAME = (
    HEAD
    + """
class Game(World):
    '''Play.'''
    def reset(self, seed): return 'go'
    def grade(self): return 1.0
"""
)


def written(folder: Path, text: str, name: str = "game.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def loaded(folder: Path, body: str) -> TaskCatalog:
    return load_tasks([written(folder, HEAD + body)])


def refused(folder: Path, body: str) -> str:
    with pytest.raises(StartupError) as caught:
        loaded(folder, body)
    return caught.value.message


def test_a_file_names_every_world_that_it_defines_in_order(tmp_path: Path) -> None:
    body = """
class _Base(World):
    def reset(self, seed): return 'go'
class Second(_Base):
    '''Two.'''
class First(_Base):
    '''One.'''
"""
    assert [task.id for task in loaded(tmp_path, body)] == ["second", "first"]
    assert [task.id for task in load_tasks([f"{tmp_path}/game.py:First"])] == ["first"]


def test_a_module_names_its_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_worlds_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    written(package, GAME)
    monkeypatch.chdir(tmp_path)
    source = "my_worlds_package.game:Game"
    assert [task.id for task in load_tasks([source])] == ["game"]
    assert [path.name for path in host_paths([source])] == ["game.py"]


def test_a_world_imports_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_game.py").write_text("WORD = 'found'\n")
    body = (
        "from beside_the_game import WORD\nclass A(World):\n    __doc__ = WORD\n    def reset(self, seed): pass\n"
    )
    assert next(iter(loaded(tmp_path, body))).instruction == "found"


def test_parameters_fields_and_seed_reach_the_task(tmp_path: Path) -> None:
    body = """
class A(World):
    '''One line.

    More of it.'''
    @classmethod
    def tasks(cls):
        yield WorldTask('small', {'size': 3}, seed=7, fields={'limits': {'max_turns': 5}, 'tags': ['x']})
        yield WorldTask('large', {'size': 9}, instruction='Other.')
    def reset(self, seed, size): return 'go'
"""
    small, large = loaded(tmp_path, body)
    assert (small.id, small.instruction, small.limits.max_turns, small.tags) == ("small", "One line.", 5, ("x",))
    assert small.environment is not None
    assert small.environment.shown() == {"class": "game.py:A", "parameters": {"size": 3}, "seed": 7}
    assert (large.instruction, large.graded, large.needs_sandbox) == ("Other.", False, False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import nowhere_to_be_found", "game.py:2: it cannot be imported: ModuleNotFoundError"),
        ("class A(World:\n    pass", "game.py:2: SyntaxError"),
        ("\n\n1 / 0", "game.py:4: it cannot be imported: ZeroDivisionError"),
        ("raise SystemExit(3)", "game.py:2: it cannot be imported: SystemExit: 3"),
        ("class A: pass", "it defines no world"),
        ("class A(World):\n    '''x'''", "it defines no world"),
    ],
)
def test_what_cannot_be_imported_is_told_with_its_line(tmp_path: Path, body: str, said: str) -> None:
    assert said in refused(tmp_path, body)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("def reset(self): pass", "it is called as reset(seed), but too many positional arguments"),
        ("def reset(self, seed, size): pass", "missing a required argument: 'size'"),
        ("def reset(self, seed): pass\n    def grade(self, work): pass", "grade(), but missing"),
        ("def reset(self, seed): pass\n    def respond(self): pass", "respond(answer), but too many"),
        ("def reset(self, seed): pass\n    grade = 3", "grade must be a plain method"),
        ("def reset(self, seed): pass\n    @staticmethod\n    def close(): pass", "close must be a plain method"),
        ("def reset(self, seed): pass\n    def __init__(self, x): pass", "must be made without arguments"),
        (
            "@TASKS@return 1 / 0",
            "tasks() raised ZeroDi",
        ),
        ("@TASKS@return []", "tasks() gives no task"),
        (
            "@TASKS@return ['a']",
            "gives a str, not a WorldTask",
        ),
        (
            "@TASKS@return [WorldTask('a'), WorldTask('a')]",
            "two tasks with the id 'a'",
        ),
        (
            "@TASKS@return [WorldTask('a', seed='x')]",
            "seed: A: task a: 'x' is not a whole number",
        ),
        (
            "@TASKS@return [WorldTask('a', {'b': 1})]",
            "parameters: A: task a: it is called as reset(seed, b), but got an unexpected keyword argument 'b'",
        ),
        (
            "@TASKS@return [WorldTask('a', fields={'x': 1})]",
            "x: A: task a: there is no such field",
        ),
        (
            "@TASKS@return [WorldTask('a/b')]",
            "id: A: task a/b:",
        ),
        (
            "@TASKS@return [WorldTask('a', fields={'base': {'inline': {'f': ''}}})]",
            "set needs_sandbox = True",
        ),
    ],
)
def test_a_wrong_class_is_told_with_its_line(tmp_path: Path, methods: str, said: str) -> None:
    methods = methods.replace("@TASKS@", "def reset(self, seed): pass\n    @classmethod\n    def tasks(cls): ")
    message = refused(tmp_path, f"class A(World):\n    '''x'''\n    {methods}\n")
    assert said in message
    assert "game.py:2: " in message


@pytest.mark.parametrize("name", ["reset", "step", "state", "close", "Close", "bash", "submit"])
def test_a_tool_with_a_reserved_name_is_refused(tmp_path: Path, name: str) -> None:
    body = (
        "class A(World):\n    '''x'''\n    def reset(self, seed): pass\n"
        f"    @tool(name={name!r})\n    def act(self) -> str:\n        '''Acts.'''\n"
    )
    assert repr(name) in refused(tmp_path, body)


@pytest.mark.parametrize("name", ["grade", "respond", "solve", "close"])
def test_the_methods_that_turnstile_calls_are_never_tools(tmp_path: Path, name: str) -> None:
    more = ", answer: str" if name == "respond" else ""
    body = (
        "class A(World):\n    '''x'''\n    def reset(self, seed): pass\n"
        f"    @tool\n    def {name}(self{more}) -> str:\n        '''Acts.'''\n"
    )
    assert f"{name} is the world's own" in refused(tmp_path, body)


def test_two_tools_of_one_name_are_refused_and_both_are_named(tmp_path: Path) -> None:
    body = (
        "class A(World):\n    '''x'''\n    def reset(self, seed): pass\n"
        "    @tool\n    def act(self) -> str:\n        '''Acts.'''\n"
        "    @tool(name='act')\n    def other(self) -> str:\n        '''Acts.'''\n"
    )
    message = refused(tmp_path, body)
    assert "two tools are named 'act'" in message
    assert "method act" in message
    assert "method other" in message


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("def act(self, x) -> str:\n        '''Acts.'''", "'x' has no type annotation"),
        ("def act(self, x: int) -> str: return ''", "it has no docstring"),
        (
            "def act(self, context: ToolContext) -> str:\n        '''Acts.'''",
            "a world's tool has no ToolContext",
        ),
        ("def act(self, *x: int) -> str:\n        '''Acts.'''", "cannot be given by name"),
    ],
)
def test_a_tool_that_a_model_could_not_call_is_refused(tmp_path: Path, tool: str, said: str) -> None:
    head = "from turnstile_server.own_tools import ToolContext\nclass A(World):\n    '''x'''\n"
    assert said in refused(tmp_path, f"{head}    def reset(self, seed): pass\n    @tool\n    {tool}\n")


def test_a_world_that_gives_tasks_without_end_is_stopped(tmp_path: Path) -> None:
    body = """
import itertools
class A(World):
    '''x'''
    @classmethod
    def tasks(cls):
        for number in itertools.count():
            yield WorldTask(f'a-{number}')
    def reset(self, seed): pass
"""
    with pytest.raises(StartupError, match="more than 5 tasks"):
        load_tasks([written(tmp_path, HEAD + body)], bounded(TaskSettings, max_class_tasks=5))


def test_a_missing_file_class_or_module_is_told(tmp_path: Path) -> None:
    source = written(tmp_path, GAME)
    for wrong, said in (
        (f"{tmp_path}/gone.py", "no such file"),
        (f"{source}:Gone", "there is no class Gone; the worlds there are: Game"),
        (f"{source}:Start", "Start is not a class that derives from"),
        ("no_such_module_at_all:Game", "ModuleNotFoundError"),
    ):
        with pytest.raises(StartupError, match=said):
            load_tasks([wrong])


def test_a_folder_runs_no_python_and_says_how_to_name_it(tmp_path: Path) -> None:
    written(tmp_path, "raise RuntimeError('run')\n")
    with pytest.raises(StartupError, match=r"is named by its file, like .*game\.py"):
        load_tasks([tmp_path])


def test_neither_a_task_file_nor_a_request_names_a_class(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("id: a\ninstruction: x\nworld: {class: game.py:Game}\n")
    with pytest.raises(StartupError, match="a class is a task source of its own"):
        load_tasks([path])
    ref = TaskRef.model_validate({"instruction": "x", "world": {"class": "os:system"}})
    with pytest.raises(Exception, match=r"task\.world: a class is a task source of its own"):
        task_from_ref(ref, allow_inline=True)


def test_a_tool_of_a_world_and_one_of_the_servers_settings_cannot_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def act() -> str:\n    '''Acts.'''\n    return ''\n")
    body = (
        "class A(World):\n    '''x'''\n    def reset(self, seed): pass\n"
        "    @tool\n    def act(self) -> str:\n        '''Acts.'''\n"
    )
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path / "data",
            "tasks": {"sources": (written(tmp_path, HEAD + body),)},
            "tools": {"functions": ({"function": f"{tmp_path}/tools.py:act", "where": "host"},)},
        }
    )
    with pytest.raises(StartupError, match=r"two tools are named 'act'.*world game\.py:A"):
        build_backends(settings)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../x": ""}, "not a plain relative path"),
        ({"a": "", "a/b": ""}, "'a' is a file and"),
        ({"a": b"\xff"}, "valid string"),
        ({"a": "x" * 3000}, "1 files of 3000 bytes; the most is"),
    ],
)
def test_files_that_reset_gives_must_be_files_of_a_task(files: dict[str, str], said: str) -> None:
    task, settings = Task(id="a", instruction="x", base=Files()), TaskSettings(max_folder_bytes=2048)
    with pytest.raises(TaskFailed, match=re.escape(said)):
        started(task, EpisodeStart("x", files), settings)
    made = started(task, EpisodeStart("Do it.", {"b": "new"}), settings)
    assert made.instruction == "Do it."
    assert made.base is not None
    assert made.base.inline["b"] == "new"
