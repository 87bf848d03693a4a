"""Agent specs for the faults that need another one: with sub-agents on, or with a small context window.

The specs that ship switch sub-agents off where they can, and give agents their usual window. The tables here say,
by fault and agent, which text of the spec to replace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from turnstile_server.agents.shipped import SPECS

Change = tuple[str, str]
"""A text in the spec's strings, and its replacement."""

CODEX_WINDOW = "model_context_window = 200000"
GEMINI_LOOPS = '"disableLoopDetection": true'

VARIANTS: Mapping[str, Mapping[str, Sequence[Change]]] = {
    "subagent": {
        "claude-code": [("--tools=Bash,Read,Edit,Write", "--tools=Bash,Read,Edit,Write,Agent,Task")],
        "codex": [("[agents]\nenabled = false", "[agents]\nenabled = true")],
        "gemini-cli": [('"replace", "mcp_turnstile_*"', '"replace", "invoke_agent", "mcp_turnstile_*"')],
        "goose": [("summon: {{enabled: false", "summon: {{enabled: true")],
        "qwen-code": [("--bare", "")],
    },
    "compaction": {
        "claude-code": [("--verbose", "--verbose\n--autocompact=100000")],
        "codex": [(CODEX_WINDOW, f"{CODEX_WINDOW}\nmodel_auto_compact_token_limit = 40000")],
        "gemini-cli": [(GEMINI_LOOPS, f'{GEMINI_LOOPS}, "compressionThreshold": 0.03')],
        "opencode": [('"auto": false', '"auto": true'), ('"context": 200000', '"context": 80000')],
        "pi": [('"contextWindow": 200000', '"contextWindow": 80000')],
    },
}
"""By fault and agent. An agent that is neither here nor below is played as it ships."""

ENVIRONMENT: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "compaction": {"goose": {"GOOSE_CONTEXT_LIMIT": "64000", "GOOSE_AUTO_COMPACT_THRESHOLD": "0.5"}},
}
"""By fault and agent: further environment variables."""


class VariantError(Exception):
    """A spec does not contain the text to be replaced."""


def variant(fault: str, agent: str, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """``spec`` for this fault; None where it is played as it ships. Raises VariantError."""
    changes = VARIANTS.get(fault, {}).get(agent, ())
    changed: Any = dict(spec)
    for old, new in changes:
        if not _has(changed, old):
            raise VariantError(f"the spec of {agent} has no {old!r} to be changed for {fault}")
        changed = _changed(changed, old, new)
    env = ENVIRONMENT.get(fault, {}).get(agent, {})
    if env:
        changed["env"] = {**changed.get("env", {}), **env}
    return changed if changes or env else None


def write_specs(fault: str, folder: Path) -> dict[str, str]:
    """The changed specs into ``folder``, where they replace those that ship; by agent, what went wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong: dict[str, str] = {}
    for path in SPECS.glob("*.yaml"):
        spec: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
        try:
            changed = variant(fault, spec["name"], spec)
        except VariantError as error:
            wrong[spec["name"]] = str(error)
            continue
        if changed is not None:
            if tree := changed.get("install", {}).get("tree"):
                changed["install"]["tree"] = str((path.parent / tree).resolve())
            (folder / path.name).write_text(yaml.safe_dump(changed), "utf-8")
    return wrong


def _has(value: Any, text: str) -> bool:
    if isinstance(value, dict):
        return any(_has(one, text) for one in value.values())
    if isinstance(value, list):
        return any(_has(one, text) for one in value)
    return isinstance(value, str) and text in value


def _changed(value: Any, old: str, new: str) -> Any:
    """In a list, a string that came to have other lines is as many strings: arguments of a command."""
    if isinstance(value, dict):
        return {name: _changed(one, old, new) for name, one in value.items()}
    if isinstance(value, list):
        changed = [_changed(one, old, new) for one in value]
        return [
            part
            for one, after in zip(value, changed, strict=True)
            for part in (after.splitlines() if isinstance(one, str) and old in one else [after])
        ]
    return value.replace(old, new) if isinstance(value, str) else value
