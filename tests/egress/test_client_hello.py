"""The name in a TLS greeting, read from what real clients send and from what nobody should."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.egress.client_hello import ClientHello, HelloReader, NotTls, asks_again, parse_hello

MOST = 16 << 10
RECORD_HEAD = 5


def greeting(name: str | None, *, newest: bool = True) -> bytes:
    """The first bytes of Python's TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if not newest:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def record(message: bytes) -> bytes:
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def hello(*extensions: tuple[int, bytes]) -> bytes:
    """A handshake message with these extensions."""
    packed = b"".join(kind.to_bytes(2, "big") + len(data).to_bytes(2, "big") + data for kind, data in extensions)
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + len(packed).to_bytes(2, "big") + packed
    return b"\1" + len(body).to_bytes(3, "big") + body


def server_name(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    packed = b"".join(bytes([kind]) + len(name).to_bytes(2, "big") + name for name in names)
    return 0, len(packed).to_bytes(2, "big") + packed


def read(data: bytes, most: int = MOST) -> ClientHello | None:
    return HelloReader(most).feed(data)


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("name", ["pypi.org", "a" * 63 + ".example.org", None])
def test_the_name_of_a_real_greeting_is_read(name: str | None, newest: bool) -> None:
    assert read(greeting(name, newest=newest)) == ClientHello(name)


@given(st.data())
def test_a_greeting_may_come_in_any_pieces_of_bytes_and_of_records(data: st.DataObject) -> None:
    message = greeting("pypi.org")[RECORD_HEAD:]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(message) - 1), max_size=8)))
    records = b"".join(
        record(message[start:end]) for start, end in zip([0, *cuts], [*cuts, len(message)], strict=True)
    )
    after = b"\x17\x03\x03\0\1x"
    wire = records + after
    parts = sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=12)))
    reader = HelloReader(MOST)
    found = None
    fed = 0
    for start, end in zip([0, *parts], [*parts, len(wire)], strict=True):
        found = reader.feed(wire[start:end])
        fed = end
        if found is not None:
            break
    assert found == ClientHello("pypi.org")
    assert fed >= len(records)


@given(st.binary(max_size=400))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for wire in (data, record(data or b"\0"), record(b"\1" + len(data).to_bytes(3, "big") + data)):
        try:
            found = read(wire)
        except NotTls:
            continue
        assert found is None or found.server_name is None or found.server_name.isascii()


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_greeting_never_shows_a_name_beside_its_own_bytes(at: int, byte: int) -> None:
    wire = bytearray(greeting("pypi.org"))
    wire[at % len(wire)] = byte
    try:
        found = read(bytes(wire))
    except NotTls:
        return
    if found is not None and found.server_name is not None:
        assert found.server_name.encode() in bytes(wire)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin with TLS"),
        (b"SSH-2.0-x\r\n", "does not begin with TLS"),
        (b"\x16\x02\0\0\1\1", "does not begin with TLS"),
        (b"\x16\x03\1\0\0", "no size that TLS allows"),
        (b"\x16\x03\1\xff\xff", "no size that TLS allows"),
        (record(b"\2\0\0\0"), "not a ClientHello"),
        (record(b"\1\xff\xff\xff"), "larger than"),
        (record(hello() + b"\1"), "shares a record"),
        (record(hello((0, b"\0"))), "ends too early"),
        (record(hello(server_name(b"a.org", b"b.org"))), "belong to nothing"),
        (record(hello(server_name(b"a.org", kind=1))), "unknown kind"),
        (record(hello(server_name(b"\xff.org"))), "not ASCII"),
        (record(hello(server_name(b"a.org"), server_name(b"b.org"))), "extension twice"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(wire: bytes, said: str) -> None:
    with pytest.raises(NotTls, match=said):
        read(wire)


def test_a_greeting_that_hides_its_name_says_so() -> None:
    assert read(record(hello(server_name(b"front.org"), (0xFE0D, b"\0")))) == ClientHello(
        "front.org", "encrypted_client_hello"
    )
    assert parse_hello(hello()[4:]) == ClientHello(None)


def test_a_greeting_is_held_up_to_its_bound_only() -> None:
    small = record(hello())
    assert read(small, len(small)) == ClientHello(None)
    with pytest.raises(NotTls, match="ClientHello is larger than"):
        read(small, len(small) - 1)
    whole = hello((21, bytes(400)))
    one_by_one = b"".join(record(whole[at : at + 1]) for at in range(len(whole)))
    assert read(record(whole), 600) == ClientHello(None)
    with pytest.raises(NotTls, match="larger than 600 bytes"):
        read(one_by_one, 600)


def test_a_second_greeting_may_follow_records_that_a_server_passes_over() -> None:
    before = b"\x14\x03\x03\0\1\1" + b"\x17\x03\x03\0\5early"
    wire = before + greeting("pypi.org") + b"rest"
    again = HelloReader(MOST, again=True)
    assert again.feed(wire[:8]) is None
    assert again.feed(wire[8:]) == ClientHello("pypi.org")
    assert again.rest == 4
    for refused in (HelloReader(MOST), HelloReader(10, again=True)):
        with pytest.raises(NotTls):
            refused.feed(wire)
    with pytest.raises(NotTls, match="does not begin with TLS"):  # not between two records of it
        HelloReader(MOST, again=True).feed(record(greeting("pypi.org")[RECORD_HEAD:][:9]) + before)


@pytest.mark.parametrize("curve", ["secp384r1", "prime256v1", None])
def test_a_server_s_first_bytes_tell_whether_it_asks_for_a_second_greeting(
    curve: str | None, certificate: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if curve is not None:
        context.set_ecdh_curve(curve)
    incoming, said = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, said, server_side=True)
    incoming.write(greeting("pypi.org"))
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    data = said.read()
    assert asks_again(data) is (curve is not None)
    told = [asks_again(data[:size]) for size in range(len(data))]
    assert set(told[:43]) == {None}
    assert set(told[43:]) == {curve is not None}


@pytest.mark.slow
def test_what_is_no_first_message_of_a_server_asks_for_nothing() -> None:
    assert asks_again(b"") is None
    assert asks_again(b"\x15\x03\x03\0\2\2\x28") is False
    assert asks_again(b"SSH-2.0-x\r\n") is False
    assert asks_again(record(b"\x0e\0\0\0")) is False
    in_pieces = b"".join(record(bytes([byte])) for byte in b"\2\0\0\x56\3\3" + bytes(40))
    assert asks_again(in_pieces) is True
