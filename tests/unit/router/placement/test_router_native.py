"""The decision in C gives what the one in numpy gives, bit by bit, whatever instructions it was compiled for."""

import random
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from diptych.common.block_identity import IdentityHeader, block_keys
from diptych.common.compiled import ALL_LANES
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.common.request import Prompt
from diptych.common.store.interface import KvEvent
from diptych.common.store.worker_record import WorkerLoad
from diptych.common.tiers import LOWER_TIERS, TIER_NAMES, TierState
from diptych.router.api.packed_ids import PackedIds, unpack
from diptych.router.placement.block_table import to_bytes
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.native.library import SOURCES, choose_library
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.policies import policy_by_name
from diptych.router.placement.pulls import FIELD
from diptych.router.placement.replication import Replication
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import Placement, PlacementRequest
from diptych.rpc.v1 import router_pb2
from diptych_tests.records import worker_record

HEADERS = [IdentityHeader(bytes(32), "model", "tokenizer", "float16", size) for size in (16, 8)]


@pytest.fixture(params=ALL_LANES)
def library(request, set_lanes):
    set_lanes(request.param)
    return choose_library("native")


def a_worker(name, role, header, chance):
    known = chance.random() < 0.8
    load = WorkerLoad(
        num_running=chance.randrange(20),
        waiting_prompt_tokens=chance.choice([0, 0, chance.randrange(3000)]),
        prefill_tokens_per_s=chance.uniform(500, 25_000) if known else 0.0,
        decode_step_s=chance.uniform(0.01, 0.02) if known else 0.0,
        link_bytes_per_s={f"p{i}": chance.uniform(1e8, 1e10) for i in range(chance.randrange(4))},
    )
    tiers = tuple(TierState(tier.name, bytes_per_s=chance.choice([0.0, 1e9])) for tier in LOWER_TIERS)
    return worker_record(name, incarnation="i", role=role, block_size=header.block_size, load=load, tiers=tiers)


class Setup:
    """The same index, workers and pending work behind two placers."""

    def __init__(
        self, seed, library, num_workers=12, policy="cost", host=True, headers=HEADERS, replicates=False, drains=0
    ):
        self.chance = chance = random.Random(seed)
        self.headers = headers
        self.index, self.reservations = BlockIndex(4000), Reservations()
        self.placers = [
            Placer(
                self.index,
                self.reservations,
                random.Random(seed),
                policy_by_name(policy),
                Replication(bound=0.01) if replicates else None,
                library=one,
            )
            for one in (None, library)
        ]
        self.prompts = [[chance.randrange(1000) for _ in range(chance.randrange(1, 700))] for _ in range(12)]
        half = num_workers // 2
        kinds = [(f"p{i}", "prefill") for i in range(half)] + [(f"d{i}", "decode") for i in range(num_workers - half)]
        workers = [a_worker(name, role, chance.choice(headers), chance) for name, role in kinds]
        if replicates:  # a copy is a pull
            able = {"request_fields": (FIELD,), "compat": {"kv": "one"}, "kv_bytes_per_token": 1_000}
            workers = [msgspec.structs.replace(worker, **able) for worker in workers]
        for record in workers:
            self.index.register(record.worker_id, "i", 0, 0)
            for tier in TIER_NAMES if host else TIER_NAMES[:1]:
                keys = []
                for prompt in chance.sample(self.prompts, 6):
                    whole = block_keys(next(h for h in headers if h.block_size == record.block_size), prompt)
                    keys += whole[: chance.randrange(len(whole) + 1)]
                self.index.apply(record.worker_id, KvEvent("i", 0, 1, "stored", tuple(keys), tier))
        for i in range(40):
            one, other = chance.choice(workers[:half]), chance.choice(workers[half:])
            self.reservations.reserve(str(i), Reservation(one.worker_id, other.worker_id, chance.randrange(900)))
        unfit = {
            (p.worker_id, d.worker_id): ["block_size"]
            for p in workers[:half]
            for d in workers[half:]
            if p.block_size != d.block_size or chance.random() < 0.05
        }
        sides = [
            [Candidate(r, chance.uniform(0, 5), next(h for h in headers if h.block_size == r.block_size)) for r in side]
            for side in (workers[:half], workers[half:])
        ]
        leaving = [sides[1].pop() for _ in range(drains)]
        leaving = [replace(c, record=msgspec.structs.replace(c.record, leaves_in_s=9.0)) for c in leaving]
        for placer in self.placers:
            placer.set_workers(*sides, unfit, {}, leaving)
        self.decode = [candidate.record for candidate in sides[1]]

    def ask(self, **more):
        chance = self.chance
        tokens = chance.choice(self.prompts)
        if chance.random() < 0.3:
            tokens = [*tokens[: chance.randrange(len(tokens) + 1)], 7]
        request = PlacementRequest(
            len(tokens),
            chance.choice([0, 64, 10_000]),
            needs_kv=chance.random() < 0.8,
            allow_local_fallback=chance.random() < 0.8,
            colocated_margin=chance.choice([0.1, 1.0, float("inf")]),
        )
        barred = chance.choice([0, 0, 2])
        exclude = frozenset((record.worker_id, "i") for record in chance.sample(self.decode, barred))
        request = replace(request, **more)
        return [placer.place(request, PromptBlocks(Prompt(tokens)), 4.0, exclude) for placer in self.placers]


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, Placement):
        assert (one.chosen, one.order, one.notes, one.colocated) == (
            other.chosen, other.order, other.notes, other.colocated,
        )  # fmt: skip
        assert one.candidates == other.candidates
        assert one.best(3) == other.best(3)
        assert other.chosen in other.candidates
    else:
        assert one == other


