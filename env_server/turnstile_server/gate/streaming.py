"""Answering a call, whole or as a stream.

The status is withheld until the engine has spoken, at most ``status_hold_s``, so that earlier failures are real
statuses; later ones are the dialect's in-stream error. Terminal bytes leave only after the commit.
"""

from __future__ import annotations

import anyio

from turnstile_server.gate.call import Call, head_of, reply_of
from turnstile_server.gate.dialects.base import Dialect, ModelCall
from turnstile_server.gate.exchange import Exchange, unbuffered
from turnstile_server.settings import GateSettings


async def answer_whole(exchange: Exchange, call: Call, request: ModelCall, dialect: Dialect) -> None:
    """Raises the call's error (nothing is sent then) and CallerGone."""
    answer = await call.outcome()
    reply = reply_of(answer, head_of(call, request.model))
    turn = (b"x-turnstile-turn", answer.node.turn.turn_id.encode())
    await exchange.respond(200, dialect.reply(reply, request), [turn])


async def answer_stream(
    exchange: Exchange, call: Call, request: ModelCall, dialect: Dialect, settings: GateSettings
) -> None:
    """Raises the call's error while no status is sent, and CallerGone."""
    with anyio.move_on_after(settings.status_hold_s):
        await call.spoke()
    if call.error is not None and not call.shown:
        raise call.error
    head = head_of(call, request.model)
    writer = dialect.stream(head, request)
    await exchange.start(200, unbuffered(writer.content_type))
    await exchange.write(writer.start())
    sent = 0
    while True:
        pending = call.deltas[sent:]
        if pending:
            sent += len(pending)
            call.shown = max(call.shown, sent)
            await exchange.write(b"".join(writer.delta(delta) for delta in pending))
        elif call.done:
            break
        else:
            with anyio.move_on_after(settings.keepalive_s) as silence:
                await call.changed(sent)
            if silence.cancelled_caught:
                await exchange.write(writer.keepalive())
    if call.error is not None:
        await exchange.end(writer.error(call.error))
    elif call.answer is not None:
        await exchange.end(writer.end(reply_of(call.answer, head)))
