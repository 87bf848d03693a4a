"""The reasons for an episode's end and for its reward: one line in words, made from its record alone. Pure.

``0: 2 of 5 hidden tests failed: test_a, test_b; the agent stopped by itself after 4 turns``

What must hold: no record makes it raise; it is one line of at most ``MAX_WHY`` characters; what agents, models and
tasks wrote is shown as ``turnstile.visible`` shows it, and cut, so that it cannot push the rest out of the line.
"""

from __future__ import annotations

from typing import Final

from turnstile.models.episode import Episode
from turnstile.models.evidence import grade_in_words, shown_number
from turnstile.models.regrade import Regrade
from turnstile.models.reward import RewardChange
from turnstile.models.status import EndedBy, EpisodeStatus, ErrorInfo, Fault
from turnstile.visible import visible_line

MAX_WHY: Final = 300
_MOST_OF_END = 130
_MESSAGE = 140
_NO_REWARD = "no reward"
_EXTERNAL = "external"
_UNREADABLE = "record_unreadable"

_FAILED: Final = {
    Fault.INFRASTRUCTURE: "the infrastructure failed",
    Fault.AGENT: "the agent failed",
    Fault.TASK: "the task failed",
    Fault.CALLER: "its caller failed it",
    Fault.SETUP: "the set-up cannot work",
    None: "it failed",
}
_STOPPED: Final = {
    "budget_exhausted": "stopped by its budget",
    "context_length_exceeded": "the model's context was full",
    "too_many_refusals": "stopped for too many refusals",
    "stale_weights": "stopped because its tokens got stale",
    "time_limit": "stopped by a limit of time",
}


def why_of(episode: Episode) -> str:
    """The line. For an episode that has not ended: what it is at."""
    match episode.status:
        case EpisodeStatus.QUEUED:
            return "queued: it waits for a place to run"
        case EpisodeStatus.PREPARING:
            return "preparing: what its agent works in is being made"
        case EpisodeStatus.RUNNING:
            return "running" if episode.stats.turns == 0 else f"running: {_turns(episode)} so far"
        case EpisodeStatus.GRADING:
            return f"grading: what the agent left is being judged, {_after(episode)}"
        case EpisodeStatus.FAILED:
            parts = [_failed(episode)]
        case EpisodeStatus.CANCELLED:
            parts = [_cancelled(episode)]
        case _:
            parts = [visible_line(_end(episode), _MOST_OF_END)]
            parts.insert(0, visible_line(_reward(episode), MAX_WHY - len(parts[0]) - 2))
    return visible_line("; ".join([*parts, *_notes(episode)]), MAX_WHY)


def explained(episode: Episode) -> Episode:
    """The episode with its ``why``, whatever it had there."""
    return episode.model_copy(update={"why": why_of(episode)})


def _reward(episode: Episode) -> str:
    """The reward, and why, of an episode whose work is graded."""
    late, reward = episode.late_rewards, episode.reward
    if late is not None and late.pending:
        return "no reward yet: it waits for that of its trainer"
    if reward is None:
        return f"{_NO_REWARD}: nothing was judged" if episode.grading else "not graded: its task has no grader"
    given, again = _last_given(episode), _last_applied(episode)
    if given is not None and (again is None or given.at >= again.at):
        by = "its trainer" if given.by is None else visible_line(given.by, 40)
        because = "" if given.why is None else f": {visible_line(given.why, _MESSAGE)}"
        return f"{shown_number(reward)}: given by {by}{because}"
    words = grade_in_words(episode.grading, episode.reward_components)
    return f"{shown_number(reward)}: {words}" if words else f"{shown_number(reward)}"


