"""Takes the pictures of the viewer in docs/pictures from the recorded run of real agents: ``make pictures``.

    python scripts/viewer_pictures.py [--out docs/pictures] [--only NAME …]

Needs Chromium (scripts/install_chromium.sh). The same recording and pages give the same pictures, whatever
the time of day: times are shown in UTC. Look at every one before it is committed.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from turnstile_server.commands.view_folder import view_folder
from turnstile_server.testing.server import TOKENIZER_FOLDER

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "ui" / "recorded" / "agents-run.tar.xz"
PICTURES = ROOT / "docs" / "pictures"
START_S = 60.0
COLOURS = 256
"""Of a picture, at most: flat pages have few, and the file is a third of the size."""


@dataclass(frozen=True)
class Picture:
    """``path`` below ``/ui``. ``seen``: a selector of what must be there first; ``top``: of what is then scrolled
    to the upper edge. ``height`` in pixels."""

    name: str
    path: str
    seen: str
    height: int = 800
    scheme: Literal["light", "dark"] = "light"
    top: str | None = None


RUN = "real-agents"
EPISODE = "claude-code-01"
"""Its work passes the tests that the agent saw, and fails two hidden ones."""
SAMPLE = f"/episodes/{EPISODE}/tokens/{{turn}}"
"""``{turn}``: its last turn; ``{at}``: where the first turn's completion begins."""
TOKENS = ".token-lines [role=option]"
PICTURES_TAKEN: Sequence[Picture] = (
    Picture("runs", "/runs", ".runs td a", height=290),
    Picture("run", f"/runs/{RUN}", "canvas", height=1010),
    Picture("run-dark", f"/runs/{RUN}", "canvas", height=1010, scheme="dark"),
    Picture("episodes", f"/episodes?run_id={RUN}&sort=reward&order=asc", "[role=gridcell] a", height=700),
    Picture("group", "/groups/claude-code-0?node=1", ".ways > .chosen", height=1330),
    Picture(
        "compare", f"/compare/claude-code-00/{EPISODE}", "[aria-label='Table: Facts']", top="#parting", height=640
    ),
    Picture("episode", f"/episodes/{EPISODE}", "article", height=1000),
    Picture("tokens", f"{SAMPLE}?at={{at}}", f"{TOKENS}[aria-selected=true]", height=760),
    Picture(
        "tokens-dark",
        f"{SAMPLE}?colour=turn&at={{at}}",
        f"{TOKENS}[aria-selected=true]",
        height=760,
        scheme="dark",
    ),
)


@contextmanager
def viewer(folder: Path) -> Iterator[tuple[str, str]]:
    """Address and key of a viewer on the folder, in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_view, args=(folder, theirs))
    process.start()
    try:
        if not ours.poll(START_S):
            raise SystemExit("the viewer did not start")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _view(folder: Path, told: Connection) -> None:
    view_folder(folder, TOKENIZER_FOLDER, lambda url, key: told.send((url, key)))


def take(browser: Browser, url: str, key: str, picture: Picture, out: Path) -> None:
    context = browser.new_context(
        color_scheme=picture.scheme,
        viewport={"width": 1280, "height": picture.height},
        timezone_id="UTC",
        locale="en-GB",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"{url}/ui{picture.path.format(**places(url, key))}#key={key}")
    page.wait_for_selector(picture.seen)
    if picture.top is not None:
        page.locator(picture.top).evaluate("element => element.scrollIntoView()")
    expect(page.get_by_text("Loading…")).to_have_count(0)
    page.wait_for_timeout(500)  # charts and rows draw themselves
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
    flat = image.quantize(COLOURS, dither=Image.Dither.NONE)
    target = out / f"viewer-{picture.name}.png"
    flat.save(target, optimize=True)
    print(f"{target} {target.stat().st_size // 1024} KiB", flush=True)


def places(url: str, key: str) -> dict[str, str]:
    """What stands for the names in the path of a picture."""
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) as api:
        turns = api.get(f"/episodes/{EPISODE}/turns", params={"arrays": False}).raise_for_status().json()["turns"]
        turn = turns[-1]["turn_id"]
        window = api.get(f"/turns/{turn}/tokens", params={"count": 1}).raise_for_status().json()
    return {"turn": turn, "at": str(window["turns"][0]["start"])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes the pictures of the viewer.")
    parser.add_argument("--out", type=Path, default=PICTURES)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in PICTURES_TAKEN])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="viewer-pictures-") as work, tarfile.open(RECORDED) as recorded:
        recorded.extractall(work)
        with viewer(Path(work)) as (url, key), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
            for picture in PICTURES_TAKEN:
                if asked.only is None or picture.name in asked.only:
                    take(browser, url, key, picture, asked.out)
            browser.close()


if __name__ == "__main__":
    main()
