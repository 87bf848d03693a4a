"""Settings of the engine, the renderer and the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from turnstile_server.settings.section import BoundedSection, Section


class EngineSettings(BoundedSection):
    """The engine that samples."""

    kind: str = Field(
        "embedded",
        description="Which engine samples: `embedded`, `sglang`, `vllm`, `trainer` (the training loop does), or "
        "one that a package adds. `upstream`: a hosted model answers, for evaluation; nothing can be trained. "
        "`none`: no model; `/health` answers, everything else is 503.",
    )
    url: str | None = Field(None, description="`sglang`, `vllm`, `upstream`: base URL of the running server.")
    api_key: SecretStr | None = Field(
        None,
        description="`sglang`, `vllm`: the key that the server was started with (its `--api-key`). `upstream`: "
        "that of the hosted model's API.",
    )
    socket: Path | None = Field(
        None,
        description="`embedded`: Unix socket of an embedded engine that runs already, in place of one of the "
        "server's own; the workers of one server share one so.",
    )
    urls: tuple[str, ...] = Field(
        (),
        description="Base URLs of several running engines of one kind and model: the workers. Instead of `url`.",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Time to open a connection to the engine.")
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Time for the engine to become ready at start: SGLang answers nothing while it loads a model. "
        "Then the server ends with exit code 2.",
    )
    first_chunk_timeout_s: float = Field(
        600.0, gt=0, description="Time to the engine's first chunk (unstreamed: to its answer); then 504."
    )
    chunk_timeout_s: float = Field(120.0, gt=0, description="Silence between two chunks of a stream; then 504.")
    control_timeout_s: float = Field(60.0, gt=0, description="Time for pause, resume, abort, state, score.")
    weights_timeout_s: float = Field(600.0, gt=0, description="Time to load new weights.")
    group_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Time for a process group of the trainer to form, when an engine joins it; then 504.",
    )
    group_relay_host: str | None = Field(
        None,
        description="`sglang`: an address of this server that its engines reach. They join process groups through "
        "it, so that a group that never forms can be given up; none: only engines at a loopback address do.",
    )
    check_weights: bool = Field(
        True,
        description="`sglang`: names and shapes of new weights are compared with the model's before they are "
        "sent, where its folder can be read from here. SGLang ends, or mixes old and new weights, when they do "
        "not fit.",
    )
    stop_grace_s: float = Field(5.0, ge=0, description="`embedded`: time for its process to end before SIGKILL.")
    max_connections: int = Field(512, ge=1, description="Calls in flight on the engine; further ones wait.")
    max_reply_bytes: int = Field(
        256 << 20, ge=1 << 16, description="Largest answer of the engine, or largest chunk of a streamed one."
    )
    routed_experts: bool = Field(
        False,
        description="`sglang`: record which experts of a mixture each token went through, for routing replay. The "
        "engine needs `--enable-return-routed-experts`.",
    )
    max_batch: int = Field(16, ge=1, description="`embedded`: calls decoded together; further ones wait.")
    context_length: int | None = Field(
        None, ge=16, description="Context window in tokens, at most the engine's; none: the engine's."
    )
    threads: int = Field(1, ge=1, description="`embedded`: threads of torch.")
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:[0-9]+)?)$",
        description="`embedded`: where it computes: `cpu`, `cuda` or `cuda:N`.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="`embedded`: type of its weights, cache and arithmetic; sampling and logprobs are float32.",
    )
    prefill_chunk: int = Field(
        512, ge=1, description="`embedded`: prompt tokens fed between two decoding steps of the other calls."
    )
    completion_timeout_s: float = Field(
        600.0,
        gt=0,
        description="`trainer`: how long a model call waits for its completion, pauses not counted; then 504.",
    )
    max_pending: int = Field(
        1024, ge=1, description="`trainer`: model calls that wait for their completion at once; more are 429."
    )


class RenderingSettings(Section):
    """The rendering of messages into tokens."""

    thinking_history: Literal["keep", "template"] = Field(
        "keep", description="`keep`: earlier thinking stays in the context; `template`: the chat template decides."
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Options of the chat template, e.g. `{enable_thinking = false}`."
    )
    call_format: str = Field(
        "auto",
        description="The form of the model's tool calls: a name of docs/models.md, one that a package adds, or "
        "`none`; `auto` reads it off the chat template.",
    )
    tools_text: str = Field(
        "",
        description="A Jinja text that shows a model its tools (`tools`) where its chat template does not: it "
        "stands before the system text. Empty: such a model gets none.",
    )
    calls: Literal["faithful", "strict"] = Field(
        "faithful",
        description="`faithful`: a call that can be read in one way only is read, and what was amiss is noted; "
        "`strict`: it is text.",
    )


class JournalSettings(BoundedSection):
    """The journal on disk."""

    durability: Literal["power", "process"] = Field(
        "power",
        description="`power`: a turn is synced to disk before it is acknowledged; `process`: turns survive `kill "
        "-9`, not a power cut.",
    )
    segment_bytes: int = Field(
        256 << 20,
        ge=1 << 16,
        description="A segment file is closed at this size, or at 1/64 of the file system if that is less (but "
        "not below 1 MiB).",
    )
    max_queue_bytes: int = Field(
        256 << 20, ge=1 << 20, description="Appends that wait for the disk; more are 503."
    )
    retention_days: float | None = Field(
        None, gt=0, description="Ended episodes older than this are deleted, fetched or not; none: kept."
    )
    retention_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Above this size the oldest ended episodes are deleted, fetched or not; none: kept.",
    )
    retention_share: float | None = Field(
        0.5,
        ge=0,
        le=1,
        description="The journal takes at most this share of its file system: above it the oldest ended "
        "episodes that a trainer has fetched are deleted, and where that is not enough new episodes are refused "
        "(503); 0 or none: no such bound.",
    )
    retention_free_bytes: int | None = Field(
        1 << 30,
        ge=0,
        description="With less free disk space than this (at most a tenth of the file system is asked for) the "
        "oldest ended episodes that a trainer has fetched are deleted; 0 or none: no such bound.",
    )
    retention_spares_unexported: bool = Field(
        True,
        description="Whether `retention_share` and `retention_free_bytes` spare ended episodes whose samples, "
        "tree or turns nobody has fetched; false: they delete the oldest ended ones, fetched or not.",
    )
    min_free_bytes: int = Field(
        64 << 20, ge=0, description="With less free disk space than this, turns are refused (503); 0: no check."
    )
