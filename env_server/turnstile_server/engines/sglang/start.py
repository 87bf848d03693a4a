"""Reads an SGLang server at start, and checks that it is the right one.

Every reason not to serve is a StartupError that names what was asked, what came, and what to do.

Endpoints (sglang 0.5.23): ``/model_info`` (model_path, served_model_name, weight_version), ``/server_info``
(server arguments, max_req_input_len), ``/v1/models`` (max_model_len), ``/tokenize``. None of them gives the
vocabulary size, so it is read from the server's model folder where that is readable from here, else from ours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.protocol import EngineCapabilities
from turnstile_server.engines.replies import error_for_status, parse_json
from turnstile_server.engines.server_replies import get_object, read_object
from turnstile_server.engines.server_start import ServerStart
from turnstile_server.engines.sglang.experts import check_experts
from turnstile_server.engines.sglang.facts import ServerFacts, check_model, facts_of, window_of
from turnstile_server.engines.sglang.router import refuse_router
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import EngineProtocolError, StartupError
from turnstile_server.settings import EngineSettings


async def read_server(
    http: EngineHttp,
    settings: EngineSettings,
    *,
    expected_tokenizer: TokenizerProbe | None,
    vocab_size: int | None,
    model_dir: Path | None = None,
) -> ServerFacts:
    """Waits until the server is ready, reads it and compares model and tokenizer. Raises StartupError.

    ``model_dir``: our folder of the model.
    """
    start = ServerStart(http.url, settings, name="SGLang", path="/model_info")
    patience_s = settings.control_timeout_s
    with start.reading():
        model = await start.first_answer(partial(_model_info, http))
        server = await get_object(http, "/server_info", patience_s)
        models = await get_object(http, "/v1/models", patience_s)
        if vocab_size is None and expected_tokenizer is not None:
            vocab_size = expected_tokenizer.vocab_size
        facts = facts_of(http.url, model, server, window_of(models, server, settings), vocab_size)
        if model_dir is not None:
            check_model(http.url, Path(facts.model_path), model_dir)
        if settings.routed_experts:
            folders = (Path(facts.model_path), model_dir)
            window = facts.capabilities.context_length
            shape = check_experts(http.url, server, folders, window, settings.max_reply_bytes)
            facts = replace(facts, capabilities=replace(facts.capabilities, experts=shape))
        if expected_tokenizer is not None:
            await _compare_tokenizers(http, settings, expected_tokenizer, facts.capabilities, server)
    return facts


async def _model_info(http: EngineHttp, timeout_s: float) -> dict[str, Any]:
    """Raises StartupError for a router, which does not have it."""
    status, body = await http.request("GET", "/model_info", timeout_s=timeout_s)
    if status == 404:
        await refuse_router(http, timeout_s)
    return read_object(status, body, "/model_info")


async def _compare_tokenizers(
    http: EngineHttp,
    settings: EngineSettings,
    probe: TokenizerProbe,
    capabilities: EngineCapabilities,
    server: dict[str, Any],
) -> None:
    if server.get("skip_tokenizer_init") is True:
        raise StartupError("The engine runs without a tokenizer; start it without --skip-tokenizer-init.")
    probe.check_fits(capabilities.vocab_size)
    body = orjson.dumps({"prompt": list(probe.texts), "add_special_tokens": False})
    status, answer = await http.request("POST", "/tokenize", body, timeout_s=settings.control_timeout_s)
    if status != 200:
        raise error_for_status(status, answer)
    value = parse_json(answer, "/tokenize")
    theirs = value.get("tokens") if isinstance(value, dict) else None
    if not isinstance(theirs, list) or not all(isinstance(ids, list) for ids in theirs):
        raise EngineProtocolError("/tokenize gave no tokens.")
    probe.check_same(theirs)
