"""Perplexity of a text, through the engine as it serves: scheduler, chunks of a prompt, KV pool and back ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine
from diptych.engine.quantize.text import Text

PIECE = 1024
"""Tokens of a prompt of held-out text."""
_BLOCK_SIZE = 16
_STEP_TOKENS = 512
"""Of a prompt that one step computes: a prompt's later tokens read KV that earlier steps have stored."""
_LOGITS = 1 << 25
"""Of a step: 128 MiB, a few times over. Large vocabularies have smaller steps."""


def perplexity(
    folder: Path,
    text: Text,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    tick: Callable[[int], None] = lambda done: None,
    **load: Any,
) -> float:
    """exp of the mean negative log likelihood of the text's tokens, each given those in front of it in its piece.

    Args:
        text: of this model's tokenizer, in pieces that fit into the model's context with one token more.
        dtype: of weights that are not quantized, and of activations.
        tick: called with the number of pieces that are done.
        load: more arguments of TorchModelRunner.load.
    Raises: ConfigError when the model cannot be loaded, DiptychError when it cannot compute.
    """
    prompts = text.prompts()
    num_blocks = -(-(max(map(len, prompts)) + 1) // _BLOCK_SIZE) + 1
    runner = TorchModelRunner.load(
        folder, device=device, dtype=dtype, num_blocks=num_blocks, block_size=_BLOCK_SIZE, **load
    )
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_batched_tokens=step_tokens(runner.description.vocab_size),
        max_step_time_s=None,  # a chunk's size would depend on the machine's speed
        mixed_step_time_s=None,
        enable_prefix_caching=False,
    )
    identity = IdentityHeader(bytes(32), "perplexity", "perplexity", runner.kv_dtype, _BLOCK_SIZE)
    engine = OfflineEngine(LocalExecutor(runner), config, identity)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    total, count = 0.0, 0
    for i, prompt in enumerate(prompts):
        [result] = engine.generate([EngineRequest(f"piece-{i}", Prompt(tuple(prompt)), sampling)])
        if result.error is not None:
            raise result.error
        known = result.prompt_logprobs[max(len(text.prefix), 1) - 1 :]  # special tokens are no text
        total -= math.fsum(one.logprob for one in known)
        count += len(known)
        tick(i + 1)
    return math.exp(total / count)


def step_tokens(vocab_size: int) -> int:
    """Tokens of a step, a multiple of the block size."""
    return max(_BLOCK_SIZE, min(_STEP_TOKENS, _LOGITS // vocab_size // _BLOCK_SIZE * _BLOCK_SIZE))
