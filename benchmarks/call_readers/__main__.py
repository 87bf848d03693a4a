"""The calls that models write, read by Turnstile, by SGLang's detectors and by vLLM's parsers, side by side.

    python benchmarks/call_readers KITS [--sglang PYTHON] [--vllm PYTHON] [--calls 40] [--only qwen3 …]
        [--write]

KITS: model folders (``scripts/model_kits.py``). PYTHON: those of the engines' environments
(``scripts/install_sglang_cpu.sh``, ``scripts/install_vllm_cpu.sh``). Each model's own template writes the calls:
the values of ``tests/rendering/call_battery.json``, and as many random replies as ``--calls`` says, with one call
or two. A reading is right if it has the calls that the template was given, with JSON's types. Behind them come the
malformed replies of the battery, each with the reading that it says is right.

``--write`` puts the tables into docs/call-readers.md. Every difference is listed there, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import ModelCannotServe, StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "call-readers.md"
BATTERY = json.loads((ROOT / "tests/rendering/call_battery.json").read_text())

PARSERS = {
    "apertus": ("apertus2509", "apertus"),
    "cohere": ("cohere_command4", "cohere_command4"),
    "dsml_v32": ("deepseekv32", "deepseek_v32"),
    "dsml_v4": ("deepseekv4", "deepseek_v4"),
    "gemma4": ("gemma4", "gemma4"),
    "gigachat": ("gigachat3", "gigachat3"),
    "glm": ("glm47", "glm47"),
    "harmony": ("gpt-oss", None),
    "hermes": ("hermes", "hermes"),
    "hunyuan3": ("hunyuan", "hy_v3"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "llama3": ("llama3", "llama3_json"),
    "minicpm5": ("minicpm5", "minicpm5"),
    "minimax_m2": ("minimax-m2", "minimax_m2"),
    "minimax_m3": ("minimax-m3", "minimax_m3"),
    "mistral_v3": ("mistral", "mistral"),
    "mistral_v11": ("mistral", "mistral"),
    "muse": ("muse", "muse_glimmer"),
    "qwen3_coder": ("qwen3_coder", "qwen3_coder"),
}
"""The names of SGLang's and vLLM's parsers for a call format; None: it has none that reads text. A format that is
not here has none in either."""
OF_A_MODEL = {
    "glm-4.5": ("glm45", "glm45"),
    "glm-4.6": ("glm45", "glm45"),
    "ling-3": ("ling3", "ling3"),
    "spark-2.5": ("spark25", "glm47"),
    "step-3.5": ("step3p5", "step3p5"),
    "qwen2.5": ("qwen", "hermes"),
    "qwen3": ("qwen", "hermes"),
    "qwen3-2507": ("qwen", "hermes"),
    "qwen3-vl": ("qwen", "hermes"),
    "qwq": ("qwen", "hermes"),
    "granite-4.0": ("hermes", "granite4"),
    "granite-4.1": ("hermes", "granite4"),
}
MALFORMED_ON = {
    "qwen3": "hermes",
    "qwen3-coder": "qwen3_coder",
    "glm-4.7": "glm",
    "llama-3.3": "llama3",
    "kimi-k2": "kimi_k2",
    "mistral-small-3.2": "mistral_v11",
    "mistral-nemo": "mistral_v3",
    "gemma-4": "gemma4",
    "gpt-oss": "harmony",
    "deepseek-v3.2": "dsml_v32",
    "minimax-m2": "minimax_m2",
}
"""The models in whose tokens the malformed replies of a format are written."""

START_S, JOB_S = 60, 20
"""Seconds that a reader has to start, and for the cases of a model."""
IN_REASONING = {"x-in-think", "o-analysis"}
"""Replies that the engines' reasoning parsers see first."""

PIECES = (
    *(
        "ls -la",
        "  ",
        "\n",
        "\t",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "<",
        ">",
        "</",
        "\r\n",
        "; ",
        "```",
    ),
    *(
        "é",
        "日本",
        "🙂",
        "\u2028",
        "&amp;",
        "null",
        "True",
        "5",
        "0.5",
        "def f():\n    return 1\n",
        "functions.a:0",
    ),
    *("</tool_call>", "<tool_call>", "</parameter>", "</function>", "<arg_key>", "</arg_value>", "<|im_end|>"),
    "[TOOL_CALLS]",
)
"""Of which random strings are made."""


