"""Constrained decoding in the embedded engine: a grammar is compiled by ``llguidance`` and masks the vocabulary.

What must hold: compiling never holds up the event loop nor the scheduler's thread, and is bounded in size and in
work, whatever an agent writes; a grammar that cannot be compiled is refused before its call is queued, with the
library's words (which name the keyword of the schema); a constraint sees each token of its completion once, in
order; a call is refused for its own work, never for that of earlier calls with the same grammar.

llguidance and not XGrammar: it refuses keywords that it cannot hold instead of leaving them out, compiles in
milliseconds because it computes masks as they are needed, and needs no torch of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import numpy as np
import torch
from torch import Tensor

from turnstile_server.engines.embedded.lark import NotSupported, json_schema_grammar, structural_tag_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

BACKEND: Final = "llguidance"
MOST_BYTES: Final = 1 << 18
"""Longest text of a grammar."""
MOST_SYMBOLS: Final = 100_000
"""Symbols of a compiled grammar: a fifth of a second."""
MOST_FUEL: Final = 50_000
"""The library's measure for the texts and patterns of a grammar: some 2,000 members, which take half a second. The
time is quadratic in them."""
MOST_STATES: Final = 100_000
"""States of the lexer of one compiled grammar, which the library keeps for all its calls: up to 100 MB."""
MOST_MASKS: Final = 10_000
"""Masks of one compiled grammar, after which the next call has it compiled anew, so that earlier calls' states do
not use up its own."""
MESSAGE_CHARS: Final = 500
"""Longest message of the library that a refusal repeats."""
KEPT_GRAMMARS: Final = 32
"""Compiled grammars that are kept, the latest used."""


_QUOTED: Final = re.compile(r"\s*\d+ \| ")
_PLACE: Final = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")


class GrammarRefused(Exception):
    """The grammar cannot be held; the message says why and what to change."""


class CompiledGrammar:
    """A grammar at its beginning. Calls follow copies of it, which share the states of its lexer."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.masks = 0
        """Masks of all its calls; counted by the scheduler's thread alone."""
        self.full = False
        """The work of a call exceeded its bounds; perhaps it was that of all calls together."""

    @property
    def worn(self) -> bool:
        """True where the next call should have it compiled anew."""
        return self.full or self.masks >= MOST_MASKS


