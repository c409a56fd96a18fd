"""Shapes and dtypes in which attention is tested on a GPU."""

from __future__ import annotations

import torch

from diptych.bench.kernels.cases import LLAMA_8B, Heads

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {B16: 8e-3, F16: 2e-3, F32: 1e-5}
SHAPES = [
    (LLAMA_8B, B16, 16), (LLAMA_8B, F16, 64), (LLAMA_8B, F32, 16), (Heads(9, 3, 64), B16, 32), (Heads(9, 3, 64), F32, 16),
    (Heads(16, 2, 80), B16, 128), (Heads(8, 8, 96), F16, 16), (Heads(8, 1, 256), B16, 16), (Heads(8, 1, 256), F32, 64),
]  # fmt: skip
"""Heads, dtype, block size."""
