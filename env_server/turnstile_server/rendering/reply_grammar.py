"""The grammars of replies: an answer in a format, or a call that is forced, as XGrammar's structural tags. Pure.

How a model writes a call is not known here by family: a probe call is written by the chat template, and what
stands before and behind its JSON arguments is the form. A form is used only where a call in it is read back as
that call. So a format whose arguments are no JSON (tags around bare values), or whose calls carry ids of their
own, has none.

What must hold: whatever a grammar takes, the reply parser reads as the answer or the call that was asked for,
behind thinking where the model thinks. A control token is asked for as that token, never as its letters, and in
grammars of one shape always by the same ids: XGrammar 0.2.7 and 0.2.8 keep masks by the shape alone, so that one
with another id would get the mask of the first, and the engine gives the call up.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.protocol import ParsedReply

Form = dict[str, Any]
"""A format of a structural tag."""

KEPT_FORMS: Final = 1024
"""Tools whose calls' form is kept, the latest used."""

OPTIONS: Final = "x-guidance"
"""The member of a schema in which llguidance looks for options."""

_PROBE: Final = re.compile(r'\{\s*"zq"\s*:\s*"zq7"\s*\}')
_READ_BACK: Final = '{"zq": [1, {"a": "}\\n]"}, null]}'
_BLANK: Final[Form] = {"type": "regex", "pattern": r"[\n ]{0,2}"}
"""Between thinking and what follows it."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """What the model writes around a call's JSON arguments; control tokens as their texts."""

    before: str
    after: str


