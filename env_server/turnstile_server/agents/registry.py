"""The agents that a server can launch: every ``*.yaml`` of the spec folders, checked when the server starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from turnstile_server.agents.launch import PLACEHOLDERS, placeholder_errors
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import StartupError, Unprocessable

SPECS = Path(__file__).parent / "specs"
EXTERNAL = "external"
"""The agent name of episodes whose agent the caller runs."""

YAML = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""libyaml reads the specs that ship ten times as fast as the parser in Python, at each start of a server."""


class AgentRegistry:
    """Agent specs by name, in the order in which they were loaded."""

    def __init__(self, specs: Mapping[str, AgentSpec]) -> None:
        self._specs = dict(specs)

    def get(self, name: str) -> AgentSpec:
        """The spec of the agent ``name``. Raises Unprocessable, naming the known agents, for an unknown one."""
        spec = self._specs.get(name)
        if spec is None:
            raise Unprocessable(
                f"agent {name!r} is not known here; this server launches {', '.join(self._specs) or 'none'}, "
                f"and records agents that you run yourself as {EXTERNAL!r}"
            )
        return spec

    def resume_refusal(self, spec: AgentSpec) -> str:
        """Why an agent that cannot resume has no forks, and which of these agents can."""
        able = ", ".join(one.name for one in self if one.can_resume) or "none"
        return (
            f"{spec.name} is launched by this server and cannot go on from files: its own state lies in its "
            f"process, which no snapshot has. External agents can be forked, and of this server's: {able}"
        )

    def __iter__(self) -> Iterator[AgentSpec]:
        return iter(self._specs.values())


def load_registry(further: Sequence[Path] = ()) -> AgentRegistry:
    """Load the agents that ship, then those of the folders ``further``. A later one replaces a namesake.

    Raises StartupError, naming the file and the field, for a spec that is wrong: an unknown field, dialect or
    placeholder, an unpinned npm package, a name that is taken twice in one folder, or ``extends`` of no agent.
    """
    specs: dict[str, AgentSpec] = {}
    read: dict[str, Mapping[str, Any]] = {}
    for folder in (SPECS, *further):
        if not folder.is_dir():
            raise StartupError(f"agents.specs: {folder} is not a folder")
        texts = {path: _read(path) for path in sorted(folder.glob("*.yaml"))}
        read |= {text["name"]: text for text in texts.values() if isinstance(text.get("name"), str)}
        found = [_checked(path, _extended(path, text, read)) for path, text in texts.items()]
        names = [spec.name for spec in found]
        for spec in found:
            if spec.name == EXTERNAL or names.count(spec.name) > 1:
                raise StartupError(f"an agent spec in {folder} has a name that is taken: {spec.name}")
            specs[spec.name] = spec
    return AgentRegistry(specs)


def _read(path: Path) -> Mapping[str, Any]:
    """The fields of one file; its ``tree`` becomes an absolute path."""
    try:
        fields = yaml.load(path.read_text("utf-8"), YAML)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the agent spec {path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise StartupError(f"the agent spec {path} is wrong: it is not a mapping of fields")
    install = fields.get("install")
    if isinstance(install, dict) and isinstance(install.get("tree"), str):
        fields["install"] = {**install, "tree": str((path.parent / install["tree"]).resolve())}
    return fields


def _extended(path: Path, fields: Mapping[str, Any], read: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """``fields`` over those of the spec that they extend. Mappings are joined; any other value replaces."""
    if fields.get("extends") is None:  # a spec that was dumped has the field, too
        return fields
    base = read.get(fields["extends"]) if isinstance(fields["extends"], str) else None
    if base is None or base.get("extends") is not None:
        raise StartupError(
            f"the agent spec {path} is wrong: extends: {fields['extends']!r} is no agent of this folder or an "
            "earlier one, or extends another one itself"
        )
    if "command" in fields:  # how the agent goes on is arguments of the other command
        base = {name: value for name, value in base.items() if name != "resume"}
    return _joined(base, fields)


def _joined(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**base, **over}
    for name in base.keys() & over.keys():
        if isinstance(base[name], dict) and isinstance(over[name], dict):
            joined[name] = _joined(base[name], over[name])
    return joined


def _checked(path: Path, fields: Mapping[str, Any]) -> AgentSpec:
    try:
        spec = AgentSpec.model_validate(fields)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise StartupError(f"the agent spec {path} is wrong: {faults}") from error
    unfilled = placeholder_errors(spec)
    if unfilled:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise StartupError(
            f"the agent spec {path} is wrong: {'; '.join(unfilled)}. Placeholders are {known}; a brace is written "
            "twice"
        )
    tree = spec.install.tree
    if tree is not None and not Path(tree).is_dir():
        raise StartupError(f"the agent spec {path} is wrong: install.tree: {tree} is not a folder")
    return spec
