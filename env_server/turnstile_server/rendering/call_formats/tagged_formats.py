"""The formats that write calls as tags, one function for each. Their forms are those of the models' templates."""

from __future__ import annotations

import re
from typing import Any

from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.call_formats.tagged_calls import (
    TaggedCalls,
    TaggedGrammar,
    by_schema_in_python,
    by_tag,
)
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_NAME = r"(?P<name>[^\s<>{}\[\]\"']+)"
_QUOTED = r"\"(?P<name>[^\"<>]+)\""
_KEY = r"\"(?P<key>[^\"<>]+)\""


def qwen3_coder() -> CallFormat:
    """Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step 3.5: ``<function=NAME>`` and ``<parameter=KEY>``.

    One line break on each side of a value is markup; ``True``, ``False`` and ``None`` are Python's."""
    return TaggedCalls(
        TaggedGrammar(
            "<tool_call>",
            "</tool_call>",
            r"<function=(?P<name>[^<>\s]+)>",
            "</function>",
            r"<parameter=(?P<key>[^<>\n]+)>",
            "</parameter>",
            line_breaks=True,
            missing_end_read=True,
            function_alone="<function=",
            valued=by_schema_in_python,
        )
    )


def seed_oss() -> CallFormat:
    """Seed-OSS: as Qwen3-Coder in ``<seed:tool_call>``; white space around a value is the value's."""
    return TaggedCalls(
        TaggedGrammar(
            "<seed:tool_call>",
            "</seed:tool_call>",
            r"<function=(?P<name>[^<>\s]+)>",
            "</function>",
            r"<parameter=(?P<key>[^<>\n]+)>",
            "</parameter>",
            valued=by_schema_in_python,
        )
    )


def glm() -> CallFormat:
    """GLM 4.5 to 5, Ling 3, Spark 2.5: the name, then ``<arg_key>`` and ``<arg_value>`` in turns."""
    return TaggedCalls(
        TaggedGrammar(
            "<tool_call>",
            "</tool_call>",
            _NAME,
            "",
            r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>",
            "</arg_value>",
            marks=("<arg_key>", "</arg_key>", "<arg_value>"),
        )
    )


def hunyuan3() -> CallFormat:
    """Hunyuan 3: as GLM, with a suffix on every tag, and one tag around all calls."""
    suffix = ":opensource"
    tags = ("tool_call", "tool_sep", "arg_key", "arg_value")
    return TaggedCalls(
        TaggedGrammar(
            f"<tool_calls{suffix}>",
            f"</tool_calls{suffix}>",
            rf"<tool_call{suffix}>{_NAME}\s*<tool_sep{suffix}>",
            f"</tool_call{suffix}>",
            rf"<arg_key{suffix}>(?P<key>[^<>]+)</arg_key{suffix}>\s*<arg_value{suffix}>",
            f"</arg_value{suffix}>",
            marks=tuple(f"<{slash}{tag}{suffix}>" for tag in tags for slash in ("", "/")),
        )
    )


def minimax_m2() -> CallFormat:
    """MiniMax M2: ``<invoke name="…">`` and ``<parameter name="…">``; white space around a value is the
    value's."""
    return TaggedCalls(
        TaggedGrammar(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            rf"<invoke name={_QUOTED}>",
            "</invoke>",
            rf"<parameter name={_KEY}>",
            "</parameter>",
        )
    )


def dsml_v32() -> CallFormat:
    """DeepSeek V3.2: ``<｜DSML｜function_calls>``."""
    return _dsml("function_calls")


def dsml_v4() -> CallFormat:
    """DeepSeek V4: ``<｜DSML｜tool_calls>``."""
    return _dsml("tool_calls")


def _dsml(block: str) -> CallFormat:
    """DeepSeek's markup language: the tag of a value says if it is a bare string or JSON."""
    return TaggedCalls(
        TaggedGrammar(
            f"<｜DSML｜{block}>",
            f"</｜DSML｜{block}>",
            rf"<｜DSML｜invoke name={_QUOTED}>",
            "</｜DSML｜invoke>",
            rf"<｜DSML｜parameter name={_KEY} string=\"(?:(?P<string>true)|false)\">",
            "</｜DSML｜parameter>",
            valued=by_tag,
            marks=("｜DSML｜",),
        )
    )


def minicpm5() -> CallFormat:
    """MiniCPM 5: ``<function name="…">`` and ``<param name="…">``, values that hold markup in CDATA sections."""
    return TaggedCalls(
        TaggedGrammar(
            "",
            "",
            rf"<function name={_QUOTED}>",
            "</function>",
            rf"<param name={_KEY}>",
            "</param>",
            function_alone="<function name=",
            valued=_character_data,
            marks=("<function", "<param"),
        )
    )


def _character_data(
    offered: ToolSchemas, name: str, key: str, tag: re.Match[str], text: str
) -> tuple[Any, tuple[str, ...]]:
    section = re.fullmatch(r"<!\[CDATA\[(.*)\]\]>", text, re.DOTALL)
    return by_schema_in_python(offered, name, key, tag, section[1] if section else text)
