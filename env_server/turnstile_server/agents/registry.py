"""The agents this server can launch: every ``*.yaml`` of the folders of specs, checked when the server starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from turnstile_server.agents import placeholders
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import StartupError, Unprocessable

SPECS = Path(__file__).parent / "specs"
EXTERNAL = "external"
"""The name of every agent that somebody else runs."""


class AgentRegistry:
    def __init__(self, specs: Mapping[str, AgentSpec]) -> None:
        self._specs = dict(specs)

    def get(self, name: str) -> AgentSpec:
        """Raises Unprocessable, naming the agents there are."""
        spec = self._specs.get(name)
        if spec is None:
            raise Unprocessable(
                f"agent {name!r} is not known here; this server launches {', '.join(self._specs) or 'none'}, "
                f"and records agents that you run yourself as {EXTERNAL!r}"
            )
        return spec

    def __iter__(self) -> Iterator[AgentSpec]:
        return iter(self._specs.values())


def load_registry(further: Sequence[Path] = ()) -> AgentRegistry:
    """The agents that ship, and those of ``further`` folders, which may replace them by name.

    Raises StartupError, naming the file and the field.
    """
    specs: dict[str, AgentSpec] = {}
    for folder in (SPECS, *further):
        if not folder.is_dir():
            raise StartupError(f"agents.specs: {folder} is no folder")
        found = [_load(path) for path in sorted(folder.glob("*.yaml"))]
        names = [spec.name for spec in found]
        for spec in found:
            if spec.name == EXTERNAL or names.count(spec.name) > 1:
                raise StartupError(f"an agent spec in {folder} has a name that is taken: {spec.name}")
            specs[spec.name] = spec
    return AgentRegistry(specs)


def _load(path: Path) -> AgentSpec:
    """The spec, its ``tree`` as an absolute path."""
    try:
        spec = AgentSpec.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the agent spec {path} cannot be read: {error}") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise StartupError(f"the agent spec {path} is wrong: {faults}") from error
    unfilled = placeholders.faults(spec)
    if unfilled:
        known = ", ".join(f"{{{name}}}" for name in placeholders.PLACEHOLDERS)
        raise StartupError(
            f"the agent spec {path} is wrong: {'; '.join(unfilled)}. Placeholders are {known}; a brace is written "
            "twice"
        )
    if spec.install.tree is None:
        return spec
    tree = (path.parent / spec.install.tree).resolve()
    if not tree.is_dir():
        raise StartupError(f"the agent spec {path} is wrong: install.tree: {tree} is no folder")
    return spec.model_copy(update={"install": spec.install.model_copy(update={"tree": str(tree)})})
