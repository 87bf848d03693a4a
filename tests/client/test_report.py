"""``turnstile report``: which episodes it shows, whose numbers it has, and that its page does no harm."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_cli import DONE, FAILED, USAGE, Done, on, one_sentence, turnstile
from test_episode_views import say
from test_hostile_text import ALL, harmless
from test_statistics_by import row

from control_support import Door
from turnstile.exporters.sample_files import write_jsonl, write_safetensors
from turnstile.models import (
    Episode,
    EpisodeStatus,
    EpisodeSummary,
    EpisodeTimings,
    Limits,
    Message,
    Sampling,
    SamplingUsed,
    TaskRef,
    TurnOutline,
    TurnTimings,
)
from turnstile.models.messages import ToolCall
from turnstile.report.choose import choose
from turnstile.report.contents import MOST_CHARACTERS, MOST_ROWS, RunReport, ShownEpisode, TokenPiece, ends_of
from turnstile.report.figures import number, share
from turnstile.report.page import page
from turnstile.rollout import Rollout
from turnstile.sync import Client

RUN = "report-1"
MEAN = "mean reward (± its standard error)"
HOSTILE = f"</pre></style></title><script>alert(1)</script><img src=x onerror=alert(1)>\" onload='x' {ALL}"
SENT = HOSTILE.replace("\ud83d", "")
"""Half characters cannot be sent as JSON."""
STEPS = 3


class Page(HTMLParser):
    """The elements of a page and its text, by element; raises where an element is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._tables: dict[str, list[list[str]]] = {}
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))
        if self._open[-1:] == ["caption"]:
            self._tables[data] = self._rows
        elif self._open[-1:] in (["th"], ["td"]):
            self._rows[-1].append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def table(self, caption: str) -> list[list[str]]:
        """The cells of the table with this caption, row by row, its head first."""
        return self._tables[caption]

    def tiles(self) -> dict[str, str]:
        strong = [at for at, (name, _) in enumerate(self.texts) if name == "strong"]
        return {self.texts[at + 1][1]: self.texts[at][1] for at in strong}


