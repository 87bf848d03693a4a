"""Tokens per second of an engine, called directly or through the gate: the same Chat Completions, streamed.

    python -m gpu_engines_parts.load sglang gate --concurrent 64 --tokens 256 --engine-port N --control-port N

Both ask for logprobs, which training needs. The embedded engine has no Chat Completions: called directly
(``--engine-socket``) it gets the ids of the same conversation in ChatML. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

import httpx

CALLS_EACH = 4
PROMPT = "Write down everything that you know about the number {number}, and do not stop early."
CHATML = "<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
KEY_VARIABLE = "TURNSTILE_CONTROL_KEY"


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=options.concurrent)
    direct = options.engine == "embedded" and options.through == "engine"
    transport = httpx.AsyncHTTPTransport(uds=options.engine_socket, limits=limits) if direct else None
    async with httpx.AsyncClient(timeout=600, limits=limits, transport=transport) as http:
        places: list[tuple[str, dict[str, str]]]
        places = [(f"http://127.0.0.1:{options.engine_port}", {})] * options.concurrent
        if options.through == "gate":
            places = [await _episode(http, options.control_port) for _ in range(options.concurrent)]
        model = "m"
        if direct:
            places = [("http://embedded", {})] * options.concurrent
        elif options.through == "engine":
            model = (await http.get(f"{places[0][0]}/v1/models")).json()["data"][0]["id"]

        async def play(number: int, url: str, headers: dict[str, str]) -> int:
            sampled = 0
            for call in range(options.calls):
                content = PROMPT.format(number=number * options.calls + call)
                if direct:
                    sampled += await _generate(http, content, options.tokens)
                    continue
                body = {
                    "model": model,
                    "max_tokens": options.tokens,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "logprobs": options.through == "engine",  # the gate always has them
                    "messages": [{"role": "user", "content": content}],
                }
                async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                            sampled += usage["completion_tokens"]
            return sampled

        began = time.perf_counter()
        sampled = await asyncio.gather(*[play(number, *place) for number, place in enumerate(places)])
    seconds = time.perf_counter() - began
    return {
        "engine": options.engine,
        "through": options.through,
        "concurrent": options.concurrent,
        "tokens": sum(sampled),
        "tokens_per_s": sum(sampled) / seconds,
    }


async def _generate(http: httpx.AsyncClient, content: str, tokens: int) -> int:
    """One streamed call of the embedded engine's own interface. Returns how many tokens it sampled."""
    text = {"prompt": [CHATML.format(content=content)], "add_special_tokens": False}
    ids = (await http.post("http://embedded/tokenize", json=text)).json()["tokens"][0]
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens},
        "return_logprob": True,
        "stream": True,
    }
    sampled = 0
    async with http.stream("POST", "http://embedded/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                sampled = json.loads(line[6:])["meta_info"]["completion_tokens"]
    return sampled


async def _episode(http: httpx.AsyncClient, control_port: int) -> tuple[str, dict[str, str]]:
    """Address and headers of the model calls of a new episode."""
    created = await http.post(
        f"http://127.0.0.1:{control_port}/episodes",
        json={"task": {"instruction": "benchmark"}, "agent": "external"},
        headers={"authorization": f"Bearer {os.environ[KEY_VARIABLE]}"},
    )
    created.raise_for_status()
    episode = created.json()
    return episode["model_url"], {"authorization": f"Bearer {episode['episode_key']}"}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm", "embedded"))
    parser.add_argument("through", choices=("engine", "gate"))
    parser.add_argument("--concurrent", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--calls", type=int, default=CALLS_EACH, help="of each, one after the other")
    parser.add_argument("--engine-port", type=int, default=0)
    parser.add_argument("--engine-socket", help="of the embedded engine")
    parser.add_argument("--control-port", type=int, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(arguments()))))
