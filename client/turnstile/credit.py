"""Arithmetic of policy-gradient losses that is easy to get wrong where a rollout has several rows. Pure functions
on numbers and NumPy arrays; group means and deviations are in ``turnstile.groups``.

What must hold: a rollout is one sample, however many rows it has (sub-agents, compactions, branches). Rows come as
they do everywhere: a row has T tokens, its mask is 1 where the token is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)
Floats = npt.NDArray[np.float64]
Array = npt.ArrayLike
Per = Literal["rollout", "token", "batch"]
Share = Literal["full", "uniform", "last"]


def leave_one_out(rewards: Mapping[K, float]) -> dict[K, float]:
    """RLOO: the reward minus the mean of the *other* rollouts of the group, ``r_i − Σ_{j≠i} r_j / (n − 1)``. A
    group of one has no baseline: 0.0. Ahmadian et al. 2024, arXiv 2402.14740; Kool et al. 2019."""
    total, n = math.fsum(rewards.values()), len(rewards)
    if n < 2:
        return dict.fromkeys(rewards, 0.0)
    return {key: reward - (total - reward) / (n - 1) for key, reward in rewards.items()}


def row_weights(
    rollouts: Sequence[Hashable], trained: Sequence[int], *, per: Per = "rollout", length: int = 1
) -> Floats:
    """A weight for every row, to be multiplied with the *sum* of the loss over the row's trained tokens; the sum
    over all rows of a step is then the loss, whatever the micro-batches.

    ``rollouts``: each row's rollout id; ``trained``: its number of trained tokens. With R rollouts that train
    anything, T_r trained tokens in all rows of rollout r and T in all:

    - ``rollout``: ``1 / (R · T_r)``. Each rollout counts the same; GRPO's sample mean of token means (Shao et al.
      2024, arXiv 2402.03300), over rollouts instead of rows.
    - ``token``: ``1 / T``. Each token counts the same; DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.3).
    - ``batch``: ``1 / (R · length)``, a constant; Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which
      divides by the longest response that is allowed.

    A row without a trained token weighs 0. Raises ValueError for other lengths or a negative number.
    """
    counts = np.asarray(trained, dtype=np.int64)
    if len(counts) != len(rollouts) or (counts < 0).any() or length < 1:
        raise ValueError(f"{len(rollouts)} rollout ids and {len(counts)} token numbers, length {length}")
    of_rollout: dict[Hashable, int] = {}
    for rollout, count in zip(rollouts, counts.tolist(), strict=True):
        of_rollout[rollout] = of_rollout.get(rollout, 0) + count
    training = sum(count > 0 for count in of_rollout.values())
    divisor = {
        "rollout": [training * of_rollout[rollout] for rollout in rollouts],
        "token": [int(counts.sum())] * len(rollouts),
        "batch": [training * length] * len(rollouts),
    }[per]
    return np.where(counts > 0, 1.0 / np.maximum(divisor, 1), 0.0)


def truncated_importance(
    trainer: Array,
    recorded: Array,
    mask: Array,
    *,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> Floats:
    """Truncated importance sampling: the weight of each token's loss, float64 [T], against the difference between
    the trainer's probabilities and the engine's.

    ``trainer``: log-probabilities of the recorded tokens that the trainer computes with the weights that sampled
    them; ``recorded``: those of the engine. ``token``: ``min(exp(trainer − recorded), cap)`` (Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). ``sequence``: the ratio of the whole
    row, the product over its trained tokens, capped, on each of them: unbiased below the cap, and of a variance
    that grows with the length (Ionides 2008, "Truncated importance sampling"). 0 where the mask is 0. The weights
    are constants: no gradient goes through them. Raises ValueError for other lengths, a cap of 0 or less and a
    number that is not finite.
    """
    trained = np.asarray(mask).astype(bool)
    difference = _difference(trainer, recorded, trained)
    if not cap > 0:
        raise ValueError(f"a cap of {cap}: it must be above 0")
    ratio = difference if level == "token" else np.full(difference.shape, difference.sum())
    # In logarithms: a ratio far above the cap would overflow.
    return np.where(trained, np.exp(np.minimum(ratio, math.log(cap))), 0.0)


def staleness_weights(versions: Array, now: int, *, half_life: float, drop_above: int | None = None) -> Floats:
    """The weight of each token by the age of the weights that sampled it, ``2^(−age / half_life)`` with
    ``age = now − version`` in updates; 0 above ``drop_above`` and where no weights sampled (−1).

    A heuristic, not an estimator: it trades bias for variance, as the clip of a decoupled objective does (Fu et
    al. 2025, arXiv 2505.24298, which bounds the age itself). Raises ValueError for a version after
    ``now``.
    """
    sampled_by = np.asarray(versions, dtype=np.int64)
    age = now - sampled_by
    if (age < 0).any() or not half_life > 0:
        raise ValueError(f"versions up to {sampled_by.max(initial=-1)} at {now}, half-life {half_life}")
    kept = (sampled_by >= 0) & (age <= (np.inf if drop_above is None else drop_above))
    return np.where(kept, 0.5 ** (age / half_life), 0.0)


def turn_returns(turn_rewards: Iterable[float | None], final: float = 0.0, *, gamma: float = 1.0) -> list[float]:
    """Credit of each turn: the discounted sum of the rewards from it on, ``G_k = r_k + γ G_{k+1}``, with
    ``final``, the rollout's own reward, added to that of the last turn. None counts as 0: the turn has no reward
    of its own. REINFORCE's return with turns as steps (Williams 1992; Zeng et al. 2025, arXiv 2505.11821, for
    turns)."""
    returns: list[float] = []
    following = final
    for position, reward in enumerate(reversed(list(turn_rewards))):
        following = (reward or 0.0) + (following if position == 0 else gamma * following)
        returns.append(following)
    return returns[::-1]


def spread_over_turns(values: Sequence[float], spans: Sequence[tuple[int, int]], length: int) -> Floats:
    """Values of turns on their tokens, float64 [length]: ``values[k]`` on ``[start, end)`` of turn k, 0 elsewhere.
    The spans are those of ``Sample.turn_spans``. Raises ValueError for spans that overlap or leave the row."""
    found = np.zeros(length)
    end_before = 0
    for value, (start, end) in zip(values, spans, strict=True):
        if not end_before <= start <= end <= length:
            raise ValueError(f"the turn [{start}, {end}) overlaps the one before it or leaves a row of {length}")
        found[start:end] = value
        end_before = end
    return found


def segment_rewards(
    reward: float,
    trained: Sequence[int],
    *,
    share: Share | Callable[[float, Sequence[int]], Sequence[float]] = "full",
) -> list[float]:
    """A rollout's reward on each of its rows (segments), which train ``trained`` tokens each.

    ``full``: on each, as Turnstile's exporters do (the policy gradient of an outcome reward, Sutton et al. 1999,
    gives every action the whole return). ``uniform``: ``reward / n``. ``last``: on the last one, 0 on the others,
    for a critic that carries it back. A function: whatever it returns. A baseline must be taken over rollouts
    before any share: shares of a reward are no rewards of rollouts. Raises ValueError for another number of
    values.
    """
    n = len(trained)
    if callable(share):
        found = list(share(reward, trained))
    elif share == "full":
        found = [reward] * n
    elif share == "uniform":
        found = [reward / max(n, 1)] * n
    else:
        found = [0.0] * (n - 1) + [reward] * min(n, 1)
    if len(found) != n:
        raise ValueError(f"{len(found)} shares for {n} segments")
    return found


def capped_segments(
    trained: Sequence[int], at_most: int, generator: np.random.Generator | None = None
) -> list[int]:
    """The positions of the at most ``at_most`` rows of a rollout to train, in order, so that one with many
    segments does not fill a batch; the last one is always kept. Without a ``generator`` the latest, which biases
    towards ends; with one a uniform choice of the others. ``at_most=1`` collapses a rollout to its final segment.
    Rows without a trained token are never chosen. Raises ValueError for ``at_most`` below 1."""
    if at_most < 1:
        raise ValueError(f"at most {at_most} segments: 1 is the least")
    candidates = [position for position, count in enumerate(trained) if count > 0]
    others, last = candidates[:-1], candidates[-1:]
    room = min(at_most - 1, len(others))
    if generator is None:
        return others[len(others) - room :] + last
    chosen = generator.choice(len(others), size=room, replace=False) if room else ()
    return sorted(others[int(index)] for index in chosen) + last


def _difference(trainer: Array, recorded: Array, trained: npt.NDArray[np.bool_]) -> Floats:
    ours, engines = np.asarray(trainer, dtype=np.float64), np.asarray(recorded, dtype=np.float64)
    if not ours.shape == engines.shape == trained.shape:
        raise ValueError(f"shapes differ: {ours.shape} computed, {engines.shape} recorded, {trained.shape} masked")
    # Untrained tokens have no recorded number: theirs is 0.0.
    difference = np.subtract(ours, engines, where=trained, out=np.zeros(ours.shape))
    if not np.isfinite(difference).all():
        raise ValueError("a log-probability of a trained token is not finite")
    return difference
