"""Where the control key and the server's secret come from, and who may read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from turnstile_server.control.auth import ControlKey, load_control_key
from turnstile_server.data_dir import load_secret
from turnstile_server.errors import StartupError
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNSTILE_CONTROL_KEY", raising=False)


def settings(data_dir: Path, **control: object) -> Settings:
    return load_settings({"data_dir": data_dir, "control": control})


def test_the_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    first = load_control_key(settings(tmp_path / "new"))
    path = tmp_path / "new" / "control.key"
    assert len(first) >= 32
    assert path.read_text().strip() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_control_key(settings(tmp_path / "new")) == first
    assert os.listdir(path.parent) == ["control.key"]


def test_two_data_directories_have_two_keys(tmp_path: Path) -> None:
    assert load_control_key(settings(tmp_path / "a")) != load_control_key(settings(tmp_path / "b"))


def test_a_configured_key_is_used_and_not_written_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert load_control_key(settings(tmp_path, key="a-key-of-my-own-1234")) == "a-key-of-my-own-1234"
    assert os.listdir(tmp_path) == []
    assert "control.key is not used" in caplog.text
    assert "a-key-of-my-own-1234" not in caplog.text


@pytest.mark.parametrize("name", ["TURNSTILE_CONTROL_KEY", "TURNSTILE_CONTROL__KEY"])
def test_both_names_of_the_environment_variable_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "from-the-environment")
    assert load_control_key(settings(tmp_path)) == "from-the-environment"


def test_a_flag_beats_the_environment_and_the_environment_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "t.toml"
    config.write_text('[control]\nkey = "from-the-config-file"\nport = 9\n')
    assert load_settings({}, config).control.key == "from-the-config-file"
    monkeypatch.setenv("TURNSTILE_CONTROL_KEY", "from-the-environment")
    assert load_settings({}, config).control.key == "from-the-environment"
    assert load_settings({}, config).control.port == 9
    assert load_settings({"control": {"key": "sixteen-from-flag"}}, config).control.key == "sixteen-from-flag"


@pytest.mark.parametrize("key", ["with/slash/in-it-1", "with space in it 1", "schl\u00fcssel-mit-umlaut"])
def test_a_key_that_fits_no_path_or_header_is_refused_at_start(tmp_path: Path, key: str) -> None:
    with pytest.raises(StartupError, match="TURNSTILE_CONTROL_KEY"):
        load_control_key(settings(tmp_path, key=key))


def test_a_damaged_key_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "control.key").write_bytes(b"\xff\x00")
    with pytest.raises(StartupError, match=r"control\.key"):
        load_control_key(settings(tmp_path))


def test_the_secret_is_32_bytes_made_once_and_private(tmp_path: Path) -> None:
    secret = load_secret(tmp_path / "new")
    assert len(secret) == 32
    assert load_secret(tmp_path / "new") == secret
    assert stat.S_IMODE((tmp_path / "new" / "server.secret").stat().st_mode) == 0o600
    assert load_secret(tmp_path / "other") != secret


def test_a_cut_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.secret").write_bytes(b"short")
    with pytest.raises(StartupError, match="5 bytes"):
        load_secret(tmp_path)


def test_a_data_directory_that_cannot_be_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="is a file, not a folder"):
        load_secret(tmp_path / "file")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "headers", "passes"),
    [
        ("/ws", [], False),
        ("/k/wrong-key/ws", [], False),
        ("/health", [], False),
        ("/ws", [(b"authorization", b"Bearer the-key-of-the-test")], True),
        ("/k/the-key-of-the-test/ws", [], True),
    ],
)
async def test_a_websocket_needs_the_key_too(path: str, headers: list[tuple[bytes, bytes]], passes: bool) -> None:
    reached: list[str] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "websocket", "path": path, "raw_path": path.encode(), "headers": headers}
    await ControlKey(app, "the-key-of-the-test", WrongKeys())(scope, receive, send)
    assert reached == (["/ws"] if passes else [])
    assert [message["type"] for message in sent] == ([] if passes else ["websocket.close"])
    assert b"the-key" not in scope["raw_path"]
