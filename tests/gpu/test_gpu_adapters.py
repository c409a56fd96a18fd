"""Adapters through the engine on one GPU: more of them than slots, mixed with requests of the base model, from CUDA graphs and
with steps ahead. GPU_TESTS_DEVICE=cpu is a rehearsal without a GPU, on the compiled kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych_tests.gpu_adapters import ADAPTERS, SHAPE, SLOTS, Engine, made
from diptych_tests.gpu_cards import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


MIXED = [(i % 5, i % (ADAPTERS + 1)) for i in range(28)]
"""Five prompts, with different adapters and without."""


def test_tokens_are_the_same_in_any_company(tmp_path: Path) -> None:
    """Batch-invariant, and in bf16 on a GPU: alone and mixed, from slots that other adapters had before."""
    shape = replace(SHAPE, dtype="bfloat16") if DEVICE == "cuda" else SHAPE
    model, folders = made(tmp_path, shape)
    how = {"dtype": shape.dtype, "batch_invariant": True}
    engine = Engine(model, folders, SLOTS, **how)
    together = engine.tokens(MIXED)
    distinct = sorted(set(MIXED))
    alone = {request: engine.tokens([request])[0] for request in distinct}
    assert together == [alone[request] for request in MIXED]
    assert engine.engine.stats().adapters.evictions > 0
    changed = [
        alone[request] != alone[request[0], 0] for request in distinct if request[1] and (request[0], 0) in alone
    ]
    assert sum(changed) > len(changed) // 2
    bare = Engine(model, (), 0, **how)
    base = [request for request in distinct if not request[1]]
    assert bare.tokens(base) == [alone[request] for request in base]


def test_in_float32_graphs_give_the_tokens_of_torch(tmp_path: Path) -> None:
    model, folders = made(tmp_path, SHAPE)
    engine = Engine(model, folders, SLOTS, dtype="float32")
    reference = Engine(model, folders, SLOTS, dtype="float32", backend="torch")
    assert engine.tokens(MIXED) == reference.tokens(MIXED)
