"""Specs of agents for the faults that need another one: with sub-agents on, with a small window.

The specs that ship switch sub-agents off where they can, and give agents the window that they are used to. Here an
agent's name decides, in data: what to replace in the text of which field of its spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from turnstile_server.agents.registry import SPECS

Change = tuple[str, str]
"""A text that the spec's strings contain, and what stands there instead."""

VARIANTS: Mapping[str, Mapping[str, Sequence[Change]]] = {
    "subagent": {
        "claude-code": [("--tools=Bash,Read,Edit,Write", "--tools=Bash,Read,Edit,Write,Agent,Task")],
        "codex": [("multi_agent = false", "multi_agent = true")],
        "gemini-cli": [('"tools": {{"core": ["run_shell_command", "read_file", "write_file", "replace"]}},', "")],
        "goose": [("summon: {{enabled: false", "summon: {{enabled: true")],
    },
    "compaction": {
        "claude-code": [("--verbose", "--verbose\n--autocompact=100000")],
        "codex": [
            (
                "model_context_window = 200000",
                "model_context_window = 200000\nmodel_auto_compact_token_limit = 60000",
            )
        ],
    },
}
"""By fault and agent. An agent that is not here is played as it ships."""


def specs_for(fault: str, folder: Path) -> Path | None:
    """The changed specs in ``folder``, where they replace those that ship; None where the fault needs none.
    Raises ValueError when a spec no longer has what was to be changed."""
    variants = VARIANTS.get(fault)
    if variants is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for path in SPECS.glob("*.yaml"):
        spec: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
        changes = variants.get(spec["name"], ())
        for old, new in changes:
            if not _has(spec, old):
                raise ValueError(f"the spec of {spec['name']} has no {old!r} to be changed for {fault}")
            spec = _changed(spec, old, new)
        if changes:
            if tree := spec.get("install", {}).get("tree"):
                spec["install"]["tree"] = str((path.parent / tree).resolve())
            (folder / path.name).write_text(yaml.safe_dump(spec), "utf-8")
    return folder


def _has(value: Any, text: str) -> bool:
    if isinstance(value, dict):
        return any(_has(one, text) for one in value.values())
    if isinstance(value, list):
        return any(_has(one, text) for one in value)
    return isinstance(value, str) and text in value


def _changed(value: Any, old: str, new: str) -> Any:
    """In a list, a string that came to have several lines is as many strings: arguments of a command."""
    if isinstance(value, dict):
        return {name: _changed(one, old, new) for name, one in value.items()}
    if isinstance(value, list):
        changed = [_changed(one, old, new) for one in value]
        return [
            part
            for one, after in zip(value, changed, strict=True)
            for part in (after.split("\n") if isinstance(one, str) and old in one else [after])
        ]
    return value.replace(old, new) if isinstance(value, str) else value
