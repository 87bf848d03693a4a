"""Requests to the engine's routes of the control API, as data. All but ``engine`` change something; none is
repeated after it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from turnstile._requests import ApiCall, _body, _json
from turnstile.models import (
    AdapterRequest,
    EngineInfo,
    PauseMode,
    PauseRequest,
    WeightBucketRequest,
    WeightGroupRequest,
    WeightsRequest,
    WeightUpdateBegin,
    WorkerRequest,
)


def engine() -> ApiCall[EngineInfo]:
    return ApiCall("GET", "/engine", EngineInfo.model_validate_json, repeatable=True)


def pause(mode: PauseMode, extra_s: float) -> ApiCall[EngineInfo]:
    return _post("pause", extra_s, PauseRequest, mode=mode)


def resume(extra_s: float) -> ApiCall[EngineInfo]:
    return _post("resume", extra_s)


def update_weights(path: str, version: str, mode: PauseMode, extra_s: float) -> ApiCall[EngineInfo]:
    return _post("weights", extra_s, WeightsRequest, path=path, version=version, mode=mode)


def begin_update(version: str, way: str, mode: PauseMode, extra_s: float) -> ApiCall[EngineInfo]:
    return _post("weights/begin", extra_s, WeightUpdateBegin, version=version, way=way, mode=mode)


def load_bucket(bucket: WeightBucketRequest, extra_s: float) -> ApiCall[EngineInfo]:
    return _call("POST", "weights/bucket", extra_s, _json(bucket))


def end_update(extra_s: float) -> ApiCall[EngineInfo]:
    return _call("POST", "weights/end", extra_s, b"{}")


def cancel_update(extra_s: float) -> ApiCall[EngineInfo]:
    return _post("weights/cancel", extra_s)


def join_group(fields: Mapping[str, Any], extra_s: float) -> ApiCall[EngineInfo]:
    return _post("groups", extra_s, WeightGroupRequest, **fields)


def leave_group(name: str, extra_s: float) -> ApiCall[EngineInfo]:
    return _call("DELETE", f"groups/{quote(name, safe='')}", extra_s)


def load_adapter(name: str, path: str, extra_s: float) -> ApiCall[EngineInfo]:
    return _post("adapters", extra_s, AdapterRequest, name=name, path=path)


def unload_adapter(name: str, extra_s: float) -> ApiCall[EngineInfo]:
    return _call("DELETE", f"adapters/{quote(name, safe='')}", extra_s)


def sleep(extra_s: float) -> ApiCall[EngineInfo]:
    return _post("sleep", extra_s)


def wake(extra_s: float) -> ApiCall[EngineInfo]:
    return _post("wake", extra_s)


def add_worker(url: str, extra_s: float) -> ApiCall[EngineInfo]:
    return _post("workers", extra_s, WorkerRequest, url=url)


def remove_worker(worker_id: str, extra_s: float) -> ApiCall[EngineInfo]:
    return _call("DELETE", f"workers/{quote(worker_id, safe='')}", extra_s)


def _post(what: str, extra_s: float, model: type[BaseModel] | None = None, **fields: Any) -> ApiCall[EngineInfo]:
    """Raises InvalidRequest, naming the fields, before anything is sent."""
    return _call("POST", what, extra_s, None if model is None else _body(model, **fields))


def _call(method: str, what: str, extra_s: float, body: bytes | None = None) -> ApiCall[EngineInfo]:
    return ApiCall(method, f"/engine/{what}", EngineInfo.model_validate_json, body=body, extra_s=extra_s)
