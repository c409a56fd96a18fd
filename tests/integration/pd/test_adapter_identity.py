"""The router and the engine name blocks alike, of every adapter and every salt: what the router finds in a worker's dump
is what the worker has cached."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType

from diptych.common.adapters.peft import read_adapter
from diptych.common.request import Prompt
from diptych.router.placement.placer import PromptBlocks
from diptych.rpc.convert import prompt_fields
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import worker_pb2
from diptych_tests.lora import write_adapter

PROMPT = tuple((7 * i + 3) % 1000 for i in range(40))
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6)}
CACHED = 32
"""Tokens of the full blocks."""


async def test_hits_are_exactly_where_adapter_and_salt_are_the_same(pd: ModuleType, tmp_path: Path) -> None:
    """Adapters a, b, none with salts s, t, none, twice each, at one worker and over two."""
    folders = {"": ""} | {name: str(tmp_path / "lora" / name) for name in ("a", "b")}
    for seed, name in enumerate(("a", "b")):
        write_adapter(Path(folders[name]), SHAPES, seed=seed)
    ids = {name: read_adapter(Path(folder)).id if folder else "" for name, folder in folders.items()}
    settings = {"enable_lora": True, "max_loras": 2, "lora_dir": (str(tmp_path / "lora"),)}
    model = lambda: pd.fake_model(max_loras=2, num_blocks=128)  # noqa: E731
    for num_prefill in (0, 1):
        async with (
            pd.cluster(
                num_prefill=num_prefill,
                decode=model,
                prefill=model,
                decode_config=settings,
                prefill_config=settings,
            ) as cluster,
            pd.FakeRouter(cluster.decode.address) as router,
            pd.worker_channel(cluster.decode.address) as channel,
        ):
            header = model().identity

            async def held() -> set[bytes]:
                """Keys that the worker says it has."""
                keys: set[bytes] = set()
                async for part in WorkerStub(channel).DumpBlocks(worker_pb2.DumpBlocksRequest(), timeout=300):
                    for tier in part.tiers:
                        keys |= {tier.block_keys[i : i + 16] for i in range(0, len(tier.block_keys), 16)}
                return keys

            answers = {}
            for number, ((name, salt), again) in enumerate(product(product(ids, (b"s", b"t", b"")), (False, True))):
                prompt = Prompt(PROMPT, salt, ids[name])
                mine = {row.tobytes() for row in PromptBlocks(prompt).keys(header)}
                assert len(mine) == CACHED // 16
                assert mine & await held() == (mine if again else set()), (name, salt)
                message = cluster.submit_message(attempt=f"a{number}", prompt=list(PROMPT))
                for field, value in prompt_fields(prompt, adapter_folder=folders[name], with_ids=False).items():
                    if field != "prompt_token_ids":
                        setattr(message, field, value)
                answer = await router.run(message)
                assert answer.error is None
                assert answer.finished.usage.cached_tokens == (CACHED if again else 0), (name, salt)
                assert answers.setdefault((name, salt), answer.token_ids) == answer.token_ids
            assert len({tuple(answers[name, b""]) for name in ids}) == len(ids)
            await cluster.nothing_left()