def _end(episode: Episode) -> str:
    """The end, in words, of an episode that its agent, its caller or a budget ended."""
    error = episode.error
    if error is not None:
        how = _STOPPED.get(error.type, "out of time" if episode.status is EpisodeStatus.TIMED_OUT else "stopped")
        return f"{how} {_after(episode)}: {_message(error)}"
    exit_code = episode.agent_exit_code
    if episode.ended_by is EndedBy.SUBMISSION:
        return f"the agent ended with its answer {_after(episode)}"
    if episode.ended_by is EndedBy.REQUEST or episode.agent == _EXTERNAL:
        return f"{'its caller' if episode.agent == _EXTERNAL else 'a request'} finished it {_after(episode)}"
    if exit_code:
        return f"the agent ended with {_exit(exit_code)} {_after(episode)}"
    return f"the agent stopped by itself {_after(episode)}"


def _failed(episode: Episode) -> str:
    error = episode.error
    has = _NO_REWARD if episode.reward is None else f"{shown_number(episode.reward)}"
    if error is None:
        return f"{has}: it failed {_after(episode)}, and its record does not say why"
    if error.type == _UNREADABLE:
        return f"{has}: its record cannot be read: {_message(error)}"
    if error.fault is Fault.AGENT:
        code = episode.agent_exit_code
        signal = None if code is None else _signal(code)
        killed = "" if signal is None else f", killed by signal {signal}"
        return f"{has}: the agent failed {_after(episode)}{killed}: {_message(error)}"
    what = _FAILED[error.fault]
    grader = error.detail.get("grader") if isinstance(error.detail, dict) else None
    if isinstance(grader, str):
        what = f"grading by {visible_line(grader, 40)} failed"
    elif episode.timings.grading_s is not None:
        what = "grading failed"
    return f"{has}: {what} ({visible_line(error.type, 40)}) {_after(episode)}: {_message(error)}"


def _cancelled(episode: Episode) -> str:
    error = episode.error
    if error is not None:
        by = {"lease_lapsed": "its owner's lease lapsed", "stale_weights": "its tokens got stale"}.get(error.type)
        return f"{_NO_REWARD}: cancelled {_after(episode)}{f', {by}' if by else ''}: {_message(error)}"
    at = episode.timings
    steps = ((at.grading_s, "graded"), (at.running_s, "running"), (at.preparing_s, "prepared"))
    step = next((name for reached, name in steps if reached is not None), "queued")
    by = " by a request" if episode.ended_by is EndedBy.REQUEST else ""
    return f"{_NO_REWARD}: cancelled{by} while it was {step}, {_after(episode)}"


def _notes(episode: Episode) -> list[str]:
    notes = []
    again, stale = _last_applied(episode), episode.staleness
    if again is not None:
        before = "had no reward" if again.before.reward is None else f"was {shown_number(again.before.reward)}"
        notes.append(f"judged again, it {before}")
    bound = None if stale is None else stale.bound
    if stale is not None and stale.exceeded and bound is not None and _type(episode) != "stale_weights":
        notes.append(f"its tokens are stale ({stale.versions} versions, its bound is {bound.max_versions})")
    return notes


def _last_given(episode: Episode) -> RewardChange | None:
    """The latest reward of the trainer's that the episode was given."""
    changes = () if episode.late_rewards is None else episode.late_rewards.changes
    return next((one for one in reversed(changes) if one.reward is not None), None)


def _last_applied(episode: Episode) -> Regrade | None:
    return next((one for one in reversed(episode.regrades) if one.applied), None)


def _type(episode: Episode) -> str | None:
    return None if episode.error is None else episode.error.type


def _message(error: ErrorInfo) -> str:
    return visible_line(error.message, _MESSAGE) or visible_line(error.type, 40)


def _turns(episode: Episode) -> str:
    return f"{episode.stats.turns} turn{'' if episode.stats.turns == 1 else 's'}"


def _after(episode: Episode) -> str:
    return "before its first turn" if episode.stats.turns == 0 else f"after {_turns(episode)}"


def _exit(code: int) -> str:
    found = _signal(code)
    return f"exit code {code}" if found is None else f"exit code {code}, killed by signal {found}"


def _signal(code: int) -> int | None:
    """The signal that an exit code names as shells do, 128 + signal; Linux has 64."""
    return code - 128 if 128 < code <= 192 else None
