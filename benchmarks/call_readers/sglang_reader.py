"""SGLang's reading of calls, for ``python benchmarks/call_readers``: run by the Python of SGLang's environment."""

from __future__ import annotations

from typing import Any

from reading import Read, answer
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from transformers import AutoTokenizer


def reader_of(folder: str, name: str) -> Read:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def read(case: dict[str, Any]) -> tuple[list[list[Any]], str]:
        parser = FunctionCallParser([Tool.model_validate(tool) for tool in case["tools"]], name, tokenizer)
        text, calls = parser.parse_non_stream(case["text"])
        return [[call.name, call.parameters] for call in calls], text

    return read


if __name__ == "__main__":
    answer(reader_of)
