"""``turnstile ui``: the server's viewer in a browser, or, on a folder, a viewer without a server.

The key reaches the browser in the fragment of the address, which the page removes. It is never an argument of the
browser's process, which every user of the machine could read: the browser is given a page of this user's own. That
page leads to the address and is deleted soon after. A terminal does not show the key unless asked. The key of a
folder is made for one call of the command, so it is shown where no browser opens.

The server package serves folders. It is found by the entry-point group ``turnstile.viewers``: nothing of it is
imported here.
"""

from __future__ import annotations

import os
import tempfile
import time
import webbrowser
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import quote, urlsplit

import typer

from turnstile._requests import NOT_READY
from turnstile.cli.connection import DEFAULT_URL, DataDirOption, KeyOption, key_from
from turnstile.cli.output import FAILED, USAGE, echo, fail, reported
from turnstile.sync import Client

_READ_WITHIN_S = 10.0
"""Time for the browser to read the page; a slow one shows the address as printed, and asks for the key."""
_OVER_SSH = "over SSH no browser is opened; `ssh -L` brings the server's port to your machine"
_NO_BROWSER = "no browser could be opened here; open the address yourself"
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>Turnstile</title>
<p><a href="{address}">Open the viewer</a></p>
"""

VIEWERS = "turnstile.viewers"
FolderViewer: TypeAlias = Callable[[Path, Path | None, Callable[[str, str], None]], None]
"""Takes a folder, a model folder or None, and what to tell the address and the key; returns when it was ended."""


def ui(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="The data directory of a stopped server, a copy, or an export, to look at without a server."
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; otherwise the address is only printed.")
    ] = True,
    with_key: Annotated[
        bool, typer.Option("--with-key", help="Print the address with the key in it.", show_default=False)
    ] = False,
    url: Annotated[str, typer.Option("--url", envvar="TURNSTILE_URL", help="The server's URL.")] = DEFAULT_URL,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="With FOLDER: the model's folder, for the texts of tokens. TURNSTILE_MODEL."),
    ] = None,
) -> None:
    """Open the server's viewer in a browser, or look at a folder without a server."""
    if folder is not None:
        _view(folder, model, browser=browser)
        return
    if model is not None:
        fail("--model is for a FOLDER; a server has its own", USAGE)
    server, in_url = _split(url)
    key = key or in_url or key_from(data_dir)
    with reported(), Client([server], key=key) as client:
        for error in client.health().values():
            if error is not None and error.type != NOT_READY:  # it shows what there is all the same
                raise error
    address = f"{server}/ui"
    whole = _with_key(address, key) if key else address
    echo(whole if with_key else address)
    if not browser:
        return
    if "SSH_CONNECTION" in os.environ:
        echo(_OVER_SSH, err=True)
    elif not _open(whole):
        echo(_NO_BROWSER, err=True)


def _view(folder: Path, model: Path | None, *, browser: bool) -> None:
    """Looks at a folder until Ctrl-C."""
    view, pages = _folder_viewer(), Path()

    def ready(server: str, key: str) -> None:
        address = f"{server}/ui"
        whole = _with_key(address, key)
        echo(f"{folder} is shown, read-only, until Ctrl-C", err=True)
        if not browser or "SSH_CONNECTION" in os.environ:
            echo(whole)  # nothing else could open it
            if browser:
                echo(_OVER_SSH, err=True)
            return
        echo(address)
        if not _opened_by(pages, whole):
            echo(whole)
            echo(_NO_BROWSER, err=True)

    with tempfile.TemporaryDirectory(prefix="turnstile-ui-") as made:
        pages = Path(made)
        try:
            view(folder, model, ready)
        except ValueError as error:
            fail(str(error), FAILED)


def _folder_viewer() -> FolderViewer:
    """Ends the command where the server package is missing."""
    missing = "`turnstile ui FOLDER` needs the server package: pip install 'turnstile-rl[server]'"
    entries = entry_points(group=VIEWERS, name="folder")
    if not entries:
        fail(missing, USAGE)
    try:
        found: FolderViewer = next(iter(entries)).load()
    except ImportError as error:
        fail(f"{missing}: {error}", USAGE)
    return found


def _with_key(address: str, key: str) -> str:
    return f"{address}#key={quote(key, safe='')}"


def _split(url: str) -> tuple[str, str | None]:
    """The server's URL without a key in its path (``/k/KEY``), and that key."""
    parts = urlsplit(url)
    before, mark, key = parts.path.rstrip("/").partition("/k/")
    return parts._replace(path=before, query="", fragment="").geturl(), key if mark else None


def _open(address: str) -> bool:
    """Opens the address in a browser; True if one was found."""
    with tempfile.TemporaryDirectory(prefix="turnstile-ui-") as folder:
        opened = _opened_by(Path(folder), address)
        if opened:
            time.sleep(_READ_WITHIN_S)
    return opened


def _opened_by(folder: Path, address: str) -> bool:
    """True if a browser was found. Its page in the folder is this user's alone (mode 600)."""
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(_REDIRECT.format(address=address.replace("&", "&amp;").replace('"', "%22")), "utf-8")
    return webbrowser.open(page.as_uri())
