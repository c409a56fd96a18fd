"""Assignment of prompts to prefill or decode in the GPU benchmarks: by the router's placer and costs, on measured
rates, for prompts of up to a length."""

from __future__ import annotations

import random
import time

from diptych.common.block_identity import IdentityHeader
from diptych.common.request import Prompt
from diptych.common.store.worker_record import WorkerLoad, WorkerRecord
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import Placement, PlacementRequest

_HEADER = IdentityHeader(bytes(32), "model", "tokenizer", "bfloat16", 16)
_PREFILL, _DECODE = "prefill-0", "decode-0"


class CostRule:
    """One prefill worker and one decode worker of equal speed, with no other router.

    Args:
        most_tokens: longer prompts always go to prefill; shorter ones where they cost less.
        prefill_per_s: prompt tokens that either computes alone.
        step_s: of decode.
        link_bytes_per_s: between the two.
        kv_bytes_per_token: transferred bytes.
    """

    def __init__(
        self,
        *,
        most_tokens: int,
        prefill_per_s: float,
        step_s: float = 0.0055,
        link_bytes_per_s: float = 250e9,
        kv_bytes_per_token: int = 131_072,
    ) -> None:
        self._most = most_tokens
        index = BlockIndex()
        self._reservations = Reservations()
        self._placer = Placer(index, self._reservations, random.Random(0))
        sides = {}
        for role, name in (("prefill", _PREFILL), ("decode", _DECODE)):
            index.register(name, "i", 0, 0)
            load = WorkerLoad(
                num_running=0, num_waiting=0, waiting_prompt_tokens=0, prefill_tokens_per_s=prefill_per_s,
                decode_step_s=step_s, link_bytes_per_s={_PREFILL: link_bytes_per_s} if role == "decode" else {},
            )  # fmt: skip
            record = WorkerRecord(
                worker_id=name, incarnation="i", role=role, address="127.0.0.1:1", pid=1, model="model", compat={},
                kv_bytes_per_token=kv_bytes_per_token, num_blocks=1 << 16, block_size=16, max_model_len=131_072,
                max_num_seqs=256, event_epoch=0, load=load,
            )  # fmt: skip
            sides[role] = [Candidate(record, time.monotonic(), _HEADER)]
        self._placer.set_workers(sides["prefill"], sides["decode"], {}, {})

    def place(self, attempt: str, num_tokens: int) -> bool:
        """Returns: whether decode computes it. Call `first_token` and `ended` later."""
        wish = PlacementRequest(num_tokens, self._most)
        placed = self._placer.place(wish, PromptBlocks(Prompt(range(num_tokens))), time.monotonic())
        assert isinstance(placed, Placement)
        local = placed.chosen.prefill is None
        self._reservations.reserve(attempt, Reservation(_DECODE if local else _PREFILL, _DECODE, num_tokens))
        return local

    def first_token(self, attempt: str) -> None:
        self._reservations.prompt_computed(attempt)

    def ended(self, attempt: str) -> None:
        self._reservations.release(attempt)
