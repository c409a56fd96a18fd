"""Random models and adapters for tests on a GPU, and an engine that has them. GPU_TESTS_DEVICE=cpu: without a GPU, on the
compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from diptych_tests.gpu_cards import DEVICE
from diptych_tests.lora import linear_shapes, write_adapter

ADAPTERS, SLOTS, BLOCK, BLOCKS = 6, 4, 16, 1024
SHAPE = replace(SMALL, layers=4) if DEVICE == "cuda" else TINY
LENGTHS = (5, 70, 1, 333, 33) if DEVICE == "cuda" else (5, 70, 1, 33)
TOKENS = 24


def made(folder: Path, shape: Shape) -> tuple[Path, list[Path]]:
    """A model, and adapters of different ranks and modules."""
    model = write_model(folder / "model", shape, DEVICE)
    targets = ((), ("q_proj", "v_proj"), ("gate_proj", "down_proj"))
    sizes = {"size": 0.06, "alpha": 16.0}
    return model, [
        write_adapter(folder / f"a{i}", linear_shapes(model, targets[i % 3]), rank=(4, 16, 9)[i % 3], seed=i, **sizes)
        for i in range(ADAPTERS)
    ]


def prompt_ids(number: int) -> tuple[int, ...]:
    return tuple((7919 * number + 31 * k) % (SHAPE.vocab - 3) + 3 for k in range(LENGTHS[number % len(LENGTHS)]))


def temperature_of(number: int) -> float:
    """Of a prompt's draws, whose seed is its number."""
    return 0.9 if number % 2 else 0.0


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
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number, temperature=temperature_of(number))
            self.count += 1
            prompt = Prompt(prompt_ids(number), adapter=self.ids[adapter])
            made.append(EngineRequest(f"r{self.count}", prompt, params))
        results = self.engine.generate(made)
        assert [result.error for result in results] == [None] * len(results)
        return [result.token_ids for result in results]