@dataclass(frozen=True, slots=True)
class Case:
    """A reply that a model writes, and the calls that are in it: none where it is to be shown as text."""

    name: str
    tools: tuple[Tool, ...]
    ids: tuple[int, ...]
    text: str
    """Without the end of the turn, but harmony's."""
    calls: tuple[tuple[str, Any], ...]
    also: tuple[tuple[tuple[str, Any], ...], ...] = ()
    """Other calls for which the template writes the same text."""


def offered(name: str, properties: dict[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "d", "parameters": parameters}
    return Tool(name, {"type": "function", "function": function})


def random_value(chance: random.Random, depth: int = 0) -> tuple[Any, dict[str, Any]]:
    """A value, and a schema that takes it."""
    kind = chance.choice(("string",) * 6 + ("integer", "number", "boolean") + ("array", "object") * (depth < 2))
    if kind == "string":
        return "".join(chance.choices(PIECES, k=chance.randint(0, 6))), {"type": kind}
    if kind == "integer":
        return chance.randint(-(10**12), 10**12), {"type": kind}
    if kind == "number":
        return chance.randint(-999, 999) / 8 + 0.0625, {"type": kind}
    if kind == "boolean":
        return chance.random() < 0.5, {"type": kind}
    inner = [random_value(chance, depth + 1)[0] for _ in range(chance.randint(1, 3))]
    if kind == "array":
        return inner, {"type": kind}
    return {f"k{index}": each for index, each in enumerate(inner)}, {"type": kind}


def written(renderer: Renderer, name: str, tools: Sequence[Tool], calls: Sequence[tuple[str, Any]]) -> Case:
    made = tuple(
        ToolCall(tool, json.dumps(arguments, ensure_ascii=False), f"call_{index}")
        for index, (tool, arguments) in enumerate(calls)
    )
    ids = renderer.encode_reply(Message("assistant", "", tool_calls=made), tools).tolist()
    if len(calls) > 1:  # some templates write the first alone
        first = renderer.encode_reply(Message("assistant", "", tool_calls=made[:1]), tools).tolist()
        calls = calls[:1] if ids == first else calls
    end = len(ids) if renderer.report.call_format == "harmony" else -1  # where SGLang's detector wants it
    return Case(name, tuple(tools), tuple(ids), renderer.decode(ids[:end]), tuple(calls))


def with_alternatives(some: Sequence[Case]) -> list[Case]:
    """A template may write one text for 5 and for "5": reading either is right."""
    of_text: dict[str, list[Case]] = {}
    for case in some:
        of_text.setdefault(f"{case.text}{[tool.spec for tool in case.tools]}", []).append(case)
    return [
        replace(case, also=tuple(other.calls for other in same_text if other is not case))
        for same_text in of_text.values()
        for case in same_text
    ]


def cases(renderer: Renderer, count: int, seed: int) -> Iterator[Case]:
    """The battery, then random calls. What the template refuses to write is left out."""
    for case in BATTERY["values"]:
        try:
            tools = [offered("write", {"v": case["schema"]})]
            yield written(renderer, case["id"], tools, [("write", {"v": case["value"]})])
        except ModelCannotServe:
            continue
    chance = random.Random(seed)
    for number in range(count):
        properties: dict[str, Any] = {}
        arguments: dict[str, Any] = {}
        for index in range(chance.randint(0, 3)):
            arguments[f"p{index}"], properties[f"p{index}"] = random_value(chance)
        calls = [("first", arguments)] + [("second", {"v": random_value(chance)[0]})] * (chance.random() < 0.3)
        kinds = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
        second = {"v": {"type": kinds[type(calls[-1][1]["v"])]}} if len(calls) == 2 else {}
        try:
            case = written(
                renderer, f"random {number}", [offered("first", properties), offered("second", second)], calls
            )
        except ModelCannotServe:
            continue
        yield case


def malformed(renderer: Renderer, battery_name: str) -> Iterator[Case]:
    tools = (
        offered("bash", {"command": {"type": "string"}}),
        offered("write", {"v": {"type": "string"}, "w": {"type": "string"}}),
    )
    for reply in BATTERY["replies"]:
        if reply["format"] == battery_name and reply["id"] not in IN_REASONING:
            ids = (*renderer.encode_completion(reply["text"]), renderer.stop_token_ids[0])
            calls = tuple((name, arguments) for name, arguments in reply["calls"] or ())
            yield Case(reply["id"], tools, ids, reply["text"], calls)


def ours(renderer: Renderer, case: Case) -> dict[str, Any]:
    parser = renderer.parser(case.tools, prompt_tail=np.array([], np.int32))
    parser.feed(list(case.ids))
    reply = parser.finish()[1].message
    return {"calls": [[call.name, call.arguments] for call in reply.tool_calls], "text": reply.content}


def job(folder: Path, parser: str, some: Sequence[Case]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "parser": parser,
        "cases": [{"tools": [tool.spec for tool in case.tools], "text": case.text} for case in some],
    }


def theirs(engine: str, python: str, jobs: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]] | None]:
    """The readings of each job; None where the reader ended in it, or took too long."""
    shim = ROOT / "tests/sglang_cpu"
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(shim) if engine == "sglang" else "",
    }
    command = [
        "timeout",
        str(START_S + JOB_S * len(jobs)),
        python,
        str(HERE / f"{engine}_reader.py"),
    ]
    done = subprocess.run(
        command, input=json.dumps(jobs), env=environment, text=True, capture_output=True, check=False
    )
    lines = [line.removeprefix("READ ") for line in done.stdout.splitlines() if line.startswith("READ ")]
    yield from map(json.loads, lines)
    if len(lines) < len(jobs):
        print(
            f"{engine}: {jobs[len(lines)]['folder']}: status {done.returncode}: {done.stderr[-300:]}",
            file=sys.stderr,
        )
        yield None
        yield from theirs(engine, python, jobs[len(lines) + 1 :])


