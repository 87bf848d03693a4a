"""Observation and action spaces, and how an action is read. Pure: no client, no episode.

Arrays have fixed shapes, so that vector environments can stack them and share memory. What must hold: an action is
read as the output of a sampler, which stops at the first stop id and at the call's ``max_new_tokens``; everything
after that is padding. No token is added or reordered.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from gymnasium import spaces

from turnstile import errors
from turnstile.models import PendingCall

ActionKind = Literal["ids", "text"]
Observation = dict[str, Any]

LOWEST: Final = float(np.finfo(np.float32).min)
"""Lower bound of a logprob; infinite ones are refused."""


@dataclass(frozen=True, slots=True)
class Spaces:
    """``vocab_size``: of the model; ``max_prompt_tokens``, ``max_completion_tokens``: widths of the arrays."""

    vocab_size: int
    max_prompt_tokens: int
    max_completion_tokens: int

    @property
    def observation(self) -> spaces.Dict:
        """``prompt_ids`` int32[max_prompt_tokens], 0 from ``prompt_length`` on; ``max_new_tokens`` of this call.

        After an episode's end all are 0.
        """
        return spaces.Dict(
            {
                "prompt_ids": spaces.Box(0, self.vocab_size - 1, (self.max_prompt_tokens,), np.int32),
                "prompt_length": spaces.Discrete(self.max_prompt_tokens + 1),
                "max_new_tokens": spaces.Discrete(self.max_completion_tokens + 1),
            }
        )

    def action(self, kind: ActionKind) -> spaces.Space[Any]:
        """``ids``: ``completion_ids`` int64[n], ``logprobs`` float32[n, 1], ``length`` of both. ``text``: a str.

        The logprobs are a column because Gymnasium's checker wants flat boxes scaled to one, which they are not.
        """
        width = self.max_completion_tokens
        if kind == "text":
            # An ASCII character is at most one token, so that any sampled text fits.
            return spaces.Text(max_length=width, min_length=0, charset=string.printable)
        return spaces.Dict(
            {
                "completion_ids": spaces.MultiDiscrete(np.full(width, self.vocab_size)),
                "logprobs": spaces.Box(LOWEST, 0.0, (width, 1), np.float32),
                "length": spaces.Discrete(width, start=1),
            }
        )

    def observed(self, call: PendingCall | None) -> Observation:
        """The observation of a waiting call; None: of an episode that has ended."""
        ids = np.zeros(self.max_prompt_tokens, np.int32)
        if call is None:
            return {"prompt_ids": ids, "prompt_length": np.int64(0), "max_new_tokens": np.int64(0)}
        ids[: len(call.input_ids)] = call.input_ids
        return {
            "prompt_ids": ids,
            "prompt_length": np.int64(len(call.input_ids)),
            "max_new_tokens": np.int64(min(call.max_new_tokens, self.max_completion_tokens)),
        }


def pack(completion_ids: Any, logprobs: Any, max_completion_tokens: int) -> dict[str, Any]:
    """A completion as an element of the action space, padded with 0. Raises InvalidRequest if it is too long."""
    ids, numbers = np.asarray(completion_ids).reshape(-1), np.asarray(logprobs, np.float32).reshape(-1)
    if len(ids) > max_completion_tokens or len(ids) != len(numbers):
        raise errors.InvalidRequest(
            f"{len(ids)} ids with {len(numbers)} logprobs; an action has room for {max_completion_tokens} of each"
        )
    room = max_completion_tokens - len(ids)
    return {
        "completion_ids": np.pad(ids.astype(np.int64), (0, room)),
        "logprobs": np.pad(numbers, (0, room))[:, None],
        "length": np.int64(len(ids)),
    }


def completion_of(action: Any, call: PendingCall, kind: ActionKind) -> dict[str, Any]:
    """The fields of ``EpisodeHandle.complete`` in an action. ``length`` may be absent where nothing is padded.

    Raises InvalidRequest for anything that is not an action of this ``kind``.
    """
    if kind == "text":
        if not isinstance(action, str):
            raise errors.InvalidRequest("an action is a string in this environment (action='text')")
        return {"text": action}
    if not isinstance(action, Mapping) or not {"completion_ids", "logprobs"} <= action.keys():
        raise errors.InvalidRequest(
            "an action is a dict of completion_ids and logprobs (and length) in this environment (action='ids')"
        )
    ids = np.asarray(action["completion_ids"]).reshape(-1)
    length = int(action.get("length", len(ids)))
    if length < 0:
        raise errors.InvalidRequest(f"length = {length}; a completion has no fewer than 0 tokens")
    end = min(length, call.max_new_tokens)
    stops = np.flatnonzero(np.isin(ids[:end], call.stop_token_ids))
    if len(stops):
        end = int(stops[0]) + 1
    return {"completion_ids": ids[:end], "logprobs": np.asarray(action["logprobs"]).reshape(-1)[:end]}
