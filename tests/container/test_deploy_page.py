"""docs/deploy.md is followed word for word, in a clean clone: every shell and Python block, in order.

What differs from the page is in ``SUBSTITUTED`` and nothing else: the images are built before, and names that this
machine may have of its own are others.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from compose_support import clean, own_names, program
from image_builds import ROOT, run

from sglang_server import sglang_server
from turnstile_server.demo import TINY

pytestmark = [
    pytest.mark.docker,
    pytest.mark.container,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
FOLLOWED_S = 900
TEN_MINUTES_S = 600
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks_of(heading: str, page: str) -> list[Block]:
    """The blocks of the section with this heading, up to the next heading of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    inside, fenced, lines = False, False, []
    for line in page.splitlines():
        if not fenced and re.match(rf"#{{1,{level}}} ", line):
            inside = line == heading
        elif line.startswith("```"):
            fenced = not fenced
        if inside:
            lines.append(line)
    return [Block(language, text) for language, text in BLOCK.findall("\n".join([*lines, ""]))]


@pytest.fixture
def name(host_ports: None) -> Iterator[str]:
    made = f"turnstile-test-{secrets.token_hex(4)}"
    yield made
    run("docker", "rm", "-f", made, ok=False)
    for volume in ("data", "tiny-data", "restored"):
        run("docker", "volume", "rm", "-f", f"{made}-{volume}", ok=False)


@pytest.fixture
def clone(tmp_path: Path, name: str) -> Path:
    """A clean clone of what is committed."""
    folder = tmp_path / "turnstile"
    run("git", "clone", "--quiet", f"file://{ROOT}", folder, timeout_s=120)
    for own in ("compose.yaml",):
        (folder / own).write_text(own_names((folder / own).read_text(), name))
    return folder


def follow(blocks: list[Block], folder: Path, substituted: dict[str, str], **environment: str) -> str:
    """Runs the blocks as one shell session that stops at the first command that fails; what it printed.

    A Python block is saved as the file that the page names. ``substituted``: texts that must be on the page, each
    with what stands for it.
    """
    script = "set -euo pipefail\n"
    for block in blocks:
        if block.language == "python":
            script += f"cat > first.py <<'END OF FILE'\n{block.text}END OF FILE\n"
        else:
            script += block.text
    for said, instead in substituted.items():
        assert said in script, f"the page does not say {said!r} any more"
        script = script.replace(said, instead)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=clean(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FOLLOWED_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.thorough
def test_ten_minutes_from_a_clone_to_audited_episodes(clone: Path, name: str, embedded_image: str) -> None:
    page = (clone / "docs" / "deploy.md").read_text()
    began = time.monotonic()
    substituted = {"docker compose": shlex.join(program()), "--build --wait": "--no-build --wait"}
    try:
        said = follow(
            blocks_of("## In ten minutes", page), clone, substituted, TURNSTILE_EMBEDDED_IMAGE=embedded_image
        )
    finally:
        down = [*program(), "--profile", "tiny", "down", "--volumes"]
        subprocess.run(down, cwd=clone, env=clean({"TURNSTILE_CONTROL_KEY": "k" * 20}), check=False)
    assert time.monotonic() - began < TEN_MINUTES_S
    assert "sandboxes: local: bubblewrap" in said
    assert (
        len(re.findall(r"(?m)^(?:completed|truncated) [01]\.0 \[\d", said)) == 16
    )  # four groups of four, each graded and sampled
    assert (clone / ".env").stat().st_mode & 0o077 == 0


@pytest.mark.thorough
@pytest.mark.sglang
def test_an_sglang_that_runs_already(clone: Path, name: str, server_image: str) -> None:
    page = (clone / "docs" / "deploy.md").read_text()
    first = [block for block in blocks_of("## In ten minutes", page) if ".env" in block.text][:1]
    client = [block for block in blocks_of("## In ten minutes", page) if "python3 -m venv" in block.text]
    key = [
        Block("sh", f"{line}\n") for line in page.splitlines() if line.startswith("export TURNSTILE_CONTROL_KEY=")
    ]
    assert len(first) == len(client) == len(key) == 1
    blocks = [
        *first,
        *client,
        *key,
        *blocks_of("### One that you run already", page),
        *blocks_of("## The volume", page),
    ]
    substituted = {
        "docker build -f server/Dockerfile -t turnstile .": ":",
        "host.docker.internal:host-gateway turnstile\n": f"host.docker.internal:host-gateway {server_image}\n",
        "--name turnstile ": f"--name {name} ",
        "docker exec turnstile ": f"docker exec {name} ",
        "docker stop --time 30 turnstile\n": f"docker stop --time 30 {name}\n",
        "docker rm turnstile\n": f"docker rm {name}\n",
        "turnstile-data:/data": f"{name}-data:/data",
        "turnstile-restored:/data": f"{name}-restored:/data",
        ":ro turnstile \\\n": f":ro {server_image} \\\n",
        "-restored:/data turnstile \\\n": f"-restored:/data {server_image} \\\n",
    }
    with sglang_server(TINY, ("--host", "0.0.0.0")) as url:
        reached = url.replace("127.0.0.1", "host.docker.internal")
        follow(blocks, clone, substituted, MODEL_DIR=str(TINY), SGLANG_URL=reached)
    restored = run(
        "docker", "run", "--rm", "-v", f"{name}-restored:/data", server_image, "ls", "/data", "/data/journal"
    )
    assert "server.secret" in restored
    assert "segment-" in restored


def test_every_block_of_the_page_is_run_or_marked_as_text() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    followed = ("## In ten minutes", "### One that you run already", "## The volume")
    found = sum(len(blocks_of(heading, page)) for heading in followed)
    assert found == len(BLOCK.findall(page))
    assert os.access(ROOT / "scripts" / "install_compose.sh", os.X_OK)
