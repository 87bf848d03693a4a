"""``turnstile ui``: what it prints, what the browser is given, and who could read the key meanwhile."""

from __future__ import annotations

import stat
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from typer.testing import CliRunner

from control_support import Door
from turnstile.cli import ui as ui_command
from turnstile.cli.app import app

DONE, USAGE, UNREACHABLE = 0, 2, 3


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser read at the addresses that it was given."""
    read: list[str] = []

    def open_page(address: str) -> bool:
        page = Path(url2pathname(urlsplit(address).path))
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        read.append(f"{address}\n{page.read_text()}")
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    monkeypatch.setattr(ui_command, "_READ_WITHIN_S", 0.0)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return read


def turnstile_ui(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(
        app, ["ui", *arguments], env={"TURNSTILE_URL": None, "TURNSTILE_CONTROL_KEY": None}
    )
    return result.exit_code, result.stdout, result.stderr


def test_the_browser_gets_the_key_by_a_page_that_only_its_user_can_read(door: Door, pages: list[str]) -> None:
    assert turnstile_ui("--url", door.url, "--key", door.key) == (DONE, f"{door.url}/ui\n", "")
    (page,) = pages
    address, _, text = page.partition("\n")
    assert door.key not in address
    assert f"url={door.url}/ui#key={door.key}" in text
    assert not Path(url2pathname(urlsplit(address).path)).exists()


def test_a_key_in_the_url_stays_out_of_the_address(door: Door, pages: list[str]) -> None:
    code, printed, _ = turnstile_ui("--url", f"{door.url}/k/{door.key}")
    assert (code, printed) == (DONE, f"{door.url}/ui\n")
    assert f"{door.url}/ui#key={door.key}" in pages[0]


def test_the_key_is_printed_only_when_asked_for(door: Door, pages: list[str]) -> None:
    whole = f"{door.url}/ui#key={door.key}\n"
    assert turnstile_ui("--url", door.url, "--key", door.key, "--no-browser", "--with-key") == (DONE, whole, "")
    assert turnstile_ui("--url", door.url, "--key", door.key, "--no-browser") == (DONE, f"{door.url}/ui\n", "")
    assert pages == []


def test_over_ssh_the_address_is_printed(door: Door, pages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 50000 192.0.2.2 22")
    code, printed, said = turnstile_ui("--url", door.url, "--key", door.key)
    assert (code, printed) == (DONE, f"{door.url}/ui\n")
    assert "ssh -L" in said
    assert pages == []


def test_without_a_server_nothing_is_opened(pages: list[str]) -> None:
    code, _, said = turnstile_ui("--url", "http://127.0.0.1:9")
    assert code == UNREACHABLE
    assert "turnstile serve" in said
    assert pages == []
