"""A report's contents from the folder of ``turnstile run --out``: records and samples, no conversation.

The folder is read where no server is. It has no turns and no tokenizer, so tokens are shown by their ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnstile import errors
from turnstile.models import Episode, summary_of
from turnstile.models.samples_encoding import WireError, decode_samples, sample_as_json
from turnstile.report.choose import ChosenEpisode, choose
from turnstile.report.contents import RunReport, ShownEpisode, TokenPiece, ends_of

EPISODES_FILE = "episodes.jsonl"
SAMPLES_FOLDER = "samples"


def report_of_folder(folder: Path, *, episodes: int, asked: Sequence[str], tokens: int) -> RunReport:
    """As ``report_of_run``. Raises InvalidRequest for a folder that has no such run or a damaged one, NotFound
    for an episode that is asked for and not there, OSError."""
    records: dict[str, Episode] = {}
    never_begun = 0
    for line in _lines(folder / EPISODES_FILE):
        if line is None:
            never_begun += 1
        else:
            records[line.episode_id] = line
    summaries = tuple(summary_of(each) for each in records.values())
    if not summaries:
        raise errors.InvalidRequest(f"{folder / EPISODES_FILE} has no episode")
    missing = [each for each in asked if each not in records]
    if missing:
        raise errors.NotFound(f"{folder} has no episode {missing[0]}")
    chosen = choose(summaries, max(episodes, len(set(asked))), asked)
    names = sorted({row.run_id for row in summaries if row.run_id is not None})
    return RunReport(
        name=", ".join(names) or folder.resolve().name,
        source="the folder of `turnstile run --out`",
        summaries=summaries,
        shown=tuple(_shown(folder, records[each.summary.episode_id], each, tokens) for each in chosen),
        made_at=time.time(),
        client_version=version("turnstile-rl"),
        never_begun=never_begun,
    )


def _lines(path: Path) -> Iterator[Episode | None]:
    """The episode of each line; None for a rollout without one. A last line without an end was being written when
    the run was killed, or is being written now: it is passed over."""
    if not path.is_file():
        raise errors.InvalidRequest(f"{path} is not there: name the folder of `turnstile run --out`, or a run id")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)["episode"]
                yield None if found is None else Episode.model_validate(found)
            except (ValueError, KeyError, TypeError) as error:
                raise errors.InvalidRequest(f"{path}, line {number}: no rollout of `turnstile run`") from error


def _shown(folder: Path, episode: Episode, choice: ChosenEpisode, most: int) -> ShownEpisode:
    missing = ["The folder has no conversations; a report of the run on its server shows them."]
    rows = _samples(folder / SAMPLES_FOLDER, episode.episode_id) if most else []
    pieces: tuple[TokenPiece, ...] = ()
    total = 0
    if rows is None:
        missing.append("Its samples have a format that is not read here (jsonl and safetensors are).")
    elif rows:
        longest = max(rows, key=lambda row: sum(row.loss_mask))
        total = len(longest.ids)
        pieces = tuple(longest.piece(start, end) for start, end in ends_of(total, most))
    return ShownEpisode(
        reason=choice.reason,
        episode=episode,
        summary=choice.summary,
        all_turns=choice.summary.turns,
        tokens=pieces,
        all_tokens=total,
        missing=tuple(missing),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample as far as a report shows it."""

    ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[str | None]

    @classmethod
    def of(cls, row: dict[str, Any]) -> _Row:
        return cls(row["input_ids"], row["loss_mask"], row["logprobs"], row["weight_version"])

    def piece(self, start: int, end: int) -> TokenPiece:
        """A sample has logprobs of what it trains alone."""
        mask = tuple(self.loss_mask[start:end])
        logprobs = zip(mask, self.logprobs[start:end], strict=True)
        return TokenPiece(
            start=start,
            ids=tuple(self.ids[start:end]),
            text=None,
            special=(False,) * len(mask),
            loss_mask=mask,
            logprobs=tuple(logprob if trained else None for trained, logprob in logprobs),
            versions=tuple(self.versions[start:end]),
        )


def _samples(folder: Path, episode_id: str) -> list[_Row] | None:
    """None: they are there, in a format that is not read."""
    lines, arrays = folder / f"{episode_id}.jsonl", folder / f"{episode_id}.safetensors"
    try:
        if lines.is_file():
            return [_Row.of(json.loads(line)) for line in lines.read_text("utf-8").splitlines()]
        if arrays.is_file():
            return [_Row.of(sample_as_json(each)) for each in decode_samples(arrays.read_bytes()).samples]
    except (ValueError, KeyError, TypeError, ValidationError, WireError) as error:
        raise errors.InvalidRequest(f"the samples of {episode_id} in {folder} are damaged") from error
    return None if any(folder.glob(f"{episode_id}.*")) else []
