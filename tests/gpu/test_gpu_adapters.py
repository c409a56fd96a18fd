"""Adapters through the engine on one GPU: more of them than slots, mixed with requests of the base model, from CUDA graphs and
with steps ahead. GPU_TESTS_DEVICE=cpu is a rehearsal without a GPU, on the compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.bench.gpu.random_model import SMALL, TINY, Shape, write_model
from diptych.common.adapters.peft import read_adapter
from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, KeepAdapter
from diptych.engine.offline import OfflineEngine
from diptych_tests.lora import linear_shapes, write_adapter

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
ADAPTERS, SLOTS, BLOCK, BLOCKS = 6, 4, 16, 1024
SHAPE = replace(SMALL, layers=4) if DEVICE == "cuda" else TINY
LENGTHS = (5, 70, 1, 333, 33) if DEVICE == "cuda" else (5, 70, 1, 33)
TOKENS = 24
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


def made(folder: Path, shape: Shape) -> tuple[Path, list[Path]]:
    """A model, and adapters of different ranks and modules."""
    model = write_model(folder / "model", shape, DEVICE)
    targets = ((), ("q_proj", "v_proj"), ("gate_proj", "down_proj"))
    sizes = {"size": 0.06, "alpha": 16.0}
    return model, [
        write_adapter(folder / f"a{i}", linear_shapes(model, targets[i % 3]), rank=(4, 16, 9)[i % 3], seed=i, **sizes)
        for i in range(ADAPTERS)
    ]


class Engine:
    """With all adapters kept; slots: 0: a model without them."""

    def __init__(self, model: Path, folders: Sequence[Path], slots: int, **how: Any) -> None:
        self.runner = TorchModelRunner.load(
            model, device=DEVICE, num_blocks=BLOCKS, block_size=BLOCK, max_model_len=1024, max_loras=slots,
            max_lora_rank=16, **{"backend": "triton" if DEVICE == "cuda" else "native", **how},
        )  # fmt: skip
        config = EngineConfig(num_blocks=BLOCKS, block_size=BLOCK, max_num_batched_tokens=256)
        rule = self.runner.pool.kv.groups[0].dtype
        self.engine = OfflineEngine(
            LocalExecutor(self.runner), config, IdentityHeader(b"k" * 32, "m", "t", rule, BLOCK)
        )
        self.ids = [""]
        for folder in folders if slots else ():
            facts = read_adapter(folder)
            self.engine.send(KeepAdapter(self.runner.read_adapter(folder, facts)))
            self.ids.append(facts.id)
        self.count = 0

    def tokens(self, requests: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Of all at once. Args: requests: number of the prompt, and of the adapter; 0: none."""
        made = []
        for number, adapter in requests:
            ids = tuple((7919 * number + 31 * k) % (SHAPE.vocab - 3) + 3 for k in range(LENGTHS[number % len(LENGTHS)]))
            params = SamplingParams(
                max_tokens=TOKENS, ignore_eos=True, seed=number, temperature=0.9 if number % 2 else 0.0
            )
            self.count += 1
            made.append(EngineRequest(f"r{self.count}", Prompt(ids, adapter=self.ids[adapter]), params))
        results = self.engine.generate(made)
        assert [result.error for result in results] == [None] * len(results)
        return [result.token_ids for result in results]


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
