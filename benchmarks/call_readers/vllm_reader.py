"""vLLM's reading of calls, for ``python benchmarks/call_readers``: run by the Python of vLLM's environment."""

from __future__ import annotations

from typing import Any

from reading import Read, answer
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


def reader_of(folder: str, name: str) -> Read:
    tokenizer, kind = AutoTokenizer.from_pretrained(folder), ToolParserManager.get_tool_parser(name)

    def read(case: dict[str, Any]) -> tuple[list[list[Any]], str]:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "x"}], tools=case["tools"], tool_choice="auto"
        )
        found = kind(tokenizer, request.tools).extract_tool_calls(case["text"], request)
        return [[call.function.name, call.function.arguments] for call in found.tool_calls], found.content or ""

    return read


if __name__ == "__main__":
    answer(reader_of)
