"""Every attack on the reward that docs/attacks.md lists: one module for each sort of them."""

from __future__ import annotations

from reward_attacks import answers, commands, files, frameworks, processes, secrets_of_graders, startup
from reward_attacks.attack import RewardAttack

_SORTS = (startup, files, frameworks, answers, processes, secrets_of_graders, commands)
SORTS: dict[str, tuple[RewardAttack, ...]] = {module.SORT: module.ATTACKS for module in _SORTS}
"""The attacks below each heading of the page."""
REWARD_ATTACKS: tuple[RewardAttack, ...] = tuple(attack for sort in SORTS.values() for attack in sort)
