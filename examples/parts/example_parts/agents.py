"""Agents: an entry point names the path of a spec."""

from pathlib import Path

ONE_LINE = Path(__file__).parent / "one-line.yaml"
