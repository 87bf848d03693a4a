"""The proxy at its socket: what it lets through, what it refuses, what it says, and what it records."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
from ipaddress import IPv4Address
from pathlib import Path

import anyio
import pytest
from anyio.streams.tls import TLSStream
from egress_support import Names, ProxyRig, read_all, tls
from stepped_clock import loop_clock

from turnstile.models import NetworkOutcome
from turnstile_server.egress.addresses import SystemResolver
from turnstile_server.egress.policy import NetworkPhase
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def test_an_allowed_host_gets_one_request_without_what_was_for_the_proxy(rig: ProxyRig) -> None:
    said = await rig.get(
        f"http://Mirror.TEST:{rig.hosts.http}/simple/?q=secret",
        "Proxy-Authorization: Basic abc",
        "Proxy-Connection: keep-alive",
        "Connection: keep-alive, X-Mine",
        "X-Mine: 1",
        "X-Other: 2",
    )
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"keep-alive" not in said.partition(b"\r\n\r\n")[0].lower()
    assert b"connection: close" in said.partition(b"\r\n\r\n")[0].lower()
    (seen,) = rig.hosts.requests
    head = seen.lower()
    assert head.startswith(b"get /simple/?q=secret http/1.1\r\n")
    assert f"host: mirror.test:{rig.hosts.http}".encode() in head
    assert b"x-other: 2" in head
    for gone in (b"proxy-", b"x-mine", b"keep-alive"):
        assert gone not in head
    decision = await rig.last()
    assert (decision.allowed, decision.outcome, decision.method) == (True, NetworkOutcome.OK, "GET")
    assert (decision.host, decision.port, decision.address) == ("mirror.test", rig.hosts.http, "127.0.0.1")
    assert decision.bytes_up > 0
    assert decision.bytes_down > len(seen)
    assert "secret" not in rig.log.report("ep").model_dump_json()


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_reaches_the_host_whole(rig: ProxyRig, framing: str) -> None:
    body = b"some body" * 1000
    headers, sent = f"Content-Length: {len(body)}", body
    if framing == "chunks":
        headers, sent = "Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    authority = f"mirror.test:{rig.hosts.http}"
    head = f"POST http://{authority}/up HTTP/1.1\r\nHost: {authority}\r\n{headers}\r\n\r\n"
    said = await rig.ask(head.encode() + sent)
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert body in rig.hosts.requests[0].replace(b"\r\n2328\r\n", b"\r\n")


async def test_a_response_that_comes_before_the_whole_body_arrives(rig: ProxyRig) -> None:
    authority = f"mirror.test:{rig.hosts.http}"
    head = f"POST http://{authority}/early HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 50000000\r\n\r\n"
    async with await rig.connect() as stream:
        await stream.send(head.encode())
        assert (await read_all(stream)).startswith(b"HTTP/1.1 413 ")


async def test_a_second_request_on_the_same_connection_reaches_nobody(rig: ProxyRig) -> None:
    authority = f"mirror.test:{rig.hosts.http}"
    first = f"GET http://{authority}/one HTTP/1.1\r\nHost: {authority}\r\n\r\n"
    second = f"GET http://{authority}/two HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    said = await rig.ask(first + second)
    assert said.count(b"HTTP/1.1 200") == 1
    assert [b"/one" in seen.partition(b"\r\n")[0] for seen in rig.hosts.requests] == [True]
    assert not any(b"/two" in seen for seen in rig.hosts.requests)


@pytest.mark.parametrize(
    "authority",
    [
        "evil.test:80",
        "mirror.test:81",
        "wild.test:{http}",
        "evilwild.test:{http}",
        "127.0.0.1:{http}",
        "[::1]:{http}",
    ],
)
async def test_a_host_that_is_not_listed_is_403_with_the_list(rig: ProxyRig, authority: str) -> None:
    said = await rig.get(f"http://{authority.format(http=rig.hosts.http)}/x")
    assert said.startswith(b"HTTP/1.1 403 Refused by the network policy\r\n")
    assert b"is not on the allow-list of this task, which has, for agent: mirror.test:" in said
    assert b"x-turnstile-network: host" in said
    assert (await rig.last()).outcome is NetworkOutcome.HOST
    stream, refused = await rig.tunnel(authority.format(http=rig.hosts.http))
    await stream.aclose()
    assert refused.startswith(b"HTTP/1.1 403 ")
    assert rig.hosts.requests == []


async def test_a_wildcard_lets_the_names_below_it_through(rig: ProxyRig) -> None:
    for name in ("a.wild.test", "A.B.Wild.Test."):
        assert (await rig.get(f"http://{name}:{rig.hosts.http}/")).startswith(b"HTTP/1.1 200")
    assert [entry.host for entry in rig.log.entries] == ["a.wild.test", "a.b.wild.test"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("GET / HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "this is a proxy"),
        ("GET https://mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "send CONNECT host:443"),
        ("GET ftp://mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "this is a proxy"),
        ("GET http://u:p@mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "credentials in a URL"),
        ("GET http://mirror.test/#x HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "fragment"),
        ("GET http://mirror.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", "names another host than the URL"),
        ("GET http://mirror.test/ HTTP/1.1\r\nHost: mirror.test:81\r\n\r\n", "names another host than the URL"),
        ("GET http://mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\nHost: evil.test\r\n\r\n", "is not HTTP/1.1"),
        ("GET http://mirror.test/ HTTP/1.1\r\n\r\n", "is not HTTP/1.1"),
        ("GET http://127.1/ HTTP/1.1\r\nHost: 127.1\r\n\r\n", "is not host:port"),
        ("CONNECT mirror.test HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "CONNECT needs host:port"),
        ("CONNECT u:p@mirror.test:443 HTTP/1.1\r\nHost: mirror.test\r\n\r\n", "credentials in a URL"),
        (
            "POST http://mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\nContent-Length: 5\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
        (
            "POST http://mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\nContent-Length: 5\r\n"
            "Content-Length: 6\r\n\r\n",
            "is not HTTP/1.1",
        ),
        (
            "GET http://mirror.test/ HTTP/1.1\r\nHost: mirror.test\r\nX: a\r\n b\r\n",
            "unexpectedly closed connection",
        ),
        ("\x16\x03\x01\0\0", "is not HTTP/1.1"),
    ],
)
async def test_what_could_be_read_in_two_ways_is_400_and_reaches_nobody(
    rig: ProxyRig, request_: str, said: str
) -> None:
    rig.allow("mirror.test", "127.0.0.1")
    async with await rig.connect() as stream:
        await stream.send(request_.encode("latin-1"))
        await stream.send_eof()
        answer = await read_all(stream)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert said in answer.decode()
    decision = await rig.last()
    assert (decision.allowed, decision.outcome) == (False, NetworkOutcome.REQUEST)
    assert rig.hosts.requests == []
    assert "u:p" not in decision.model_dump_json()


@pytest.mark.parametrize("rig", [{"max_header_bytes": 1024}], indirect=True)
async def test_a_head_above_the_bound_is_refused(rig: ProxyRig) -> None:
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/", f"X: {'x' * 4096}")
    assert said.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("rig", [{"plain_http": False}], indirect=True)
async def test_plain_http_can_be_switched_off(rig: ProxyRig) -> None:
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 403 ")
    assert b"egress.plain_http" in said


@pytest.mark.parametrize(
    "answer",
    [
        *("169.254.169.254", "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.100.100.200", "0.0.0.0"),
        *("255.255.255.255", "224.0.0.1", "168.63.129.16", "192.0.0.192", "198.18.0.1", "240.0.0.1"),
        *("::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff0e::1", "fec0::1", "::169.254.169.254"),
        *("::ffff:169.254.169.254", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1"),
        *("2002:a00:1::1", "2001:0:1::1"),
    ],
)
async def test_a_name_that_leads_to_a_private_address_is_refused(rig: ProxyRig, names: Names, answer: str) -> None:
    names.answers["mirror.test"] = [[answer]]
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/latest/meta-data/")
    assert said.startswith(b"HTTP/1.1 403 ")
    assert b"which is no public address" in said
    decision = await rig.last()
    assert (decision.allowed, decision.outcome) == (False, NetworkOutcome.ADDRESS)


async def test_an_address_that_is_listed_must_still_be_public(rig: ProxyRig) -> None:
    rig.allow("169.254.169.254", "[::ffff:10.0.0.1]:80")
    for url in ("http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/", "http://[::ffff:10.0.0.1]/"):
        said = await rig.get(url)
        assert b"x-turnstile-network: address" in said


async def test_the_name_is_looked_up_once_and_the_checked_address_is_the_one_connected_to(
    rig: ProxyRig, names: Names
) -> None:
    names.answers["mirror.test"] = [["10.0.0.1", "127.0.0.1"], ["169.254.169.254"]]
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 200")
    assert names.asked == ["mirror.test"]
    assert (await rig.last()).address == "127.0.0.1"
    again = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert b"x-turnstile-network: address" in again


async def test_a_host_that_cannot_be_found_or_reached_is_502(rig: ProxyRig, names: Names) -> None:
    names.answers["mirror.test"] = [[]]
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 502 ")
    assert (await rig.last()).outcome is NetworkOutcome.UNRESOLVED
    rig.allow("mirror.test:1")
    names.answers["mirror.test"] = [["127.0.0.1"]]
    said = await rig.get("http://mirror.test:1/")
    assert said.startswith(b"HTTP/1.1 502 ")
    assert (await rig.last()).outcome is NetworkOutcome.UNREACHABLE


@pytest.mark.parametrize("rig", [{"connect_timeout_s": 0.2}], indirect=True)
async def test_a_host_that_is_not_found_in_time_is_502(rig: ProxyRig, names: Names) -> None:
    names.silent = True
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 502 ")
    assert b"mirror.test did not answer within 0.2 s" in said


async def test_the_system_s_resolver_gives_addresses_and_says_what_it_does_not_find() -> None:
    resolver = SystemResolver(1)
    assert await resolver.resolve("127.0.0.1", 80) == [IPv4Address("127.0.0.1")]
    with pytest.raises(OSError, match="no name for a resolver"):
        await resolver.resolve("a" * 64, 80)


async def test_a_look_up_that_nobody_waits_for_holds_its_place_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver, go_on, asked = SystemResolver(1), threading.Event(), []

    def slow(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        go_on.wait(30)
        return [(2, 1, 6, "", ("192.0.2.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    for name in ("first.test", "second.test"):
        with anyio.move_on_after(0.1) as scope:
            await resolver.resolve(name, 80)
        assert scope.cancelled_caught
    assert asked == ["first.test"]
    go_on.set()
    assert await resolver.resolve("third.test", 80) == [IPv4Address("192.0.2.1")]
    assert asked == ["first.test", "third.test"]


@pytest.mark.parametrize("path", ["garbage", "nothing", "reset"])
async def test_a_host_that_answers_nonsense_or_nothing_is_502(rig: ProxyRig, path: str) -> None:
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/{path}")
    assert said.startswith(b"HTTP/1.1 502 ")
    assert (await rig.last()).outcome is NetworkOutcome.UPSTREAM


async def test_a_tunnel_carries_tls_for_its_own_name(rig: ProxyRig, certificate: Path) -> None:
    stream, said = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    assert said.startswith(b"HTTP/1.1 200 ")
    secure = await tls(stream, certificate, "secure.test")
    payload = gzip.compress(bytes(range(256)) * 4096)

    async def send() -> None:
        for at in range(0, len(payload), 1000):
            await secure.send(payload[at : at + 1000])

    back = b""
    async with anyio.create_task_group() as both:
        both.start_soon(send)
        while len(back) < len(payload):
            back += await secure.receive()
    assert back == payload
    await anyio.aclose_forcefully(secure)
    decision = await rig.last()
    assert (decision.allowed, decision.outcome, decision.method) == (True, NetworkOutcome.OK, "CONNECT")
    assert decision.bytes_up > len(payload)
    assert decision.bytes_down > len(payload)


@pytest.mark.parametrize("name", ["other.test", "secure.test.evil.test", "wild.secure.test"])
async def test_a_tunnel_whose_tls_asks_for_another_name_is_cut(
    rig: ProxyRig, certificate: Path, name: str
) -> None:
    stream, said = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    assert said.startswith(b"HTTP/1.1 200 ")
    with pytest.raises(Exception, match=r"(?i)alert"):
        await tls(stream, certificate, name)
    decision = await rig.last()
    assert (decision.allowed, decision.outcome, decision.bytes_up) == (False, NetworkOutcome.NAME, 0)
    assert decision.detail == f"the tunnel is to secure.test, but its TLS greeting asks for '{name}'"


async def test_a_host_may_ask_for_a_second_greeting(rig: ProxyRig, certificate: Path) -> None:
    rig.hosts.context.set_ecdh_curve("secp384r1")  # no client offers a key for it before it is asked to
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    async with await tls(stream, certificate, "secure.test") as secure:
        await secure.send(b"hello")
        assert await secure.receive() == b"hello"
    assert (await rig.last()).outcome is NetworkOutcome.OK


@pytest.mark.parametrize("waits", [True, False])
async def test_a_second_greeting_that_asks_for_another_name_is_cut(
    rig: ProxyRig, certificate: Path, waits: bool
) -> None:
    """Also where it comes before the host has asked for it."""
    rig.hosts.context.set_ecdh_curve("secp384r1")
    incoming, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(certificate))
    client = context.wrap_bio(incoming, sent, server_hostname="secure.test")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    first = sent.read()
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    await stream.send(first)
    incoming.write(await stream.receive())
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    second = sent.read()
    assert b"secure.test" in second
    second = second.replace(b"secure.test", b"hidden.test")
    if not waits:
        await anyio.aclose_forcefully(stream)
        stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
        await stream.send(first)
    await stream.send(second)
    assert (await read_all(stream)).endswith(b"\x15\x03\x03\0\2\2\x31")
    decision = await rig.last()
    assert (decision.outcome, decision.bytes_up) == (NetworkOutcome.NAME, len(first))
    assert decision.detail == "the tunnel is to secure.test, but its TLS greeting asks for 'hidden.test'"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: secure.test\r\n\r\n", "is not TLS"),
        (b"SSH-2.0-OpenSSH\r\n", "is not TLS"),
        (b"", "closed before a TLS greeting"),
    ],
)
async def test_a_tunnel_without_tls_is_cut_before_a_byte_of_it_passes(
    rig: ProxyRig, sent: bytes, said: str
) -> None:
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    async with stream:
        if sent:
            await stream.send(sent)
        await stream.send_eof()
        assert (await read_all(stream))[:1] == b"\x15"
    decision = await rig.last()
    assert (decision.allowed, decision.outcome, decision.bytes_up) == (False, NetworkOutcome.NAME, 0)
    assert said in str(decision.detail)


async def test_a_tunnel_whose_tls_names_no_host_is_cut(rig: ProxyRig) -> None:
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(Exception, match=r"(?i)alert"):
        await TLSStream.wrap(stream, ssl_context=context, server_side=False)
    assert "names no host (SNI)" in str((await rig.last()).detail)


async def test_an_opaque_port_carries_what_is_no_tls(rig: ProxyRig) -> None:
    settings = rig.proxy.settings.model_copy(update={"opaque_ports": (rig.hosts.http,)})
    rig.proxy.settings = settings
    stream, said = await rig.tunnel(f"mirror.test:{rig.hosts.http}")
    assert said.startswith(b"HTTP/1.1 200 ")
    async with stream:
        await stream.send(b"GET /raw HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_all(stream)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("rig", [{"max_bytes_down": 200_000}], indirect=True)
async def test_a_download_is_cut_at_the_budget_and_the_next_request_is_told(rig: ProxyRig) -> None:
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/endless")
    assert 0 < len(said) <= 200_000
    decision = await rig.last()
    assert (decision.allowed, decision.outcome) == (True, NetworkOutcome.BYTES)
    assert decision.bytes_down <= 200_000
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 403 ")
    assert b"egress.max_bytes_down" in said


@pytest.mark.parametrize("rig", [{"max_bytes_up": 100_000}], indirect=True)
async def test_an_upload_is_cut_at_the_budget(rig: ProxyRig, certificate: Path) -> None:
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    secure = await tls(stream, certificate, "secure.test")

    async def send_on() -> None:
        while True:
            await secure.send(bytes(10_000))
            await secure.receive()

    with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
        await send_on()
    await anyio.aclose_forcefully(secure)
    decision = await rig.last()
    assert decision.outcome is NetworkOutcome.BYTES
    assert 0 < decision.bytes_up <= 100_000
    assert rig.hosts.tls_bytes <= 100_000


@pytest.mark.parametrize("rig", [{"max_connections": 2}], indirect=True)
async def test_connections_beyond_the_budget_are_429(rig: ProxyRig) -> None:
    said = [await rig.get("http://evil.test/") for _ in range(3)]
    assert [each.split(b" ")[1] for each in said] == [b"403", b"403", b"429"]
    assert b"egress.max_connections" in said[2]


@pytest.mark.parametrize("rig", [{"max_open": 1, "max_connections": 3}], indirect=True)
async def test_connections_that_are_one_too_many_at_once_count_in_the_budget(rig: ProxyRig) -> None:
    async with await rig.connect():
        await wait_until(lambda: rig.proxy.stats.open == 1)
        for bound in (b"egress.max_open)", b"egress.max_open)", b"egress.max_connections)"):
            said = await rig.get("http://mirror.test/")
            assert said.startswith(b"HTTP/1.1 429 ")
            assert bound in said


@pytest.mark.parametrize(
    ("rig", "bound"),
    [({"max_open": 2}, b"(egress.max_open)"), ({"max_open_total": 2}, b"(egress.max_open_total)")],
    indirect=["rig"],
)
async def test_connections_at_once_beyond_the_bound_are_429_and_the_others_go_on(
    rig: ProxyRig, bound: bytes
) -> None:
    idle = [await rig.connect() for _ in range(2)]
    await wait_until(lambda: rig.proxy.stats.open == 2)
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 429 ")
    assert bound in said
    await idle[0].send(
        f"GET http://mirror.test:{rig.hosts.http}/ HTTP/1.1\r\nHost: mirror.test:{rig.hosts.http}\r\n\r\n".encode()
    )
    assert (await read_all(idle[0])).startswith(b"HTTP/1.1 200")
    for each in idle:
        await each.aclose()


@pytest.mark.parametrize("rig", [{"idle_timeout_s": 0.2}], indirect=True)
async def test_a_connection_on_which_nothing_moves_is_cut(rig: ProxyRig) -> None:
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/silent")
    assert said.startswith(b"HTTP/1.1 504 ")
    assert b"nothing was sent for" in said
    assert (await rig.last()).outcome is NetworkOutcome.IDLE


@pytest.mark.parametrize("rig", [{"request_timeout_s": 20}], indirect=True)
async def test_a_client_that_says_nothing_is_cut(rig: ProxyRig) -> None:
    async with await rig.connect() as stream:
        with loop_clock() as clock:
            assert b"no whole request came within 20 s" in await clock.pass_while(read_all(stream))
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    async with stream:
        await stream.send(b"\x16\x03\x01")
        with loop_clock() as clock:
            assert (await clock.pass_while(read_all(stream)))[:1] == b"\x15"
    assert "no TLS greeting came within 20 s" in str((await rig.last()).detail)


async def test_the_end_of_a_phase_cuts_what_it_had_allowed(rig: ProxyRig, certificate: Path) -> None:
    stream, _ = await rig.tunnel(f"secure.test:{rig.hosts.https}")
    secure = await tls(stream, certificate, "secure.test")
    await secure.send(b"x")
    assert await secure.receive() == b"x"
    rig.listener.admit(None)
    with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
        await secure.receive()
    await anyio.aclose_forcefully(secure)
    assert (await rig.last()).outcome is NetworkOutcome.ENDED
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert said.startswith(b"HTTP/1.1 403 ")
    assert b"closed now" in said
    rig.allow(phase=NetworkPhase.TESTS)
    said = await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    assert b"which has, for tests: nothing" in said


async def test_a_cancelled_listener_leaves_no_connection_and_no_socket(rig: ProxyRig) -> None:
    async with await rig.connect() as stream:
        await stream.send(b"GET ")
        await wait_until(lambda: rig.proxy.stats.open)
        rig.listener.admit(None)
        assert await read_all(stream) == b""
    assert rig.proxy.stats.open == 0


async def test_the_log_keeps_the_first_decisions_and_the_sums_of_all(rig: ProxyRig) -> None:
    rig.log.most = 2
    for _ in range(3):
        await rig.get(f"http://mirror.test:{rig.hosts.http}/")
    await rig.get("http://evil.test/")
    await wait_until(lambda: not rig.proxy.stats.open)
    report = rig.log.report("ep_1")
    assert (len(report.decisions), report.further) == (2, 2)
    assert (report.allowed, report.refused) == (3, 1)
    assert report.bytes_down == rig.proxy.stats.bytes_down
    assert rig.proxy.stats.outcomes == {NetworkOutcome.OK: 3, NetworkOutcome.HOST: 1}
