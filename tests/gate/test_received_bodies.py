"""A body is what its parts are together, however it is cut and whenever its parts are taken."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.http.exchange import ReceivedBody
from turnstile_server.http.intake import BodyReader, Intake
from turnstile_server.settings import GateSettings

SIZES = st.lists(st.sampled_from((0, 1, 3, 2_047, 2_048, 4_095, 4_096, 9_000)), min_size=1, max_size=12)


def cut(sizes: list[int]) -> list[bytes]:
    """Parts of these sizes, all of whose bytes tell where they are."""
    text = b"".join(b"%07d," % at for at in range(sum(sizes) // 8 + 1))
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    return parts


@given(SIZES)
def test_a_body_is_its_parts(sizes: list[int]) -> None:
    parts = cut(sizes)
    received = ReceivedBody()
    for part in parts:
        received.add(part)
    whole = received.whole()
    assert type(whole) is bytes
    assert whole == b"".join(parts)


@given(SIZES, st.lists(st.booleans(), min_size=12, max_size=12))
def test_rest_hands_on_what_next_gives(sizes: list[int], waits: list[bool]) -> None:
    parts = cut(sizes)
    messages = [
        {"type": "http.request", "body": part, "more_body": at < len(parts) - 1} for at, part in enumerate(parts)
    ]

    async def read(*, at_once: bool) -> tuple[list[Any], int]:
        left = list(zip(messages, waits, strict=False))
        settings = GateSettings()
        intake = Intake("gate", settings)

        async def receive() -> Any:
            message, waited = left.pop(0)
            if waited:
                await asyncio.sleep(0)
            return message

        got: list[Any] = []

        def take(message: Any) -> bool:
            got.append(message)
            return bool(message["more_body"])

        with intake.reserving("ep_0", 0, "gate") as reservation:
            reader = BodyReader(receive, reservation, intake, settings, "gate")
            if at_once:
                await reader.rest(take)
            else:
                while take(await reader.next()):
                    pass
            return got, reservation.size

    assert (
        anyio.run(lambda: read(at_once=True)) == anyio.run(lambda: read(at_once=False)) == (messages, sum(sizes))
    )
