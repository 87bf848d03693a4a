"""docs/own-tools.md is true: its examples run as they stand, and its tables name every field."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from own_tools_support import OwnServer

from turnstile_server.own_tools.names import BUILT_IN
from turnstile_server.settings import Settings, ToolSettings
from turnstile_server.settings.own_tools import FunctionSpec, OwnToolSpecs, ServerSpec
from turnstile_server.tools.toolbox import Toolbox

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[2] / "docs" / "own-tools.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


async def test_the_function_and_the_server_of_the_page_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    function, shelf = blocks("python")
    (tmp_path / "notes.py").write_text(function)
    (tmp_path / "shelf_server.py").write_text(shelf)
    for number, block in enumerate(blocks("yaml")):
        specs = OwnToolSpecs.model_validate(yaml.safe_load(block)["tools"]).below(tmp_path)
        server = OwnServer({"t": specs.model_dump()}, mount_grace_s=0.5)
        async with server.episode() as episode:
            if number == 0:
                assert (await episode("remember", key="a", text="b")).structured == {"key": "a", "notes": 1}
            else:
                assert (await episode("shelf_add", title="Emma")).text == "1 books"
    assert len(blocks("yaml")) == 2


def test_the_toml_and_the_variables_of_the_page_are_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toml,) = blocks("toml")
    assert toml == '[[tools.functions]]\nfunction = "my_package.notes:remember"\n'
    (shell,) = blocks("sh")
    for name, value in re.findall(r"-e (TURNSTILE_\w+)='(.*?)'", shell, re.DOTALL):
        monkeypatch.setenv(name, value)
    tools = Settings().tools
    assert tools.functions[0].function == "/tools/notes.py:remember"
    assert tools.servers[0].args == ("/tools/shelf_server.py",)


@pytest.mark.parametrize("spec", [FunctionSpec, ServerSpec])
def test_the_tables_name_every_field(spec: type[FunctionSpec | ServerSpec]) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert set(spec.model_fields) - named == set()


def test_the_names_of_the_built_in_tools_are_those_of_the_toolbox() -> None:
    assert [tool.name for tool in Toolbox(ToolSettings()).all_tools] == list(BUILT_IN)
