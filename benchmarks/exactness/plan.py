"""The replies that the stand-in engine samples: text, token ids and logprobs, all from one seed.

A prompt asks for its reply by a marker, ``[[step]]``, in its last message; the plan says what that step's reply
looks like. A step that is sampled again (a retry that reached the engine) gets another *variant*: other words,
and so other ids, as a policy at temperature 1 gives. Each reply holds its own name, ``<step.variant>``: so an
agent can tell which sample it was given.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

MODEL: Final = Path(__file__).resolve().parents[2] / "env_server" / "turnstile_server" / "testing" / "model"
"""A small vocabulary and a chat template as Qwen3's: both ship, so the numbers can be had again anywhere."""
MARKER: Final = re.compile(r"\[\[([a-z0-9-]+)\]\]")
NAME: Final = re.compile(r"<([a-z0-9-]+\.\d+)>")
END: Final = "<|im_end|>"
LOGPROB_STEP: Final = 2.0**-14
"""Logprobs are multiples of it: exact in float32, so that a recorded one equals the sampled one or is wrong."""
_TEXT: Final = """read the handler first then run tests again while parser keeps journal entries sorted before
every commit because queue workers replay sockets slowly and budgets shrink when matchers render unexpected
histories"""
WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Step:
    """One reply. ``calls``: names of the tools that it calls. ``words``, ``thought``: lengths of the text and of
    the reasoning."""

    calls: tuple[str, ...] = ()
    words: int = 24
    thought: int = 12


@dataclass(frozen=True, slots=True)
class Fault:
    """What the engine does with the first sample of a step.

    ``status``: it answers with this error, once. ``pace_s``: it waits so long before each token.
    ``update_after``: the weight version changes before this token."""

    status: int | None = None
    pace_s: float = 0.0
    update_after: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """``split``: share of the tokens that are sampled as two tokens of the same text. ``compact``: the policy
    writes JSON without spaces, unlike the chat template."""

    steps: dict[str, Step]
    faults: dict[str, Fault] = field(default_factory=dict)
    split: float = 0.0
    compact: bool = False
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        steps = {
            key: Step(tuple(one["calls"]), one["words"], one["thought"]) for key, one in value["steps"].items()
        }
        faults = {key: Fault(**one) for key, one in value["faults"].items()}
        return cls(steps, faults, value["split"], value["compact"], value["seed"])


@dataclass(frozen=True, slots=True)
class Sample:
    """A whole reply, as the engine would sample it to its end."""

    name: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text of each id; that of the end token is empty."""
    logprobs: tuple[float, ...]
    thought: str
    content: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments, the latter as the policy wrote them."""


class Sampler:
    """Samples replies with the vocabulary of a ``tokenizer``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.get_vocab()
        self._texts = {index: text for text, index in self._vocabulary.items()}
        self._added = set(tokenizer.get_added_tokens_decoder())
        self.end = self._vocabulary[END]

    def sample(self, plan: Plan, key: str, variant: int) -> Sample:
        step = plan.steps[key]
        name = f"{key}.{variant}"
        pick = random.Random(f"{plan.seed}/{name}")
        thought = " ".join(pick.choices(WORDS, k=step.thought))
        content = f"Step <{name}>: {' '.join(pick.choices(WORDS, k=step.words))}."
        separators = (",", ":") if plan.compact else (", ", ": ")
        calls = tuple(
            (call, json.dumps({"command": f"{pick.choice(WORDS)} {number}.txt"}, separators=separators))
            for number, call in enumerate(step.calls)
        )
        comma, colon = separators
        bodies = [f'{{"name"{colon}"{call}"{comma}"arguments"{colon}{given}}}' for call, given in calls]
        text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        text += "".join([content, *(f"\n<tool_call>\n{body}\n</tool_call>" for body in bodies)])
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids = [part for index in ids for part in self._split(index, plan.split, pick)]
        pieces = [self._tokenizer.decode([index], skip_special_tokens=False) for index in ids]
        if "".join(pieces) != text:
            raise ValueError(f"the pieces of {name} do not add up to its text")
        logprobs = tuple(logprob(name, place) for place in range(len(ids) + 1))
        return Sample(name, (*ids, self.end), (*pieces, ""), logprobs, thought, content, calls)

    def _split(self, index: int, share: float, pick: random.Random) -> list[int]:
        """The id, or two ids of the same bytes."""
        if index in self._added or pick.random() >= share:
            return [index]
        text = self._texts[index]
        cuts = [
            at for at in range(1, len(text)) if text[:at] in self._vocabulary and text[at:] in self._vocabulary
        ]
        if not cuts or not text.removeprefix("Ġ").isascii():
            return [index]
        cut = pick.choice(cuts)
        return [self._vocabulary[text[:cut]], self._vocabulary[text[cut:]]]


def logprob(name: str, place: int) -> float:
    """One of 2^14 negative numbers: two places of one run hardly ever have the same."""
    digest = hashlib.sha256(f"{name}/{place}".encode()).digest()
    return -(1 + int.from_bytes(digest[:2], "big") % (1 << 14)) * LOGPROB_STEP
