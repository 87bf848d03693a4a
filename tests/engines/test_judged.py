"""The judge of recorded turns passes the true logprobs of a tree, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines_support import prompt_of, reference_logprobs
from judged import Judged

from capture.play import Play, reply
from capture.turns import make_turn
from turnstile.models import Turn, WeightSpan

PARENTS = {"t0": None, "t1": "t0", "t2": "t0", "t3": "t1"}
"""Two continuations of one turn, one of which goes on."""
SAMPLED, CUT = 12, 7
"""Tokens of a turn, and of them those that the first weights sampled."""


@pytest.fixture
def folders(tiny_model: Path, other_tiny_model: Path) -> dict[str, Path]:
    return {"old": tiny_model, "new": other_tiny_model}


@pytest.fixture
def turns(folders: dict[str, Path]) -> list[Turn]:
    match = Play().match("user:u")
    paths: dict[str | None, np.ndarray] = {None: np.empty(0, np.int32)}
    made = []
    for seq, (name, parent) in enumerate(PARENTS.items()):
        context, sampled = prompt_of(2 * seq, 20), prompt_of(2 * seq + 1, SAMPLED)
        path = paths[name] = np.concatenate([paths[parent], context, sampled])
        old, new = (reference_logprobs(folder, path, len(path) - SAMPLED, 1.0) for folder in folders.values())
        turn = make_turn(
            match,
            reply("a"),
            seq=seq,
            tools_key="none",
            context_ids=context.tolist(),
            completion_ids=sampled.tolist(),
            logprobs=[*old[:CUT].tolist(), *new[CUT:].tolist()],
            turn_id=name,
        )
        made.append(turn.model_copy(update={"parent_id": parent, "weight_spans": spans(CUT)}))
    return made


def spans(cut: int) -> tuple[WeightSpan, ...]:
    return (WeightSpan(start=0, end=cut, version="old"), WeightSpan(start=cut, end=SAMPLED, version="new"))


def test_true_logprobs_of_every_turn_of_a_tree_pass(turns: list[Turn], folders: dict[str, Path]) -> None:
    judged = Judged()
    judged.add(turns, folders)
    judged.check()
    assert judged.tokens == {"old": len(turns) * CUT, "new": len(turns) * (SAMPLED - CUT)}


@pytest.mark.parametrize("name", PARENTS)
@pytest.mark.parametrize("cut", [CUT - 1, CUT + 1])
def test_one_token_under_other_weights_does_not(
    turns: list[Turn], folders: dict[str, Path], name: str, cut: int
) -> None:
    wrong = [
        turn.model_copy(update={"weight_spans": spans(cut)}) if turn.turn_id == name else turn for turn in turns
    ]
    judged = Judged()
    judged.add(wrong, folders)
    with pytest.raises(AssertionError):
        judged.check()
