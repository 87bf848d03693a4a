"""A report's contents from servers, over the control API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version

from turnstile import errors
from turnstile.models import TurnOutline, summary_of
from turnstile.report.choose import ChosenEpisode, choose
from turnstile.report.contents import MOST_BREAKS, MOST_TURNS, RunReport, ShownEpisode, TokenPiece, ends_of
from turnstile.sync import Client, EpisodeHandle


def report_of_run(client: Client, run_id: str, *, episodes: int, asked: Sequence[str], tokens: int) -> RunReport:
    """``episodes``: so many are shown; ``asked``: these among them, by id, of other runs too.
    ``tokens``: shown of each at most.

    Raises NotFound where the servers have no episode of the run, or not one that is asked for.
    """
    summaries = tuple(client.summaries(run_id=run_id))
    if not summaries:
        raise errors.NotFound(
            f"the servers have no episode of the run {run_id}; `turnstile episodes list` shows runs"
        )
    known = {row.episode_id for row in summaries}
    others = [summary_of(client.episode(each).status()) for each in asked if each not in known]
    chosen = choose([*summaries, *others] if others else summaries, max(episodes, len(set(asked))), asked)
    engines = client.engine()
    facts = {
        "server": ", ".join(sorted(set(client.versions().values()))),
        "model": ", ".join(sorted({each.model_name for each in engines.values()})),
        "context length": ", ".join(sorted({str(each.context_length) for each in engines.values()})),
    }
    return RunReport(
        name=run_id,
        source=f"the control API of {len(engines)} server{'s' if len(engines) > 1 else ''}",
        summaries=summaries,
        shown=tuple(_shown(client, each, tokens) for each in chosen),
        made_at=time.time(),
        client_version=version("turnstile-rl"),
        facts=facts,
    )


def _shown(client: Client, choice: ChosenEpisode, tokens: int) -> ShownEpisode:
    handle = client.episode(choice.summary.episode_id)
    episode = handle.status()
    missing: list[str] = []
    turns = handle.turn_outlines()
    kept = tuple(turn for start, end in ends_of(len(turns), MOST_TURNS) for turn in turns[start:end])
    breaks = handle.breaks(limit=MOST_BREAKS) if choice.summary.breaks else None
    if breaks is not None and breaks.total > len(breaks.breaks):
        missing.append(f"Of {breaks.total} breaks the first {len(breaks.breaks)} are shown.")
    pieces, total = _tokens(handle, turns, tokens) if turns and tokens else ((), 0)
    return ShownEpisode(
        reason=choice.reason,
        episode=episode,
        summary=choice.summary,
        turns=kept,
        all_turns=len(turns),
        breaks=() if breaks is None else breaks.breaks,
        tokens=pieces,
        all_tokens=total,
        missing=tuple(missing),
    )


def _tokens(handle: EpisodeHandle, turns: Sequence[TurnOutline], most: int) -> tuple[tuple[TokenPiece, ...], int]:
    """The first and the last tokens of the path with most sampled tokens, and the length of that path."""
    turn_id = _longest_path(turns)
    total = handle.tokens(turn_id, 0, 0).total
    pieces = [piece for start, end in ends_of(total, most) for piece in _window(handle, turn_id, start, end)]
    return tuple(pieces), total


def _window(handle: EpisodeHandle, turn_id: str, start: int, end: int) -> list[TokenPiece]:
    """In as many requests as the server's bound of a window makes necessary."""
    pieces: list[TokenPiece] = []
    while start < end:
        window = handle.tokens(turn_id, start)
        count = min(len(window.ids), end - start)
        if not count:
            break
        names = (*window.weight_version_names, None)
        indices = [-1 if each is None else each for each in window.weight_version[:count]]
        pieces.append(
            TokenPiece(
                start=start,
                ids=window.ids[:count],
                text=window.text[:count],
                special=window.special[:count],
                loss_mask=window.loss_mask[:count],
                logprobs=window.logprobs[:count],
                versions=tuple(names[each] for each in indices),
            )
        )
        start += count
    return pieces


def _longest_path(turns: Sequence[TurnOutline]) -> str:
    """The last turn of the path along which most tokens were sampled; of equal ones the first."""
    sampled: dict[str | None, int] = {None: 0}
    for turn in turns:
        # A fork's first turn continues one of another episode.
        sampled[turn.turn_id] = sampled.get(turn.parent_id, 0) + turn.completion_tokens
    return max(turns, key=lambda turn: sampled[turn.turn_id]).turn_id
