"""Attention of a prompt that is computed in one go: nothing of it is cached, so that its K and V lie in the projection's output,
and torch's scaled_dot_product_attention (cuDNN's kernel on a GPU) reads them there. The pool is not looked at."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEAD_DIMS = (64, 128)


def dense_prefill(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Causal attention of one sequence's tokens over one another.

    Args:
        q: [num_tokens, num_q_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; rotated, contiguous in the last dim.
    Returns: [num_tokens, num_q_heads, head_dim], q's dtype.
    Raises: RuntimeError on a GPU where cuDNN has no kernel for it (see is_supported).
    """
    some, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with _backend(q.device):
        out = scaled_dot_product_attention(some, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def is_supported(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN computes such heads here: by a trial."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim not in HEAD_DIMS:
        return False
    q, k, v = (
        torch.zeros(128, n, head_dim, dtype=dtype, device=device) for n in (num_q_heads, num_kv_heads, num_kv_heads)
    )
    try:
        dense_prefill(q, k, v, scale=1.0)
    except RuntimeError:
        return False
    return True


def _backend(device: torch.device) -> AbstractContextManager[object]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else nullcontext()
