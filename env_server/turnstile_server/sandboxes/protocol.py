"""Sandboxes and their providers as the rest of the server sees them: the contract of every backend.

What must hold for every backend: code inside reaches no network but the agent endpoint of its own episode and,
through the server's proxy, the hosts that its task is allowed; a command ends, with its whole process group, when
its time is over; output and files that come out are bounded; the host never unpacks or interprets anything that
the agent wrote; ``destroy`` releases everything, in any state, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase, NetworkPolicy
from turnstile_server.egress.proxy import EgressProxy
from turnstile_server.errors import SandboxDeath
from turnstile_server.runtimes.store import RuntimeStore
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.settings import SandboxSettings

WORKDIR = "/workspace"
"""The work folder of a task, unless its image has it elsewhere."""

IMAGE_WORKDIR = "image"
"""In a spec, for a work folder: the image's own."""


IMAGE_PYTHON = "python3"
"""The interpreter of the image itself, by its name on the PATH."""


class User(StrEnum):
    """The user of a command. None of them can read, signal or trace another's processes, or the helper's, or read
    another's home."""

    HARNESS = "harness"
    """The process of a launched agent, with the episode's key."""
    AGENT = "agent"
    """The model's commands and files, and the task's set-up. Owns the work folder."""
    TESTS = "tests"
    """The programs that judge, in the sandbox that grades."""
    WORK = "work"
    """The work under test, in the sandbox that grades. Owns nothing there but its home."""


HOMES = {user: f"/home/{user}" for user in User}
"""A writable folder for each, empty at first."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Ceilings of one sandbox."""

    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    """Size of everything that can be written, together, where it is in memory."""
    files: int = 16384
    """Files and folders in it."""

    @property
    def socket_bytes(self) -> int:
        """Bytes that TCP and UDP may hold, where the kernel does not count them to the memory (control groups of
        version 1): an eighth of that."""
        return self.memory_bytes // 8


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the host, always read-only inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The kind of a sandbox. Equal specs are interchangeable, so the pool keeps warm sandboxes by spec."""

    limits: SandboxLimits
    image: str | None = None
    """Backends without images (``local``) refuse one; None is the backend's default."""
    workdir: str = WORKDIR
    image_files: bool = False
    """True: the work folder is the image's own (so the root cannot be read-only)."""
    passable: tuple[str, ...] = ()
    """With ``image_files``: folders of the image that every user may pass through, whatever the image says."""
    mounts: tuple[Mount, ...] = ()
    network: NetworkPolicy | None = None
    """The rules, by phase, of what it may reach through the server's proxy; None: nothing."""
    folders: tuple[str, ...] = ()
    """Further folders that every user may write to, empty at first."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of every command but the harness's. With ``image_files`` the image's own are there, too."""


class StandardStreams(Protocol):
    """The other end of a command's standard input and output while it runs."""

    async def next_input(self) -> bytes:
        """More standard input; empty: there is no more."""
        ...

    def take_output(self, data: bytes) -> None:
        """A part of standard output. Called from the task that reads the sandbox's connection, so it may not wait:
        what it keeps, it bounds."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command inside a sandbox. Its environment is built from nothing: ``env`` over that of the spec, over PATH,
    HOME, LANG, TMPDIR."""

    argv: tuple[str, ...]
    cwd: str | None = None
    """None: the work folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    user: User = User.AGENT
    timeout_s: float | None = None
    """After it the process group is killed. None: until it ends, is killed, or the sandbox is destroyed."""
    max_output_bytes: int = 1 << 20
    """Per stream. Of more, the first and the last half are kept."""
    stdin: bytes = b""
    on_line: Callable[[bytes], None] | None = None
    """Called with the latest line of output while the command runs, when there is a new one: at most once in
    ``line_s`` seconds, with at most 512 bytes, from the task that reads the sandbox's connection, so it may not
    wait. A backend that sees output only at the end (Docker without the helper) never calls it."""
    line_s: float = 1.0
    streams: StandardStreams | None = None
    """Reads standard output as it is written, and has more standard input; the result then has no standard output.
    Only where ``Sandbox.can_launch``."""
    launches: User | None = None
    """The command may run programs as this user: it inherits a launcher (``helper/turnstile_helper/launcher.py``),
    whose descriptor is in its environment as ``TURNSTILE_LAUNCHER``. Only where ``Sandbox.can_launch``."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The end of a command."""

    exit_code: int
    """128 + signal for a process ended by one; 137 after a time-out."""
    stdout: bytes
    stderr: bytes
    dropped_bytes: int
    """Output beyond ``max_output_bytes``, both streams together, left out of the middle."""
    timed_out: bool
    duration_s: float


