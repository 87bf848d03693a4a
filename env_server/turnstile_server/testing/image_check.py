"""Checks of one image: ``turnstile doctor --image IMAGE``.

A sandbox of the image is made, and a few commands are run in it. Nothing of the image is trusted, and nothing is
changed outside of the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from turnstile_server.agents.registry import load_registry
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.backends import started_sandboxes
from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed, TurnstileError
from turnstile_server.grading.hidden_tests import OLDEST_PYTHON
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.transport import not_possible
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, Command, Sandbox, SandboxLimits, SandboxSpec, User
from turnstile_server.settings import SandboxSettings, Settings
from turnstile_server.testing.doctor import Finding
from turnstile_server.testing.machine import MachineReport

_LIMITS = SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=64 << 20)
_PROBE_S = 30.0
_PYTHON = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
_LIBC = (
    "for each in /lib/ld-musl-*.so.1; do [ -e $each ] && echo musl; done; "
    "for each in /lib64/ld-linux-*.so.* /lib/ld-linux-*.so.*; do [ -e $each ] && echo glibc; done; :"
)
_WRITABLE = 'for each in /tmp "$HOME" .; do : 2> /dev/null > "$each/.turnstile" || echo "$each"; done'


async def check_image(settings: Settings, image: str) -> MachineReport:
    """Tries what works in ``image``. Raises StartupError where no Docker sandbox can be made here, or the agents'
    specs are wrong, and TaskFailed where the engine does not have the image."""
    agents = list(load_registry(settings.agents.specs))
    sandboxes = settings.sandboxes.model_copy(update={"kind": "docker", "docker_image": image})
    machine = await _architecture(sandboxes, image)
    async with started_sandboxes(settings.model_copy(update={"sandboxes": sandboxes})) as provider:
        try:
            sandbox = await provider.create(SandboxSpec(_LIMITS, image=image))
        except TaskFailed:
            raise
        except TurnstileError as error:
            raise StartupError(error.message) from error
        try:
            findings = [machine, *await _findings(sandbox, agents)]
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()
    return MachineReport(passed=all(each.passed is not False for each in findings), findings=tuple(findings))


async def _architecture(settings: SandboxSettings, image: str) -> Finding:
    """Raises StartupError, TaskFailed."""
    engine = DockerEngine(settings)
    try:
        await engine.open()
        found = await engine.image(image)
    except SandboxUnavailable as error:
        raise not_possible(error) from error
    finally:
        engine.close()
    if found is None:
        raise TaskFailed(f"Docker has no image {image}; fetch or build it first (docker pull {image})")
    fits = found.architecture in call_filter.ARCHITECTURES
    return Finding(name="architecture", passed=fits, text=found.architecture)


async def _findings(sandbox: Sandbox, agents: Sequence[AgentSpec]) -> list[Finding]:
    helper = sandbox.agent_url is not None
    carried = sandbox.python != IMAGE_PYTHON
    runs_on = "the carried runtime" if carried else f"the image's {IMAGE_PYTHON}"
    said = f"on {runs_on}" if helper else "cannot run: no runtime is carried in, and the image has no Python 3.8"
    shell = await _said(sandbox, "/bin/sh", "-c", "echo yes") == "yes"
    libc = (await _said(sandbox, "/bin/sh", "-c", _LIBC) or "").split()
    closed = await _said(sandbox, "/bin/sh", "-c", _WRITABLE)
    bash = await _said(sandbox, "bash", "-c", "echo $BASH_VERSION")
    git = await _said(sandbox, "git", "--version")
    programs = {program for spec in agents for program in spec.programs}
    has = {name for name in programs if await _said(sandbox, "/bin/sh", "-c", 'command -v "$0"', name) is not None}
    return [
        Finding(name="helper", passed=helper, text=said),
        Finding(
            name="shell",
            passed=shell,
            text="/bin/sh" if shell else "no /bin/sh: set-up, tools and most agents need one",
        ),
        Finding(
            name="writable",
            passed=closed == "" if shell else None,
            text=f"not {closed}" if closed else "/tmp, the home, the work folder",
        ),
        Finding(name="bash", passed=None, text=bash or "none: commands of the model run by sh"),
        Finding(name="git", passed=None, text=git or "none"),
        Finding(name="libc", passed=None, text=", ".join(dict.fromkeys(libc)) or "none that is known"),
        await _tests_in_python(sandbox),
        runnable(agents, has, helper=helper, shell=shell),
    ]


async def _tests_in_python(sandbox: Sandbox) -> Finding:
    version = await _said(sandbox, IMAGE_PYTHON, "-I", "-S", "-c", _PYTHON)
    wanted = ".".join(map(str, OLDEST_PYTHON))
    if version is None:
        return Finding(name="tests", passed=None, text="no python3: `runner: command` alone works")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYTHON:
        text = f"python3 {version}, older than {wanted}: `runner: command` alone works"
        return Finding(name="tests", passed=None, text=text)
    pytest = await _said(sandbox, IMAGE_PYTHON, "-c", "import pytest; print(pytest.__version__)")
    with_pytest = f"pytest {pytest}" if pytest is not None else "no pytest"
    return Finding(name="tests", passed=None, text=f"python3 {version}, {with_pytest}")


def runnable(agents: Sequence[AgentSpec], has: set[str], *, helper: bool, shell: bool) -> Finding:
    """Which agents can run, with the programs that the image has of those that they start by name."""
    if not helper or not shell:
        return Finding(name="agents", passed=None, text="none")
    lacking = {spec.name: [each for each in spec.programs if each not in has] for spec in agents}
    fit = [name for name, missing in lacking.items() if not missing]
    unfit = [f"{name} (needs {', '.join(missing)})" for name, missing in lacking.items() if missing]
    text = ", ".join(fit) + (f"; not {', '.join(unfit)}" if unfit else "")
    return Finding(name="agents", passed=None, text=text)


async def _said(sandbox: Sandbox, *argv: str) -> str | None:
    """The output of a command; None where it failed."""
    done = await sandbox.exec(Command(argv, user=User.AGENT, timeout_s=_PROBE_S))
    return done.stdout.decode(errors="replace").strip() if done.exit_code == 0 else None
