"""Needs of a task's tests, found in their text: a network, a service, state outside the work folder.

Harbor judges in the agent's own container, with its network, where all of these are there. A copy of the work
folder has none, and such a script then writes 0 for work that may be right. So it is refused by name. This sees
what is written plainly; ``turnstile tasks validate`` finds the rest, because the known solution then fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ADVICE = "put it into the image, or let the tests be rehearsed (tasks.rehearse_tests; not those of steps)"
_FETCHES = (
    re.compile(r"\b(?:apt-get|apt|apk|yum|dnf)\b[^#|;&]*\b(?:update|install|add|upgrade)\b"),
    re.compile(r"\bpip3?\s+(?:\S+\s+)*?install\b(?!.*--no-index)"),
    re.compile(r"\b(?:curl|wget)\b.*\bhttps?://(?!localhost|127\.0\.0\.1|\[::1\])"),
    re.compile(r"\b(?:uvx|uv\s+(?:pip|tool|run|add|sync))\b(?!.*--offline)"),
    re.compile(r"\b(?:npx|npm\s+(?:install|ci|i)|yarn\s+add|pnpm\s+(?:install|add))\b(?!.*--offline)"),
    re.compile(r"\bgit\s+clone\b.*\b(?:https?|ssh|git)(?:://|@)"),
    re.compile(r"\b(?:conda|mamba|cargo|go|gem)\s+(?:install|get)\b(?!.*--offline)"),
)
_OFFLINE = re.compile(r"\b(?:UV_OFFLINE|PIP_NO_INDEX)=(?:1|true)")
_SERVICE = re.compile(
    r"\b(?:localhost|127\.0\.0\.1|0\.0\.0\.0):\d+|\b(?:systemctl|pgrep|pidof)\b|\bservice\s+\w+\s+status\b"
)
_STARTS = re.compile(r"(?<!&)&\s*$|\bPopen\(|\bnohup\b|\b(?:HTTPServer|TestClient)\(", re.MULTILINE)
_PATH = re.compile(r"(?<![\w.~$}/-])/(?:[A-Za-z0-9_.+-]+/)*[A-Za-z0-9_.+-]+")
_SYSTEM = ("/etc", "/root", "/home", "/var", "/srv", "/mnt", "/run")
"""Folders in which programs keep state. A test that names a path there looks at what the agent left."""
_OURS = ("/tests", "/logs/verifier", "/solution", "/dev", "/proc", "/usr", "/bin", "/sbin", "/lib")
"""Paths that say nothing of the agent's work."""
_TEXTS = (".sh", ".py", ".bash")


@dataclass(frozen=True, slots=True)
class TextFinding:
    """A line of a test that needs what a copy of the work folder lacks."""

    file: str
    line: int
    why: str
    fetches: bool = False
    """It is a network that is needed."""


def needs_more(
    files: Mapping[str, str], instruction: str, workdir: str | None, *, online: bool = False
) -> list[TextFinding]:
    """``files``: texts of the tests by path. ``workdir`` None: not known before the image is there, so that
    nothing is said of paths. ``online``: tests may reach hosts."""
    scripts = {name: text for name, text in sorted(files.items()) if name.endswith(_TEXTS)}
    offline = online or any(_OFFLINE.search(text) for text in scripts.values())
    starts = any(_STARTS.search(text) for text in scripts.values())
    asked = frozenset(_paths(instruction))
    found: list[TextFinding] = []
    for name, text in scripts.items():
        for number, line in _lines(text):
            if name.endswith((".sh", ".bash")) and not offline and (fetch := _fetch(line)) is not None:
                why = f"`{fetch}` needs a network, and tests have none; {_ADVICE}"
                found.append(TextFinding(name, number, why, fetches=True))
            if not starts and (service := _SERVICE.search(line)) is not None:
                why = f"`{service[0]}` asks a service that the agent left running, and none runs where tests do"
                found.append(TextFinding(name, number, why))
            for path in _outside(line, asked, workdir):
                why = f"{path} lies outside the work folder {workdir}, the only part of the work that is judged"
                found.append(TextFinding(name, number, why))
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _fetch(line: str) -> str | None:
    for pattern in _FETCHES:
        if (match := pattern.search(line)) is not None:
            return " ".join(match[0].split())
    return None


def _outside(line: str, asked: frozenset[str], workdir: str | None) -> list[str]:
    if workdir is None:
        return []
    found = []
    for path in _paths(line):
        if _below(path, (workdir, *_OURS)):
            continue
        if path in asked or _below(path, _SYSTEM):
            found.append(path)
    return found


def _paths(text: str) -> list[str]:
    return list(dict.fromkeys(path.rstrip(".") for path in _PATH.findall(text)))


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
