"""Settings of the two listeners: the control API with OpenEnv, and the gate (the model API)."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, FiniteFloat, field_validator

from turnstile_server.settings.section import BoundedSection, Port

_HOSTS = (
    "Host names, without ports, by which {what} may be called; `*` for every name. None: loopback names{public} "
    "where it listens on a loopback address, else every name. Loopback names are always served, and a sandbox's "
    "own socket is not asked."
)
_ORIGINS = (
    "Origins of web pages that may call {what}, as `https://HOST` or `https://HOST:*`; `*` for every page. Pages "
    "of the Host that was called{public} are allowed, and local pages where the Host is a loopback name."
)


class _Clients(BoundedSection):
    """Bounds on the clients of a listener."""

    max_connections: int = Field(
        2048,
        ge=1,
        description="Connections open at once, or an eighth of the process's descriptors if that is less. When "
        "all are taken, the oldest that is idle or has shown no key makes way; where none is, new ones get 503.",
    )


class ControlSettings(_Clients):
    """The control API: the listener for the trainer."""

    host: str = Field("127.0.0.1", description="Address of the control listener.")
    port: Port = Field(8000, description="Port of the control listener; 0 takes a free one.")
    auth: bool = Field(
        True,
        description="False: requests need no control key. Only for a server behind another authentication. Host "
        "and Origin of every request are then checked: name the proxy's host in `allowed_hosts`.",
    )
    allowed_hosts: tuple[str, ...] | None = Field(
        None, description=_HOSTS.format(what="`/mcp` and the WebSockets (with `auth` false everything)", public="")
    )
    allowed_origins: tuple[str, ...] = Field(
        (), description=_ORIGINS.format(what="`/mcp` and the WebSockets (with `auth` false everything)", public="")
    )
    key: str | None = Field(
        None,
        min_length=16,
        description="The control key (also `TURNSTILE_CONTROL_KEY`); none: one is made at the first start.",
    )
    trust_forwarded: bool = Field(
        False,
        description="Believe `X-Forwarded-Host` and `X-Forwarded-Proto` when telling a caller where agents reach "
        "the gate. Only behind a proxy that sets them itself.",
    )
    max_body_bytes: int = Field(
        8 << 20, ge=1024, description="Largest body of a control request; a larger one is 413."
    )
    max_piece_bytes: int = Field(
        1 << 30,
        ge=1024,
        description="Largest body of `POST /engine/weights/bucket`, a piece of new weights: as large as the "
        "largest tensor at least (in base64); also of all that come at once.",
    )
    max_body_values: int = Field(
        100_000,
        ge=100,
        description="JSON values in the body of a control request, or in a message of a WebSocket; more are 413. "
        "Ten times as many at `POST …/completions`, for token ids and logprobs; a completion of more than 50,000 "
        "tokens by OpenEnv's `generate` needs a higher bound.",
    )
    max_body_bytes_total: int = Field(
        64 << 20, ge=1024, description="Bytes of the bodies of all control requests in flight; more are 429."
    )
    page_size: int = Field(
        100,
        ge=1,
        le=1000,
        description="Episodes on a page of `GET /episodes`, and tasks on one of `GET /tasks`, where the request "
        "does not say.",
    )


class OpenEnvSettings(BoundedSection):
    """OpenEnv's routes on the control API."""

    mode: Literal["simulation", "production"] = Field(
        "simulation",
        description="`production`: OpenEnv clients get tools only. `reset`, `step` and `state` are not served, "
        "over HTTP or WebSockets.",
    )
    step_reward: FiniteFloat | None = Field(
        None,
        description="Reward of a step whose episode goes on. None, which is the truth: there is none yet. A "
        "number is for `openenv validate`, which wants one of every step.",
    )
    wait_s: float = Field(
        45.0,
        gt=0,
        description="`reset`, `wait` and `finish` answer after this at the latest; the published clients give up "
        "after 60.",
    )
    max_sockets: int = Field(1024, ge=1, description="WebSockets open at once; further ones get CAPACITY_REACHED.")
    max_sessions: int = Field(
        1024,
        ge=1,
        description="Sessions of standard MCP clients at `/mcp`; those without a running episode make way.",
    )