class Constraint:
    """The state of one call's grammar. Used by one thread at a time.

    ``stop_ids``: the ids that end the call. They are allowed where the grammar may end, and only there.
    """

    def __init__(self, grammar: CompiledGrammar, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop for stop in stop_ids if stop < vocab_size)

    def mask(self) -> Tensor:
        """bool[vocab_size], on the CPU: the ids that may come next. None are where the grammar has ended and the
        call has no stop ids. Raises GrammarRefused where the grammar's work exceeds its bounds."""
        if self.complete:
            allowed = np.zeros(self._vocab_size, np.bool_)
            allowed[self._stop_ids] = True
            return torch.from_numpy(allowed)
        self._grammar.masks += 1
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._grammar.full = True
            words = _words(self._matcher.get_error())
            raise GrammarRefused(f"the format of the answer is too complex to be followed: {words}")
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        may_end = self._matcher.is_accepting()
        for stop in self._stop_ids:
            allowed[stop] = may_end or (bool(allowed[stop]) and self._ends_with(stop))
        return torch.from_numpy(allowed)

    def takes_all(self, tokens: Sequence[int]) -> bool:
        """Takes the tokens that an earlier part of the completion sampled; False where they are not of the
        grammar."""
        return not tokens or self._matcher.consume_tokens(list(tokens))

    def take(self, token: int) -> None:
        """The call's next token, which the mask allowed. A stop id ends the call, and no grammar need have it."""
        if token not in self._stop_ids:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """True where nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _ends_with(self, stop: int) -> bool:
        """True where the grammar itself ends with this stop id."""
        after = self._matcher.deep_copy()
        return after.consume_token(stop) and after.is_accepting()


class Grammars:
    """Compiles grammars for the vocabulary of ``tokenizer`` (a fast one of ``transformers``), which may be smaller
    than the model's ``vocab_size``. ``end_id``: a token that ends replies, if it has one."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._vocabulary: LLTokenizer | None = None
        self._one = anyio.CapacityLimiter(1)
        self._compiled: OrderedDict[bytes, CompiledGrammar | str] = OrderedDict()
        """By content: the grammar at its beginning, or why it is refused."""

    @staticmethod
    def installed() -> bool:
        """True if the library is there."""
        return find_spec(BACKEND) is not None

    async def constraint(
        self,
        stop_ids: Iterable[int],
        before: Sequence[int],
        *,
        json_schema: Any = None,
        structural_tag: Any = None,
    ) -> Constraint:
        """The constraint of a completion that begins with ``before``, the tokens that an earlier part of it
        sampled. One of ``json_schema`` and ``structural_tag`` is its grammar, as a text. Raises GrammarRefused."""
        if not self.installed():
            raise GrammarRefused(
                f"a format of the answer needs the package {BACKEND}: pip install 'turnstile-rl[embedded]'"
            )
        if json_schema is not None and structural_tag is not None:
            raise GrammarRefused("json_schema and structural_tag exclude each other: send one of them")
        text = structural_tag if json_schema is None else json_schema
        if not isinstance(text, str):
            raise GrammarRefused("a grammar must be a string")
        if len(text) > MOST_BYTES:
            raise GrammarRefused(f"a grammar may have {MOST_BYTES} characters, this one has {len(text)}")
        is_tag = json_schema is None
        key = hashlib.sha256((b"tag " if is_tag else b"schema ") + text.encode("utf-8", "replace")).digest()
        found = self._kept(key)
        if found is None:
            async with self._one:  # the thread has it to its end, so what it compiled is found by the next
                found = self._kept(key)
                if found is None:
                    found = await anyio.to_thread.run_sync(self._compile, text, is_tag)
                    self._compiled[key] = found
                    while len(self._compiled) > KEPT_GRAMMARS:
                        self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise GrammarRefused(found)
        constraint = Constraint(found, self._vocab_size, stop_ids)
        if not constraint.takes_all(before):
            raise GrammarRefused("the tokens before do not have the format of the answer")
        return constraint

    def _kept(self, key: bytes) -> CompiledGrammar | str | None:
        """What is kept for the key; None where it is to be compiled."""
        found = self._compiled.get(key)
        if found is None or (isinstance(found, CompiledGrammar) and found.worn):
            return None
        self._compiled.move_to_end(key)
        return found

    def _compile(self, text: str, is_tag: bool) -> CompiledGrammar | str:
        """Runs in a thread. The library lets other threads run while it compiles, and not while it reads the
        tokenizer, which is done once."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer  # noqa: PLC0415 - optional

        try:
            lark = structural_tag_grammar(text) if is_tag else json_schema_grammar(text)
        except NotSupported as error:
            return str(error)
        if self._vocabulary is None:
            try:
                written = self._tokenizer.backend_tokenizer.to_str()
                self._vocabulary = LLTokenizer(written, n_vocab=self._vocab_size, eos_token=self._end_id)
            except (AttributeError, ValueError) as error:
                return f"this model's tokenizer cannot be constrained ({error})"
        limits = LLParserLimits(
            max_grammar_size=MOST_SYMBOLS,
            initial_lexer_fuel=MOST_FUEL,
            max_lexer_states=MOST_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._vocabulary, lark, log_level=0, limits=limits)
        if matcher.is_error():
            return f"the format of the answer cannot be held: {_words(matcher.get_error())}"
        return CompiledGrammar(matcher)


def _words(error: str) -> str:
    """The library's message in one line, without the place in our own grammar that it quotes below."""
    lines = takewhile(lambda line: _QUOTED.match(line) is None, error.splitlines())
    return _PLACE.sub("", " ".join(" ".join(lines).split()))[:MESSAGE_CHARS]
