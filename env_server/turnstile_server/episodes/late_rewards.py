"""Rewards from the trainer: whether an episode takes one, and its record with it. Pure.

What must hold: nothing is taken that is not asked for by the task, finite and in its bounds; a repeated key
changes nothing; what was there before is kept in the history; an episode without a reward for another reason
than that it waits for one (it failed, it was cancelled) gets none.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.models import Episode, LateRewards, RewardChange, RewardUpdate
from turnstile_server.errors import Conflict, NotFound, Unprocessable
from turnstile_server.tasks.model import Task


def late_rewards_of(task: Task) -> LateRewards | None:
    """The late rewards that an episode of the task takes; None: it has only its graders' reward."""
    rules = task.reward
    if not rules.late:
        return None
    return LateRewards(bounds=rules.bounds, turn_bounds=rules.turn_bounds or rules.bounds)


def rewarded(
    episode: Episode, update: RewardUpdate, turn_ids: Sequence[str], *, now: float, max_changes: int
) -> Episode:
    """The record with the reward; the same object where the key was used for this before. ``turn_ids``: in commit
    order. Raises Conflict, Unprocessable, NotFound."""
    late = episode.late_rewards
    if late is None:
        raise Conflict(
            f"episode {episode.episode_id} takes no rewards from its trainer: its task has no `reward.late`"
        )
    turns = _by_id(episode.episode_id, update, turn_ids)
    earlier = next((one for one in late.changes if one.key == update.key), None)
    if earlier is not None:
        if (earlier.reward, earlier.turn_rewards) == (update.reward, turns):
            return episode
        raise Conflict(f"key {update.key!r} was used before, for another reward of episode {episode.episode_id}")
    if len(late.changes) >= max_changes:
        raise Conflict(
            f"episode {episode.episode_id} has {len(late.changes)} changes of its rewards, the most that are "
            "kept; give the rewards of several turns in one request"
        )
    if update.reward is not None:
        _check_reward(episode, late, update)
    _check_turns(episode, late, turns, replace=update.replace)
    change = RewardChange(
        key=update.key,
        at=now,
        by=update.by,
        why=update.why,
        reward=update.reward,
        previous=episode.reward if update.reward is not None else None,
        turn_rewards=turns,
        previous_turns={turn: episode.turn_rewards[turn] for turn in turns if turn in episode.turn_rewards},
    )
    pending = late.pending and update.reward is None
    return episode.model_copy(
        update={
            "reward": episode.reward if update.reward is None else update.reward,
            "turn_rewards": {**episode.turn_rewards, **turns},
            "late_rewards": late.model_copy(update={"pending": pending, "changes": (*late.changes, change)}),
        }
    )


def _by_id(episode_id: str, update: RewardUpdate, turn_ids: Sequence[str]) -> dict[str, float]:
    known, found = set(turn_ids), {}
    for name, reward in update.turn_rewards.items():
        number = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None
        turn_id = turn_ids[number] if number is not None and number < len(turn_ids) else name
        if turn_id not in known:
            raise NotFound(f"episode {episode_id} has no turn {name!r:.100}; it has {len(turn_ids)} turns")
        if turn_id in found:
            raise Unprocessable(f"turn_rewards: the turn {turn_id} is named twice, by its id and by its number")
        found[turn_id] = reward
    return found


def _check_reward(episode: Episode, late: LateRewards, update: RewardUpdate) -> None:
    name = episode.episode_id
    if not episode.status.ended:
        raise Conflict(f"episode {name} is {episode.status.value}: its reward can be given once it has ended")
    if episode.reward is None and not late.pending:
        raise Conflict(f"episode {name} is {episode.status.value} and waits for no reward")
    if episode.reward is not None and not update.replace:
        raise Conflict(f"episode {name} has the reward {episode.reward:g} already; `replace: true` replaces it")
    _check_bounds("reward", update.reward, late.bounds)


def _check_turns(episode: Episode, late: LateRewards, turns: dict[str, float], *, replace: bool) -> None:
    for turn_id, reward in turns.items():
        _check_bounds(f"turn_rewards.{turn_id}", reward, late.turn_bounds)
        if not replace and turn_id in episode.turn_rewards:
            raise Conflict(
                f"turn {turn_id} has the reward {episode.turn_rewards[turn_id]:g} already; `replace: true` "
                "replaces it"
            )


def _check_bounds(field: str, value: float | None, bounds: tuple[float, float]) -> None:
    if value is not None and not bounds[0] <= value <= bounds[1]:
        raise Unprocessable(f"{field}: {value:g} is not in the task's bounds [{bounds[0]:g}, {bounds[1]:g}]")
