"""Parts from a package outside of this repository: ``examples/parts``, built, installed, and every part used.

The package is installed beside Turnstile, not into its environment: into a folder of ``PYTHONPATH``, where an
interpreter finds its modules and its entry points in the same way.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from turnstile.plugins import GROUPS, Plugins

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / "examples" / "parts"
DISTRIBUTION = "turnstile-example-parts 1.0"
CHECKED = {
    "turnstile.dialects",
    "turnstile.call_formats",
    "turnstile.task_sources",
    "turnstile.row_kinds",
    "turnstile.graders",
    "turnstile.agents",
}
"""Groups of which every server loads each part, or its doctor looks at more than whether it can be imported."""

TEMPLATE = (
    "{% for tool in tools or [] %}<call>{{ tool.function.name }}</call>{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_LINE = (PARTS / "example_parts" / "one-line.yaml").read_text()

CALLS = """
import sys
from pathlib import Path
from turnstile.models import Tool
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings

renderer = create_renderer(Path(sys.argv[1]), RenderingSettings(call_format=sys.argv[2]))
tool = Tool("bash", {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}})
renderer.check_tools([tool])
ids = renderer.encode_completion('I look. <call>bash\\n{"command": "ls"}</call>')
parser = renderer.parser([tool], prompt_tail=ids[:0])
parser.feed(ids)
message = parser.finish()[1].message
assert message.content == "I look.", message
assert [(call.name, call.arguments) for call in message.tool_calls] == [("bash", '{"command": "ls"}')], message
"""


@dataclass(frozen=True)
class Used:
    """An interpreter that finds the parts in ``site``."""

    site: Path
    folder: Path

    def turnstile(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.python(Path(sys.executable).parent / "turnstile", *arguments)

    def python(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        own = {"PYTHONPATH": str(self.site), "COLUMNS": "200"}
        return subprocess.run(
            command, cwd=self.folder, env={**os.environ, **own}, capture_output=True, text=True, check=False
        )

    def play(self, *arguments: object) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """``turnstile run`` with a server of its own: the episodes, and the rows of their exported samples."""
        out = self.folder / "out"
        done = self.turnstile(
            "run", "--model", "tiny", "--data-dir", self.folder / "data", "--out", out, *arguments
        )
        assert done.returncode == 0, done.stdout + done.stderr
        episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
        rows = [list(csv.reader(file.open())) for file in sorted((out / "samples").iterdir())]
        return episodes, [row for head, *found in rows for row in found if len(head) == len(row) == 4]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    command = [find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--target", folder, PARTS]
    subprocess.run(command, check=True, cwd=folder)
    return folder


@pytest.fixture
def installed(site: Path, tmp_path: Path) -> Used:
    return Used(site, tmp_path)


@pytest.fixture
def named(tmp_path: Path) -> Used:
    """Where the modules can be imported, and no package declares them."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "example_parts").symlink_to(PARTS / "example_parts")
    return Used(tmp_path / "modules", tmp_path)


def task_file(folder: Path, grader: str) -> Path:
    grading = {"short": {"grader": grader, "chars": 3}}
    file = folder / "short.jsonl"
    file.write_text(json.dumps({"id": "short", "instruction": "Be brief.", "grading": grading}) + "\n")
    return file


def row_file(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"question": "What is it?", "reference": "a row"}) + "\n")
    return file


def check_episodes(episodes: list[dict[str, Any]], rows: list[list[str]]) -> None:
    found = {each["task"]["id"]: each["episode"] for each in episodes}
    assert set(found) == {"sum-0", "sum-1", "short", "question-0"}
    assert {each["status"] for each in found.values()} == {"completed"}
    assert found["short"]["grading"]["summary"] == ["short: the answer has 0 characters, at most 3 are wanted"]
    trained = sorted(int(row[-1]) for row in rows)
    assert trained == sorted(each["stats"]["trained_tokens"] for each in found.values())
    assert trained[0] > 0


