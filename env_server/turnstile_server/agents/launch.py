"""Fills the placeholders of an agent's spec with one episode's values. Pure: nothing is run or written.

The same function fills the spec at start (as a check) and for each episode. So an unknown placeholder is a
start-up error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from turnstile_server.agents.packages import ARCH, MACHINE, NODE
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import TaskFailed
from turnstile_server.runtimes.layout import ca_file_of
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, Command, User

INSTALLS = "/opt/turnstile/agents"
"""The folder inside in which each sandbox has what is installed for its agent."""

PLACEHOLDERS = (
    "model_url",
    "tool_url",
    "episode_key",
    "instruction",
    "instruction_file",
    "workdir",
    "home",
    "install",
    "node",
    "python",
    "ca_file",
    "arch",
    "machine",
    "max_turns",
)
_SAMPLE_VALUES = dict.fromkeys(PLACEHOLDERS, "x")


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """The command that a sandbox starts for one episode, and the files that it needs."""

    command: Command
    files: Mapping[str, str]
    """Text by absolute path, to be written before the start."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The values of one episode that an agent's spec is filled with."""

    episode_id: str
    episode_key: str
    agent_url: str
    """Base URL of the model API and the MCP endpoint, as the sandbox reaches them."""
    instruction: str
    workdir: str
    home: str
    install: str
    """Name of the agent's folder below ``INSTALLS``."""
    max_turns: int
    env: Mapping[str, str]
    """The episode's own environment; it overrides the spec's."""
    max_output_bytes: int
    python: str = IMAGE_PYTHON
    """The interpreter for programs of agents (``Sandbox.python``)."""
    keeps_session: bool = False
    """The agent can be resumed later, in a fork."""
    resumes: bool = False
    """It goes on with the session that its home has; ``instruction`` is what it is told to go on."""


def build_launch(spec: AgentSpec, context: LaunchContext) -> AgentLaunch:
    """Fill ``spec`` for one episode.

    Raises TaskFailed for a spec that cannot be filled; the registry loads none.
    """
    model_url = f"{context.agent_url}/e/{context.episode_id}"
    instruction_file = f"{context.home}/instruction.md"
    values = {
        "model_url": model_url,
        "tool_url": f"{model_url}/mcp",
        "episode_key": context.episode_key,
        "instruction": context.instruction,
        "instruction_file": instruction_file,
        "workdir": context.workdir,
        "home": context.home,
        "install": f"{INSTALLS}/{context.install}",
        "node": f"{INSTALLS}/{NODE}/bin/node",
        "python": context.python,
        "ca_file": ca_file_of(context.python),
        "arch": ARCH,
        "machine": MACHINE,
        "max_turns": str(context.max_turns),
    }

    def fill(text: str) -> str:
        try:
            return fill_placeholders(text, values)
        except ValueError as error:
            raise TaskFailed(f"the spec of agent {spec.name} cannot be filled in: {text!r}: {error}") from error

    files = {fill(path): fill(text) for path, text in spec.files.items()}
    env = {"HOME": context.home, **{name: fill(text) for name, text in spec.env.items()}, **context.env}
    command = Command(
        argv=tuple(fill(part) for part in _command(spec, context)),
        env=env,
        user=User(spec.user),
        max_output_bytes=context.max_output_bytes,
        stdin=fill(spec.stdin).encode(),
        launches=None if spec.launches is None else User(spec.launches),
    )
    return AgentLaunch(command, {instruction_file: context.instruction, **files})


def _command(spec: AgentSpec, context: LaunchContext) -> tuple[str, ...]:
    if spec.resume is None or not (context.keeps_session or context.resumes):
        return spec.command
    kept = tuple(part for part in spec.command if part not in spec.resume.without)
    return (*kept, *spec.resume.arguments) if context.resumes else kept


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``values`` by placeholder. A doubled brace becomes a brace.

    Raises ValueError for a placeholder that is not in ``values`` and for a single brace.
    """
    try:
        return text.format_map(values)
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
        fault = f"there is no placeholder {{{error.args[0]}}}" if isinstance(error, KeyError) else str(error)
        raise ValueError(fault) from error


def uses_placeholder(spec: AgentSpec, name: str) -> bool:
    """True if any text of ``spec`` needs this value."""
    return any(f"{{{name}}}" in text for _, text in _texts(spec))


def placeholder_errors(spec: AgentSpec) -> list[str]:
    """Every text of ``spec`` that cannot be filled, or would give the key away, with the name of its field; empty
    for a good spec."""
    found: list[str] = []
    for field, text in _texts(spec):
        if spec.user == "harness" and field.startswith(("command.", "resume.")) and "{episode_key}" in text:
            found.append(
                f"{field}: every command in the sandbox can read an argument; give the key in env or files"
            )
        try:
            fill_placeholders(text, _SAMPLE_VALUES)
        except ValueError as error:
            found.append(f"{field}: {error}")
    return found


def _texts(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """Every text that is filled, with the path of its field."""
    for index, part in enumerate(spec.command):
        yield f"command.{index}", part
    for index, part in enumerate(() if spec.resume is None else spec.resume.arguments):
        yield f"resume.arguments.{index}", part
    yield "stdin", spec.stdin
    for name, text in spec.env.items():
        yield f"env.{name}", text
    for path, text in spec.files.items():
        yield f"files.{path}", path
        yield f"files.{path}", text
