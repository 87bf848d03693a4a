"""What a generateContent body is parsed into, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import BodyContext, ModelRequest
from turnstile_server.gate.dialects.gemini import GeminiDialect
from turnstile_server.gate.dialects.gemini.schema import json_schema
from turnstile_server.gate.dialects.parse_cache import ParseCache

GEMINI = GeminiDialect()
WHOLE = {"model": "m", "method": "generateContent"}
Wire = dict[str, Any]


def parse(body: Wire, **params: str) -> ModelRequest:
    return GEMINI.parse(json.dumps(body).encode(), BodyContext(params={**WHOLE, **params}))


def messages(*contents: Wire) -> tuple[Message, ...]:
    return parse({"contents": list(contents)}).messages


def user(*parts: Wire) -> Wire:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Wire) -> Wire:
    return {"role": "model", "parts": list(parts)}


def function_call(name: str = "f", **fields: Any) -> Wire:
    return {"functionCall": {"name": name, **fields}}


def result(response: Any, name: str = "f", **fields: Any) -> Wire:
    return {"functionResponse": {"name": name, "response": response, **fields}}


DEEP: Wire = {}
for _ in range(300):
    DEEP = {"items": DEEP}
T: Callable[[str], Wire] = lambda text: {"text": text}  # noqa: E731
GO = user(T("go"))


# Contents -----------------------------------------------------------------------------------

CONTENTS: dict[str, tuple[list[Wire], list[Message]]] = {
    "texts of one content are one message": ([user(T("a"), T("b"))], [Message("user", "ab")]),
    "no role is a user": ([{"parts": [T("a")]}], [Message("user", "a")]),
    "an empty role is a user": ([{"role": "", "parts": [T("a")]}], [Message("user", "a")]),
    "users that follow each other stay apart": (
        [user(T("a")), user(T("b"))],
        [Message("user", "a"), Message("user", "b")],
    ),
    "one part instead of a list": ([{"role": "user", "parts": T("a")}], [Message("user", "a")]),
    "no parts": ([{"role": "user"}], [Message("user", "")]),
    "an empty reply": ([GO, model()], [Message("user", "go"), Message("assistant", "")]),
    "a reply of an empty text": ([GO, model(T(""))], [Message("user", "go"), Message("assistant", "")]),
    "thoughts are reasoning": (
        [model({"text": "why", "thought": True}, T("a"), {"text": ", so", "thought": True}, T("b"))],
        [Message("assistant", "ab", reasoning="why, so")],
    ),
    "signatures are dropped": (
        [model({"text": "", "thoughtSignature": "eA=="}, {**function_call(id="c"), "thought_signature": "eA=="})],
        [Message("assistant", "", tool_calls=(ToolCall("f", "{}", "c"),))],
    ),
    "arguments are compact JSON in their order": (
        [model(function_call(args={"b": [1, 2.0], "a": {"x": None}}, id="c"))],
        [Message("assistant", "", tool_calls=(ToolCall("f", '{"b":[1,2.0],"a":{"x":null}}', "c"),))],
    ),
    "text behind a call": (
        [model(function_call(args={}), T("a"))],
        [Message("assistant", "a", tool_calls=(ToolCall("f", "{}"),))],
    ),
    "snake_case": (
        [model({"function_call": {"name": "f", "args": {"a_b": 1}}}), user({"function_response": {"name": "f"}})],
        [Message("assistant", "", tool_calls=(ToolCall("f", '{"a_b":1}'),)), Message("tool", "")],
    ),
    "results are messages, in order": (
        [user(result({"output": "1"}, id="a"), result({"output": "2"}, id="b"))],
        [Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b")],
    ),
    "text beside results": (
        [user(T("x"), result({"output": "1"}), T("y"), T("z"), result({"output": "2"}), T(""), T("t"))],
        [
            Message("user", "x"),
            Message("tool", "1"),
            Message("user", "yz"),
            Message("tool", "2"),
            Message("user", "t"),
        ],
    ),
    "empty text beside results is nothing": (
        [user(T(""), result({"output": "1"}), T(""))],
        [Message("tool", "1")],
    ),
    "the role function": ([{"role": "function", "parts": [result({"output": "1"})]}], [Message("tool", "1")]),
    "what is about a part": (
        [user({"text": "a", "partMetadata": {"x": 1}, "callIndex": 0, "mediaResolution": {}, "new": 1})],
        [Message("user", "a")],
    ),
}


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_contents_become_messages(name: str) -> None:
    contents, expected = CONTENTS[name]
    assert messages(*contents) == tuple(expected)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": "a"}, "a"),
        ({"content": "a"}, "a"),
        ({"error": "no such file"}, "no such file"),
        ({"output": ""}, ""),
        ({}, ""),
        (None, ""),
        ({"result": 3}, '{"result":3}'),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"stdout": "a"}, '{"stdout":"a"}'),
        ({"output": "a", "code": 0}, '{"output":"a","code":0}'),
        ({"result": "ü"}, "ü"),
        ({"x": "ü\u2028"}, '{"x":"ü\u2028"}'),
    ],
)
def test_a_result_is_the_text_in_its_wrapper_or_the_object_as_json(response: Any, text: str) -> None:
    assert messages(user(result(response))) == (Message("tool", text),)


IDS: dict[str, tuple[list[Wire], list[str | None]]] = {
    "by name": (
        [model(function_call("f", id="1"), function_call("g", id="2")), user(result({}, "g"), result({}, "f"))],
        ["2", "1"],
    ),
    "by order among one name": (
        [
            model(function_call("f", id="1"), function_call("f", id="2")),
            user(result({}, "f")),
            user(result({}, "f")),
        ],
        ["1", "2"],
    ),
    "not what another result has": (
        [
            model(function_call("f", id="1"), function_call("f", id="2")),
            user(result({}, "f", id="1"), result({}, "f")),
        ],
        ["1", "2"],
    ),
    "in a reply of several contents": (
        [model(function_call("f", id="1")), model(T("a")), user(result({}, "f"))],
        ["1"],
    ),
    "not of an earlier reply": (
        [model(function_call("f", id="1")), user(T("no")), model(T("well")), user(result({}, "f"))],
        [None],
    ),
    "of the latest reply": (
        [
            model(function_call("f", id="1")),
            user(T("no")),
            model(function_call("f", id="2")),
            user(result({}, "f")),
        ],
        ["2"],
    ),
    "unknown": ([model(function_call("f", id="1")), user(result({}, "g"), result({}, "f", id="x"))], [None, "x"]),
    "calls without ids": ([model(function_call("f")), user(result({}, "f"))], [None]),
}


@pytest.mark.parametrize("name", sorted(IDS))
def test_a_result_without_an_id_answers_the_first_open_call_of_its_name(name: str) -> None:
    contents, ids = IDS[name]
    assert [m.tool_call_id for m in messages(*contents) if m.role == "tool"] == ids


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ({"parts": [T("a"), T("b")], "role": "user"}, ("ab",)),
        ({"parts": T("a")}, ("a",)),
        ("a", ("a",)),
        ({"parts": [T("")]}, ()),
        ({}, ()),
        ("", ()),
        (None, ()),
    ],
)
@pytest.mark.parametrize("key", ["systemInstruction", "system_instruction"])
def test_the_instruction_is_one_leading_system_message(
    key: str, instruction: Any, expected: tuple[str, ...]
) -> None:
    found = parse({"contents": [GO], key: instruction}).messages
    assert found == (*(Message("system", text) for text in expected), Message("user", "go"))


# Tools --------------------------------------------------------------------------------------

SCHEMAS: list[tuple[Any, Any]] = [
    ({"type": "STRING"}, {"type": "string"}),
    ({"type": "string", "description": "STRING"}, {"type": "string", "description": "STRING"}),
    ({"description": "d", "enum": ["A"], "type": "STRING"}, {"type": "string", "description": "d", "enum": ["A"]}),
    (
        {"type": "OBJECT", "properties": {"type": {"type": "INTEGER"}, "min_items": {"type": "NUMBER"}}},
        {"type": "object", "properties": {"type": {"type": "integer"}, "min_items": {"type": "number"}}},
    ),
    (
        {"type": "ARRAY", "items": {"type": "BOOLEAN"}, "minItems": "1", "max_items": 3},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    ),
    ({"type": "STRING", "minLength": "9" * 5000}, {"type": "string", "minLength": "9" * 5000}),
    ({"type": "STRING", "maxLength": "\u0663"}, {"type": "string", "maxLength": "\u0663"}),
    ({"type": "STRING", "maxLength": "\u00b2"}, {"type": "string", "maxLength": "\u00b2"}),
    ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
    ({"type": "STRING", "nullable": False}, {"type": "string"}),
    ({"type": "STRING", "enum": ["A"], "nullable": True}, {"type": ["string", "null"], "enum": ["A", None]}),
    ({"any_of": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ({"type": "TYPE_UNSPECIFIED", "title": "X"}, {"title": "X"}),
    ({"type": "OBJECT", "additionalProperties": False}, {"type": "object", "additionalProperties": False}),
    ({"type": "OBJECT", "default": {"type": "STRING"}}, {"type": "object", "default": {"type": "STRING"}}),
    (None, None),
]


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_an_openapi_schema_becomes_json_schema(schema: Any, expected: Any) -> None:
    assert json.dumps(json_schema(schema)) == json.dumps(expected)


def test_the_order_of_properties_is_the_one_asked_for() -> None:
    schema = {"properties": {"a": {}, "b": {}, "c": {}}, "propertyOrdering": ["c", "b", "x"]}
    assert list(json_schema(schema)["properties"]) == ["c", "b", "a"]


@pytest.mark.parametrize("key", ["parametersJsonSchema", "parameters_json_schema"])
def test_a_tool_is_the_envelope_of_every_dialect_in_its_order(key: str) -> None:
    schema = {"type": "object", "properties": {"a_b": {"type": "string"}}}
    declared = {key: schema, "description": "d", "name": "f", "response": {"type": "STRING"}}
    (tool,) = parse({"contents": [GO], "tools": [{"functionDeclarations": [declared]}]}).tools
    expected = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert json.dumps(tool.spec) == json.dumps(expected)
    assert tool.name == "f"


def test_openapi_and_json_schema_offer_the_same_tool() -> None:
    openapi = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}, "required": ["a"]}
    plain = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    one = {"function_declarations": [{"name": "f", "parameters": openapi}]}
    other = {"functionDeclarations": {"name": "f", "parametersJsonSchema": plain}}
    assert parse({"contents": [GO], "tools": one}).tools == parse({"contents": [GO], "tools": [other]}).tools


def test_what_a_declaration_leaves_out_stays_out() -> None:
    (tool,) = parse({"contents": [GO], "tools": [{"functionDeclarations": [{"name": "f"}]}]}).tools
    assert tool.spec == {"type": "function", "function": {"name": "f"}}


def test_declarations_of_several_entries_are_one_offer_and_hosted_tools_are_only_recorded() -> None:
    tools = [
        {"googleSearch": {}, "functionDeclarations": [{"name": "f"}]},
        {"functionDeclarations": [{"name": "g"}]},
        {"code_execution": {}},
        {"urlContext": None},
    ]
    found = parse({"contents": [GO], "tools": tools})
    assert [tool.name for tool in found.tools] == ["f", "g"]
    assert found.asked["hosted_tools"] == ["googleSearch", "codeExecution"]


@pytest.mark.parametrize(
    ("mode", "may"), [("AUTO", True), ("auto", True), ("VALIDATED", True), ("NONE", False), (None, True)]
)
def test_the_model_may_call_tools_unless_the_mode_is_none(mode: str | None, may: bool) -> None:
    config = {"functionCallingConfig": {"mode": mode}}
    found = parse({"contents": [GO], "toolConfig": config})
    assert found.parse_calls is may
    assert found.asked["toolConfig"] == config
    assert parse({"contents": [GO], "tool_config": {"function_calling_config": {"mode": mode}}}).parse_calls is may


# Options ------------------------------------------------------------------------------------


def config(**fields: Any) -> ModelRequest:
    return parse({"contents": [GO], "generationConfig": fields})


def test_sampling_is_recorded_and_only_the_end_is_obeyed() -> None:
    found = config(temperature=1, topP=0.5, top_k=3, seed=1, maxOutputTokens=9, stopSequences=["x"], labels={})
    assert found.asked == {
        "temperature": 1,
        "topP": 0.5,
        "topK": 3,
        "seed": 1,
        "maxOutputTokens": 9,
        "stopSequences": ["x"],
    }
    assert (found.max_tokens, found.stop) == (9, ("x",))


def test_what_never_reaches_the_model_is_ignored() -> None:
    plain = parse({"contents": [GO]})
    settings = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]
    assert (
        parse({"contents": [GO], "safetySettings": settings, "labels": {"a": "b"}, "model": "models/x"}) == plain
    )


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({}, None),
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, '{"type":"object"}'),
        ({"responseMimeType": "application/json", "responseSchema": {"type": "ARRAY"}}, '{"type":"array"}'),
        ({"responseMimeType": "application/json", "responseJsonSchema": {"type": "array"}}, '{"type":"array"}'),
        ({"response_mime_type": "application/json", "response_schema": {"type": "ARRAY"}}, '{"type":"array"}'),
    ],
)
def test_a_schema_for_the_reply_constrains_it(fields: Wire, schema: str | None) -> None:
    assert config(**fields).json_schema == schema


@pytest.mark.parametrize("key", ["includeThoughts", "include_thoughts"])
def test_thoughts_are_shown_to_who_asks_for_them(key: str) -> None:
    assert config(thinkingConfig={key: True}).show_reasoning
    assert not config(thinkingConfig={key: False}).show_reasoning
    assert not config().show_reasoning


def test_the_path_says_the_model_and_whether_to_stream() -> None:
    whole, streamed = parse({"contents": [GO]}), parse({"contents": [GO]}, method="streamGenerateContent")
    assert (whole.model, whole.stream, streamed.stream) == ("m", False, True)


def test_a_count_may_be_asked_of_contents_or_of_a_whole_request() -> None:
    inner = {"model": "models/m", "contents": [GO], "systemInstruction": {"parts": [T("s")]}}
    assert parse({"contents": [GO]}, method="countTokens").messages == (Message("user", "go"),)
    for key in ("generateContentRequest", "generate_content_request"):
        found = parse({key: inner}, method="countTokens")
        assert found.messages == (Message("system", "s"), Message("user", "go"))


# Refusals -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Wire, str]] = {
    "no contents": ({}, "contents must have at least one"),
    "contents as text": ({"contents": "a"}, "contents must be an array, not string"),
    "a content as text": ({"contents": ["a"]}, r"contents\[0\] must be an object"),
    "role": ({"contents": [GO, {"role": "system", "parts": []}]}, r"contents\[1\]\.role must be user, model"),
    "part as text": ({"contents": [{"parts": ["a"]}]}, r"contents\[0\]\.parts\[0\] must be an object"),
    "text as number": ({"contents": [user({"text": 1})]}, r"contents\[0\]\.parts\[0\]\.text must be a string"),
    "image": (
        {"contents": [GO, user(T("a"), {"inlineData": {"mimeType": "image/png"}})]},
        r"contents\[1\]\.parts\[1\]\.inlineData: the model reads text only.*here: image",
    ),
    "file": ({"contents": [user({"file_data": {"fileUri": "x"}})]}, r"parts\[0\]\.fileData: .*here: document"),
    "code": ({"contents": [model({"executableCode": {"code": "x"}})]}, r"parts\[0\]\.executableCode is not"),
    "code result": ({"contents": [model({"codeExecutionResult": {}})]}, "codeExecutionResult is not"),
    "an unknown kind of part": ({"contents": [model({"toolCall": {}})]}, r"parts\[0\]\.toolCall is not"),
    "image in a result": (
        {"contents": [user(result({}, parts=[{"inlineData": {"mimeType": "image/png"}}]))]},
        r"functionResponse\.parts\[0\]\.inlineData: .*here: image",
    ),
    "another part in a result": (
        {"contents": [user(result({}, parts=[{}]))]},
        r"functionResponse\.parts\[0\] must have inlineData or fileData",
    ),
    "image by the model": ({"contents": [model({"inlineData": {}})]}, r"parts\[0\]\.inlineData has no place"),
    "image as an instruction": (
        {"contents": [GO], "systemInstruction": {"parts": [{"inlineData": {}}]}},
        r"systemInstruction\.parts\[0\]\.inlineData",
    ),
    "call by a user": ({"contents": [user(function_call())]}, r"parts\[0\]\.functionCall has no place"),
    "result by the model": ({"contents": [model(result({}))]}, r"parts\[0\]\.functionResponse has no place"),
    "call without a name": ({"contents": [model(function_call(""))]}, r"functionCall\.name is missing"),
    "arguments as text": (
        {"contents": [model(function_call(args="{}"))]},
        r"functionCall\.args must be an object",
    ),
    "result as text": ({"contents": [user(result("a"))]}, r"functionResponse\.response must be an object"),
    "cache": ({"contents": [GO], "cachedContent": "cachedContents/x"}, "cachedContent names a context"),
    "tool twice": (
        {"contents": [GO], "tools": [{"functionDeclarations": [{"name": "f"}, {"name": "f"}]}]},
        r"tools\[0\]\.functionDeclarations\[1\]: a tool named 'f' is offered twice",
    ),
    "tool without a name": ({"contents": [GO], "tools": [{"functionDeclarations": [{}]}]}, "name is missing"),
    "any of no tools": (
        {"contents": [GO], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        "mode ANY forces a call of a tool, which is not offered",
    ),
    "another mode": (
        {"contents": [GO], "toolConfig": {"functionCallingConfig": {"mode": "MOST"}}},
        "mode 'MOST' is not accepted",
    ),
    "an image beside text": (
        {"contents": [{"parts": [{"text": "a", "partMetadata": {}, "note": 1, "inlineData": {}}]}]},
        r"contents\[0\]\.parts\[0\]\.inlineData: .*here: document",
    ),
    "deep arguments": (
        {"contents": [model(function_call(args=DEEP))]},
        r"functionCall\.args is nested too deeply",
    ),
    "allowed tools": (
        {"contents": [GO], "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["f"]}}},
        "allowedFunctionNames is not accepted",
    ),
    **{
        name: ({"contents": [GO], "generationConfig": fields}, words)
        for name, fields, words in [
            ("candidates", {"candidateCount": 2}, "candidateCount must be 1"),
            ("logprobs", {"responseLogprobs": True}, "responseLogprobs: log probabilities go to the trainer"),
            ("top logprobs", {"logprobs": 3}, "logprobs: log probabilities"),
            ("sound", {"responseModalities": ["AUDIO"]}, "only TEXT is generated"),
            ("speech", {"speechConfig": {"voice": 1}}, "speechConfig: only text"),
            ("no tokens", {"maxOutputTokens": 0}, "maxOutputTokens must be a whole number above 0"),
            ("stop", {"stopSequences": [""]}, "stopSequences must be a non-empty string or an array of them"),
            ("stops", {"stopSequences": ["x"] * 17}, "has 17 strings; at most 16"),
            ("enum", {"responseMimeType": "text/x.enum"}, "responseMimeType 'text/x.enum' is not known"),
            ("deep options", {"responseSchema": DEEP}, "responseSchema is nested deeper than 100 levels"),
            ("schema", {"responseSchema": {"type": "OBJECT"}}, "needs responseMimeType application/json"),
        ]
    },
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_done_truly_is_refused_by_name(name: str) -> None:
    body, words = REFUSED[name]
    with pytest.raises(InvalidRequest, match=words):
        parse(body)


# Parsed before ------------------------------------------------------------------------------


def texts(*texts_: str) -> list[Wire]:
    return [user(T(text)) for text in texts_]


HISTORIES: dict[str, tuple[list[Wire], list[Wire]]] = {
    "longer": (texts("a"), texts("a", "b")),
    "edited": (texts("a", "b"), texts("x", "b")),
    "thought as a number": ([model({"text": "a", "thought": True})], [model({"text": "a", "thought": 1})]),
    "number": ([model(function_call(args={"n": 1})), GO], [model(function_call(args={"n": 1.0})), GO]),
    "true": ([model(function_call(args={"n": [1]})), GO], [model(function_call(args={"n": [True]})), GO]),
    "result": ([user(result({"n": 1})), GO], [user(result({"n": 1.0})), GO]),
    "snake": (
        [model({"function_call": {"name": "f", "args": {"n": 1}}})],
        [model(function_call(args={"n": 1.0}))],
    ),
    "id": ([model(function_call(id="1")), user(result({}))], [model(function_call(id="2")), user(result({}))]),
}


@pytest.mark.parametrize("name", sorted(HISTORIES))
def test_a_history_known_from_before_is_parsed_into_the_same(name: str) -> None:
    first, then = (json.dumps({"contents": contents}).encode() for contents in HISTORIES[name])
    before = ParseCache()
    for body in (first, then, first):
        assert GEMINI.parse(body, BodyContext(before, WHOLE)) == GEMINI.parse(body, BodyContext(params=WHOLE))


def test_a_history_of_calls_whose_values_are_text_is_not_parsed_again() -> None:
    contents = [GO, model(function_call(args={"a": "x"}, id="1")), user(result({"output": "y"}, id="1"))]
    before = ParseCache()
    first = GEMINI.parse(json.dumps({"contents": contents}).encode(), BodyContext(before, WHOLE))
    then = GEMINI.parse(json.dumps({"contents": [*contents, model(T("z"))]}).encode(), BodyContext(before, WHOLE))
    assert all(ours is theirs for ours, theirs in zip(first.messages, then.messages, strict=False))


def test_a_forced_call_is_recorded_and_passed_on() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]
    for more, forced in (({}, ""), ({"allowedFunctionNames": ["g"]}, "g")):
        config = {"functionCallingConfig": {"mode": "ANY", **more}}
        call = parse({"contents": [GO], "tools": tools, "toolConfig": config})
        assert (call.forced_call, call.parse_calls, call.asked["toolConfig"]) == (forced, True, config)