@pytest.mark.parametrize("seed", range(8))
def test_both_place_alike(seed, library):
    setup = Setup(seed, library, host=seed % 3 > 0, headers=HEADERS[: 1 + seed % 2])
    reported = [setup.ask() for _ in range(30)]
    for one, other in reported:
        same(one, other)
    assert len({one.chosen.decode.worker_id for one, _ in reported if isinstance(one, Placement)}) > 1


@pytest.mark.parametrize("seed", range(4))
def test_both_find_what_a_worker_holds_that_drains(seed, library):
    setup = Setup(seed, library, host=seed % 2 > 0, headers=HEADERS[:1], replicates=True, drains=1)
    prompt = [7 * i % 1000 for i in range(6000)]
    setup.index.apply("d5", KvEvent("i", 0, 2, "stored", tuple(block_keys(HEADERS[0], prompt[:5000])), "device"))
    asked = PlacementRequest(len(prompt), 0)
    one, other = (placer.place(asked, PromptBlocks(Prompt(prompt)), 4.0) for placer in setup.placers)
    same(one, other)
    assert "KV is taken from d5, which drains" in one.notes
    assert one.chosen.computed_from > 2000  # an index of 4,000 blocks has trimmed it
    for one, other in [setup.ask() for _ in range(20)]:
        same(one, other)
        if isinstance(one, Placement):
            assert all(terms.decode.worker_id != "d5" for terms in one.candidates)


def test_both_place_alike_beyond_64_workers(library):
    setup = Setup(5, library, num_workers=150)
    for _ in range(4):
        same(*setup.ask())


@pytest.mark.parametrize("policy", ["random", "round-robin", "least-loaded", "power-of-two", "session-affinity"])
def test_other_policies_see_the_same_charges(policy, library):
    setup = Setup(3, library, policy=policy)
    for _ in range(20):
        same(*setup.ask())


def test_copies_of_hot_prefixes_go_to_the_same_worker(library):
    copies = 0
    for seed in range(8, 12):
        setup = Setup(seed, library, headers=HEADERS[:1], replicates=True)
        for _ in range(40):
            same(*setup.ask(local_prefill_max_tokens=0))
        assert setup.placers[0].num_copies == setup.placers[1].num_copies
        copies += setup.placers[0].num_copies
    assert copies > 0


def test_a_worker_that_computes_alone_for_the_margins_sake_is_the_same(library):
    setup = Setup(2, library, headers=HEADERS[:1])
    reported = []
    for i in range(100, 3000):
        setup.reservations.reserve(str(i), Reservation(f"p{i % 6}", "d0", 50_000))
    for _ in range(40):
        reported.append(setup.ask(colocated_margin=0.1, local_prefill_max_tokens=8, allow_local_fallback=True))
    for one, other in reported:
        same(one, other)
    assert any(one.colocated for one, _ in reported)


