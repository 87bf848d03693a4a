"""Requests and replies of the control API as data: no socket, no clock, no retry.

An ApiCall holds everything that the transport sends, and the function that reads the reply. The routes and bodies
are written here once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np
from pydantic import BaseModel, ValidationError

from turnstile import errors
from turnstile.models import (
    CLIENT_ID_PATTERN,
    AgentList,
    AuditReport,
    CompletionAccepted,
    CompletionRequest,
    Episode,
    EpisodeCreated,
    EpisodeRequest,
    ForkRequest,
    ForksCreated,
    LeaseState,
    LeaseTerm,
    LiveReport,
    NetworkReport,
    PendingCalls,
    Regrade,
    RegradeRequest,
    RewardUpdate,
    SampleSet,
    ServerLoad,
    SnapshotInfo,
    SnapshotList,
    TaskPage,
    TokenForest,
    TrainedRequest,
    Turn,
    TurnList,
)
from turnstile.models.faults import fault_text
from turnstile.models.samples_encoding import MEDIA_TYPE, WireError, decode_forest, decode_samples
from turnstile.task_stream import TaskPageRequest

JSON = "application/json"
NOT_READY = "not_ready"
"""The error of a server that answers and does not play episodes now; its message says why."""

T_co = TypeVar("T_co", covariant=True)
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ApiReply:
    """A reply: the status, headers in lower case, the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T_co]):
    """One request. ``parse`` reads the body of a success.

    ``repeatable``: sending it twice has the effect of once, so it may be sent again after any failure. Other calls
    are sent again only when no byte had left. ``extra_s``: seconds that the server may take beyond the usual.
    """

    method: str
    path: str
    parse: Callable[[bytes], T_co]
    params: Mapping[str, str | list[str]] = field(default_factory=dict)
    body: bytes | None = None
    accept: str = JSON
    repeatable: bool = False
    extra_s: float = 0.0


def request_of(fields: Mapping[str, Any]) -> EpisodeRequest:
    """The body of a creation. Raises InvalidRequest, naming the fields, before anything is sent."""
    try:
        return EpisodeRequest.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


def create_episode(request: EpisodeRequest) -> ApiCall[EpisodeCreated]:
    return ApiCall(
        "POST",
        "/episodes",
        EpisodeCreated.model_validate_json,
        body=_json(request),
        repeatable=request.idempotency_key is not None,
    )


def get_episode(episode_id: str, wait_s: float = 0.0) -> ApiCall[Episode]:
    params = {"wait": f"{wait_s:.3f}"} if wait_s > 0 else {}
    path = episode_path(episode_id)
    return ApiCall("GET", path, Episode.model_validate_json, params, repeatable=True, extra_s=wait_s)


def task_page(asked: TaskPageRequest, limit: int | None) -> ApiCall[TaskPage]:
    params = given(**asked.params(), limit=limit)
    return ApiCall("GET", "/tasks", TaskPage.model_validate_json, params, repeatable=True)


def agents() -> ApiCall[AgentList]:
    return ApiCall("GET", "/agents", AgentList.model_validate_json, repeatable=True)


def metrics() -> ApiCall[str]:
    return ApiCall(
        "GET", "/metrics", lambda body: body.decode(errors="replace"), accept="text/plain", repeatable=True
    )


def live(since: float) -> ApiCall[LiveReport]:
    params = given(since=since)
    return ApiCall("GET", "/live", LiveReport.model_validate_json, params, repeatable=True)


def regrade(episode_id: str, fields: Mapping[str, Any], extra_s: float) -> ApiCall[Regrade]:
    """Repeatable: the server knows the ``regrade_id``."""
    body = _body(RegradeRequest, **fields)
    path = f"{episode_path(episode_id)}/regrade"
    return ApiCall("POST", path, Regrade.model_validate_json, body=body, repeatable=True, extra_s=extra_s)


def snapshot(episode_id: str, extra_s: float) -> ApiCall[SnapshotInfo]:
    path = f"{episode_path(episode_id)}/snapshot"
    return ApiCall("POST", path, SnapshotInfo.model_validate_json, extra_s=extra_s)


def snapshots(episode_id: str) -> ApiCall[SnapshotList]:
    path = f"{episode_path(episode_id)}/snapshots"
    return ApiCall("GET", path, SnapshotList.model_validate_json, repeatable=True)


