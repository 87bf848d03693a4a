"""A policy of a million parameters that uses tools, and the task family it was made for. See README.md."""

from pathlib import Path

CHECKPOINT = Path(__file__).with_name("checkpoint")
"""The policy that ships: what ``train`` makes with its defaults."""