def same(case: Case, reading: dict[str, Any]) -> bool:
    """The calls, by name and arguments, 5 and "5" told apart; letters composed, as some vocabularies do (NFC)."""
    found = comparable(calls_of(reading))
    return any(found == comparable([list(call) for call in right]) for right in (case.calls, *case.also))


def calls_of(reading: dict[str, Any]) -> list[list[Any]]:
    """Arguments that are no JSON stay text."""
    found = []
    for name, arguments in reading["calls"]:
        try:
            found.append([name, json.loads(arguments)])
        except (ValueError, TypeError):
            found.append([name, arguments])
    return found


def wrong_by(case: Case, reading: dict[str, Any]) -> str:
    """What is wrong in a reading, in a few words."""
    found = calls_of(reading)
    if len(found) < len(case.calls):
        shown = "" if found or reading["text"].strip() else " without a trace"
        return f"{'a' if found else 'the'} call is lost{shown}"
    if len(found) > len(case.calls):
        return "a call that is not there" if not case.calls else "more calls than there are"
    if [name for name, _ in found] != [name for name, _ in case.calls]:
        return "another name"
    for (_, given), (_, right) in zip(found, case.calls, strict=True):
        if not isinstance(given, dict):
            return "arguments that are no object"
        for key, value in right.items():
            if key not in given:
                return "an argument is lost"
            if comparable(given[key]) != comparable(value):
                return wrong_value(given[key], value)
    return "an argument that is not there"


def wrong_value(given: Any, right: Any) -> str:
    if type(given) is not type(right):
        return "a value of another type"
    if isinstance(right, str) and given.strip() == right.strip():
        return "white space is lost"
    if isinstance(right, str) and right.startswith(given):
        return "a value is cut"
    return "another value"


def comparable(value: Any) -> str:
    return unicodedata.normalize("NFC", json.dumps(value, sort_keys=True, ensure_ascii=False))


def told(reading: dict[str, Any]) -> str:
    """A reading in a few words."""
    if reading["calls"]:
        shown = "; ".join(f"{name}({arguments})" for name, arguments in reading["calls"])
    else:
        shown = f"no call, text {reading['text']!r}" if reading["text"] else "no call, no text"
    shown = shown if len(shown) <= 70 else f"{shown[:67]}…"
    return escape(re.sub(r"\s+", " ", shown), quote=False).replace("|", "\\|").replace("`", "'")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("kits", type=Path)
    arguments.add_argument("--sglang", help="the Python of SGLang's environment")
    arguments.add_argument("--vllm", help="the Python of vLLM's environment")
    arguments.add_argument("--calls", type=int, default=40, help="random calls for each model")
    arguments.add_argument("--only", nargs="*", default=[])
    arguments.add_argument("--write", action="store_true", help="put the tables into docs/call-readers.md")
    chosen = arguments.parse_args()
    page = tables(compared(chosen), chosen)
    print(page)
    if chosen.write:
        before = PAGE.read_text().split("<!-- tables -->")[0]
        PAGE.write_text(f"{before}<!-- tables -->\n\n{page}\n")


