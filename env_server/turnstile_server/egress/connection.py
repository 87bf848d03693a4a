"""One connection of a sandbox to the proxy, from its request to its end.

What must hold: one request for each connection, so nothing that follows it can go to another host; no byte passes
before host, port, address and, in a tunnel, the name in each TLS greeting have been checked; a slow side stops the
other; whatever ends the connection, both sides are closed and its decision is in the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import h11
from anyio.abc import ByteStream, TaskGroup

from turnstile.models.network import NetworkOutcome
from turnstile_server.egress.bounds import EgressBounds
from turnstile_server.egress.budget import EgressStats, NetworkBudget
from turnstile_server.egress.client_hello import ClientHello, HelloReader, NotTls, asks_again
from turnstile_server.egress.dialer import Dialer
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import HostRule, NetworkPhase
from turnstile_server.egress.proxy_target import ProxyTarget, forwarded_headers, target_of, upstream_request
from turnstile_server.egress.refusal import NetworkRefused
from turnstile_server.egress.streams import READ_BYTES, HttpEnd, IdleWatch, MeteredStream
from turnstile_server.settings.egress import EgressSettings
from turnstile_server.settings.host_patterns import normal_host, shown_host

_REASON = b"Refused by the network policy"
_ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
"""A TLS alert: fatal, access_denied."""
_SHOWN_RULES = 20
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


@dataclass(frozen=True, slots=True)
class NetworkAccess:
    """The hosts that a sandbox may reach now, and the budget and the log for it."""

    phase: NetworkPhase
    rules: tuple[HostRule, ...]
    log: NetworkLog
    budget: NetworkBudget


class ProxyConnection:
    """Serves ``client`` once. The caller closes it."""

    def __init__(
        self,
        client: ByteStream,
        access: NetworkAccess,
        dialer: Dialer,
        settings: EgressSettings,
        stats: EgressStats,
    ) -> None:
        self._client = client
        self._access = access
        self._dialer = dialer
        self._settings = settings
        self._bounds = settings.bounds_of(EgressBounds)
        self._stats = stats
        self._http = HttpEnd(client, h11.SERVER, self._bounds.max_header_bytes)
        self._watch = IdleWatch(self._bounds.idle_timeout_s)
        self._entry = access.log.begin(access.phase)

    async def serve(self) -> None:
        entry = self._entry
        self._stats.open += 1
        try:
            await self._serve()
        except NetworkRefused as refusal:
            entry.fail(refusal.outcome, refusal.detail)
            await self._refuse(refusal)
        except _GONE:
            pass  # the client left
        except anyio.get_cancelled_exc_class():
            entry.fail(NetworkOutcome.ENDED, f"the {self._access.phase} phase ended")
            raise
        finally:
            self._stats.open -= 1
            self._stats.outcomes[entry.outcome] += 1
            self._access.log.end(entry)

    async def refuse(self, refusal: NetworkRefused, *, counts: bool) -> None:
        """Answers without a look at the request. ``counts``: like a connection that is served."""
        try:
            if counts:
                self._access.budget.take_connection()
        except NetworkRefused as spent:
            refusal = spent
        self._entry.fail(refusal.outcome, refusal.detail)
        self._stats.outcomes[refusal.outcome] += 1
        self._access.log.end(self._entry)
        await self._refuse(refusal)

    async def _serve(self) -> None:
        """Raises NetworkRefused, and what the client's stream raises."""
        self._access.budget.take_connection()
        request = await self._request()
        self._entry.method = request.method.decode("ascii")[:16]
        target = target_of(request)
        self._entry.host, self._entry.port = target.host, target.port
        self._check(target)
        stream = await self._dialer.dial(target, self._entry)
        try:
            upstream = MeteredStream(stream, self._access.budget, self._entry, self._watch)
            with self._watch.watching():
                if target.tunnel:
                    await self._tunnel(target, upstream)
                else:
                    await self._forward(request, target, upstream)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _request(self) -> h11.Request:
        most = self._bounds.request_timeout_s
        try:
            with anyio.fail_after(most):
                event = await self._http.next()
        except TimeoutError:
            raise NetworkRefused(NetworkOutcome.REQUEST, f"no whole request came within {most:g} s") from None
        except h11.RemoteProtocolError as error:
            raise NetworkRefused(NetworkOutcome.REQUEST, f"the request is not HTTP/1.1: {error}") from None
        if not isinstance(event, h11.Request):
            raise NetworkRefused(NetworkOutcome.REQUEST, "the connection was closed before a request came")
        return event

    def _check(self, target: ProxyTarget) -> None:
        rules, phase = self._access.rules, self._access.phase
        if not any(rule.admits(target.host, target.port) for rule in rules):
            shown = ", ".join(str(rule) for rule in rules[:_SHOWN_RULES]) or "nothing"
            more = f" and {len(rules) - _SHOWN_RULES} more" if len(rules) > _SHOWN_RULES else ""
            raise NetworkRefused(
                NetworkOutcome.HOST,
                f"{shown_host(target.host)}:{target.port} is not on the allow-list of this task",
                f", which has, for {phase}: {shown}{more}",
            )
        if not target.tunnel and not self._settings.plain_http:
            raise NetworkRefused(
                NetworkOutcome.HOST, "this server forwards no plain http:// (egress.plain_http); use https://"
            )

    async def _refuse(self, refusal: NetworkRefused) -> None:
        if not self._http.may_respond:
            return  # it has begun: the client sees it cut
        body = f"turnstile: {refusal.detail}{refusal.hint}\n".encode()
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(body))),
            ("x-turnstile-network", refusal.outcome.value),
            ("connection", "close"),
        ]
        reason = _REASON if refusal.status == 403 else refusal.status.phrase.encode()
        try:
            with anyio.move_on_after(self._bounds.request_timeout_s):
                await self._http.send(h11.Response(status_code=refusal.status, headers=headers, reason=reason))
                await self._http.send(h11.Data(data=body))
                await self._http.send(h11.EndOfMessage())
        except (*_GONE, h11.LocalProtocolError):
            return  # it left, or a HEAD may have no body

    # A tunnel

    async def _tunnel(self, target: ProxyTarget, upstream: MeteredStream) -> None:
        await self._http.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        first = self._http.trailing
        if target.port not in self._settings.opaque_ports:
            first = await self._greet(target, upstream, first)
        self._entry.allowed = True
        if first:
            await upstream.send(first)
        async with anyio.create_task_group() as both:
            both.start_soon(self._guarded, both, self._upload, upstream)
            await self._guarded(both, self._download, upstream)
            both.cancel_scope.cancel()

    async def _greet(self, target: ProxyTarget, upstream: MeteredStream, data: bytes) -> bytes:
        """Passes on the client's TLS greeting, and the second one where the host asks for it; nothing else of the
        client's before it is known whether it does. Gives what the client sent after them. Raises
        NetworkRefused."""
        try:
            greeting, data = await self._greeting(target, data)
            self._entry.allowed = True
            await upstream.send(greeting)
            said = b""
            while (again := asks_again(said)) is None:
                said += (part := await upstream.receive())
                await self._client.send(part)
            if again:
                greeting, data = await self._greeting(target, data, again=True)
                await upstream.send(greeting)
        except NetworkRefused as refusal:
            if refusal.outcome is NetworkOutcome.NAME:
                with anyio.move_on_after(self._bounds.request_timeout_s):
                    await self._client.send(_ACCESS_DENIED)
            raise
        return data

    async def _greeting(self, target: ProxyTarget, data: bytes, *, again: bool = False) -> tuple[bytes, bytes]:
        """The bytes that the client sent up to the end of its TLS greeting, and those after it. Raises
        NetworkRefused."""
        reader, seen = HelloReader(self._bounds.max_client_hello_bytes, again=again), bytearray()
        most = self._bounds.request_timeout_s
        try:
            with anyio.fail_after(most):
                while True:
                    seen += data
                    hello = reader.feed(data)
                    if hello is not None:
                        _check_name(hello, target)
                        end = len(seen) - reader.rest
                        return bytes(seen[:end]), bytes(seen[end:])
                    data = await self._client.receive(READ_BYTES)
        except NotTls as error:
            raise NetworkRefused(NetworkOutcome.NAME, f"the tunnel to {target.host} is not TLS: {error}") from None
        except TimeoutError:
            raise NetworkRefused(NetworkOutcome.NAME, f"no TLS greeting came within {most:g} s") from None
        except anyio.EndOfStream:
            raise NetworkRefused(NetworkOutcome.NAME, "the tunnel was closed before a TLS greeting") from None

    async def _upload(self, upstream: MeteredStream) -> None:
        try:
            while True:
                data = await self._client.receive(READ_BYTES)
                await upstream.send(data)
        except anyio.EndOfStream:
            await upstream.send_eof()

    async def _download(self, upstream: MeteredStream) -> None:
        while True:
            await self._client.send(await upstream.receive())
            self._watch.touch()

    # One request

    async def _forward(self, request: h11.Request, target: ProxyTarget, upstream: MeteredStream) -> None:
        host = HttpEnd(upstream, h11.CLIENT, self._bounds.max_header_bytes)
        self._entry.allowed = True
        await host.send(upstream_request(request, target))
        async with anyio.create_task_group() as both:
            both.start_soon(self._guarded, both, self._send_body, host)
            await self._guarded(both, self._send_response, host)
            both.cancel_scope.cancel()
        if self._entry.outcome is not NetworkOutcome.OK:
            raise NetworkRefused(self._entry.outcome, self._entry.detail or "")

    async def _send_body(self, host: HttpEnd) -> None:
        try:
            await self._send_whole_body(host)
        except NetworkRefused as refusal:
            # A host may respond and close before it has read the whole body: the response says what happened.
            if refusal.outcome is not NetworkOutcome.UPSTREAM:
                raise

    async def _send_whole_body(self, host: HttpEnd) -> None:
        while True:
            try:
                event = await self._http.next()
            except h11.RemoteProtocolError as error:
                raise NetworkRefused(NetworkOutcome.REQUEST, f"the request is not HTTP/1.1: {error}") from None
            if isinstance(event, h11.Data):
                await host.send(h11.Data(data=event.data))
            else:
                await host.send(h11.EndOfMessage())
                return

    async def _send_response(self, host: HttpEnd) -> None:
        """Until the response has ended."""
        try:
            while True:
                event = await host.next()
                match event:
                    case h11.InformationalResponse():
                        if self._http.wants_continue:
                            await self._http.send(h11.InformationalResponse(status_code=100, headers=[]))
                    case h11.Response():
                        headers = [*forwarded_headers(event.headers), (b"connection", b"close")]
                        await self._http.send(
                            h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
                        )
                    case h11.Data():
                        await self._http.send(h11.Data(data=event.data))
                    case h11.EndOfMessage():
                        await self._http.send(h11.EndOfMessage())
                        return
                    case _:
                        raise NetworkRefused(NetworkOutcome.UPSTREAM, "the host closed before its response")
                self._watch.touch()
        except h11.RemoteProtocolError as error:
            raise NetworkRefused(
                NetworkOutcome.UPSTREAM, f"the host's response is not HTTP/1.1: {error}"
            ) from None

    async def _guarded(
        self, both: TaskGroup, direction: Callable[..., Awaitable[None]], *args: MeteredStream | HttpEnd
    ) -> None:
        """Runs one direction. What ends it ends the other, and stands in the log; nothing is raised."""
        try:
            await direction(*args)
        except NetworkRefused as refusal:
            self._entry.fail(refusal.outcome, refusal.detail)
            both.cancel_scope.cancel()
        except (*_GONE, h11.LocalProtocolError):
            both.cancel_scope.cancel()


def _check_name(hello: ClientHello, target: ProxyTarget) -> None:
    """Raises NetworkRefused where TLS asks for another name than the tunnel's."""
    if hello.hidden is not None:
        problem = f"hides the name it asks for ({hello.hidden})"
    elif hello.server_name is None:
        if target.by_address:
            return
        problem = "names no host (SNI)"
    else:
        try:
            same = normal_host(hello.server_name) == target.host
        except ValueError:
            same = False
        if same:
            return
        problem = f"asks for {hello.server_name[:253]!a}"
    raise NetworkRefused(NetworkOutcome.NAME, f"the tunnel is to {target.host}, but its TLS greeting {problem}")
