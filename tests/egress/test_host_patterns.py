"""Patterns of hosts, and what a task gets of the server's ceiling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from turnstile_server.errors import Unprocessable
from turnstile_server.settings import EgressSettings
from turnstile_server.settings.host_patterns import normal_host, parse_pattern
from turnstile_server.tasks.network import NetworkWish, network_policy

LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=3).map(lambda labels: ".".join([*labels, "org"]))


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("PyPI.org", "pypi.org"),
        ("pypi.org.", "pypi.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("_dmarc.example.org", "_dmarc.example.org"),
        ("10.0.0.5", "10.0.0.5"),
        ("[2001:DB8::0:1]", "2001:db8::1"),
        ("[::ffff:10.0.0.5]", "10.0.0.5"),
    ],
)
def test_one_host_has_one_form(written: str, normal: str) -> None:
    assert normal_host(written) == normal


@pytest.mark.parametrize(
    "disguise",
    [
        *(
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
            "0177.0.0.1",
            "127.0.0.1.",
            "0x7f000001",
            "a..b",
            "",
            ".",
            "-a.org",
        ),
        *("a b.org", "a\x00.org", "[fe80::1%eth0]", "fe80::1%eth0", "[::1", "a%2eorg"),
        *("a" * 64 + ".org", "a." * 127 + "org"),
        *("１２７.0.0.1", "127。0。0。1", "①.0.0.1", "１２７.1", "［::1］"),
    ],
)
def test_what_a_resolver_could_read_as_an_address_is_no_name(disguise: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        normal_host(disguise)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("https://pypi.org", "is a URL: write its host alone"),
        ("user@pypi.org", "is a URL"),
        ("pypi.org/simple", "paths cannot be allowed one by one"),
        ("10.0.0.0/8", "egress.allow_addresses"),
        ("py*.org", "before the first dot"),
        ("*.*.org", "not the name of a host"),
        ("*.0.0.5", "neither a name nor an address"),
        ("*.10.0.0.5", "not for addresses"),
        ("pypi.org:0", "from 1 to 65535"),
        ("pypi.org:65536", "from 1 to 65535"),
        ("pypi.org:https", "from 1 to 65535"),
        ("2001:db8::1", "stands in brackets"),
        ("[2001:db8::1]443", "stands in brackets"),
    ],
)
def test_a_bad_pattern_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ValidationError, match=r"(?s)allow") as caught:
        NetworkWish(allow=(text,))
    assert said in str(caught.value)


def test_a_wildcard_matches_names_below_it_and_nothing_else() -> None:
    pattern = parse_pattern("*.debian.org")
    assert pattern.matches("deb.debian.org")
    assert pattern.matches("a.b.debian.org")
    for other in ("debian.org", "evildebian.org", "debian.org.evil.net", "org", "10.0.0.5"):
        assert not pattern.matches(other), other
    assert parse_pattern("*").matches("any.example")
    assert not parse_pattern("*").matches("169.254.169.254")


@pytest.mark.slow
@given(NAME, LABEL)
def test_a_wildcard_covers_exactly_the_names_below_it(name: str, label: str) -> None:
    wildcard, exact = parse_pattern(f"*.{name}"), parse_pattern(name)
    below = f"{label}.{name}"
    assert wildcard.matches(below)
    assert not wildcard.matches(name)
    assert not wildcard.matches(label + name)
    assert wildcard.covers(parse_pattern(below))
    assert wildcard.covers(parse_pattern(f"*.{below}"))
    assert not wildcard.covers(exact)
    assert not exact.covers(wildcard)


@pytest.mark.slow
@given(st.text(max_size=40))
def test_no_text_has_two_normal_forms(text: str) -> None:
    try:
        once = str(parse_pattern(text))
    except ValueError:
        return
    assert once.isascii()
    assert str(parse_pattern(once)) == once


def test_a_task_gets_what_the_ceiling_covers() -> None:
    settings = EgressSettings(allow=("*.debian.org:80", "pypi.org", "[fd00::5]:8080"))
    wish = NetworkWish(allow=("deb.debian.org", "pypi.org"), agent=("PyPI.org:443",), tests=("[fd00:0::5]:8080",))
    policy = network_policy(wish, settings)
    assert policy is not None
    assert [(str(rule), rule.ports) for rule in policy.setup] == [
        ("deb.debian.org", (80,)),
        ("pypi.org", (443, 80)),
    ]
    assert [str(rule) for rule in policy.agent] == ["pypi.org:443"]
    assert [str(rule) for rule in policy.tests] == ["[fd00::5]:8080"]
    assert policy.setup[0].admits("deb.debian.org", 80)
    assert not policy.setup[0].admits("deb.debian.org", 443)


def test_a_wish_above_the_ceiling_is_refused_with_its_host_and_the_setting() -> None:
    settings = EgressSettings(allow=("*.debian.org",))
    wish = NetworkWish(allow=("debian.org", "deb.debian.org", "*"), tests=("deb.debian.org:22",))
    with pytest.raises(Unprocessable) as caught:
        network_policy(wish, settings)
    assert caught.value.message == (
        "network.allow: debian.org is above this server's ceiling (egress.allow); "
        "network.allow: * is above this server's ceiling (egress.allow); "
        "network.tests: deb.debian.org:22 is above this server's ceiling (egress.allow)"
    )


def test_no_wish_and_an_empty_one_give_no_network() -> None:
    assert network_policy(NetworkWish(), EgressSettings(allow=("*",))) is None
    assert network_policy(NetworkWish(allow=(), tests=()), EgressSettings()) is None