def test_no_worker_and_nothing_cached(library):
    placers = [Placer(BlockIndex(), Reservations(), random.Random(0), library=one) for one in (None, library)]
    for placer in placers:
        placer.set_workers([], [], {}, {})
    same(*(placer.place(PlacementRequest(5, 64), PromptBlocks(Prompt([1] * 5)), 0.0) for placer in placers))


def test_a_late_explanation_is_of_the_time_of_the_decision(library):
    setup = Setup(4, library, headers=HEADERS[:1])
    one, other = setup.ask(needs_kv=True)
    before = other.best(None)
    for i in range(100, 160):
        setup.reservations.reserve(str(i), Reservation("p0", "d0", 500))
        setup.ask()
    assert other.best(None) == before == one.best(None)


def test_what_was_looked_up_is_marked_as_lately_used(library):
    index = BlockIndex(64)
    placer = Placer(index, Reservations(), random.Random(0), library=library)
    record = a_worker("d0", "decode", HEADERS[0], random.Random(1))
    index.register("d0", "i", 0, 0)
    hot = list(range(16 * 20))
    index.apply("d0", KvEvent("i", 0, 1, "stored", tuple(block_keys(HEADERS[0], hot))))
    placer.set_workers([], [Candidate(record, 0.0, HEADERS[0])], {}, {})
    for number in range(2, 40):
        index.apply("d0", KvEvent("i", 0, number, "stored", tuple(block_keys(HEADERS[0], [number] * 16 * 4))))
        for _ in range(4):
            placer.snapshot(PromptBlocks(Prompt(hot)))
    assert index.hit_blocks("d0", block_keys(HEADERS[0], hot)) == 20


@pytest.mark.usefixtures("compiler")
def test_the_library_is_compiled_once():
    folder = cache_dir() / "native"
    first = SOURCES.build(folder)
    before = first.stat().st_mtime_ns
    assert SOURCES.build(folder) == first
    assert first.stat().st_mtime_ns == before


def test_without_a_compiler_numpy_decides_and_native_is_refused(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with capture_logs() as said:
        assert choose_library("auto") is None
    assert [entry["why"] for entry in said] == ["CC=no-such-compiler is not installed"]
    with pytest.raises(ConfigError, match="no-such-compiler") as refused:
        choose_library("native")
    assert refused.value.field == "placement_backend"


def test_blocks_are_named_as_everywhere_else(library):
    chance = random.Random(7)
    for case in range(60):
        size = chance.choice([1, 3, 8, 16, 32, 100])
        header = IdentityHeader(
            chance.randbytes(32), "m" * chance.randrange(300), "t", "float16", size, salt=chance.randbytes(case % 40)
        )
        tokens = [chance.randrange(2**32) for _ in range(chance.choice([0, 1, size, 5 * size + 1, 300, 4500]))]
        assert to_bytes(library.block_keys(header, tokens)) == block_keys(header, tokens)
    header = HEADERS[0]
    for num_bytes in range(0, 5000, 4):  # every way in which blocks and chunks can meet
        tokens = list(range(num_bytes // 4))
        header = replace(HEADERS[0], block_size=max(1, len(tokens)))
        assert to_bytes(library.block_keys(header, tokens)) == block_keys(header, tokens)


def test_packed_ids_are_what_protobuf_packed(library):
    chance = random.Random(3)
    for bits in (1, 7, 8, 14, 21, 28, 32):
        ids = [chance.randrange(2**bits) for _ in range(chance.randrange(1, 300))]
        prompt = PackedIds.of(router_pb2.TokenIdsInput(token_ids=ids))
        for way in (unpack, library.unpack):
            found, largest = way(prompt.packed, prompt.count)
            assert (list(found), largest) == (ids, max(ids))
        for wrong in (prompt.packed[:-1], prompt.packed + b"\0", b"", b"\x0a", b"\x12" + prompt.packed[1:]):
            with pytest.raises(ValueError, match="no packed"):
                library.unpack(wrong, prompt.count)
        with pytest.raises(ValueError, match="no packed"):
            library.unpack(prompt.packed, prompt.count + 1)
        with pytest.raises(ValueError, match="no packed"):
            library.unpack(prompt.packed, prompt.count - 1)
    for number in (b"\x80\x80\x80\x80\x10", b"\xff\xff\xff\xff\xff\x01"):  # 2^32, six bytes
        with pytest.raises(ValueError, match="no packed"):
            library.unpack(b"\x0a" + bytes([len(number)]) + number, 1)
