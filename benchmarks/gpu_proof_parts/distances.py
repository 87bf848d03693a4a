"""How far recorded logprobs are from the engine's own score, and from a plain float32 forward of the weights.

    python -m gpu_proof_parts.distances MODEL --control-port N --device cuda --episodes 64 --tokens 128

Plays one streamed call in each of so many episodes at once, audits the episodes (the server scores their tokens on
its engine), and computes the recorded logprobs again here: transformers, without a cache, in float32, with the
weights in MODEL. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from turnstile import Client
from turnstile.models import Sample

PROMPT = "Tell a short story about the number {number}."
Distances = NDArray[np.float64]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    key = os.environ["TURNSTILE_CONTROL_KEY"]
    with Client(f"http://127.0.0.1:{options.control_port}", key=key) as client:
        numbers = range(options.seed * 100_000, options.seed * 100_000 + options.episodes)
        with ThreadPoolExecutor(options.episodes) as pool:
            episodes = list(pool.map(lambda number: _play(client, number, options.tokens), numbers))
        reports = [client.audit(episode) for episode in episodes]
        samples = [sample for episode in episodes for sample in client.episode(episode).samples().samples]
    broken = [check.name for report in reports for check in report.invariants if not check.passed]
    audits = [version for report in reports for version in report.versions]
    compared = sum(version.compared for version in audits)
    torch.backends.cuda.matmul.allow_tf32 = False
    network = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device).eval()
    exact = np.concatenate([_gaps(network, sample, options.device) for sample in samples])
    return {
        "engine": reports[0].engine,
        "weights": sorted({version.version for version in audits}),
        "episodes": len(episodes),
        "broken": broken,
        "tokens": len(exact),
        "audit": {
            "compared": compared,
            "max": max(version.max_abs_delta or 0.0 for version in audits),
            "mean": sum((version.mean_abs_delta or 0.0) * version.compared for version in audits) / compared,
            "p99_of_the_worst_episode": max(version.p99_abs_delta or 0.0 for version in audits),
        },
        "float32": {
            "max": float(np.abs(exact).max()),
            "mean": float(np.abs(exact).mean()),
            "p99": float(np.quantile(np.abs(exact), 0.99)),
            "bias": float(exact.mean()),
        },
    }


def _play(client: Client, number: int, tokens: int) -> str:
    """Plays one call in a new episode, and finishes it. Returns the episode's id."""
    created = client.create_episode({"instruction": "benchmark"}, agent="external")
    with httpx.Client(timeout=600) as http:
        body = {
            "model": "m",
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": PROMPT.format(number=number)}],
        }
        headers = {"authorization": f"Bearer {created.episode_key}"}
        http.post(f"{created.model_url}/v1/chat/completions", json=body, headers=headers).raise_for_status()
    created.finish()
    return created.episode_id


@torch.inference_mode()
def _gaps(network: Any, sample: Sample, device: str) -> Distances:
    """Recorded - recomputed logprob of each trained token of the sample, float64 [tokens]."""
    ids = torch.tensor(sample.input_ids.tolist(), device=device)[None]
    logits = network(input_ids=ids, use_cache=False).logits[0, :-1].float()
    table = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    sampled = sample.loss_mask[1:].astype(bool)
    gaps: Distances = sample.logprobs[1:][sampled].astype(np.float64) - table[sampled]
    return gaps


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the weights that are served")
    parser.add_argument("--control-port", type=int, required=True)
    parser.add_argument("--device", required=True, help="of the float32 forward")
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1, help="other prompts for each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(measured(arguments())))