def check_harmless(text: str) -> Page:
    """The page runs nothing, loads nothing, and shows nothing that moves or hides what is read."""
    found = Page(text)
    assert {tag for tag, _ in found.elements} <= {
        *("html", "head", "meta", "title", "style", "body", "main", "footer", "section", "h1", "h2", "h3", "h4"),
        *("p", "dl", "dt", "dd", "ul", "li", "strong", "a", "pre", "span", "div", "details", "summary"),
        *("table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption"),
        *("svg", "line", "text", "polyline", "polygon", "rect", "circle"),
    }
    names = {name for _, attributes in found.elements for name in attributes}
    assert [name for name in names if name.startswith("on") or name in ("src", "style", "srcset", "action")] == []
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {str(each["href"]).removeprefix("#") for each in found.of("a")} <= set(ids)
    (style,) = [data for tag, data in found.texts if tag == "style"]
    assert not re.search(r"url\(|@import", style)
    policy = next(each for each in found.of("meta") if each.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    wanted = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert policy["content"] == wanted
    assert harmless(text)
    return found


def report_on(*summaries: EpisodeSummary, shown: tuple[ShownEpisode, ...] = ()) -> RunReport:
    return RunReport("run", "a test", summaries, shown, made_at=1.79e9, client_version="1")


# Which episodes are shown


def test_some_of_each_kind_are_chosen_and_the_same_ones_each_time() -> None:
    rewards = [0.0, 0.25, 0.5, 0.75, 1.0]
    rows = [row(episode_id=f"graded-{at}", reward=reward, created_at=at) for at, reward in enumerate(rewards)]
    rows.append(row(episode_id="failed", error_type="sandbox_failed", created_at=7))
    rows.append(row(episode_id="broken-once", breaks={"history_edited": 1}, created_at=8))
    rows.append(row(episode_id="broken", breaks={"history_edited": 1, "tools_changed": 2}, created_at=9))
    rows.append(row(episode_id="running", status=EpisodeStatus.RUNNING, created_at=10))
    found = [(each.summary.episode_id, each.reason) for each in choose(rows, 7)]
    assert found == [
        ("graded-4", "best"),
        ("graded-0", "worst"),
        ("graded-2", "median"),
        ("failed", "failed"),
        ("broken", "broken"),
        ("graded-3", "best"),
        ("graded-1", "worst"),
    ]
    assert [(each.summary.episode_id, each.reason) for each in choose(reversed(rows), 7)] == found
    everything = choose(rows, 20, ["running", "unknown"])
    assert (everything[0].summary.episode_id, everything[0].reason) == ("running", "asked for")
    assert Counter(each.summary.episode_id for each in everything) == Counter(each.episode_id for each in rows)
    assert choose(rows, 0) == []


def test_the_ends_of_what_is_long_are_shown() -> None:
    assert ends_of(0, 10) == ()
    assert ends_of(10, 10) == ((0, 10),)
    assert ends_of(100, 5) == ((0, 3), (98, 100))
    assert ends_of(100, 1) == ((0, 1),)


# The page


def hostile_episode(summary: EpisodeSummary) -> ShownEpisode:
    calls = (ToolCall(HOSTILE, HOSTILE),)
    turn = TurnOutline(
        turn_id="t",
        episode_id="e",
        parent_id=None,
        seq=0,
        dialect="chat",
        weight_spans=(),
        finish_reason="stop",
        sampling=SamplingUsed(max_new_tokens=1),
        template_hash="",
        tools_key="",
        request_key="",
        new_messages=(Message("user", HOSTILE), Message("tool", "x" * 10_000_000)),
        reply=Message("assistant", HOSTILE, reasoning=HOSTILE, tool_calls=calls),
        timings=TurnTimings(started_at=0.0),
        context_tokens=1,
        completion_tokens=1,
        mean_logprob=-1.0,
        start=1,
        untrained_reason=None,
    )
    episode = Episode(
        episode_id="e",
        status=EpisodeStatus.COMPLETED,
        agent="a",
        task=TaskRef(id="t"),
        rollout_id="r",
        sampling=Sampling(),
        limits=Limits(),
        timings=EpisodeTimings(created_at=0.0),
        reward_components={HOSTILE: 1.0},
    )
    tokens = TokenPiece(0, (1, 2), (HOSTILE, "a\nb"), (True, False), (0, 1), (None, -2.0), (None, HOSTILE))
    return ShownEpisode("best", episode, summary, (turn,), 1, (), (tokens,), 9)


def test_a_page_of_hostile_text_is_harmless() -> None:
    fields: dict[str, Any] = {"task": HOSTILE, "agent": HOSTILE, "title": HOSTILE, "tags": (HOSTILE,)}
    fields |= {"error_type": HOSTILE, "weight_version": HOSTILE, "breaks": {HOSTILE: 1}, "untrained": {HOSTILE: 3}}
    rows = [row(**fields, why=HOSTILE, reward=1.0, train_step=step, ended_s=60.0 * step) for step in range(3)]
    text = page(report_on(*rows, shown=(hostile_episode(rows[0]),)))
    found = check_harmless(text)
    assert "script" not in {tag for tag, _ in found.elements}
    shown = "".join(data for _, data in found.texts)
    assert "<script>alert(1)</script>" in shown
    assert "a\\n\nb" in shown
    assert f"{number(10_000_000 - MOST_CHARACTERS)} more characters" in shown
    assert "7 more tokens follow." in shown
    assert len(text) < 200_000


@pytest.mark.slow
def test_a_run_of_many_tasks_steps_and_versions_stays_small() -> None:
    rows = [
        row(
            episode_id=f"e{at}",
            task=f"task-{at}",
            train_step=at,
            weight_version=str(at),
            reward=at % 2,
            created_at=at,
        )
        for at in range(3000)
    ]
    text = page(report_on(*rows))
    found = check_harmless(text)
    assert len(text) < 1_500_000
    assert len(found.table("By task")) == 1 + MOST_ROWS
    assert sum(f"{number(3000 - MOST_ROWS)} further rows are left out." in data for _, data in found.texts) == 3
    # Versions are text, and come in the order of their numbers.
    assert [cells[0] for cells in found.table("By weight version")][1:13] == [str(at) for at in range(12)]


def test_a_run_without_rewards_and_tokens_is_a_page_too() -> None:
    found = check_harmless(page(report_on(row(status=EpisodeStatus.QUEUED))))
    assert found.tiles()[MEAN] == "–"
    assert found.of("svg") == []


def test_what_changes_from_step_to_step_is_drawn() -> None:
    steps = [
        row(train_step=step, reward=0.5, used=True, lag=1.0, oldest=2, sampled_tokens=4, trained_tokens=step)
        for step in range(1, 4)
    ]
    drawn = [text for element, text in check_harmless(page(report_on(*steps))).texts if element == "figcaption"]
    assert [title for title in drawn if "train step" in title] == [
        "Mean reward by train step, ± its standard error",
        "Trained share by train step",
        "Lag by train step, in weight versions",
    ]


# The command


@pytest.fixture(scope="module")
def recorded_run(door: Door) -> list[str]:
    """Ids of the run's episodes: one per train step, with rewards from the trainer; the last one has a break."""
    made = []
    with Client(door.url, key=door.key) as client:
        for step in range(STEPS):
            task = {"id": f"task-{step}", "instruction": f"Say {SENT}", "reward": {"late": True}}
            episode = client.create_episode(task, run_id=RUN, train_step=step)
            asked = {"role": "user", "content": f"step {step} {SENT}"}
            reply = say(door, episode.episode_id, asked)
            say(door, episode.episode_id, asked, reply, {"role": "user", "content": "and?"})
            if step == STEPS - 1:
                edited = {"role": "assistant", "content": "what the model never said"}
                say(door, episode.episode_id, asked, edited, {"role": "user", "content": "and?"})
                say(door, episode.episode_id, {"role": "user", "content": "another thing"})
            episode.finish()
            episode.reward(step / (STEPS - 1))
            made.append(episode.episode_id)
    return made


def reported(door: Door, *arguments: str | Path) -> Done:
    return turnstile("report", *arguments, **on(door))


@pytest.mark.slow
def test_the_numbers_are_those_of_the_server(door: Door, recorded_run: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = reported(door, RUN, "--out", out, "--solved-at", "0.5")
    assert done.returncode == DONE, done.stderr
    assert f"{out}: {STEPS} episodes, {STEPS} shown" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    found = check_harmless(out.read_text("utf-8"))
    with Client(door.url, key=door.key) as client:
        stats = client.stats(["step"], run_id=RUN, solved_at=0.5)
        total = stats.total
        tiles = found.tiles()
        assert (tiles["episodes"], tiles["graded"], tiles["solved"]) == (
            str(STEPS),
            str(STEPS),
            str(total.solved),
        )
        assert 1 < total.solved < STEPS
        assert tiles[MEAN] == f"{number(total.reward_mean)} ± {number(total.reward_error)}"
        assert tiles["of sampled tokens trained"] == share(total.trained_share)
        assert tiles["breaks"] == str(sum(total.breaks.values())) == "1"
        assert tiles["further conversations"] == str(total.new_conversations) == "1"
        head, *steps = found.table("By train step")
        for cells, wanted in zip(steps, stats.rows, strict=True):
            shown = dict(zip(head, cells, strict=True))
            assert shown["train step"] == str(wanted.key["step"])
            assert shown["reward"] == number(wanted.reward_mean)
            assert shown["sampled"] == number(wanted.sampled_tokens)
            assert shown["breaks"] == number(sum(wanted.breaks.values()))
        texts = [data for _, data in found.texts]
        assert next(iter(client.versions().values())) in texts
        assert next(iter(client.engine().values())).model_name in texts
        # Each token of the path that is shown has its text, its id and its mask.
        last = client.episode(recorded_run[0]).turn_outlines()[-1]
        window = client.episode(recorded_run[0]).tokens(last.turn_id)
    titles = [str(each["title"]) for each in found.of("span") if each.get("title")]
    assert all(
        any(title.startswith(f"token {at}, id {id_}") for title in titles) for at, id_ in enumerate(window.ids)
    )
    sampled = sum(each is not None for each in window.logprobs)
    assert sum("logprob" in title for title in titles) >= sampled > 0
    assert sum(text.startswith("user") for text in texts) >= 2 * STEPS


@pytest.mark.slow
def test_episodes_and_tokens_are_as_many_as_asked_for(door: Door, recorded_run: list[str], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("an old one")
    done = reported(door, RUN, "--out", out, "--episodes", "1", "--episode", recorded_run[1], "--tokens", "6")
    assert done.returncode == DONE, done.stderr
    found = check_harmless(out.read_text("utf-8"))
    assert [(tag, data) for tag, data in found.texts if tag == "h3"] == [("h3", "1. task-1: asked for")]
    assert sum("title" in each for each in found.of("span")) == 6


def test_a_run_that_is_not_there_is_one_sentence(door: Door, tmp_path: Path) -> None:
    said = one_sentence(reported(door, "no-such-run", "--out", tmp_path / "report.html"), FAILED)
    assert "no episode of the run no-such-run" in said
    assert list(tmp_path.iterdir()) == []
    assert "episodes.jsonl is not there" in one_sentence(reported(door, tmp_path), USAGE)


@pytest.mark.parametrize("format_", ["jsonl", "safetensors"])
def test_the_folder_of_a_run_needs_no_server(
    door: Door, recorded_run: list[str], tmp_path: Path, format_: str
) -> None:
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    with Client(door.url, key=door.key) as client, (folder / "episodes.jsonl").open("w") as lines:
        for episode_id in recorded_run:
            handle = client.episode(episode_id)
            episode, samples = handle.status(), handle.samples()
            rollout = Rollout(episode.task, "g", 0, episode.rollout_id, episode, samples, None, 1, 1.0)
            lines.write(json.dumps(rollout.as_json()) + "\n")
            with (folder / "samples" / f"{episode_id}.{format_}").open("wb") as file:
                (write_jsonl if format_ == "jsonl" else write_safetensors)([samples], file)
        lost = Rollout(TaskRef(id="lost"), "g", 1, "r", None, None, None, 3, 1.0)
        lines.write(json.dumps(lost.as_json()) + "\n")
        total = client.stats(run_id=RUN).total
    out = tmp_path / "report.html"
    done = turnstile("report", folder, "--out", out, TURNSTILE_URL="http://127.0.0.1:9")
    assert done.returncode == DONE, done.stderr
    found = check_harmless(out.read_text("utf-8"))
    tiles = found.tiles()
    assert tiles[MEAN] == f"{number(total.reward_mean)} ± {number(total.reward_error)}"
    assert tiles["of sampled tokens trained"] == share(total.trained_share)
    texts = [data for _, data in found.texts]
    assert "1 rollouts have no episode" in texts
    titles = [str(each["title"]) for each in found.of("span") if "title" in each]
    version = samples.samples[0].weight_version_names[0]
    assert any(re.search(rf"logprob -\d+\.\d+, trained, weights {re.escape(version)}$", each) for each in titles)
    written = (folder / "episodes.jsonl").read_bytes()
    (folder / "episodes.jsonl").write_bytes(written + b'{"episode": {"epi\xc3')
    assert turnstile("report", folder, "--out", out).returncode == DONE, "of a run that was killed"
    (folder / "episodes.jsonl").write_bytes(b"\xff\n")
    assert "line 1" in one_sentence(turnstile("report", folder, "--out", out), USAGE)
    (folder / "episodes.jsonl").write_text('{"episode": 3}\n')
    assert "line 1" in one_sentence(turnstile("report", folder, "--out", out), USAGE)
