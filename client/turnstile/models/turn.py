"""A turn: one successful model call, immutable, written once.

``tokens(turn) = tokens(parent) ⊕ context_ids ⊕ completion_ids``; only the deltas are stored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from turnstile.models.arrays import Floats, TokenIds
from turnstile.models.base import SCHEMA_VERSION, Model
from turnstile.models.experts import Experts
from turnstile.models.messages import Message

FinishReason = Literal["stop", "length", "abort"]


class BreakReason(StrEnum):
    """The reason that a call did not simply continue the tokens that the model had been fed."""

    NEW_CONVERSATION = "new_conversation"
    """Not even the first message is known, and it is not the episode's first call."""
    SYSTEM_CHANGED = "system_changed"
    """The call repeats a known conversation, and its system text differs (a clock in the system prompt)."""
    HISTORY_EDITED = "history_edited"
    """A system, user or tool message differs from the one that was fed."""
    REPLY_EDITED = "reply_edited"
    """An assistant message differs from what the model sampled."""
    HISTORY_TRUNCATED = "history_truncated"
    """The call ends before the reply of the path it shares."""
    TOOLS_CHANGED = "tools_changed"
    """Same conversation, other tools or template options."""
    THINKING_STRIPPED = "thinking_stripped"
    """``thinking_history = template`` and the template drops earlier thinking here."""
    RENDERER_CANNOT_CONTINUE = "renderer_cannot_continue"
    """The parent matched, but the chat template has no append-only continuation from it."""


class ParseStatus(StrEnum):
    """The outcome of parsing the tool calls of a completion. All but ``OK`` went to the agent as plain text."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"


class ParseNote(StrEnum):
    """What is to be known of how a reply was read: mostly a liberty with a call that could be read in one way
    only, and was not written as it should be."""

    END_MISSING = "end_missing"
    """The last tag is missing, before the next call or at the end of the reply."""
    OPENING_MISSING = "opening_missing"
    """The first tag is missing."""
    PARAMETER_END_MISSING = "parameter_end_missing"
    """A parameter is not closed before the next one, or before the end of the call."""
    END_IN_VALUE = "end_in_value"
    """A value holds the tag that closes it."""
    ARGUMENTS_KEY = "arguments_key"
    """Another key than the format's holds the arguments (``parameters`` for ``arguments``)."""
    ARGUMENTS_MISSING = "arguments_missing"
    """There are no arguments, or null for them; the call has an empty object."""
    ARGUMENTS_ENCODED_TWICE = "arguments_encoded_twice"
    """The arguments are a JSON string that holds the object."""
    RAW_CONTROL_CHARACTERS = "raw_control_characters"
    """A JSON string holds a line break or another control character as it is."""
    PYTHON_LITERAL = "python_literal"
    """``True``, ``None`` or a list as Python writes it stands where JSON should."""
    VALUE_UNTYPED = "value_untyped"
    """A value is none that its schema takes; it was handed on as the string that it is."""
    UNDECLARED_PARAMETER = "undeclared_parameter"
    """The tool declares no such parameter; it was handed on as a string."""
    UNDECLARED_TOOL = "undeclared_tool"
    """No such tool was offered; the call was handed on."""
    OTHER_FORM = "other_form"
    """The call is written in another form of the same format."""
    ID_WITHOUT_TOKEN = "id_without_token"
    """No liberty with a call: an id was sampled that the tokenizer has no token for (``Turn.without_token``)."""


class BreakAt(Model):
    """The first divergent message: its index in the call, and the path inside it (e.g. ``content``)."""

    message: int
    path: str = ""
    kind: str = ""


class Break(Model):
    """A typed break: the reason and the first place where the call left the known path."""

    reason: BreakReason
    at: BreakAt | None = None
    continues: str | None = None
    """``system_changed`` only: id of the latest turn that the call repeats."""


class WeightSpan(Model):
    """Completion positions ``[start, end)`` were sampled by the weights named ``version``.

    ``stale_kv``: the engine kept the attention cache of older weights below this span.
    """

    start: int = Field(ge=0)
    end: int
    version: str
    stale_kv: bool = False


class SamplingUsed(Model):
    """The sampling that produced a completion. ``constrained``: a grammar masked the vocabulary. ``given``: the
    text was given and not sampled (``trainer`` engine); its logprobs are 0.0 and are no policy's numbers."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    constrained: bool = False
    given: bool = False
    adapter: str | None = None
    """The LoRA adapter that sampled, on the weights of ``weight_spans``; None: those alone."""


class UpstreamUsage(Model):
    """What a hosted model's server says of a reply (``docs/evaluation.md``). Counts are None where it says none:
    they are its own, of a tokenizer that is not known here."""

    model: str
    """The model that answered, by the server's word."""
    finish: str | None
    """The reason that the reply ended, in the server's words; None: it was cut."""
    prompt_tokens: int | None = None
    """Those that were read from a cache included."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def words(self) -> str:
        """The model, and the counts for people to read."""
        counts = (self.prompt_tokens, self.completion_tokens)
        if counts == (None, None):
            return f"{self.model}, tokens not counted"
        prompt, completion = ("?" if count is None else f"{count:,}" for count in counts)
        return f"{self.model}, {prompt} + {completion} tokens by its server's count"


class TurnTimings(Model):
    """Monotonic durations in seconds; ``started_at`` is Unix time."""

    started_at: float
    render_s: float = 0.0
    """From the call's arrival to its prompt ids."""
    rest_s: float = 0.0
    """The part of ``render_s``, at its beginning, that was a wait for the snapshot of the turn before."""
    queue_s: float = 0.0
    """After the prompt ids: waiting for a place on a worker, before the first token."""
    first_token_s: float | None = None
    """From the call's arrival to the engine's first tokens."""
    pieces: int = 0
    """In which the tokens came. 1: all at once, so the first token is not told from the last; 0: not recorded."""
    engine_s: float = 0.0
    """From the prompt ids to the end of generation."""
    total_s: float = 0.0
    """From the call's arrival to the turn being ready for the journal."""


