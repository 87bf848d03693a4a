"""A scripted agent: one conversation in one dialect, by plain HTTP. It notes which samples it was given.

It retries as the vendors' SDKs do: after a 408, 409, 429 or 5xx and after a lost connection, at most twice, with
the header ``x-stainless-retry-count`` where the dialect's SDK sends it. Waits are shorter than theirs.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from exactness.dialects import Dialect, Endpoint, Json, Reply, dumps
from exactness.plan import NAME

RETRIES: Final = 2
WAIT_S: Final = 0.3
CALL_S: Final = 60.0
AGAIN: Final = frozenset({408, 409, 429})


class CallFailed(Exception):
    """A call had no reply after its retries. Says the status and the beginning of the body."""


@dataclass
class Notes:
    """What the agents of one run saw. ``given``: names of the samples whose replies they went on with."""

    given: set[str] = field(default_factory=set)
    calls: int = 0
    first_byte_s: float | None = None
    """Of a streamed call: the first bytes with text in them."""
    whole_s: float | None = None


@dataclass
class Agent:
    """``history``: messages in the dialect's form, the system prompt left out."""

    http: httpx.AsyncClient
    endpoint: Endpoint
    dialect: Dialect
    notes: Notes
    system: str
    history: list[Json] = field(default_factory=list)
    pending: tuple[tuple[str, str], ...] = ()
    """Calls of the last reply that have no results yet."""

    def beside(self, system: str) -> Agent:
        """Another agent of the same episode, with a conversation of its own."""
        return Agent(self.http, self.endpoint, self.dialect, self.notes, system)

    def ask(self, text: str) -> None:
        self.history.append(self.dialect.user(text))

    def answer_calls(self, *texts: str) -> None:
        """Results for the calls of the last reply, in order. A reply that lost its calls is answered by the
        user."""
        if len(self.pending) == len(texts):
            self.history += self.dialect.results(self.pending, texts)
        else:
            self.ask("\n".join(texts))
        self.pending = ()

    async def call(self, *, lose: bool = False) -> Reply:
        """Sends the history and adds the reply to it. ``lose``: the first reply is read and forgotten, as if it
        had got lost behind the gateway, and the call is sent again. Raises CallFailed."""
        body = dumps(self.dialect.body(self.system, self.history, stream=False))
        attempt = 0
        if lose:
            await self._send(body, 0)
            attempt = 1
        while True:
            self.notes.calls += 1
            try:
                response = await self._send(body, attempt)
                if response.status_code == 200:
                    return self._take(response.json())
                failed = f"{response.status_code} {response.text[:160]}"
                final = response.status_code < 500 and response.status_code not in AGAIN
            except httpx.TransportError as error:
                failed, final = type(error).__name__, False
            attempt += 1
            if final or attempt > RETRIES:
                raise CallFailed(failed)
            await asyncio.sleep(WAIT_S)

    async def hang_up(self, after_s: float, *, stream: bool = False) -> None:
        """Sends the history and closes the connection after a time, without a whole reply."""
        body = dumps(self.dialect.body(self.system, self.history, stream=stream))
        self.notes.calls += 1
        async with httpx.AsyncClient(timeout=CALL_S) as http:
            sent = asyncio.create_task(http.post(self._url(stream), content=body, headers=self._headers(0)))
            await asyncio.sleep(after_s)
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    async def retry(self) -> Reply:
        """The call again, as the SDK's first retry."""
        self.notes.calls += 1
        body = dumps(self.dialect.body(self.system, self.history, stream=False))
        response = await self._send(body, 1)
        if response.status_code != 200:
            raise CallFailed(f"{response.status_code} {response.text[:160]}")
        return self._take(response.json())

    async def stream(self, attempt: int = 0) -> None:
        """Sends the history for a stream, reads it to its end and notes the times. It is a conversation's last
        call. ``attempt``: above 0 it is a retry. Raises CallFailed."""
        body = dumps(self.dialect.body(self.system, self.history, stream=True))
        self.notes.calls += 1
        began = time.perf_counter()
        text, refused = "", ""
        url, headers = self._url(True), self._headers(attempt)
        async with self.http.stream("POST", url, content=body, headers=headers, timeout=CALL_S) as response:
            async for line in response.aiter_lines():
                if response.status_code != 200:
                    refused += line
                elif line.startswith("data: {"):
                    text += self.dialect.delta(json.loads(line[6:]))
                    if text and self.notes.first_byte_s is None:
                        self.notes.first_byte_s = time.perf_counter() - began
        self.notes.whole_s = time.perf_counter() - began
        if response.status_code != 200:
            raise CallFailed(f"{response.status_code} {refused[:160]}")
        self.notes.given.update(NAME.findall(text))

    def _take(self, body: Any) -> Reply:
        reply = self.dialect.read(body)
        self.notes.given.update(NAME.findall(reply.text))
        self.history += reply.echo
        self.pending = reply.calls
        return reply

    async def _send(self, body: bytes, attempt: int) -> httpx.Response:
        return await self.http.post(self._url(False), content=body, headers=self._headers(attempt), timeout=CALL_S)

    def _url(self, stream: bool) -> str:
        return self.endpoint.base_url + self.dialect.path(stream)

    def _headers(self, attempt: int) -> dict[str, str]:
        headers = {"content-type": "application/json", **self.dialect.headers(self.endpoint.key)}
        if self.dialect.counts_retries:
            headers["x-stainless-retry-count"] = str(attempt)
        return headers
