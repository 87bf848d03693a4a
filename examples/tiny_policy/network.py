"""The network: a stock Qwen3 of under a million parameters, started with the two heads that copying needs.

Learning to copy what stands elsewhere in the prompt (an induction head, Olsson et al. 2022, "In-context Learning
and Induction Heads") takes a model this small longer than all the rest. So two heads are set by hand: in layer 0
one that attends to the token before, in layer 1 one that attends to where the present token stood before and
copies what came after it. Only weights are set; the architecture is Hugging Face's, which SGLang serves too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HIDDEN, LAYERS, HEADS, HEAD_DIM, MLP = 128, 4, 4, 32, 384
THETA = 1e6
WINDOW = 4096
MAX_COMPLETION = 96
"""Twice what a reply of the family takes."""


def make_network(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """float32, on CPU."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    network: Qwen3ForCausalLM = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    network.generation_config.update(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, do_sample=True, top_k=0, max_new_tokens=MAX_COMPLETION
    )
    with torch.no_grad():
        _set_copying_heads(network)
    return network


def _set_copying_heads(network: Qwen3ForCausalLM) -> None:
    """The residual stream is divided: dimension 0 is a constant, 1 to 95 say which token it is, the last 32 which
    token stood before. Layer 0, head 0 fills the last; layer 1, heads 0 and 1 look them up."""
    here, before = slice(1, HIDDEN - HEAD_DIM), slice(HIDDEN - HEAD_DIM, HIDDEN)
    embedding = network.model.embed_tokens.weight
    embedding.normal_(std=1 / math.sqrt(HIDDEN))
    embedding[:, 0] = 1 / math.sqrt(HIDDEN) * 2
    embedding[:, before] = 0.0
    squeeze = _orthonormal(HEAD_DIM, HIDDEN - HEAD_DIM - 1)

    first = network.model.layers[0].self_attn
    query, key = _one_back()
    _head(first.q_proj.weight, 0).zero_()[:, 0] = query
    _head(first.k_proj.weight, 0).zero_()[:, 0] = key
    _head(first.v_proj.weight, 0).zero_()[:, here] = squeeze
    _head(first.o_proj.weight.T, 0).zero_()[:, before] = 0.1 * torch.eye(HEAD_DIM)
    first.q_norm.weight.fill_(2.2)
    first.k_norm.weight.fill_(2.2)

    second = network.model.layers[1].self_attn
    slow = _slow_dimensions()
    copied = _orthonormal(2 * HEAD_DIM, HIDDEN - HEAD_DIM - 1)
    for head in (0, 1):
        match = torch.zeros(HEAD_DIM, HEAD_DIM)
        match[slow] = _orthonormal(len(slow), HEAD_DIM)
        value = copied[head * HEAD_DIM : (head + 1) * HEAD_DIM]
        _head(second.q_proj.weight, head).zero_()[:, here] = match @ squeeze
        _head(second.k_proj.weight, head).zero_()[:, before] = match
        _head(second.v_proj.weight, head).zero_()[:, here] = value
        _head(second.o_proj.weight.T, head).zero_()[:, here] = 0.3 * value
    second.q_norm.weight.fill_(2.4)
    second.k_norm.weight.fill_(2.4)


def _head(weight: Tensor, head: int) -> Tensor:
    """A view of the rows of one head; the other dimension is the residual stream's."""
    return weight[head * HEAD_DIM : (head + 1) * HEAD_DIM]


def _frequencies() -> Tensor:
    """Of the rotary embedding, float32 [HEAD_DIM / 2]: dimensions i and i + HEAD_DIM / 2 turn together."""
    return THETA ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


def _one_back() -> tuple[Tensor, Tensor]:
    """Query and key, the same at every position, whose product is largest for the position before. Three
    frequencies, so that it is large nowhere else."""
    query, key = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
    for index, share in enumerate((0.5, 0.3, 0.2)):
        turn = float(_frequencies()[index])
        query[index] = math.sqrt(share)
        key[index] = math.sqrt(share) * math.cos(turn)
        key[index + HEAD_DIM // 2] = math.sqrt(share) * math.sin(turn)
    return query, key


def _slow_dimensions() -> list[int]:
    """Those that hardly turn over an episode's length, so that a match does not depend on the distance."""
    slow = [index for index, turn in enumerate(_frequencies().tolist()) if turn < 2e-3]
    return slow + [index + HEAD_DIM // 2 for index in slow]


def _orthonormal(rows: int, columns: int) -> Tensor:
    columns_apart: Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return columns_apart.T
