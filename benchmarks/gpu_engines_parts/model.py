"""Makes a model of 0.6 billion random parameters in bfloat16, with the tokenizer of the tiny model. No network.

    python -m gpu_engines_parts.model OUT [--seed 1]

The shape is that of Qwen3-0.6B with a smaller vocabulary. Random weights take as long to compute as trained ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from make_tiny_model import make_tokenizer

VOCABULARY = 32_768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tokenizer = make_tokenizer(VOCABULARY)
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters, seed {options.seed}")


if __name__ == "__main__":
    main()
