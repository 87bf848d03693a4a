"""Measures rendering: a full render, a continuation and a parse, at 1k, 8k and 128k tokens of history.

    python benchmarks/rendering.py [--model DIR] [--repeat 7] [--markdown]

Each number is the median over the repeats, in milliseconds of CPU time (one thread, no waiting). A
continuation does not grow with the history: the bytes that it tokenizes are asserted to be the same.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from turnstile.models import Int32Array, Message, Tool, ToolCall
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, PathEnd, Renderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.settings import RenderingSettings

SIZES = (1_000, 8_000, 128_000)
REPLY = 'Let me look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la src"}}\n</tool_call>'
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
TOOLS = [
    Tool(
        name,
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Run a command in the repository and give back what it prints. " * 4,
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        },
    )
    for name in ("bash", "read", "write", "search")
]


def conversation(renderer: Renderer, tokens: int) -> list[Message]:
    """Tool turns until the render has about ``tokens`` tokens."""
    turn = [
        Message(
            "assistant", "Next.", reasoning="One more.", tool_calls=(ToolCall("bash", '{"command": "ls"}', "c"),)
        ),
        Message("tool", TEXT * 5, tool_call_id="c"),
    ]
    head = [Message("system", "You fix bugs."), Message("user", "Fix the parser.")]
    base = len(renderer.render(head, TOOLS).ids)
    each = (len(renderer.render([*head, *(turn * 8)], TOOLS).ids) - base) / 8
    return head + turn * max(1, round((tokens - base) / each))


def median_ms(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * 1000)
    return statistics.median(times)


def parse(renderer: Renderer, ids: Int32Array, *, chunk: int) -> Message:
    parser = renderer.parser(TOOLS, prompt_tail=ids[:0])
    for start in range(0, len(ids), chunk):
        parser.feed(ids[start : start + chunk])
    return parser.finish()[1].message


def rows(name: str, renderer: Renderer, encode: Callable[[str], Int32Array], repeat: int) -> list[list[str]]:
    result = []
    reply_ids = encode(REPLY + "<|im_end|>")
    reply = parse(renderer, reply_ids, chunk=len(reply_ids))
    assert reply.tool_calls, reply
    tokenized: set[int] = set()
    for size in SIZES:
        messages = conversation(renderer, size)
        prompt = renderer.render(messages, TOOLS).ids
        end = PathEnd(prompt[-64:], reply_ids, reply, "stop")

        def bridge(text: str, end: PathEnd = end) -> Bridge:
            new = [Message("tool", text, tool_call_id="c")]
            continued = renderer.bridge(end, new, TOOLS)
            assert isinstance(continued, Bridge), continued
            return continued

        short, long = TEXT[:60], TEXT * 20
        tokenized.add(bridge(short).tokenized_bytes)
        answer = encode(TEXT * (size // len(encode(TEXT)) + 1))[:size]
        few, many = max(3, repeat // 2), repeat * 20
        costs = [
            median_ms(partial(renderer.render, messages, TOOLS), few),
            median_ms(partial(bridge, short), many),
            median_ms(partial(bridge, long), many),
            median_ms(partial(parse, renderer, reply_ids, chunk=len(reply_ids)), many),
            median_ms(partial(parse, renderer, answer, chunk=len(answer)), few),
            median_ms(partial(parse, renderer, answer, chunk=4), few),
        ]
        result.append([name, f"{len(prompt):,}", *(f"{cost:.2f}" for cost in costs)])
    assert len(tokenized) == 1, f"a continuation tokenized history: {tokenized}"
    lengths = [len(encode(text)) for text in (TEXT[:60], TEXT * 20)]
    print(
        f"{name}: tool results of {lengths[0]} and {lengths[1]} tokens, reply of {len(reply_ids)}", file=sys.stderr
    )
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--model", type=Path, help="a folder with a Qwen3-like tokenizer; default: a tiny one is made"
    )
    options.add_argument("--repeat", type=int, default=7)
    options.add_argument("--markdown", action="store_true")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if model is None:
            model = Path(scratch) / "tiny"
            maker = Path(__file__).resolve().parent.parent / "examples" / "make_tiny_model.py"
            subprocess.run([sys.executable, str(maker), str(model)], check=True, stdout=subprocess.DEVNULL)
        tokenizer = load_vocabulary(model).tokenizer

        def encode(text: str) -> Int32Array:
            return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

        table: list[list[str]] = []
        for name, settings in (
            ("keep", RenderingSettings()),
            ("template", RenderingSettings(thinking_history="template")),
        ):
            table += rows(name, create_renderer(model, settings), encode, arguments.repeat)
    header = [
        "thinking",
        "history",
        "render",
        "bridge short",
        "bridge long",
        "parse reply",
        "parse history-long reply",
        "the same by 4",
    ]
    if arguments.markdown:
        lines = [header, ["---"] * len(header), *table]
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))
        return
    widths = [max(len(line[column]) for line in [header, *table]) for column in range(len(header))]
    for line in [header, *table]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
