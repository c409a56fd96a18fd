"""The scheduler's window groups on real models: prefill hands over what the windows need, decode slides on behind it, and the
ids are transformers'."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import transformers

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.kv_groups import PoolDemand
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import (
    EngineRequest,
    Failed,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    RangePacked,
    SlabGrant,
    TokensOut,
    UnpackRange,
)
from diptych.engine.offline import OfflineEngine

BLOCK, CHUNK, COUNT = 4, 16, 24
FAMILIES = {
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": 11, "query_pre_attn_scalar": 48, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "window-only": ("MistralForCausalLM", {"sliding_window": 13}),
}  # fmt: skip


def engine_of(folder, backend):
    demand = PoolDemand(max_num_seqs=4, max_num_batched_tokens=CHUNK)
    runner = TorchModelRunner.load(
        folder, num_blocks=48, block_size=BLOCK, num_threads=1, backend=backend, demand=demand
    )
    config = EngineConfig(
        num_blocks=48, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=CHUNK, max_step_time_s=None,
        mixed_step_time_s=None, slab_quota_per_peer=8, check_invariants=True,
    )  # fmt: skip
    identity = IdentityHeader(b"k" * 32, "m", "t", "float32", BLOCK)
    return OfflineEngine(LocalExecutor(runner), config, identity, clock=FakeClock())


def settle(engine):
    events = []
    while True:
        worked = engine.core.step()
        new = engine.core.take_events()
        events += new
        if not worked and not new:
            return events


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    made = {}

    def make(name, tiny_model_dir):
        if name not in made:
            torch.set_num_threads(1)
            architecture, overrides = FAMILIES[name]
            folder = tiny_model_dir(tmp_path_factory.mktemp(name), architecture, **overrides)
            kind = getattr(transformers, architecture)
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            rng = random.Random(5)
            prompts = [[rng.randrange(320) for _ in range(n)] for n in (2, 30, 53)]
            expected = []
            for prompt in prompts:
                ids = list(prompt)
                with torch.inference_mode():
                    for _ in range(COUNT):
                        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                        assert best.values[0] - best.values[1] > 1e-4, "the random model has a tie: pick another seed"
                        ids.append(best.indices[0].item())
                expected.append(ids[len(prompt) :])
            made[name] = folder, prompts, expected
        return made[name]

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_colocated_and_handed_over_the_ids_are_transformers(family, tiny_model_dir, name, backend):
    folder, prompts, expected = family(name, tiny_model_dir)
    sampling = SamplingParams(COUNT, temperature=0.0, ignore_eos=True)
    requests = [EngineRequest(f"r{i}", Prompt(tuple(p)), sampling) for i, p in enumerate(prompts)]
    together = engine_of(folder, backend)
    assert [result.token_ids for result in together.generate(requests)] == expected

    prefill, decode = engine_of(folder, backend), engine_of(folder, backend)
    slabs = iter(range(1000))
    kv = prefill.core.scheduler.limits.kv
    for request, ids in zip(requests, expected, strict=True):
        decode.send(replace(request, mode=KvMode.REMOTE))
        settle(decode)
        grants = [SlabGrant(next(slabs), 1, memoryview(bytearray(1 << 16))) for _ in range(8)]
        payloads = {grant.slab: grant.payload for grant in grants}
        prefill.send(GrantSlabs(tuple(grants)))
        prefill.send(replace(request, mode=KvMode.PREFILL, peer=request.attempt))
        tokens, moved = [], 0
        for event in settle(prefill):
            if isinstance(event, RangePacked):
                moved += event.size_bytes
                data = memoryview(bytearray(payloads[event.slab][: event.size_bytes]))
                decode.send(
                    UnpackRange(
                        event.attempt, 1, event.first_token, event.num_tokens, data, num_layers=event.num_layers,
                        group=event.group,
                    )
                )  # fmt: skip
            elif isinstance(event, TokensOut):
                decode.send(FirstToken(event.attempt, event.token_ids[0]))
        prompt = request.prompt.token_ids
        edges = sum((BLOCK - 1) * group.bytes_per_token(kv.shard) for group in kv.groups if group.window)
        assert moved <= kv.transfer_bytes(0, len(prompt)) + edges
        decode.send(KvComplete(request.attempt))
        events = settle(decode)
        assert not [event.error for event in events if isinstance(event, Failed)]
        tokens = [t for event in events if isinstance(event, TokensOut) for t in event.token_ids]
        assert tokens == ids
    for engine in (together, prefill, decode):
        audit = engine.core.scheduler.audit(True)
        assert audit.violations == ()
        assert all(blocks.running == blocks.reserved == 0 for blocks in (audit.blocks, *audit.more_blocks))
