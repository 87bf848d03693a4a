"""The viewer's files: open, in one version, under any prefix, and with headers that let nothing else run."""

from __future__ import annotations

import gzip
import re
from importlib.resources import files

import httpx
import pytest

from control_support import Door, OpenDoor
from turnstile_server.control.viewer_routes import ASSETS, SECURITY_HEADERS

pytestmark = pytest.mark.anyio

MOST_BYTES = 1 << 20
PAGES = ("/ui", "/ui/", "/ui/episodes", "/ui/episodes/ep-1", "/ui/episodes/ep%2F1/tokens/t-1")


def names(page: httpx.Response) -> list[str]:
    """The addresses of what a page loads, as a browser resolves them."""
    found = re.findall(r'(?:href|src)="([^"]*assets[^"]*)"', page.text)
    return [str(page.url.join(name)) for name in found]


@pytest.mark.parametrize("path", PAGES)
async def test_every_address_is_the_page_without_a_key_and_names_the_same_files(
    stranger: httpx.AsyncClient, path: str
) -> None:
    page = await stranger.get(path)
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    loaded = names(page)
    assert len(loaded) == len(ASSETS)
    for address in loaded:
        file = await stranger.get(address)
        assert file.status_code == 200
        assert file.headers["content-type"] == ASSETS[address.rpartition("/")[2]]
        assert file.headers["cache-control"].endswith("immutable")


async def test_the_plain_address_leads_to_the_viewer(stranger: httpx.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        greeted = await stranger.request(method, "/")
        assert greeted.status_code == 303
        assert SECURITY_HEADERS.items() <= dict(greeted.headers).items()
        assert greeted.url.join(greeted.headers["location"]).path == "/ui"
    behind_a_proxy = greeted.url.copy_with(path="/rl/").join(greeted.headers["location"])
    assert behind_a_proxy.path == "/rl/ui"
    assert "the API asks for the control key" in (await stranger.get("/")).text
    assert (await stranger.post("/", json={})).status_code == 405


async def test_no_answer_lets_the_browser_run_frame_or_send_anything_else(stranger: httpx.AsyncClient) -> None:
    page = await stranger.get("/ui/episodes")
    for answer in (page, await stranger.get(names(page)[0]), await stranger.get("/ui")):
        assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    inline = re.findall(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page.text)
    assert inline == []


async def test_a_known_version_is_not_sent_again(stranger: httpx.AsyncClient) -> None:
    page = await stranger.get("/ui/episodes")
    for address in ("/ui/episodes", *names(page)):
        etag = (await stranger.get(address)).headers["etag"]
        again = await stranger.get(address, headers={"if-none-match": etag})
        assert (again.status_code, again.content) == (304, b"")


async def test_a_file_of_another_version_is_not_kept(stranger: httpx.AsyncClient) -> None:
    old = await stranger.get("/ui/assets/0123456789abcdef/app.js")
    assert (old.status_code, old.headers["cache-control"]) == (200, "no-cache")
    missing = await stranger.get("/ui/assets/0123456789abcdef/none.js")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found")


async def test_files_are_sent_compressed_to_those_who_can_read_that(stranger: httpx.AsyncClient) -> None:
    address = "/ui/assets/0/app.js"
    plain = await stranger.get(address, headers={"accept-encoding": "identity"})
    packed = await stranger.get(address, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2


async def test_only_the_viewer_is_open(stranger: httpx.AsyncClient) -> None:
    for path in ("/episodes", "/uix", "/ui%2f../episodes/x", "/openapi.json"):
        answer = await stranger.get(path)
        assert answer.status_code == 401 or answer.text.startswith("<!doctype html>"), path
    assert (await stranger.get("/episodes")).status_code == 401
    assert (await stranger.get("/ui/../episodes")).status_code == 401  # as the client resolves it
    assert (await stranger.post("/ui/episodes")).status_code == 405


async def test_a_key_in_the_path_becomes_a_fragment_of_the_viewers_own_address(
    stranger: httpx.AsyncClient, door: Door
) -> None:
    for path in ("/ui", "/ui/", "/ui/episodes/ep-1?a=b"):
        answer = await stranger.get(f"/k/{door.key}{path}")
        assert answer.status_code == 303
        there = answer.url.join(answer.headers["location"])
        assert str(there) == f"{door.url}{path}#key={door.key}"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
    for path in ("", "/"):
        for prefix in ("", "/rl"):
            answer = await stranger.get(f"/k/{door.key}{path}")
            asked = answer.url.copy_with(path=f"{prefix}{answer.url.path}")
            assert str(asked.join(answer.headers["location"])) == f"{door.url}{prefix}/ui#key={door.key}"
    assert (await stranger.post(f"/k/{door.key}", json={})).status_code == 405
    assert (await stranger.get("/k/another-key-0123456789")).status_code == 401
    assert (await stranger.get("/k/another-key-0123456789/ui")).status_code == 401


@pytest.mark.slow
def test_a_server_without_authentication_keeps_strangers_names_out_and_repeats_no_header(
    open_door: OpenDoor,
) -> None:
    with open_door(control={"auth": False}) as door:
        assert httpx.get(f"{door.url}/ui").status_code == 200
        assert httpx.get(f"{door.url}/ui", headers={"host": "stranger.example"}).status_code == 421
        own = {"origin": door.url}
        assert httpx.get(f"{door.url}/episodes", headers=own).status_code == 200
        assert httpx.get(f"{door.url}/episodes", headers={"origin": "https://a.example"}).status_code == 403
        split = httpx.get(f"{door.url}/k/a%0d%0ax-more:%201/ui")
        assert split.status_code == 303
        assert "x-more" not in split.headers


def test_all_files_together_are_small() -> None:
    folder = files("turnstile_server.viewer")
    packed = sum(len(gzip.compress(folder.joinpath(name).read_bytes())) for name in (*ASSETS, "index.html"))
    assert packed < MOST_BYTES
