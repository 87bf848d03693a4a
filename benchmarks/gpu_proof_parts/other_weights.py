"""Makes a folder of weights near those of another: each is scaled by a random number around 1. No network.

python -m gpu_proof_parts.other_weights MODEL OUT
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

SPREAD: Final = 0.05
"""Standard deviation: enough for other logprobs (by nats), and too little for nonsense."""


def main() -> None:
    options = arguments()
    shutil.copytree(options.model, options.out)
    generator = torch.Generator().manual_seed(7)
    for file in sorted(options.out.glob("*.safetensors")):
        tensors = {
            name: (tensor.float() * (1 + SPREAD * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
