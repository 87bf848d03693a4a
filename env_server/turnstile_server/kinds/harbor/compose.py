"""A task's ``docker-compose.yaml``, where it says no more than a Dockerfile and ``task.toml`` could.

Supported: one service ``main`` with an image or a build, variables, a work folder. A sandbox has no further
containers, volumes, ports or rights, so whatever else is written there is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.tasks.parse import Loc, TaskEntry, TaskSyntaxError, parse_yaml

_TOP = frozenset(("services", "version", "name"))
_READ = frozenset(("image", "build", "environment", "working_dir", "command", "entrypoint"))
_HARMLESS = frozenset(
    ("container_name", "init", "tty", "stdin_open", "pull_policy", "hostname", "stop_grace_period")
)
_BUILD = frozenset(("context", "dockerfile", "args", "target"))
_WAITING = ("sleep infinity", "tail -f /dev/null")
_HARBORS_IMAGES = frozenset(("${MAIN_IMAGE_NAME}", "${PREBUILT_IMAGE_NAME}"))


@dataclass(frozen=True, slots=True)
class ComposeService:
    """The service ``main``."""

    image: str | None = None
    context: str | None = None
    """Context of the build, relative to the file; None: it has none."""
    dockerfile: str = "Dockerfile"
    args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None


class _Reader:
    def __init__(self, path: Path, entry: TaskEntry, found: FolderFindings) -> None:
        self._path, self._entry, self._found = path, entry, found

    def wrong(self, message: str, loc: Loc) -> None:
        self._found.wrong(message, loc, file=self._path, line=self._entry.line_of(loc))

    def refuse(self, message: str, loc: Loc) -> None:
        self._found.refuse(message, loc, file=self._path, line=self._entry.line_of(loc))

    def text(self, table: Mapping[str, Any], key: str, loc: Loc) -> str | None:
        value = table.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            self.wrong("this is text", (*loc, key))
            return None
        if "$" in value and value not in _HARBORS_IMAGES:
            self.refuse(f"{value!r}: variables of Compose are not filled in; write the value", (*loc, key))
            return None
        return value

    def variables(self, value: Any, loc: Loc) -> dict[str, str]:
        """``{NAME: value}`` or ``[NAME=value]``."""
        if value is None:
            return {}
        if isinstance(value, list):
            pairs = {str(each).partition("=")[0]: str(each).partition("=")[2] for each in value}
        elif isinstance(value, dict):
            pairs = {name: "" if each is None else _said(each) for name, each in value.items()}
        else:
            self.wrong("these are variables: `NAME: value` for each", loc)
            return {}
        for name, each in pairs.items():
            if "$" in each:
                self.refuse(
                    f"{each!r}: variables of Compose are not filled in; use [environment.env]", (*loc, name)
                )
        return pairs

    def service(self) -> ComposeService:
        value = self._entry.value
        if not isinstance(value, dict) or not isinstance(value.get("services"), dict):
            self.wrong("`services` is a mapping, with a service `main`", ("services",))
            return ComposeService()
        for key in sorted(value.keys() - _TOP):
            self.refuse(f"`{key}` has no place in a sandbox, which is one container", (key,))
        services = value["services"]
        for name in sorted(services.keys() - {"main"}):
            self.refuse(
                f"the service {name!r}: a sandbox is one container, the service `main`", ("services", name)
            )
        main = services.get("main")
        loc: Loc = ("services", "main")
        if not isinstance(main, dict):
            self.wrong("there is no service `main`, in which the agent works", loc)
            return ComposeService()
        for key in sorted(main.keys() - _READ - _HARMLESS):
            self.refuse(
                f"`{key}` of a service is not supported; a sandbox has no volumes, ports or rights", (*loc, key)
            )
        for key in ("command", "entrypoint"):
            words = main.get(key)
            said = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
            if said and not any(said.endswith(wait) for wait in _WAITING):
                self.refuse(
                    f"{said!r}: the container's program is Turnstile's; start services in a task's set-up",
                    (*loc, key),
                )
        image = self.text(main, "image", loc)
        environment = self.variables(main.get("environment"), (*loc, "environment"))
        place = self.text(main, "working_dir", loc)
        built = self._build(main.get("build"), (*loc, "build"))
        return ComposeService(
            None if image in _HARBORS_IMAGES else image, environment=environment, working_dir=place, **built
        )

    def _build(self, build: Any, loc: Loc) -> dict[str, Any]:
        if build is None:
            return {}
        if isinstance(build, str):
            build = {"context": build}
        if not isinstance(build, dict):
            self.wrong("this is a folder, or a mapping with `context`", loc)
            return {}
        for key in sorted(build.keys() - _BUILD):
            self.refuse(f"`{key}` of a build is not supported; there are {', '.join(sorted(_BUILD))}", (*loc, key))
        context = build.get("context", ".")
        return {
            "context": "."
            if context == "${CONTEXT_DIR}"
            else self.text({"context": context}, "context", loc) or ".",
            "dockerfile": self.text(build, "dockerfile", loc) or "Dockerfile",
            "args": self.variables(build.get("args"), (*loc, "args")),
            "target": self.text(build, "target", loc),
        }


def _said(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def read_compose(path: Path, found: FolderFindings) -> ComposeService:
    """The service ``main``; everything else goes to ``found``."""
    try:
        entries = parse_yaml(path.read_text())
    except TaskSyntaxError as error:
        found.wrong(error.message, file=path, line=error.line)
        return ComposeService()
    except (OSError, UnicodeDecodeError) as error:
        found.wrong(str(error), file=path)
        return ComposeService()
    return _Reader(path, entries[0], found).service()