class Process(Protocol):
    """A command that was started and runs on its own."""

    async def wait(self) -> ExecResult:
        """Waits for its end; every caller gets the same result. Raises SandboxFailed when the sandbox died."""
        ...

    async def kill(self) -> None:
        """Kills its whole process group; no-op after its end."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxOrigin:
    """The origin of a sandbox, for the caller that asked for it."""

    waited_s: float = 0.0
    """For room, before it was made or handed out."""
    warm: bool = False
    """It had been made before."""


MADE_AT_ONCE = SandboxOrigin()


class Sandbox(Protocol):
    """One isolated place to run commands in."""

    @property
    def origin(self) -> SandboxOrigin: ...

    @property
    def sandbox_id(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    @property
    def agent_url(self) -> str | None:
        """URL inside the sandbox of the model and MCP endpoints (``http://127.0.0.1:PORT``). None where they
        cannot be reached from inside: the image cannot run the helper, which forwards them."""
        ...

    @property
    def python(self) -> str:
        """The interpreter of Turnstile's own programs inside, the graders' and the agents': an absolute path where
        the sandbox has the carried runtime (``runtimes``), else ``IMAGE_PYTHON``."""
        ...

    @property
    def can_launch(self) -> bool:
        """True if ``Command.launches`` works. False without the helper; a command then gets no launcher."""
        ...

    def admit(self, episode_id: str | None) -> None:
        """From now on the sandbox's socket serves this one episode; any other, and None, is 404."""
        ...

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        """From now on the hosts that ``SandboxSpec.network`` has for this phase may be reached, and commands are
        told of the proxy; at first, and for None, nothing may be. Cuts what an earlier phase left open. ``log``
        records what the proxy decides; None: nobody reads it."""
        ...

    async def exec(self, command: Command) -> ExecResult:
        """Runs a command to its end. Cancelling the call kills it. Raises SandboxFailed when the sandbox died
        or could not start the command by a fault of its own; a program that is not there is exit code 127."""
        ...

    async def start(self, command: Command) -> Process:
        """Starts a command and returns; the sandbox owns it."""
        ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file, read as the agent. Raises FileProblem (missing, a folder, not a regular file, too
        large, not permitted)."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        """Replaces a file, written as ``user``; makes its folders. ``mode`` None keeps the permissions of the
        file that is replaced (a script stays one); a new file then gets 0o644. Raises FileProblem."""
        ...

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        """Unpacks a tar inside the sandbox, as ``user``, below ``target``. Entries that would leave ``target``
        (absolute, "..", through a link) or are devices are refused. Raises FileProblem, naming the entry."""
        ...

    async def download(self, path: str, max_bytes: int) -> bytes:
        """A tar of the folder, made inside as the agent; links are kept as links, sockets and devices left out.
        Raises FileProblem when it would be larger than ``max_bytes``."""
        ...

    async def stop_all(self) -> None:
        """Kills every process in the sandbox but the helper's own."""
        ...

    async def died(self) -> SandboxDeath:
        """Returns when the sandbox has died, or was destroyed: what ended it. A backend that gets no notice of a
        death finds out at the next command."""
        ...

    async def destroy(self) -> None:
        """Releases everything. Does not raise: a backend logs what it cannot remove, tries again, and removes it
        at the latest when it is closed or started the next time."""
        ...


@dataclass(frozen=True, slots=True)
class ProviderSetup:
    """The parameters that a backend is built from; the registry hands them to the chosen one."""

    settings: SandboxSettings
    run_dir: Path
    """This server's own folder for sockets and files of sandboxes: short, and the same at every start on one data
    directory, so that what a killed server left is found again."""
    owner: str
    """Names the data directory to an engine that several servers share."""
    egress: EgressProxy | None = None
    """None: sandboxes whose spec has a network cannot be made."""
    hidden: tuple[Path, ...] = ()
    """Files and folders of this machine that no sandbox may show: hidden tests, the server's data."""
    runtimes: RuntimeStore | None = None
    """The store that makes the runtime for containers; None: they get none."""
    ephemeral: bool = False
    """This owner does not come back: what it keeps for a next start (copies of folders) goes at its end."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """An image that a backend has."""

    image_id: str
    """Changes with the image's content."""
    size: int
    """Bytes on the backend's disk."""


@runtime_checkable
class SandboxProvider(Protocol):
    """A sandbox backend: makes sandboxes, and knows what it made."""

    @property
    def name(self) -> str: ...

    @property
    def isolated(self) -> bool:
        """False where an agent runs with the server's own rights."""
        ...

    @property
    def description(self) -> str:
        """One line for the log and ``GET /sandboxes``: what makes the sandboxes, and which limits hold; where none
        can be made, ``missing``. Known after ``start``."""
        ...

    @property
    def carries_runtime(self) -> bool:
        """True if sandboxes have the carried runtime: agents' programs are then those that start by its loader.
        Known after ``start``."""
        ...

    @property
    def missing(self) -> str | None:
        """Reason why no sandbox can be made at all, and the remedy; None where they can. Known after ``start``."""
        ...

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        """Checks that it can work, and removes what an earlier server with the same data directory left.

        ``agents`` opens, for each sandbox, the listener by which it reaches the agent app. ``tasks`` runs what the
        provider does in the background; it outlives ``close``. Raises StartupError; ``close`` is still called."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox in which nothing has run yet. Raises SandboxUnavailable (the backend does not answer, no
        room; worth another try) or TaskFailed (its image is not there, or cannot be used)."""
        ...

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        """About an image; ``image`` None: the default one. None where the backend has no images, or not this one.
        Raises SandboxUnavailable."""
        ...

    async def close(self) -> None:
        """Destroys everything that is left."""
        ...
