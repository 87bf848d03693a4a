"""``turnstile ui``: the server's viewer in a browser.

The key reaches the browser in the fragment of the address, which the page removes. It is never an argument of the
browser's process, which every user of the machine could read: the browser is given a page of this user's own. That
page leads to the address and is deleted soon after. A terminal does not show the key unless asked.
"""

from __future__ import annotations

import os
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer

from turnstile.cli.connection import DEFAULT_URL, DataDirOption, KeyOption, key_from
from turnstile.cli.output import echo, reported
from turnstile.sync import Client

_READ_WITHIN_S = 10.0
"""Time for the browser to read the page; a slow one shows the address as printed, and asks for the key."""
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>Turnstile</title>
<p><a href="{address}">Open the viewer</a></p>
"""


def ui(
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; otherwise the address is only printed.")
    ] = True,
    with_key: Annotated[
        bool, typer.Option("--with-key", help="Print the address with the key in it.", show_default=False)
    ] = False,
    url: Annotated[str, typer.Option("--url", envvar="TURNSTILE_URL", help="The server's URL.")] = DEFAULT_URL,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Open the server's viewer in a browser."""
    server, in_url = _split(url)
    key = key or in_url or key_from(data_dir)
    with reported(), Client([server], key=key) as client:
        for error in client.health().values():
            if error is not None:
                raise error
    address = f"{server}/ui"
    whole = f"{address}#key={quote(key, safe='')}" if key else address
    echo(whole if with_key else address)
    if not browser:
        return
    if "SSH_CONNECTION" in os.environ:
        echo("over SSH no browser is opened; `ssh -L` brings the server's port to your machine", err=True)
    elif not _open(whole):
        echo("no browser could be opened here; open the address yourself", err=True)


def _split(url: str) -> tuple[str, str | None]:
    """The server's URL without a key in its path (``/k/KEY``), and that key."""
    parts = urlsplit(url)
    before, mark, key = parts.path.rstrip("/").partition("/k/")
    return parts._replace(path=before, query="", fragment="").geturl(), key if mark else None


def _open(address: str) -> bool:
    """Whether a browser was found. The page is this user's alone (mode 600)."""
    with tempfile.TemporaryDirectory(prefix="turnstile-ui-") as folder:
        page = Path(folder) / "open.html"
        page.touch(mode=0o600)
        page.write_text(_REDIRECT.format(address=address.replace("&", "&amp;").replace('"', "%22")), "utf-8")
        opened = webbrowser.open(page.as_uri())
        if opened:
            time.sleep(_READ_WITHIN_S)
    return opened
