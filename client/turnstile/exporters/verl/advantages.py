"""verl's estimators of advantages, over rollouts instead of rows. Importing this registers them:
``algorithm.adv_estimator=turnstile_grpo``, ``turnstile_rloo`` and so on (``ESTIMATORS``).

verl 0.9.1 gives an estimator every row, so a rollout of three rows enters its group's baseline three times; only
its v1 GRPO takes one row a rollout. Here the estimator is given one sequence for each rollout, with its reward and
as many tokens as all its rows train, and what it says of it holds for all its rows. A group of one rollout has no
baseline, so its advantage is 0, where verl takes the raw reward.

Which rows are one rollout's is told by their keys, ``{uid}_{session}_{row}`` as in verl's queue: those that
``keys_of_rows`` has set (``trainers`` does), else the row's ``uid`` itself, in batches that you make.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
"""Those of verl that give a row one advantage, from its reward and those of its group."""

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# Not a parameter: verl calls an estimator with what a batch holds, and the batch of its v1 trainers has no keys.
_keys: ContextVar[Sequence[str] | None] = ContextVar("turnstile_keys_of_rows", default=None)


@contextmanager
def keys_of_rows(keys: Sequence[str]) -> Iterator[None]:
    """Within it the estimators take their rows' keys from here."""
    token = _keys.set(keys)
    try:
        yield
    finally:
        _keys.reset(token)


def by_rollout(estimator: Estimator) -> Estimator:
    """``estimator``, one of ``ESTIMATORS``, over rollouts. The result has verl's signature:
    ``token_level_rewards`` and ``response_mask`` [rows, tokens], ``index`` of the rows' keys or groups; it returns
    advantages and returns [rows, tokens]. Raises ValueError where no key says which rollout a row is of."""
    scales = "norm_adv_by_std_in_grpo" in inspect.signature(estimator).parameters

    @torch.no_grad()
    def estimated(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Sequence[str],
        config: Any = None,
        **further: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = _keys.get()
        keys = [_parts(key) for key in (index if given is None else given)]
        rows: dict[tuple[str, str], int] = {}
        """The rollout's last row, which has its reward."""
        for row, (group, session, number) in enumerate(keys):
            rollout = (group, session)
            if rollout not in rows or keys[rows[rollout]][2] < number:
                rows[rollout] = row
        sizes = Counter(group for group, _ in rows)
        place = {rollout: i for i, rollout in enumerate(one for one in rows if sizes[one[0]] > 1)}
        scalars = torch.zeros(len(place) + 1, dtype=token_level_rewards.dtype, device=token_level_rewards.device)
        # Rollouts without a baseline share the last place, whose advantage is 0.
        of_row = torch.tensor([place.get(key[:2], len(place)) for key in keys], device=scalars.device)
        if place:
            trained = torch.zeros_like(scalars, dtype=torch.long)
            trained.index_add_(0, of_row, response_mask.sum(-1).long())
            tokens = trained[:-1].clamp(min=1)
            mask = (torch.arange(int(tokens.max()), device=scalars.device) < tokens[:, None]).to(
                response_mask.dtype
            )
            rewards = torch.zeros(mask.shape, dtype=scalars.dtype, device=scalars.device)
            rewards[:, 0] = token_level_rewards[[rows[rollout] for rollout in place]].sum(-1)
            if scales:
                std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
                further = {**further, "norm_adv_by_std_in_grpo": std}
            groups = np.array([group for group, _ in place], dtype=object)
            found, _ = estimator(
                token_level_rewards=rewards, response_mask=mask, index=groups, config=config, **further
            )
            scalars[:-1] = found[:, 0]
        advantages = scalars[of_row].unsqueeze(-1) * response_mask
        return advantages, advantages

    return estimated


def _parts(key: str) -> tuple[str, str, int]:
    parts = str(key).rsplit("_", 2)
    if len(parts) != 3 or not parts[2].isdecimal():
        raise ValueError(
            f"{key!r} does not say which rollout its row is of: use trainer.v1.trainer_mode=turnstile_sync (or "
            "turnstile_colocate_async, turnstile_separate_async), or give rows the uid '{group}_{rollout}_{row}'"
        )
    return parts[0], parts[1], int(parts[2])


for _name in ESTIMATORS:
    register_adv_est(f"turnstile_{_name}")(by_rollout(get_adv_estimator_fn(_name)))
