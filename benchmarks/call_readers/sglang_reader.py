"""SGLang's reading of calls, for ``python benchmarks/call_readers``: run by the Python of SGLang's environment.

Standard input is a list of jobs as JSON (``job`` there); standard output has a line of readings for each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from transformers import AutoTokenizer


def read(job: dict[str, Any]) -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    readings = []
    for case in job["cases"]:
        tools = [Tool.model_validate(tool) for tool in case["tools"]]
        parser = FunctionCallParser(tools, job["parser"], tokenizer)
        try:
            text, calls = parser.parse_non_stream(case["text"])
            readings.append({"calls": [[call.name, call.parameters] for call in calls], "text": text})
        except Exception as error:  # noqa: BLE001 - a reader that fails is a result of the comparison
            readings.append({"calls": [], "text": f"{type(error).__name__}: {error}"})
    return readings


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        print(f"READ {json.dumps(read(job))}", flush=True)
