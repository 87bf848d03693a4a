"""One episode of a report: its facts, its conversation, its breaks and its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from turnstile.models import Episode, Message, TurnOutline
from turnstile.report.contents import MOST_CHARACTERS, ShownEpisode, TokenPiece
from turnstile.report.figures import facts, number, seconds, share, when
from turnstile.report.markup import Markup, joined, tag
from turnstile.visible import visible, visible_line

LEVELS = (0.9, 0.5, 0.1, 0.01)
"""Probabilities at which the shading of a token changes: level 0 is at least the first, level 4 below the last."""
_LONGEST_NAME = 80
_LONGEST_WHY = 400


def anchor(number_: int) -> str:
    return f"episode-{number_}"


def episode_part(number_: int, shown: ShownEpisode) -> Markup:
    """``number_`` counts the episodes of the report from 1."""
    summary = shown.summary
    title = f"{number_}. {visible_line(summary.task, _LONGEST_NAME)}: {shown.reason}"
    return tag(
        "section",
        tag("h3", title, id=anchor(number_)),
        tag("p", visible_line(summary.why, _LONGEST_WHY), class_="why"),
        facts(
            [
                ("episode", summary.episode_id),
                ("task", summary.title),
                ("agent", summary.agent),
                ("status", summary.status.value),
                ("reward", number(summary.reward)),
                (
                    "reward, part by part",
                    ", ".join(f"{k} {number(v)}" for k, v in shown.episode.reward_components.items()),
                ),
                ("error", None if shown.episode.error is None else _cut(shown.episode.error.message)),
                ("group", summary.group_id),
                ("train step", None if summary.train_step is None else str(summary.train_step)),
                (
                    "weights",
                    ", ".join(f"{k} ({number(v)} tokens)" for k, v in shown.episode.stats.weight_versions.items()),
                ),
                ("turns", number(summary.turns)),
                ("hosted model", _hosted(shown.episode)),
                (
                    "tokens",
                    None
                    if shown.episode.upstream is not None
                    else f"{number(summary.sampled_tokens)} sampled, {number(summary.trained_tokens)} trained",
                ),
                ("not trained", _counts(summary.untrained)),
                ("breaks", _counts(summary.breaks)),
                ("began", when(summary.created_at)),
                ("took", seconds(summary.ended_s)),
                ("time", ", ".join(f"{k} {seconds(v)}" for k, v in summary.seconds.model_dump().items() if v)),
            ]
        ),
        (tag("p", each, class_="note") for each in shown.missing),
        _fold("Conversation", _conversation(shown)) if shown.turns else "",
        _fold("Breaks", _breaks(shown)) if shown.breaks else "",
        _fold("Tokens", _tokens(shown)) if shown.tokens else "",
        class_="episode",
    )


def _hosted(episode: Episode) -> str | None:
    """The hosted model that answered, with its server's counts; None: an engine sampled."""
    if episode.upstream is None:
        return None
    counts = {name.replace("_", " "): count for name, count in episode.stats.upstream.items()}
    return (
        f"{visible_line(episode.upstream, _LONGEST_NAME)}; by its server's count: {_counts(counts) or 'nothing'}"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number(count)}" for name, count in sorted(counts.items()))


def _fold(summary: str, content: Markup) -> Markup:
    return tag("details", tag("summary", summary), content, open=True)


def _cut(text: str) -> str:
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]}\n… {number(left)} more characters"


def _conversation(shown: ShownEpisode) -> Markup:
    parts = []
    before = -1
    for turn in shown.turns:
        if before >= 0 and turn.seq > before + 1:
            parts.append(tag("p", f"{turn.seq - before - 1} turns are left out.", class_="note"))
        parts.append(_turn(turn))
        before = turn.seq
    return joined(parts)


def _turn(turn: TurnOutline) -> Markup:
    said = [
        f"turn {turn.seq}",
        _token_counts(turn),
        f"ended by {turn.finish_reason}",
    ]
    if turn.parent_id is None and turn.seq:
        said.append("a new root")
    if turn.break_ is not None:
        said.append(f"break: {turn.break_.reason.value}")
    if turn.mean_logprob is not None:
        said.append(f"mean logprob {turn.mean_logprob:.3f}")
    messages = [each for message in turn.new_messages for each in _message(message, sampled=False)]
    return tag("div", tag("h4", ", ".join(said)), messages, _message(turn.reply, sampled=True), class_="turn")


