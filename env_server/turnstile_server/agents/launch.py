"""From an agent's spec to the command that one episode's sandbox starts: placeholders filled, nothing run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnstile_server.agents.npm import ARCH, MACHINE, NODE
from turnstile_server.agents.placeholders import filled
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import TaskFailed
from turnstile_server.sandboxes.protocol import Command, User

INSTALLS = "/opt/turnstile/agents"
"""Where the folder of installed agents is mounted in every sandbox."""


@dataclass(frozen=True, slots=True)
class Launch:
    command: Command
    files: Mapping[str, str]
    """Text by absolute path, to be written before the start."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """What one episode brings to an agent's spec."""

    episode_id: str
    episode_key: str
    agent_url: str
    instruction: str
    workdir: str
    home: str
    install: str
    """Name of the agent's folder below ``INSTALLS``."""
    max_turns: int
    env: Mapping[str, str]
    max_output_bytes: int


def launch(spec: AgentSpec, occasion: Occasion) -> Launch:
    """Raises TaskFailed for a spec that cannot be filled in; the registry loads none."""
    door = f"{occasion.agent_url}/e/{occasion.episode_id}"
    instruction_file = f"{occasion.home}/instruction.md"
    values = {
        "model_url": door,
        "tool_url": f"{door}/mcp",
        "episode_key": occasion.episode_key,
        "instruction": occasion.instruction,
        "instruction_file": instruction_file,
        "workdir": occasion.workdir,
        "home": occasion.home,
        "install": f"{INSTALLS}/{occasion.install}",
        "node": f"{INSTALLS}/{NODE}/bin/node",
        "arch": ARCH,
        "machine": MACHINE,
        "max_turns": str(occasion.max_turns),
    }

    def fill(text: str) -> str:
        try:
            return filled(text, values)
        except ValueError as error:
            raise TaskFailed(f"the spec of agent {spec.name} cannot be filled in: {text!r}: {error}") from error

    files = {fill(path): fill(text) for path, text in spec.files.items()}
    env = {"HOME": occasion.home, **{name: fill(text) for name, text in spec.env.items()}, **occasion.env}
    command = Command(
        argv=tuple(fill(part) for part in spec.command),
        env=env,
        user=User.AGENT,
        max_output_bytes=occasion.max_output_bytes,
        stdin=fill(spec.stdin).encode(),
    )
    return Launch(command, {instruction_file: occasion.instruction, **files})
