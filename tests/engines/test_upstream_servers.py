"""``--engine upstream`` with real servers: SGLang's and vLLM's Chat Completions, and vLLM's Messages."""

from __future__ import annotations

from pathlib import Path

import anthropic
import pytest

from bounded import bounded
from turnstile.models import Message, Sampling
from turnstile_server.engines.upstream.chat import ChatUpstream
from turnstile_server.engines.upstream.engine import UpstreamEngine
from turnstile_server.engines.upstream.messages import MessagesUpstream
from turnstile_server.engines.upstream.protocol import UpstreamAnswers, UpstreamCall
from turnstile_server.errors import ContextOverflow, ModelCannotServe, StartupError
from turnstile_server.settings import EngineSettings
from vllm_server import CONTEXT_LENGTH
from vllm_server import TIMEOUT_S as VLLM_TIMEOUT_S

pytestmark = pytest.mark.anyio
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Count to three.")
CALL = UpstreamCall((SYSTEM, USER), (), Sampling(), 12)


async def check_answers(upstream: UpstreamAnswers, model: str) -> None:
    """A reply that is cut, its usage, a conversation that goes on, a prompt that is too long."""
    pieces = [piece async for piece in upstream.answer(CALL)]
    finish = pieces[-1].finish
    assert finish is not None
    text = "".join(piece.text for piece in pieces)
    assert (finish.reason, finish.usage.completion_tokens, finish.usage.model) == ("length", 12, model)
    assert finish.usage.prompt_tokens is not None
    assert finish.usage.prompt_tokens > 10
    assert len(pieces) > 3  # it streams
    longer = UpstreamCall((SYSTEM, USER, Message("assistant", text), Message("user", "On.")), (), Sampling(), 12)
    later = [piece async for piece in upstream.answer(longer)][-1].finish
    assert later is not None
    assert later.usage.prompt_tokens is not None
    assert later.usage.prompt_tokens > finish.usage.prompt_tokens
    long = UpstreamCall((Message("user", "word " * 3 * CONTEXT_LENGTH),), (), Sampling(), 12)
    with pytest.raises((ContextOverflow, ModelCannotServe)) as refused:
        _ = [piece async for piece in upstream.answer(long)]
    assert refused.type is ContextOverflow, str(refused.value)


async def started(url: str, model: str) -> UpstreamEngine:
    engine = UpstreamEngine(bounded(EngineSettings, kind="upstream", url=url), model)
    await engine.start()
    return engine


@pytest.mark.vllm
@pytest.mark.timeout(VLLM_TIMEOUT_S)
async def test_vllm_is_an_upstream_in_both_formats(vllm_url: str) -> None:
    with pytest.raises(StartupError, match="no model 'other'"):
        await started(vllm_url, "other")
    engine = await started(vllm_url, "policy")
    try:
        assert isinstance(engine._started, ChatUpstream)
        assert engine.capabilities.context_length == CONTEXT_LENGTH
        await check_answers(engine, "policy")
    finally:
        await engine.close()
    messages = MessagesUpstream(
        anthropic.AsyncAnthropic(api_key="none", base_url=vllm_url, max_retries=0), "policy"
    )
    try:
        await check_answers(messages, "policy")
        assert await messages.count(CALL) > 10
    finally:
        await messages.close()


@pytest.mark.sglang
async def test_sglang_is_an_upstream(sglang_url: str, tiny_model: Path) -> None:
    engine = await started(sglang_url, str(tiny_model))  # the name by which it serves a folder
    try:
        assert engine.capabilities.context_length > 1000
        await check_answers(engine, str(tiny_model))
    finally:
        await engine.close()
