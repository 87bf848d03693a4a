"""Prompts as JSON in kept pieces: the same bytes as without them, in bounded memory, and let go of."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounded import bounded
from turnstile.models import Int32Array
from turnstile_server.capture.path_buffer import PathBuffer
from turnstile_server.engines.prompt_json import (
    CONVERSATIONS,
    PIECES,
    PromptJson,
    _same_place,
    shared_ids,
    with_ids,
)
from turnstile_server.engines.prompts import EnginePrompts
from turnstile_server.errors import EngineRefused
from turnstile_server.settings import EngineSettings
from waiting import wait_until

VOCAB = 5000


def ids_of(*ids: int) -> Int32Array:
    return np.array(ids, np.int32)


def joined(pieces: list[bytes]) -> bytes:
    return b"[" + b",".join(pieces) + b"]"


@dataclass(frozen=True)
class Step:
    """A call of an episode: an earlier prompt, whole or cut, and ``new`` random ids."""

    episode_id: str
    base: int
    cut: float
    new: int
    then: str
    kept: bool
    """Its ids are in the buffer of a path, as the gate's are; else the caller changes them afterwards."""


STEPS = st.builds(
    Step,
    episode_id=st.sampled_from("ab"),
    base=st.integers(1, 3),
    cut=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1]),
    new=st.integers(1, 5),
    then=st.sampled_from(["", "", "", "", "drop", "rest"]),
    kept=st.booleans(),
)


@given(
    steps=st.lists(STEPS, min_size=1, max_size=24), most=st.sampled_from([0, 300, 1 << 20]), seed=st.integers(0)
)
def test_whatever_was_kept_the_pieces_are_the_json_of_the_whole_prompt(
    steps: list[Step], most: int, seed: int
) -> None:
    """Conversations that grow, are cut back, edited, begun anew, forgotten, and bounded."""
    draw, kept = random.Random(seed), PromptJson(most)
    prompts: list[list[int]] = [[]]
    paths = [PathBuffer([])]
    sent: dict[str, list[list[int]]] = {"a": [], "b": []}
    for at, step in enumerate(steps):
        base = prompts[-min(step.base, len(prompts))]
        new = [draw.choice([1, 2, draw.randrange(1 << 31)]) for _ in range(step.new)]
        prompt = [*base[: round(len(base) * step.cut)], *new]
        ids = ids_of(*prompt)
        if step.kept and (in_place := paths[-1].extended(0, [ids])) is not None:
            ids = in_place
        elif step.kept:
            paths.append(PathBuffer([ids]))
            ids = paths[-1].first(len(prompt))
        pieces, known = kept.write(step.episode_id, ids, float(at))
        assert joined(pieces) == json.dumps(prompt, separators=(",", ":")).encode()
        assert known == 0 or any(prompt[:known] == earlier[:known] for earlier in sent[step.episode_id])
        if not step.kept:
            ids[:] = 7  # what was given is the caller's, who may change it
        sent[step.episode_id].append(prompt)
        prompts.append(prompt)
        if step.then == "drop":
            kept.drop(step.episode_id)
            sent[step.episode_id] = []
        elif step.then == "rest":
            kept.rest(at - 2.0)
        assert kept.kept_bytes == sum(each.size for known in kept._episodes.values() for each in known)
        assert kept.kept_bytes <= most
    for episode_id in "ab":
        kept.drop(episode_id)
    assert kept.kept_bytes == 0


def test_a_conversation_that_goes_on_writes_only_what_is_new() -> None:
    kept, prompt = PromptJson(1 << 20), list(range(1000))
    kept.write("e", ids_of(*prompt), 0.0)
    for turn in range(4 * PIECES):
        prompt += [turn] * 10
        pieces, known = kept.write("e", ids_of(*prompt), 0.0)
        assert known == len(prompt) - 10
        assert pieces[-1] == b",".join([b"%d" % turn] * 10)
        assert len(pieces) <= PIECES + 1


def test_calls_that_differ_at_their_end_share_what_is_before() -> None:
    kept, history = PromptJson(1 << 20), list(range(1000))
    for turn in range(5):
        pieces, known = kept.write("e", ids_of(*history, 5000 + turn, 1), 0.0)
        assert known == (1000 if turn else 0)
    assert pieces[-1] == b"5004,1"


def test_conversations_side_by_side_do_not_drive_each_other_out() -> None:
    kept = PromptJson(1 << 20)
    prompts = [[*range(100), *[1000 + which] * 500] for which in range(CONVERSATIONS)]
    for prompt in prompts:
        kept.write("e", ids_of(*prompt), 0.0)
    for turn in range(3):
        for prompt in prompts:
            prompt.append(turn)
            assert kept.write("e", ids_of(*prompt), 0.0)[1] == len(prompt) - 1


@given(st.lists(st.integers(0, 2), max_size=9), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_shared_ids_are_those_that_are_the_same(ids: list[int], one: int, other: int, copied: bool) -> None:
    buffer = ids_of(*ids)
    pair = buffer[:one], (buffer.copy() if copied else buffer)[other:]
    expected = next((at for at, (left, right) in enumerate(zip(*pair, strict=False)) if left != right), None)
    assert shared_ids(*pair) == (min(map(len, pair)) if expected is None else expected)


def test_ids_in_one_place_are_not_compared() -> None:
    buffer = ids_of(*range(9))
    assert _same_place(buffer[:], buffer[:4])
    for other in (buffer.copy(), buffer[1:], buffer[::-1], buffer[::2], buffer.view(np.float32)):
        assert not _same_place(other, buffer[:4])


def test_a_path_in_its_buffer_is_kept_once() -> None:
    path, kept = PathBuffer([ids_of(*range(1000))]), PromptJson(1 << 20)
    first = path.first(1000)
    kept.write("e", first, 0.0)
    longer = path.extended(1000, [ids_of(7)])
    assert longer is not None
    assert kept.write("e", longer, 0.0)[1] == 1000
    (written,) = kept._episodes["e"]
    assert np.shares_memory(written.ids, first)


def test_the_ids_stand_among_the_other_fields() -> None:
    body = b"".join(with_ids("input_ids", [b"1,2", b"3"], {"rid": "r", "stream": True}))
    assert json.loads(body) == {"input_ids": [1, 2, 3], "rid": "r", "stream": True}


@pytest.mark.anyio
async def test_ids_outside_the_vocabulary_are_refused_each_time_they_come() -> None:
    prompts = EnginePrompts(EngineSettings())
    good, bad = ids_of(*range(300)), ids_of(*range(300), VOCAB)
    for _ in range(2):
        assert (
            joined(prompts.written("e", good, VOCAB)) == json.dumps(good.tolist(), separators=(",", ":")).encode()
        )
        for wrong in (bad, ids_of(*range(300), -1), np.array([1, VOCAB], np.int64), ids_of(), ids_of(1)[None]):
            with pytest.raises(EngineRefused):
                prompts.written("e", wrong, VOCAB)
    assert prompts.written("e", np.array([1, 2], np.int64), VOCAB) == [b"1,2"]
    prompts.close()


@pytest.mark.anyio
async def test_an_episode_that_rests_or_is_forgotten_keeps_nothing() -> None:
    prompts = EnginePrompts(bounded(EngineSettings, prompt_json_rest_s=0.02))
    prompts.written("a", ids_of(1, 2, 3), VOCAB)
    assert prompts.kept_bytes > 0
    await wait_until(lambda: not prompts.kept_bytes)
    prompts.written("a", ids_of(1, 2, 3), VOCAB)
    prompts.drop("a")
    assert prompts.kept_bytes == 0
    prompts.close()