@dataclass(slots=True)
class Compared:
    """One model: its cases, and each reader's readings of them; None where the reader has no such parser."""

    name: str
    call_format: str
    parsers: tuple[str | None, str | None]
    cases: list[Case]
    readings: dict[str, list[dict[str, Any]] | None]


def compared(chosen: argparse.Namespace) -> list[Compared]:
    found: list[Compared] = []
    folders = [each for each in sorted(chosen.kits.iterdir()) if (each / "tokenizer.json").is_file()]
    for folder in folders:
        if chosen.only and folder.name not in chosen.only:
            continue
        try:
            renderer = create_renderer(folder, RenderingSettings())
        except StartupError:
            continue
        call_format = renderer.report.call_format
        if call_format is None or any("writes no calls" in said for said in renderer.report.inexact):
            continue
        some = with_alternatives(list(cases(renderer, chosen.calls, seed=30)))
        if folder.name in MALFORMED_ON:
            some += malformed(renderer, MALFORMED_ON[folder.name])
        parsers = OF_A_MODEL.get(folder.name) or PARSERS.get(call_format) or (None, None)
        readings: dict[str, list[dict[str, Any]] | None] = {"turnstile": [ours(renderer, case) for case in some]}
        print(f"{folder.name}: {len(some)} cases", file=sys.stderr)
        found.append(Compared(folder.name, call_format, parsers, some, readings))
    for place, (engine, python) in enumerate((("sglang", chosen.sglang), ("vllm", chosen.vllm))):
        asked = [each for each in found if python and each.parsers[place]]
        jobs = [job(chosen.kits / each.name, str(each.parsers[place]), each.cases) for each in asked]
        answers = list(theirs(engine, python, jobs)) if jobs else []
        for each in found:
            each.readings[engine] = answers[asked.index(each)] if each in asked else None
    return found


def tables(found: Sequence[Compared], chosen: argparse.Namespace) -> str:
    lines = ["| model | form | calls | Turnstile | SGLang | vLLM |", "|---|---|---|---|---|---|"]
    for one in found:
        cells = []
        for reader, parser in zip(("turnstile", "sglang", "vllm"), ("", *one.parsers), strict=True):
            readings = one.readings[reader]
            if readings is None:
                cells.append("–")
                continue
            right = sum(same(case, each) for case, each in zip(one.cases, readings, strict=True))
            cells.append(f"{right} {f'`{parser}`' if parser else ''}".strip())
        lines.append(f"| {one.name} | `{one.call_format}` | {len(one.cases)} | {' | '.join(cells)} |")
    lines += ["", "## Every difference", ""]
    lines += [
        "| model | reader | what it does | cases | for example, right | and its reading |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        for reader, readings in one.readings.items():
            lines += differences(one, reader, readings or [])
    return "\n".join(lines)


def differences(one: Compared, reader: str, readings: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each thing that a reader does wrong with the calls of a model."""
    kinds: dict[str, list[tuple[Case, dict[str, Any]]]] = {}
    for case, reading in zip(one.cases, readings, strict=len(readings) > 0):
        if not same(case, reading):
            kinds.setdefault(wrong_by(case, reading), []).append((case, reading))
    for kind, some in kinds.items():
        named = [case.name for case, _ in some if not case.name.startswith("random")]
        count = len(some) - len(named)
        names = ", ".join([*named, *([f"{count} random"] if count else [])])
        case, reading = min(some, key=lambda pair: len(pair[0].text))
        right = told(
            {"calls": [[name, json.dumps(given, ensure_ascii=False)] for name, given in case.calls], "text": ""}
        )
        yield f"| {one.name} | {reader} | {kind} | {names} | `{right}` | `{told(reading)}` |"


if __name__ == "__main__":
    main()
