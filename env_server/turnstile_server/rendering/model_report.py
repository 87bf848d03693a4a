"""What a model folder can do in words for people: the form of its calls, its thinking, and what is not exact."""

from __future__ import annotations

from turnstile_server.rendering.message_rules import MessageRules
from turnstile_server.rendering.protocol import ModelReport
from turnstile_server.rendering.recognition import NotRecognised, Recognised
from turnstile_server.rendering.tags import Tags


def model_report(
    calls: Recognised | NotRecognised, tags: Tags, stops: tuple[str, ...], rules: MessageRules
) -> ModelReport:
    """The report on a model whose calls, tags, end tokens and rules of messages these are."""
    rewrites = tuple(way.value for way in rules.changes())
    thinking = "" if tags.think is None else " … ".join(tag.strip() for tag in tags.think)
    if isinstance(calls, NotRecognised):
        return ModelReport(None, thinking, stops, rewrites, (f"calls with tools are refused: {calls.why}",))
    inexact: list[str] = []
    if not calls.written:
        inexact.append(
            f"the chat template writes no calls; that they are {calls.format.name} is read off its marks, or set"
        )
    if calls.lost:
        inexact.append(f"what the chat template writes does not come back equal: {', '.join(calls.lost)}")
    spelled = [
        opening.text
        for opening in calls.format.form.openings
        if not opening.first and not any(token in opening.text for token in tags.marked)
    ]
    if len(spelled) == len(calls.format.form.openings):
        inexact.append(
            f"{' '.join(spelled)} is no token of this vocabulary: any text that spells it begins a call"
        )
    return ModelReport(calls.format.name, thinking, stops, rewrites, tuple(inexact))