def fork(episode_id: str, fields: Mapping[str, Any]) -> ApiCall[ForksCreated]:
    """Repeatable with an idempotency key."""
    body = _body(ForkRequest, **fields)
    path = f"{episode_path(episode_id)}/fork"
    known = fields.get("idempotency_key") is not None
    return ApiCall("POST", path, ForksCreated.model_validate_json, body=body, repeatable=known)


def finish(episode_id: str, extra_s: float) -> ApiCall[Episode]:
    path = f"{episode_path(episode_id)}/finish"
    return ApiCall("POST", path, Episode.model_validate_json, extra_s=extra_s)


def cancel(episode_id: str) -> ApiCall[Episode]:
    return ApiCall("POST", f"{episode_path(episode_id)}/cancel", Episode.model_validate_json)


def reward(episode_id: str, fields: Mapping[str, Any]) -> ApiCall[Episode]:
    """May be sent again: it has a key."""
    body = _body(RewardUpdate, **fields)
    path = f"{episode_path(episode_id)}/reward"
    return ApiCall("POST", path, Episode.model_validate_json, body=body, repeatable=True)


def trained(episode_id: str, fields: Mapping[str, Any]) -> ApiCall[Episode]:
    """May be sent again: the same step is recorded once."""
    body = _body(TrainedRequest, **fields)
    path = f"{episode_path(episode_id)}/trained"
    return ApiCall("POST", path, Episode.model_validate_json, body=body, repeatable=True)


def renew_lease(lease_id: str, lease_s: float) -> ApiCall[LeaseState]:
    body = _body(LeaseTerm, lease_s=lease_s)
    return ApiCall("POST", f"/leases/{quote(lease_id, safe='')}", LeaseState.model_validate_json, body=body)


def delete(episode_id: str) -> ApiCall[None]:
    return ApiCall("DELETE", episode_path(episode_id), _nothing)


def turns(episode_id: str) -> ApiCall[tuple[Turn, ...]]:
    return ApiCall("GET", f"{episode_path(episode_id)}/turns", _turns, repeatable=True)


def samples(episode_id: str, include_untrained: bool = False) -> ApiCall[SampleSet]:
    params = {"include_untrained": "true"} if include_untrained else {}
    path = f"{episode_path(episode_id)}/samples"
    return ApiCall("GET", path, decode_samples, params, accept=MEDIA_TYPE, repeatable=True)


def tree(episode_id: str, include_untrained: bool = False) -> ApiCall[TokenForest]:
    params = {"include_untrained": "true"} if include_untrained else {}
    path = f"{episode_path(episode_id)}/tree"
    return ApiCall("GET", path, decode_forest, params, accept=MEDIA_TYPE, repeatable=True)


def journal(episode_id: str) -> ApiCall[bytes]:
    return ApiCall("GET", f"{episode_path(episode_id)}/journal", bytes, accept="*/*", repeatable=True)


def pending(episode_id: str, wait_s: float = 0.0) -> ApiCall[PendingCalls]:
    params = {"wait": f"{wait_s:.3f}"} if wait_s > 0 else {}
    path = f"{episode_path(episode_id)}/pending"
    return ApiCall("GET", path, PendingCalls.model_validate_json, params, repeatable=True, extra_s=wait_s)


def complete(episode_id: str, fields: Mapping[str, Any]) -> ApiCall[CompletionAccepted]:
    """Repeatable: the server recognises a completion that it has taken."""
    _check_finite(fields.get("logprobs"))
    body = _body(CompletionRequest, **fields)
    path = f"{episode_path(episode_id)}/completions"
    return ApiCall("POST", path, CompletionAccepted.model_validate_json, body=body, repeatable=True)


def network(episode_id: str) -> ApiCall[NetworkReport]:
    return ApiCall(
        "GET", f"{episode_path(episode_id)}/network", NetworkReport.model_validate_json, repeatable=True
    )


def audit(episode_id: str, extra_s: float) -> ApiCall[AuditReport]:
    path = f"{episode_path(episode_id)}/audit"
    return ApiCall("POST", path, AuditReport.model_validate_json, extra_s=extra_s)


def ready() -> ApiCall[None]:
    return ApiCall("GET", "/ready", _nothing, repeatable=True)


def load() -> ApiCall[ServerLoad]:
    """Sent once: who looks, looks again."""
    return ApiCall("GET", "/load", ServerLoad.model_validate_json)


def drain() -> ApiCall[ServerLoad]:
    return ApiCall("POST", "/drain", ServerLoad.model_validate_json, repeatable=True)


def headers_of(call: ApiCall[Any], key: str | None) -> dict[str, str]:
    headers = {"accept": call.accept}
    if call.body is not None:
        headers["content-type"] = JSON
    if key:
        headers["authorization"] = f"Bearer {key}"
    return headers


