"""SDPA without a copy of the keys and values for each query head.

With a mask, transformers repeats the keys and values for each head of a group, which copies the whole cache for each
token. But the heads of a group have the same keys, values and mask, so their queries can be the rows of one query.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

GROUPED = "ngym_grouped_sdpa"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, H / G, S, D], mask [B, 1, T, S] or None -> [B, T, H, D]

    Many queries with a mask, as of a prompt in a window, are left to transformers: the mask is repeated here instead.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    is_short = length == 1 or (length <= size and attention_mask is not None)
    by_head = more.get("position_bias") is not None or (attention_mask is not None and attention_mask.shape[1] > 1)
    if groups == 1 or not is_short or by_head:
        answer: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return answer
    mask = attention_mask.repeat(1, 1, groups, 1) if attention_mask is not None and length > 1 else attention_mask
    queries = query.reshape(batch, key.shape[1], groups * length, size)
    out = scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=more.get("scaling"))
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
