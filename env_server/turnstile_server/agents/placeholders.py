"""Placeholders in the texts of an agent's spec: which there are, and how they are filled. Pure.

A text is checked by filling it, with the very call that fills it later; so what passed when the spec was loaded
is filled when an episode starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from turnstile_server.agents.spec import AgentSpec

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
    "arch",
    "machine",
    "max_turns",
)
_SAMPLE = dict.fromkeys(PLACEHOLDERS, "x")


def filled(text: str, values: Mapping[str, str]) -> str:
    """``values`` by placeholder. Raises ValueError where ``text`` has another one, or a single brace."""
    try:
        return text.format_map(values)
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
        fault = f"there is no placeholder {{{error.args[0]}}}" if isinstance(error, KeyError) else str(error)
        raise ValueError(fault) from error


def faults(spec: AgentSpec) -> list[str]:
    """What cannot be filled in, each with its field; empty for a good spec."""
    found: list[str] = []
    for field, text in _texts(spec):
        try:
            filled(text, _SAMPLE)
        except ValueError as error:
            found.append(f"{field}: {error}")
    return found


def _texts(spec: AgentSpec) -> Iterator[tuple[str, str]]:
    """Every text that is filled, with the path of its field."""
    for index, part in enumerate(spec.command):
        yield f"command.{index}", part
    yield "stdin", spec.stdin
    for name, text in spec.env.items():
        yield f"env.{name}", text
    for path, text in spec.files.items():
        yield f"files.{path}", path
        yield f"files.{path}", text
