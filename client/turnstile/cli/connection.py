"""The server of a command and its key: from flags, else the environment, else a data directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turnstile.cli.output import USAGE, fail, reported
from turnstile.servers import ServerSource
from turnstile.sync import Client

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_DATA_DIR = Path("turnstile-data")
KEY_FILE = "control.key"
RAY_SCHEME = "ray:"

UrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        envvar="TURNSTILE_URL",
        help=f"Server URL; repeat for several, or file:PATH, dns://HOST:PORT or ray:NAME. Default {DEFAULT_URL}.",
    ),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", envvar="TURNSTILE_CONTROL_KEY", help="Control key.", show_default=False)
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help=f"The server's data directory, to read its {KEY_FILE}. Default ./{DEFAULT_DATA_DIR}."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line instead of a table.")]


def connect(urls: Sequence[str] | None, key: str | None, data_dir: Path | None) -> Client:
    """The client for a command's options. No request is sent, but to Ray for ``ray:NAME``."""
    servers, found = named_servers(list(urls or (DEFAULT_URL,)), key)
    return Client(servers, key=found or key_from(data_dir))


def named_servers(urls: Sequence[str], key: str | None) -> tuple[Sequence[str] | ServerSource, str | None]:
    """What a client takes for ``urls``, and the key: Ray has that of ``ray:NAME``."""
    if len(urls) != 1 or not urls[0].startswith(RAY_SCHEME):
        return urls, key
    try:
        from turnstile.ray import Cluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        fail(str(error), USAGE)
    with reported():
        cluster = Cluster.connect(urls[0].removeprefix(RAY_SCHEME))
    return cluster.source(), key or cluster.key


def key_from(data_dir: Path | None) -> str | None:
    """The key in the data directory. Only a directory that was named must have one.

    Without a key the server may need none, or the URL may carry it.
    """
    path = (data_dir or DEFAULT_DATA_DIR) / KEY_FILE
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        if data_dir is not None:
            reason = error.strerror if isinstance(error, OSError) else "not a key"
            fail(f"cannot read the control key in {path}: {reason}", USAGE)
        return None
