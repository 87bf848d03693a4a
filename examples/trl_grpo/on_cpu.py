"""What TRL 1.16.0 lacks on a machine without a GPU, through public seams: for examples and tests, not for speed.

AsyncGRPOTrainer packs the samples of a row into a tree of shared prefixes. Its attention over that tree is a CUDA
kernel from the Hub (`trl/experimental/async_grpo/packing.py:165`, FlashAttention 3; the trainer's constructor
always chooses it, `async_grpo_trainer.py:1086`). `tree_sdpa` is the same attention in plain PyTorch, registered by
transformers' public `AttentionInterface` and chosen by the model's public `set_attn_implementation`.

The constructor also asks for the name of the CUDA device, to know its peak FLOPs (`trl/trainer/utils.py:1824`,
called at `async_grpo_trainer.py:1240`); without CUDA that raises. `no_cuda_device` answers "cpu" meanwhile, which
TRL has no figure for, so that it leaves these metrics out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

NAME = "tree_sdpa"
CPU_ARGUMENTS: Final[dict[str, Any]] = {
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Arguments of TRL's trainers for a short run on a CPU: no reports, checkpoints or progress bars."""


def tree_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each segment of the tree to the path from the root to its end (TRL's ``TreeRow.pack``).

    ``query`` [1, heads, N, dim], ``key`` and ``value`` [1, key heads, N, dim]; gives [1, N, heads, dim].
    """
    shared = query.shape[1] // key.shape[1]
    keys = key[0].index_select(1, tree_kv_index).repeat_interleave(shared, 0)
    values = value[0].index_select(1, tree_kv_index).repeat_interleave(shared, 0)
    outputs = []
    segments = zip(pairwise(tree_cu_seqlens_q.tolist()), pairwise(tree_cu_seqlens_k.tolist()), strict=True)
    for (start, end), (first, last) in segments:
        asked, path = end - start, last - first
        # The last query sees the whole path, each one before it a token less.
        seen = torch.ones(asked, path, dtype=torch.bool, device=query.device).tril(path - asked)
        outputs.append(
            F.scaled_dot_product_attention(
                query[0, :, start:end], keys[:, first:last], values[:, first:last], attn_mask=seen, scale=scaling
            )
        )
    return torch.cat(outputs, 1).transpose(0, 1).unsqueeze(0), None


def attend_on_cpu(model: object) -> None:
    """Has the trainer's ``model`` use ``tree_sdpa``: call it after the trainer was made.

    Raises TypeError for what is no model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"not a model of transformers: {type(model).__name__}")
    AttentionInterface.register(NAME, tree_sdpa)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    model.set_attn_implementation(NAME)


@contextlib.contextmanager
def no_cuda_device() -> Iterator[None]:
    """Around the making of the trainer."""
    with mock.patch("torch.cuda.get_device_name", return_value="cpu"):
        yield