def test_the_package_declares_a_part_of_every_group_and_the_doctor_finds_each(installed: Used) -> None:
    done = installed.turnstile("doctor", "--parts")
    assert done.returncode == 0, done.stdout
    for group, word in GROUPS.items():
        line = next(line for line in done.stdout.splitlines() if DISTRIBUTION in line and f" {word} " in line)
        assert line.split()[0] == "ok"
        assert "example_parts." in line
        assert Plugins(group).names(), "Turnstile's own"


def test_parts_of_a_package_are_used_by_their_names(installed: Used) -> None:
    episodes, rows = installed.play(
        *("--tasks", "sums:2", "--tasks", task_file(installed.folder, "brevity")),
        *("--tasks", f"rows:{row_file(installed.folder)}"),
        *("--engine", "uniform", "--sandbox", "frugal", "--agent", "one-line", "--format", "counts"),
    )
    check_episodes(episodes, rows)


def test_parts_that_no_package_declares_are_used_by_their_places(named: Used) -> None:
    specs = named.folder / "specs"
    specs.mkdir()
    (specs / "a.yaml").write_text(ONE_LINE.replace("dialect: plain", "dialect: example_parts.plain:PlainDialect"))
    module = named.folder / "modules" / "my_agents.py"
    module.write_text(f"from pathlib import Path\nSPEC = Path({str(specs / 'a.yaml')!r})\n")
    episodes, rows = named.play(
        *("--tasks", "example_parts.sums:Sums=sums:2"),
        *("--tasks", f"rows:{row_file(named.folder)}?kind=example_parts.questions:ROWS"),
        *("--tasks", task_file(named.folder, "example_parts.brevity:BrevityGrader")),
        *("--engine", "example_parts.uniform:UniformEngine"),
        *("--sandbox", "example_parts.frugal:FrugalProvider.from_setup"),
        *("--agent-specs", "my_agents:SPEC", "--agent", "one-line"),
        *("--format", "example_parts.counts:COUNTS"),
    )
    check_episodes(episodes, rows)


@pytest.mark.parametrize("format_", ["auto", "named_tags", "example_parts.named_tags:NamedTags"])
def test_a_call_format_of_a_package_reads_calls(installed: Used, tiny_model: Path, format_: str) -> None:
    folder = installed.folder / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    done = installed.python("-c", CALLS, folder, format_)
    assert done.returncode == 0, done.stderr


def test_a_part_that_cannot_be_loaded_is_told_with_its_package_and_stops_nothing_else(installed: Used) -> None:
    broken = installed.folder / "broken"
    metadata = broken / "acme_parts-1.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 1.2\n")
    (broken / "acme_leaving.py").write_text("raise SystemExit(3)\n")
    (broken / "acme_wrong.py").write_text("class Nothing:\n    pass\n")
    lines = []
    for group in GROUPS:
        lines += [f"[{group}]", "acme = absent_module:Part", "leaving = acme_leaving:Part"]
        lines += ["nothing = acme_wrong:Nothing"] if group in CHECKED else []
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    used = Used(Path(f"{installed.site}{os.pathsep}{broken}"), installed.folder)
    listed = used.turnstile("doctor", "--parts")
    assert listed.returncode == 1
    told = [line for line in listed.stdout.splitlines() if "FAILED" in line]
    assert len(told) == 2 * len(GROUPS) + len(CHECKED)
    assert all("acme-parts 1.2" in line for line in told)
    for said, times in (
        ("No module named 'absent_module'", len(GROUPS)),
        ("SystemExit: 3", len(GROUPS)),
        ("acme_wrong:Nothing", len(CHECKED)),
    ):
        assert sum(said in line for line in told) == times
    episodes, rows = used.play(
        *("--tasks", "sums:2", "--tasks", task_file(used.folder, "brevity")),
        *("--tasks", f"rows:{row_file(used.folder)}"),
        *("--engine", "uniform", "--sandbox", "frugal", "--agent", "one-line", "--format", "counts"),
    )
    check_episodes(episodes, rows)