def _token_counts(turn: TurnOutline) -> str:
    if turn.upstream is not None:
        return visible_line(turn.upstream.words, 200)
    return f"{number(turn.context_tokens)} + {number(turn.completion_tokens)} tokens"


def _message(message: Message, *, sampled: bool) -> Iterator[Markup]:
    kind = "message sampled" if sampled else "message"
    by = f"{message.role}, sampled" if sampled else message.role
    if message.reasoning:
        yield _text(f"{by}: thinking", message.reasoning, kind)
    if message.content or not (message.reasoning or message.tool_calls):
        yield _text(by, message.content or "(empty)", kind)
    for call in message.tool_calls:
        yield _text(f"{by} calls {visible_line(call.name, _LONGEST_NAME)}", call.arguments, kind)


def _text(head: str, text: str, kind: str) -> Markup:
    return tag("div", tag("p", head, class_="who"), tag("pre", _cut(text)), class_=kind)


def _breaks(shown: ShownEpisode) -> Markup:
    parts = []
    for each in shown.breaks:
        place = (
            ""
            if each.at is None
            else f", at message {each.at.message}{f', {each.at.path}' if each.at.path else ''}"
        )
        parts.append(tag("h4", f"turn {each.seq}: {each.reason.value}{place}"))
        for head, message in (("was known", each.known), ("came", each.incoming)):
            if message is not None:
                parts += [tag("p", head, class_="note"), *_message(message, sampled=False)]
    return joined(parts)


def _tokens(shown: ShownEpisode) -> Markup:
    parts = []
    before = 0
    for piece in shown.tokens:
        if piece.start > before:
            parts.append(tag("p", f"{number(piece.start - before)} tokens are left out.", class_="note"))
        parts.append(tag("pre", _piece(piece), class_="tokens"))
        before = piece.start + len(piece.ids)
    if before < shown.all_tokens:
        parts.append(tag("p", f"{number(shown.all_tokens - before)} more tokens follow.", class_="note"))
    return joined(parts)


def _piece(piece: TokenPiece) -> Iterator[Markup]:
    for at, id_ in enumerate(piece.ids):
        logprob, version = piece.logprobs[at], piece.versions[at]
        classes = ["s"] if piece.special[at] else []
        said = [f"token {piece.start + at}", f"id {id_}"]
        if logprob is not None:
            trained = bool(piece.loss_mask[at])
            classes += [f"l{_level(logprob)}", "t" if trained else "u"]
            said += [f"logprob {logprob:.3f}", "trained" if trained else "not trained"]
        if version is not None:
            said.append(f"weights {visible_line(version, _LONGEST_NAME)}")
        text = f"{id_} " if piece.text is None else _with_line_ends(piece.text[at])
        yield tag("span", text, class_=" ".join(classes) or None, title=", ".join(said))


def _with_line_ends(token: str) -> str:
    """Line ends are seen as a sign, and end the line."""
    return "\\n\n".join(visible(part) for part in token.split("\n"))


def _level(logprob: float) -> int:
    return sum(logprob < math.log(least) for least in LEVELS)


def legend(shown: Sequence[ShownEpisode]) -> Markup:
    """The legend of the marks of tokens; empty where no tokens are shown."""
    if not any(each.tokens for each in shown):
        return Markup("")
    words = [f"at least {share(LEVELS[0])}", *(f"below {share(least)}" for least in LEVELS)]
    samples = [tag("span", word, class_=f"l{level}") for level, word in enumerate(words)]
    return tag(
        "p",
        "Tokens: shaded by the probability with which they were sampled (",
        [joined(each, ", " if at < len(samples) - 1 else "") for at, each in enumerate(samples)],
        "); ",
        tag("span", "trained", class_="l0 t"),
        " (loss mask 1), ",
        tag("span", "sampled and not trained", class_="l0 u"),
        ", ",
        tag("span", "special", class_="s"),
        ". What has no shade was not sampled. A token's title says its position, id, logprob and weights.",
        class_="tokens legend",
    )
