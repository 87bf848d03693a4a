"""Makes a tiny random-weight Qwen3 with its own tokenizer and chat template. No network.

    python examples/make_tiny_model.py OUT [--seed 1] [--vocab 4096] [--head-dim 16] [--tied] [--experts 8]

``--experts``: a mixture of experts (Qwen3-MoE) with so many, two of them for each token.

The weights are random, so the model's answers are nonsense. Everything else is real: a byte-level BPE
trained on the Python standard library, ChatML control tokens, `<think>` and `<tool_call>` tokens, a chat
template with tools that drops thinking from earlier turns (so re-rendering a history would not give the tokens
that were sampled), and a Hugging Face folder that transformers and SGLang both load. vLLM on a CPU loads it with
`--head-dim 32`: its attention has no kernel for 16.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

TEMPLATE = """\
{%- set first_system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools or first_system %}
{{- '<|im_start|>system\\n' + first_system }}
{%- if tools %}
{{- ('\\n\\n' if first_system else '') + '# Tools\\n\\nSignatures:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a tool write:\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last_user %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if (loop.first and message.content) or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; control tokens are special, tags are added tokens that stay visible (as Qwen has it)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    bpe.train([str(path) for path in corpus], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, head_dim: int = 16, tied: bool = False, experts: int = 0
) -> PreTrainedModel:
    """Under a million parameters of noise, float32, with logits wide enough to sample varied text.

    ``tied``: the output layer is the embedding. ``experts`` 0: a dense model.
    """
    torch.manual_seed(seed)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    common = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 32_768,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "initializer_range": 0.2,
    }
    if experts:
        config = Qwen3MoeConfig(
            **common, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
        model: PreTrainedModel = Qwen3MoeForCausalLM(config).to(torch.float32)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common)).to(torch.float32)
    model.generation_config.eos_token_id = end
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--experts", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer(arguments.vocab)
    shape = {"head_dim": arguments.head_dim, "tied": arguments.tied, "experts": arguments.experts}
    model = make_model(tokenizer, arguments.seed, **shape)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{arguments.out}: {len(tokenizer)} tokens, {parameters:,} parameters, seed {arguments.seed}")


if __name__ == "__main__":
    main()
