"""vLLM's reading of calls, for ``python benchmarks/call_readers``: run by the Python of vLLM's environment.

Standard input is a list of jobs as JSON (``job`` there); standard output has a line of readings for each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


def read(job: dict[str, Any]) -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    kind = ToolParserManager.get_tool_parser(job["parser"])
    readings = []
    for case in job["cases"]:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "x"}], tools=case["tools"], tool_choice="auto"
        )
        try:
            found = kind(tokenizer, request.tools).extract_tool_calls(case["text"], request)
            calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
            readings.append({"calls": calls, "text": found.content or ""})
        except Exception as error:  # noqa: BLE001 - a reader that fails is a result of the comparison
            readings.append({"calls": [], "text": f"{type(error).__name__}: {error}"})
    return readings


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(f"READ {json.dumps(read(job))}", flush=True)