class ReplyGrammar:
    """Writes grammars for one model. ``control``: the ids of its control tokens by text. ``think``: the tags
    around thinking. ``marked``: the control tokens of the tags and of the call format. ``stop_ids``: the tokens
    that end a reply. ``write`` gives the text of a reply as the template writes it, and ``read`` the reply that a
    text is."""

    def __init__(
        self,
        control: Mapping[str, int],
        think: tuple[str, str] | None,
        marked: Sequence[str],
        stop_ids: Sequence[int],
        *,
        write: Callable[[Message, Sequence[Tool]], str],
        read: Callable[[str, Sequence[Tool]], ParsedReply],
    ) -> None:
        self._control = control
        self._cut = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
        self._think = think
        self._marked = frozenset(marked)
        self._stop_ids = list(stop_ids)
        self._write, self._read = write, read
        self._forms: OrderedDict[str, CallForm | None] = OrderedDict()
        self._forms_lock = threading.Lock()  # long lists of tools are read in threads

    def answer(self, schema: str, *, opened: bool) -> str | None:
        """An answer of this JSON schema behind the thinking that the prompt has ``opened``. None elsewhere: the
        schema alone is the grammar, and engines hold more of a schema that stands alone."""
        thinking = self._thinking(opened=True) if opened else None
        if thinking is None:
            return None
        asked = json.loads(schema)
        if isinstance(asked, dict):
            asked.pop(OPTIONS, None)
        return _tag([thinking, {"type": "json_schema", "json_schema": asked}])

    def call(self, tools: Sequence[Tool], name: str, *, opened: bool) -> str | None:
        """One call of the tool ``name``, "" for any of ``tools``, and nothing else but thinking before it. None
        where such a call has no form that is known."""
        calls: list[Form] = []
        for tool in tools:
            if name in ("", tool.name):
                form, schema = self._form(tool.name), _arguments(tool)
                if form is None or schema is None:
                    return None
                parts = [*self._pieces(form.before), {"type": "json_schema", "json_schema": schema}]
                calls.append({"type": "sequence", "elements": [*parts, *self._pieces(form.after)]})
        thinking = self._thinking(opened=opened)
        if not calls or (thinking is None and opened):
            return None
        try:
            return _tag([thinking or _BLANK, {"type": "or", "elements": calls}])
        except RecursionError:  # a schema that is nested too deep
            return None

    def _thinking(self, *, opened: bool) -> Form | None:
        """Thinking up to its end: all the rest of it, or a block that the model may begin."""
        if self._think is None:
            return None
        opening, closing = self._pieces(self._think[0]), self._pieces(self._think[1])
        if closing[0]["type"] == "token":
            most = {"type": "any_tokens", "exclude_tokens": [closing[0]["token"], *self._stop_ids]}
            rest = [most, *closing]
        elif len(closing) == 1:
            text = closing[0]["value"]
            rest = [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": text}]
        else:
            return None
        if opened:
            return {"type": "sequence", "elements": [*rest, _BLANK]}
        block: Form = {"type": "sequence", "elements": [*opening, *rest, _BLANK]}
        return {"type": "optional", "content": block}

    def _pieces(self, text: str) -> list[Form]:
        """``text``, each control token as itself."""
        pieces: list[Form] = []
        position = 0
        for found in self._cut.finditer(text):
            if found.start() > position:
                pieces.append({"type": "const_string", "value": text[position : found.start()]})
            pieces.append({"type": "token", "token": self._control[found[0]]})
            position = found.end()
        if position < len(text):
            pieces.append({"type": "const_string", "value": text[position:]})
        return pieces

    def _form(self, name: str) -> CallForm | None:
        with self._forms_lock:
            if name in self._forms:
                self._forms.move_to_end(name)
                return self._forms[name]
        form = self._probed(name)
        with self._forms_lock:
            self._forms[name] = form
            while len(self._forms) > KEPT_FORMS:
                self._forms.popitem(last=False)
        return form

    def _probed(self, name: str) -> CallForm | None:
        if self._cut.search(name):
            return None
        # As a template may ask of any tool: with descriptions and types (Hermes 3's).
        zq = {"type": "string", "description": "A probe."}
        parameters = {"type": "object", "properties": {"zq": zq}, "required": []}
        function = {"name": name, "description": "A probe.", "parameters": parameters}
        tools = (Tool(name, {"type": "function", "function": function}),)
        try:
            text = self._write(
                Message("assistant", tool_calls=(ToolCall(name, '{"zq": "zq7"}', "call_0"),)), tools
            )
        except InvalidRequest:
            return None
        places = list(_PROBE.finditer(text))
        if len(places) != 1:
            return None
        before, after = text[: places[0].start()], text[places[0].end() :]
        # Other control tokens are no part of a call: they open and close the turn.
        turns = [found for found in self._cut.finditer(before) if found[0] not in self._marked]
        before = before[turns[-1].end() :] if turns else before
        end = next((found for found in self._cut.finditer(after) if found[0] not in self._marked), None)
        after = after if end is None else after[: end.start()]
        form = CallForm(before.lstrip(), after.rstrip())
        parsed = self._read(form.before + _READ_BACK + form.after, tools)
        (read, *more) = parsed.message.tool_calls or (ToolCall("", "null"),)
        same = (read.name, json.loads(read.arguments)) == (name, json.loads(_READ_BACK))
        if not same or more or read.own_id is not None or parsed.message.content or parsed.parse_notes:
            return None
        return form


def _arguments(tool: Tool) -> Form | None:
    """The schema of the tool's arguments; None where they are no object. Keywords that an engine's library does
    not know are left out (llguidance's option, XGrammar's rule): tools declare formats and unions that nobody
    holds a free model to either. Members that the tool does not declare are not made up."""
    schema = dict(tool.parameters)
    if schema.setdefault("type", "object") != "object":
        return None
    if schema.get("properties") and not schema.keys() & _OTHER_MEMBERS:
        schema["additionalProperties"] = False
    return {**schema, OPTIONS: {"lenient": True, "coerce_one_of": True}}


_OTHER_MEMBERS: Final = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")
)


def _tag(elements: list[Form]) -> str:
    """Serialized in one way, so that engines find an equal grammar among those that they compiled."""
    form = {"type": "sequence", "elements": elements}
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
