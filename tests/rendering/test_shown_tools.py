"""Tools are read back from each way in which chat templates show them."""

from __future__ import annotations

import json

from turnstile_server.testing.shown_tools import element_tools, json_tools, listed_tools, typescript_tools

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}


def test_the_last_list_counts_and_lines_that_are_no_tools_do_not() -> None:
    text = f"<tools>\n{{}}\n</tools> by hand\n<tools>\nno JSON\n{json.dumps({'function': BASH})}\n</tools>\nMore."
    assert listed_tools(text) == {"bash": BASH}
    assert listed_tools("no list") == {}


def test_objects_are_tools_wherever_they_stand() -> None:
    listed = json.dumps([{"type": "function", "function": BASH}])
    example = '{"name": "tool_name", "arguments": {"key": "value"}}'
    text = f'Write {{"name": function name}} as {example}. {{"a": {{"b": 1}}}} {listed}{{'
    assert json_tools(text) == {"bash": BASH}


def test_elements_have_parameters_and_the_required_ones() -> None:
    text = (
        "<function>\n<name>bash</name>\n<description>Runs a command.</description>\n<parameters>\n<parameter>\n"
        "<name>command</name>\n<type>string</type>\n<description>It.</description>\n</parameter>\n"
        '<required>["command"]</required>\n</parameters>\n</function>'
    )
    [found] = element_tools(text).values()
    assert (found["name"], found["description"]) == ("bash", "Runs a command.")
    assert found["parameters"]["properties"] == {"command": {"type": "string", "description": "It."}}
    assert found["parameters"]["required"] == ["command"]


def test_types_have_fields_and_the_comment_before_them() -> None:
    text = (
        "// of the file\n\nnamespace functions {\n\n// Runs a command,\n// and more.\ntype bash = (_: {\n"
        '// It: a text.\ncommand: string,\nmode?: "fast" | "slow", // default: fast\nwords?: string[],\n'
        "}) => any;\n\ntype none = () => any;\n\ntype other = (_: {\ncount: number\n}) => any;"
    )
    found = typescript_tools(text)
    assert list(found) == ["bash", "other"]
    assert found["bash"]["description"] == "Runs a command,\nand more."
    assert found["bash"]["parameters"] == {
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "mode": {"type": "string", "enum": ["fast", "slow"]},
            "words": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["command"],
    }
    assert found["other"]["description"] == ""