def read(call: ApiCall[T_co], reply: ApiReply, server: str) -> T_co:
    """The parsed body of a success. Raises the typed error of any other reply."""
    if not 200 <= reply.status < 300:
        raise error_of(reply, server)
    try:
        return call.parse(reply.body)
    except (ValidationError, WireError) as error:
        raise errors.ProtocolError(
            f"{server} answered {call.method} {call.path} with something that this client cannot read: "
            f"{str(error).splitlines()[0]}",
            status=reply.status,
            server=server,
        ) from error


_BY_STATUS: dict[int, type[errors.TurnstileError]] = {
    400: errors.InvalidRequest,
    401: errors.AuthError,
    404: errors.NotFound,
    405: errors.InvalidRequest,
    409: errors.Conflict,
    410: errors.Gone,
    413: errors.InvalidRequest,
    422: errors.InvalidRequest,
    429: errors.ServerBusy,
    503: errors.ServerUnavailable,
}


def error_of(reply: ApiReply, server: str) -> errors.TurnstileError:
    """The typed error of a reply that is no success."""
    try:
        told = json.loads(reply.body)
        if reply.status == 503 and told.get("status") == "not ready":
            return errors.ServerUnavailable(str(told["reason"]), type=NOT_READY, status=503, server=server)
        body = told["error"]
        kind, message, detail = str(body["type"]), str(body["message"]), body.get("detail")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return errors.ProtocolError(
            f"{server} answered with status {reply.status} and no Turnstile error; is this a control API's URL?",
            status=reply.status,
            server=server,
        )
    if kind.startswith("engine_") and reply.status >= 500:
        cls: type[errors.TurnstileError] = errors.EngineError
    else:
        cls = _BY_STATUS.get(reply.status, errors.ServerError)
    return cls(
        message,
        type=kind,
        status=reply.status,
        detail=detail,
        server=server,
        retry_after_s=_seconds(reply.headers.get("retry-after")),
    )


def given(**asked: object) -> dict[str, str | list[str]]:
    """A list is a parameter that is given several times."""
    return {
        name: [str(each) for each in value] if isinstance(value, list) else str(value)
        for name, value in asked.items()
        if value is not None
    }


def episode_path(episode_id: str) -> str:
    if not re.fullmatch(CLIENT_ID_PATTERN, episode_id):
        raise errors.InvalidRequest(f"{episode_id!r} is no episode id: letters, digits, _ and -, at most 64")
    return f"/episodes/{quote(episode_id, safe='')}"


def _body(model: type[ModelT], **fields: Any) -> bytes:
    try:
        return _json(model(**fields))
    except ValidationError as error:
        raise _invalid(error) from error


def _json(model: BaseModel) -> bytes:
    """Raises InvalidRequest for a value that JSON cannot hold (a NaN would arrive as null)."""
    try:
        return json.dumps(model.model_dump(exclude_none=True), allow_nan=False, default=_listed).encode()
    except (TypeError, ValueError) as error:
        raise errors.InvalidRequest(f"the request is not JSON: {error}", type="invalid_value") from error


def _check_finite(logprobs: Any) -> None:
    """Raises InvalidRequest with the index of a number that is not finite, which JSON's own error lacks.

    Values that are no numbers are left to the model's own check.
    """
    try:
        at = np.flatnonzero(~np.isfinite(np.asarray(() if logprobs is None else logprobs, np.float64)))
    except (TypeError, ValueError):
        return
    if len(at):
        found = np.asarray(logprobs).reshape(-1)[at[0]]
        raise errors.InvalidRequest(f"logprobs: {found} at index {at[0]} is not finite", type="invalid_value")


def _listed(value: object) -> list[Any]:
    if isinstance(value, np.ndarray):
        listed: list[Any] = value.tolist()
        return listed
    raise TypeError(f"{type(value).__name__} is no JSON")


def _invalid(error: ValidationError) -> errors.InvalidRequest:
    detail = [
        {"field": ".".join(str(part) for part in item["loc"]), "reason": fault_text(item)}
        for item in error.errors()
    ]
    message = "; ".join(f"{item['field']}: {item['reason']}" for item in detail)
    return errors.InvalidRequest(message, type="invalid_value", detail=detail)


def _turns(body: bytes) -> tuple[Turn, ...]:
    return TurnList.model_validate_json(body).turns


def _nothing(_body: bytes) -> None:
    return None


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdecimal() else None
