"""The Gymnasium loop that docs/gym.md and README.md print, run as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from local import ROOT
from training_support import trainer_server
from turnstile import Client
from turnstile_server.demo import TINY

LINES = 15


def printed() -> list[str]:
    """The block in each page that has it."""
    pages = (ROOT / "README.md", ROOT / "docs" / "gym.md")
    found = [page.read_text(encoding="utf-8") for page in pages]
    return [
        block
        for text in found
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if "Turnstile/Agent-v0" in block and "policy.generate" in block
    ]


@pytest.mark.slow
def test_every_page_prints_the_same_short_loop() -> None:
    blocks = printed()
    assert 1 <= len(blocks) <= 2
    assert len(set(blocks)) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= LINES


@pytest.mark.slow
def test_the_loop_runs_as_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = printed()[0]
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    with trainer_server(TINY, tmp_path, sandboxes={"kind": "local"}) as server:
        exec(compile(code, "README.md", "exec"), {"URL": server.url, "KEY": server.key})
        with Client(server.url, key=server.key) as client:
            episode = next(client.episodes())
            samples = client.episode(episode.episode_id).samples()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(re.fullmatch(r"\w+: reward [\d.]+, \d+ turns, [1-9]\d* tokens", line) for line in lines), lines
    assert samples.stats.trained_tokens == samples.stats.sampled_tokens > 0
