"""Turnstile for verl 0.9.1: real agents as an agent loop of its ``v1`` trainers. Imported where verl is installed.

Modules in reading order: ``rows`` (a rollout as verl's ``AgentLoopOutput``s), ``agent_loop`` (plays a rollout for
each call of verl's), ``advantages`` (verl's estimators over rollouts instead of rows), ``trainers`` (verl's
trainers that tell those which rows are one rollout's; import it only in a training run: it loads all of verl).
"""

from __future__ import annotations

from turnstile.exporters.verl.agent_loop import TurnstileAgentLoop, task_in
from turnstile.exporters.verl.rows import RowTooLong, outputs_of, to_outputs

__all__ = ["RowTooLong", "TurnstileAgentLoop", "outputs_of", "task_in", "to_outputs"]