class GateSettings(_Clients):
    """The gate: the listener for agents, with the model API and the MCP endpoint."""

    host: str = Field("127.0.0.1", description="Address of the agent listener (TCP).")
    port: Port = Field(8001, description="Port of the agent listener; 0 takes a free one.")
    public_url: str | None = Field(
        None,
        description="URL by which agents outside reach the gate; none: the host of the caller's own request, with "
        "the port of the agent listener.",
    )
    allowed_hosts: tuple[str, ...] | None = Field(
        None, description=_HOSTS.format(what="the MCP endpoint", public=" and that of `public_url`")
    )
    allowed_origins: tuple[str, ...] = Field(
        (), description=_ORIGINS.format(what="the MCP endpoint", public=", and of `public_url`,")
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, description="Largest body of a model call; a larger one is 413."
    )
    max_body_bytes_per_episode: int = Field(
        64 << 20,
        ge=1024,
        description="Bytes of the bodies of one episode's requests in flight, MCP requests included; more are "
        "429. One body alone is always let in.",
    )
    max_body_bytes_total: int = Field(
        256 << 20,
        ge=1024,
        description="The same over all episodes. An episode gets at most as much as then stays free for others; "
        "where nothing is left, a body that still comes of the one that holds most is refused.",
    )
    max_calls: int = Field(
        256,
        ge=1,
        description="Model calls in flight over all episodes, from before their bodies are read, calls that only "
        "count tokens included; more are 429. An episode gets at most as many as then stay free for the others.",
    )
    max_calls_per_episode: int = Field(32, ge=1, description="The same per episode; more are 429.")
    max_record_bytes_per_episode: int = Field(
        256 << 20,
        ge=1024,
        description="Bytes of the records of one episode's turns, in memory and in the journal, and of replies "
        "that are kept merged with the assistant messages before them; then it is "
        "`truncated`, so that no agent can fill the disk for the others. Calls in flight together may exceed it.",
    )
    images: Literal["omit", "refuse"] = Field(
        "omit",
        description="Pictures, documents, sound and films in a model call, which no model here is shown. `omit`: "
        "a text stands in their place (that of the model's chat template where it has one, else "
        "`[image omitted]`), and they are counted. `refuse`: the call is refused, and its episode fails by the "
        "set-up.",
    )
    max_refusals: int = Field(
        5, ge=1, description="The episode ends after this many refused model calls in a row."
    )
    forced_calls: Literal["constrain", "free", "refuse"] = Field(
        "constrain",
        description="What becomes of a model call that forces a tool call. `constrain`: the engine's grammar "
        "holds the reply to one, where engine and call format have one (such turns are not trained by default); "
        "else as `free`: the reply is sampled as any other, and may have no call. `refuse`: 400.",
    )
    drain_s: float = Field(
        10.0,
        ge=0,
        description="When an episode ends, model calls in flight get this long to end by themselves; then they "
        "are aborted.",
    )
    idle_connection_s: float = Field(
        75.0,
        gt=0,
        description="An idle keep-alive connection is closed after this. It should be longer than clients keep "
        "theirs.",
    )
    max_prompt_bytes: int | None = Field(
        None,
        ge=1024,
        description="A model call with a larger body is refused unread as longer than the context, so that agents "
        "shorten their history; none: 16 for each token of the context, and at least 4194304.",
    )
    max_body_values: int = Field(
        100_000,
        ge=100,
        description="JSON values in the body of a model call, and in the arguments of its calls; more are refused "
        "as longer than the context.",
    )

    @field_validator("public_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be an address like http://HOST:PORT")
        return url.rstrip("/")