class Thread(Model):
    """The agent's own ids of a conversation (``name``) and of the one that started it (``parent``).

    Many agents send such headers for their sub-agents.
    """

    name: str | None = None
    parent: str | None = None


class TurnFacts(Model):
    """The fields of a turn beside its tokens."""

    schema_version: int = SCHEMA_VERSION
    turn_id: str
    episode_id: str
    parent_id: str | None
    seq: int = Field(ge=0)
    dialect: str
    weight_spans: tuple[WeightSpan, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    """The agent's stop string that ended the completion; None if something else ended it."""
    sampling: SamplingUsed
    asked_sampling: dict[str, object] = Field(default_factory=dict)
    template_hash: str
    tools_key: str
    """Hash of the offered tools (as a set) and the template options."""
    request_key: str
    """Retry identity: hash of parent, new messages, tools and asked sampling."""
    new_messages: tuple[Message, ...]
    reply: Message
    break_: Break | None = Field(default=None, alias="break")
    parse_status: tuple[ParseStatus, ...] = ()
    parse_notes: tuple[str, ...] = ()
    """The liberties with which the reply's calls were read: names of ``ParseNote``, or a call format's own
    words."""
    without_token: tuple[int, ...] = ()
    """Positions in the completion, in order, of ids that the tokenizer has no token for: rows with which a model's
    vocabulary is padded. They are no text, stay on the path, and are not trained."""
    thread: Thread | None = None
    """The conversation of this call by the agent's own headers."""
    echo: tuple[str, ...] = ()
    """Tolerated differences by name: how the agent sent the parent's reply back, and how its messages were written
    because the chat template does not keep them as they are, or the model reads text only (``image_omitted``, once
    for each)."""
    rerendered_tokens: int = 0
    """Prompt tokens rendered again because of a break (0 on an append-only path)."""
    step: int = Field(default=0, ge=0)
    """Index of the step of its task in which it was sampled; 0 where the task has one."""
    upstream: UpstreamUsage | None = None
    """Set where a hosted model answered: such a turn has no token ids, and cannot be trained."""
    timings: TurnTimings

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Turn(TurnFacts):
    """One successful model call.

    Shapes: ``context_ids`` int32[c], ``completion_ids`` int32[m], ``logprobs`` float32[m] (natural log,
    ``log softmax(logits / temperature)``, without top-p or top-k truncation).
    """

    context_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Floats
    routed_experts: Experts = None
    """uint8 or uint16 [r, layers, top_k] of a mixture of experts, if ``engine.routed_experts``: the experts of the
    last r tokens that the call fed, up to the one before its last sampled token. They go back to the last token
    whose experts no earlier turn of the path has, usually the parent's last one."""

    @property
    def generated_tokens(self) -> int:
        """Tokens of the completion: those that were sampled here, or as many as the hosted model's server counted
        (0 where it said none)."""
        if self.upstream is not None:
            return self.upstream.completion_tokens or 0
        return len(self.completion_ids)

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = len(self.completion_ids)
        if self.upstream is not None:
            if count or len(self.context_ids) or len(self.logprobs) or self.weight_spans:
                raise ValueError("a turn of a hosted model has no tokens")
            return self
        if count == 0:
            raise ValueError("a turn without sampled tokens is no turn")
        if len(self.logprobs) != count:
            raise ValueError(f"{len(self.logprobs)} logprobs for {count} sampled tokens")
        if not np.isfinite(self.logprobs).all():
            raise ValueError("a logprob is not finite")
        if self.without_token and not 0 <= self.without_token[0] <= self.without_token[-1] < count:
            raise ValueError(f"an id without a token lies outside the {count} sampled ones")
        position = 0
        for span in self.weight_spans:
            if span.start != position or span.end <= span.start:
                raise ValueError("weight spans must tile the completion in order")
            position = span.end
        if position != count:
            raise ValueError(f"weight spans cover {position} of {count} sampled tokens")
        if self.routed_experts is not None and len(self.routed_experts) < count:
            rows = len(self.routed_experts)
            raise ValueError(f"{rows} rows of experts for at least {count} tokens that were fed")
        return self


class Delivery(Model):
    """The delivery of a turn's reply: it reached the agent, or was lost. A later record, because a turn never
    changes."""

    turn_id: str
    state: Literal["written", "lost"]
    commit_s: float | None = None
    """Seconds that it took to make the turn durable, which the turn's own record cannot say."""


class Discard(Model):
    """Sampled tokens that belong to no turn: a failed or abandoned attempt."""

    reason: str
    tokens: int = Field(ge=0)
