"""The agents that a server can launch: the entry points of ``turnstile.agents``, then the settings' own specs.

An agent's object is the path (``pathlib.Path``) of its spec, a YAML file. All are checked when the server starts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile.plugins import BrokenPlugin, Plugin, Plugins, is_reference
from turnstile_server.agents.launch import PLACEHOLDERS, placeholder_errors
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import StartupError, Unprocessable
from turnstile_server.gate.dialects.registry import load_dialect

AGENTS: Final = Plugins("turnstile.agents")

EXTERNAL = "external"
"""The agent name of episodes whose agent the caller runs."""

YAML = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""libyaml reads the specs that ship ten times as fast as the parser in Python, at each start of a server."""

_LOG = logging.getLogger(__name__)


class AgentRegistry:
    """Agent specs by name, in the order in which they were loaded."""

    def __init__(self, specs: Mapping[str, AgentSpec], broken: Mapping[str, str] | None = None) -> None:
        self._specs = dict(specs)
        self.broken = dict(broken or {})
        """Reason why an agent of another package is not known, by its name."""

    def get(self, name: str) -> AgentSpec:
        """The spec of the agent ``name``. Raises Unprocessable, naming the known agents, for an unknown one."""
        spec = self._specs.get(name)
        if spec is None and name in self.broken:
            raise Unprocessable(self.broken[name])
        if spec is None:
            raise Unprocessable(
                f"agent {name!r} is not known here; this server launches {', '.join(self._specs) or 'none'}, "
                f"and records agents that you run yourself as {EXTERNAL!r}"
            )
        return spec

    def resume_refusal(self, spec: AgentSpec) -> str:
        """The refusal to fork an agent that cannot resume: the reason, and the agents that can."""
        able = ", ".join(one.name for one in self if one.can_resume) or "none"
        return (
            f"{spec.name} is launched by this server and cannot go on from files: its own state lies in its "
            f"process, which no snapshot has. External agents can be forked, and of this server's: {able}"
        )

    def __iter__(self) -> Iterator[AgentSpec]:
        return iter(self._specs.values())


def load_registry(further: Sequence[Path | str] = ()) -> AgentRegistry:
    """Load the installed agents, then those of ``further``: folders of specs, and ``package.module:object``.

    A later one replaces a namesake.

    Raises StartupError, naming the file and the field, for a spec that is wrong: an unknown field, dialect or
    placeholder, an unpinned npm package, a name that is taken twice in one folder, or ``extends`` of no agent. An
    installed agent of another package that is wrong is told in the log, and to whoever asks for it.
    """
    loading = _Loading()
    broken: dict[str, str] = {}
    loading.add([path_of(plugin) for plugin in AGENTS.declared() if plugin.ours], "turnstile-rl")
    for plugin in AGENTS.declared():
        if plugin.ours:
            continue
        try:
            loading.add_plugin(plugin)
        except StartupError as error:
            said = error.message if str(plugin) in error.message else f"{plugin} cannot be used: {error.message}"
            broken[plugin.name] = said
            _LOG.warning("%s; it is not launched here", said)
    for place in further:
        if is_reference(str(place)):
            loading.add([path_of(AGENTS.find(str(place)))], str(place))
            continue
        folder = Path(place)
        if not folder.is_dir():
            raise StartupError(f"agents.specs: {folder} is not a folder")
        loading.add(sorted(folder.glob("*.yaml")), str(folder))
    return AgentRegistry(loading.specs, broken)


def path_of(plugin: Plugin) -> Path:
    """The path of the plug-in's spec. Raises StartupError."""
    try:
        found = plugin.load()
    except BrokenPlugin as error:
        raise StartupError(str(error)) from error
    if not isinstance(found, Path):
        raise StartupError(
            f"{plugin} cannot be used: it is a {type(found).__name__}, not the pathlib.Path of a spec"
        )
    return found


class _Loading:
    """The specs so far, by name."""

    def __init__(self) -> None:
        self.specs: dict[str, AgentSpec] = {}
        self._read: dict[str, Mapping[str, Any]] = {}

    def add(self, paths: Sequence[Path], place: str) -> None:
        """The specs of one place, which may extend each other. Raises StartupError."""
        texts = {path: _read(path) for path in paths}
        self._read |= {text["name"]: text for text in texts.values() if isinstance(text.get("name"), str)}
        found = [_checked(path, _extended(path, text, self._read)) for path, text in texts.items()]
        names = [spec.name for spec in found]
        for spec in found:
            if spec.name == EXTERNAL or names.count(spec.name) > 1:
                raise StartupError(f"an agent spec in {place} has a name that is taken: {spec.name}")
            self.specs[spec.name] = spec

    def add_plugin(self, plugin: Plugin) -> None:
        """The agent of another package. Raises StartupError, and is as before then."""
        path = path_of(plugin)
        fields = _read(path)
        spec = _checked(path, _extended(path, fields, self._read))
        if spec.name != plugin.name:
            raise StartupError(f"{plugin} cannot be used: its spec has the name {spec.name!r}")
        load_dialect(spec.dialect)
        self.specs[spec.name] = spec
        self._read[spec.name] = fields


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
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault_text(fault)}" for fault in error.errors())
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
