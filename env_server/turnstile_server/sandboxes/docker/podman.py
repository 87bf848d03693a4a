"""What Podman takes otherwise through Docker's API: a container's body as it wants it.

Tried with Podman 4.3. It reads the system call filter from a file on its own side, where Docker takes the JSON
(Podman's issue 27710), and knows neither number of files nor owner of a folder in memory: those are root's, so the
helper, which gives them to their users, needs the rights that it has for files of an image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes import call_filter

_COMPONENT = "Podman Engine"
_UNKNOWN = re.compile(r",(?:nr_inodes|uid|gid)=\d+")
_RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
_FILTER = "seccomp="
PROFILE_UNSEEN = "opening seccomp profile failed"
"""Text in Podman's error for a file with a system call filter that it cannot read."""


def is_podman(version: Mapping[str, Any]) -> bool:
    """``version``: the engine's answer to ``GET /version``."""
    return any(each.get("Name") == _COMPONENT for each in version.get("Components") or ())


def write_profile(folder: Path) -> Path:
    """The system call filter as a file that the engine reads: one on this machine. Raises SandboxUnavailable."""
    path = folder / "seccomp.json"
    try:
        path.write_text(call_filter.docker_profile())
    except OSError as error:
        raise SandboxUnavailable(f"{path} cannot be written, which Podman needs: {error.strerror}") from error
    return path


def adapted(host: Mapping[str, Any], profile: Path | None) -> dict[str, Any]:
    """A ``HostConfig`` for Podman. ``profile``: None leaves its own filter, which lets the helper work; that has
    each command keep to ours."""
    options = [each for each in host.get("SecurityOpt") or () if not each.startswith(_FILTER)]
    if profile is not None:
        options.append(f"{_FILTER}{profile}")
    tmpfs = {path: _UNKNOWN.sub("", each) for path, each in (host.get("Tmpfs") or {}).items()}
    rights = list(dict.fromkeys([*(host.get("CapAdd") or ()), *(_RIGHTS if tmpfs else ())]))
    return {**host, "SecurityOpt": options, "Tmpfs": tmpfs, "CapAdd": rights}
