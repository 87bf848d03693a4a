"""The layout of a sandbox in a container elsewhere, of which only the helper has told anything. Pure."""

from __future__ import annotations

from typing import Final

from turnstile_server.errors import TaskFailed
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.helper_sandbox import Layout
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR, SandboxSpec
from turnstile_server.sandboxes.stream_provider import HostFacts
from turnstile_server.sandboxes.users import Uids

_OF_CLUSTER: Final = "KUBERNETES_"
"""Variables with which every container of a cluster is started. They are no image's."""
_OF_SHELL: Final = frozenset(("PWD", "OLDPWD", "SHLVL", "_"))


def host_layout(spec: SandboxSpec, facts: HostFacts, uids: Uids, python: str, image: str) -> Layout:
    """Raises TaskFailed for an image without a work folder, where the task wants the image's."""
    environment = tuple(
        (name, value)
        for name, value in facts.environment.items()
        if value and not name.startswith(_OF_CLUSTER) and name not in _OF_SHELL
    )
    found = Image(
        image,
        volumes=(),
        path=facts.environment.get("PATH") or Layout().path,
        architecture=call_filter.architecture(facts.machine),
        workdir=facts.workdir,
        environment=environment,
    )
    spec = containers.with_workdir(spec, found, image)
    # Nothing bounds the processes of all together: each user has a bound.
    return containers.layout(spec, found, uids, python, own_kernel=True)


def check_workdir(spec: SandboxSpec) -> None:
    """Raises TaskFailed for what a host elsewhere does not have."""
    if spec.workdir == IMAGE_WORKDIR and not spec.image_files:
        raise TaskFailed("the task's work folder is its image's, but its files are not (image_files)")
