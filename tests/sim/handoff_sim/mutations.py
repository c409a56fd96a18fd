"""Guards of the hand-off, each with a way to remove it. Without any one of them the explorer must find a failure.

A guard covered by another one is not listed, since removing it alone changes nothing: a slab number out of range cannot
carry a valid MAC; what PeerLost frees was freed by the preceding completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from handoff_sim import reference
from handoff_sim.engine import BLOCK

from diptych.common import kv_groups
from diptych.common.errors import TransferError
from diptych.engine.messages import RangePacked
from diptych.engine.sched import scheduler
from diptych.engine.sched.cache import kv_cache_manager
from diptych.engine.sched.cache.kv_cache_manager import KvCacheManager
from diptych.engine.sched.handoff.layer_groups import LayerGroups
from diptych.engine.sched.handoff.packing import PackJob
from diptych.engine.sched.handoff.remote import RemoteRequests
from diptych.kvtransfer.ledgers import reader as read_side
from diptych.kvtransfer.ledgers.ledger import DropPeer, SlabState
from diptych.kvtransfer.ledgers.publisher_ledger import Acked, PublisherLedger, Released, SendDone, Tick
from diptych.kvtransfer.ledgers.reader_ledger import FailRead, Finished, ReaderLedger, Received
from diptych.kvtransfer.ledgers.reader_ledger import Tick as ReaderTick
from diptych.kvtransfer.slabs.handle import Refusal
from diptych.prefill.sessions import PrefillSessions
from diptych.worker.reads.coverage import Coverage, KvCoverage
from diptych.worker.reads.slab_unpacker import SlabUnpacker
from diptych.worker.role_spec import PREFILL, SOURCE

Patch = Callable[[], Any]
MUTATIONS: dict[str, Patch] = {}
WITH_FILES: set[str] = set()
"""Those that are looked for in schedules which all have files of KV (file_mutations.py)."""
SEEN_BY: dict[str, int] = {
    "a_handle_of_an_old_generation_is_served": 55,
    "a_handle_is_served_after_its_lease": 87,
    "leases_are_not_swept": 76,
    "prefill_quarantine_has_no_end": 120,
    "a_late_send_frees_nothing": 14,
    "a_released_attempt_frees_nothing": 66,
    "a_range_packed_too_late_keeps_its_grant": 94,
    "legs_of_a_silent_decode_worker_go_on": 192,
    "a_slab_is_finished_while_it_is_unpacked": 94,
    "decode_begins_before_every_rank_is_in": 126,
    "a_stage_s_group_is_taken_for_the_model_s": 3611,
    "a_hit_ends_where_the_full_group_has_it": 693,
    "a_block_that_has_not_arrived_makes_a_hit": 693,
    "a_pull_counts_blocks_behind_a_gap": 659,
    "a_pull_counts_blocks_of_one_group": 659,
    "a_read_names_a_place_and_no_identity": 200,
    "an_offer_that_nobody_expects_is_kept": 246,
    "a_damaged_file_is_read": 1246,
    "an_answer_is_taken_for_another_read": 2596,
    "a_buffer_is_used_again_before_it_is_unpacked": 322,
    "a_late_answer_keeps_its_buffer": 267,
    "a_file_of_another_block_is_read": 205,
    "a_block_is_evicted_while_it_is_copied_to_a_file": 124,
    "a_file_of_another_model_is_read": 106,
    "a_part_of_a_block_counts_as_the_block": 37,
    "a_restore_that_was_cancelled_goes_on": 33,
    "a_block_that_may_be_wrong_stays_once_it_is_written": 31,
    "a_second_completion_of_a_read_counts": 66,
    "a_window_group_is_sent_whole": 29,
    "a_block_that_left_while_it_was_read_is_held": 30333,
    "a_restore_that_was_cancelled_is_not_recorded": 98768,
    "a_cancelled_read_frees_its_slab": 9,
    "a_read_past_its_deadline_frees_its_slab": 6,
    "decode_quarantine_has_no_end": 18,
    "slabs_to_read_into_are_slabs_to_publish_from": 24,
    "a_peer_has_no_quota": 6,
    "prefill_frees_what_it_has_yet_to_send": 29,
    "more_is_held_than_there_is_room_for_after_a_restart": 19,
    "blocks_are_evicted_while_files_are_read_for_them": 18,
    "a_worker_that_drains_takes_prompts": 232,
    "a_worker_that_drains_serves_no_reads": 232,
}
"""A seed that detects the missing guard, if finding one takes more than a few. It only saves time: see mutate.py."""


def mutation(patch: Patch) -> Patch:
    MUTATIONS[patch.__name__] = patch
    return patch


@contextmanager
def applied(name: str) -> Iterator[None]:
    reference.compute_all()  # by what is not mutated
    with MUTATIONS[name]():
        yield


def _handler(ledger: type, event: type, function: Callable[..., Any]) -> Any:
    return mock.patch.dict(ledger._HANDLERS, {event: function})  # type: ignore[attr-defined]


# ---- prefill: what may be read ----


def _without(refusal: Refusal, repair: Callable[[PublisherLedger, Any, float], tuple[Any, float]]) -> Any:
    """_why_not with one check gone: where it would refuse for this reason, the event is repaired and judged again."""
    original = PublisherLedger._why_not

    def lenient(self: PublisherLedger, event: Any, now: float) -> Refusal | None:
        reason = original(self, event, now)
        return original(self, *repair(self, event, now)) if reason is refusal else reason

    return mock.patch.object(PublisherLedger, "_why_not", lenient)


@mutation
def a_forged_handle_is_served() -> Any:
    return _without(Refusal.FORGED, lambda ledger, event, now: (replace(event, authentic=True), now))


@mutation
def a_handle_of_an_old_generation_is_served() -> Any:
    def repair(ledger: PublisherLedger, event: Any, now: float) -> tuple[Any, float]:
        generation = ledger.table.slabs[event.handle.slab].generation
        return replace(event, handle=replace(event.handle, generation=generation)), now

    return _without(Refusal.STALE, repair)


@mutation
def a_handle_is_served_twice() -> Any:
    original = PublisherLedger._why_not

    def lenient(self: PublisherLedger, event: Any, now: float) -> Refusal | None:
        reason = original(self, event, now)
        return None if reason is Refusal.USED else reason

    return mock.patch.object(PublisherLedger, "_why_not", lenient)


@mutation
def a_handle_is_served_after_its_lease() -> Any:
    return _without(Refusal.EXPIRED, lambda ledger, event, now: (event, float("-inf")))


# ---- prefill: freeing of slabs ----


@mutation
def released_slabs_are_free_while_they_are_sent() -> Any:
    def take_back(self: PublisherLedger, index: int, now: float, why: str) -> list[Any]:
        if self.table.slabs[index].state is SlabState.QUARANTINED:
            return []
        return self._free(index, why)

    return mock.patch.object(PublisherLedger, "_take_back", take_back)


@mutation
def an_acknowledged_slab_is_free_while_it_is_sent() -> Any:
    original = PublisherLedger._on_acked

    def on_acked(self: PublisherLedger, event: Acked, now: float) -> list[Any]:
        life = self._outstanding_slab(event.handle.slab, event.handle.generation) if event.authentic else None
        if life is not None and self.table.slabs[event.handle.slab].state is SlabState.IN_FLIGHT:
            return self._acknowledged(event.handle.slab, life)
        return original(self, event, now)

    return _handler(PublisherLedger, Acked, on_acked)


@mutation
def a_forged_acknowledgement_counts() -> Any:
    original = PublisherLedger._on_acked
    return _handler(
        PublisherLedger, Acked, lambda self, event, now: original(self, replace(event, authentic=True), now)
    )


@mutation
def an_acknowledgement_of_an_old_generation_counts() -> Any:
    original = PublisherLedger._on_acked

    def on_acked(self: PublisherLedger, event: Acked, now: float) -> list[Any]:
        life = self._outstanding.get(event.handle.slab)
        if life is not None and event.authentic:
            event = replace(event, handle=replace(event.handle, generation=life.handle.generation))
        return original(self, event, now)

    return _handler(PublisherLedger, Acked, on_acked)


@mutation
def leases_are_not_swept() -> Any:
    original = PublisherLedger._on_tick

    def on_tick(self: PublisherLedger, event: Tick, now: float) -> list[Any]:
        with mock.patch.object(self, "_take_back", return_value=[]):
            return [action for action in original(self, event, now) if isinstance(action, DropPeer)]

    return _handler(PublisherLedger, Tick, on_tick)


@mutation
def prefill_quarantine_has_no_end() -> Any:
    original = PublisherLedger._on_tick
    return _handler(
        PublisherLedger,
        Tick,
        lambda self, event, now: [a for a in original(self, event, now) if not isinstance(a, DropPeer)],
    )


@mutation
def a_late_send_frees_nothing() -> Any:
    original = PublisherLedger._on_send_done

    def on_send_done(self: PublisherLedger, event: SendDone, now: float) -> list[Any]:
        quarantined = self.table.slabs[event.slab].state is SlabState.QUARANTINED
        return [] if quarantined else original(self, event, now)

    return _handler(PublisherLedger, SendDone, on_send_done)


@mutation
def a_released_attempt_frees_nothing() -> Any:
    return _handler(PublisherLedger, Released, lambda self, event, now: [])


@mutation
def a_range_packed_too_late_keeps_its_grant() -> Any:
    original = PrefillSessions.on_step

    def on_step(self: PrefillSessions, events: Any) -> None:
        original(self, [e for e in events if not isinstance(e, RangePacked) or e.attempt in self._sessions])

    return mock.patch.object(PrefillSessions, "on_step", on_step)


@mutation
def legs_of_a_silent_decode_worker_go_on() -> Any:
    return mock.patch.object(PrefillSessions, "on_silent", return_value=None)


@mutation
def layers_are_packed_before_they_are_computed() -> Any:
    def next_job(self: LayerGroups, num_layers: int) -> PackJob | None:
        jobs = (self._packing.layer_job(one, num_layers + 1) for one in self._due.get(num_layers, ()))
        return next((job for job in jobs if job is not None), None)

    return mock.patch.object(LayerGroups, "next_job", next_job)


# ---- decode ----


@mutation
def a_read_past_its_deadline_frees_its_slab() -> Any:
    def on_tick(self: ReaderLedger, event: object, now: float) -> list[Any]:
        actions: list[Any] = []
        for read_id, read in list(self._reads.items()):
            if read.slab is not None and self._slab_state(read) is SlabState.IN_FLIGHT and read.deadline <= now:
                actions += [
                    FailRead(read_id, TransferError("late")),
                    *self._free(read_id, "late", now, acknowledge=True),
                ]
        return [*actions, *original(self, event, now)]

    original = ReaderLedger._on_tick
    return _handler(ReaderLedger, ReaderTick, on_tick)


@mutation
def a_cancelled_read_frees_its_slab() -> Any:
    original = ReaderLedger._on_finished

    def on_finished(self: ReaderLedger, event: Finished, now: float) -> list[Any]:
        if self._state(event.read_id) is SlabState.IN_FLIGHT:
            return self._free(event.read_id, "cancelled", now, acknowledge=True)
        return original(self, event, now)

    return _handler(ReaderLedger, Finished, on_finished)


@mutation
def a_second_completion_of_a_read_counts() -> Any:
    original = ReaderLedger._on_received

    def on_received(self: ReaderLedger, event: Received, now: float) -> list[Any]:
        if self._state(event.read_id) is SlabState.SETTLED:
            return self._free(event.read_id, "received", now, acknowledge=True)
        return original(self, event, now)

    return _handler(ReaderLedger, Received, on_received)


@mutation
def decode_quarantine_has_no_end() -> Any:
    original = ReaderLedger._on_tick
    return _handler(
        ReaderLedger,
        ReaderTick,
        lambda self, event, now: [a for a in original(self, event, now) if not isinstance(a, DropPeer)],
    )


@mutation
def a_payload_is_not_verified() -> Any:
    check = read_side.check_slab
    return mock.patch.object(
        read_side, "check_slab", lambda slab, handle, verify_checksum: check(slab, handle, verify_checksum=False)
    )


@mutation
def slabs_to_read_into_are_slabs_to_publish_from() -> Any:
    original = read_side.ReadSide.__init__

    def init(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **{**keywords, "first_slab": 0})

    return mock.patch.object(read_side.ReadSide, "__init__", init)


@mutation
def a_peer_has_no_quota() -> Any:
    original = ReaderLedger._start_waiting

    def start_waiting(self: ReaderLedger, now: float) -> list[Any]:
        with mock.patch.object(self, "_quota", 99):
            return original(self, now)

    return mock.patch.object(ReaderLedger, "_start_waiting", start_waiting)


@mutation
def an_offer_that_nobody_expects_is_kept() -> Any:
    original = read_side.ReadSide._on_offer

    def on_offer(self: Any, key: str, body: bytes, now: float) -> None:
        if read_side.handles.decode(body).attempt in self._expected:
            original(self, key, body, now)

    return mock.patch.object(read_side.ReadSide, "_on_offer", on_offer)


@mutation
def a_slab_is_finished_while_it_is_unpacked() -> Any:
    original = SlabUnpacker.unpack

    def unpack(self: SlabUnpacker, attempt: str, slab: Any, *, last: bool = False) -> Any:
        answer = original(self, attempt, slab, last=last)
        answer.add_done_callback(lambda answer: answer.cancelled() and self._reader.finish(slab))
        return answer

    return mock.patch.object(SlabUnpacker, "unpack", unpack)


@mutation
def decode_begins_before_every_range_is_in() -> Any:
    return mock.patch.object(Coverage, "complete", property(lambda self: True))


@mutation
def decode_begins_before_every_layer_is_in() -> Any:
    def complete(self: Coverage) -> bool:
        tokens = {token for one in self._ranges for token in range(one.first, one.end)}
        return len(tokens) == self.end - self.first

    return mock.patch.object(Coverage, "complete", property(complete))


# ---- ranks ----


@mutation
def decode_begins_before_every_rank_is_in() -> Any:
    def complete(self: KvCoverage) -> bool:
        return all(one.complete for (part, _), one in self._groups.items() if not part)

    return mock.patch.object(KvCoverage, "complete", property(complete))


@mutation
def a_stage_s_group_is_taken_for_the_model_s() -> Any:
    """By decode's engine: what a stage has of its first group goes into the blocks of the model's first one."""
    original = RemoteRequests.__init__

    def begin(self: RemoteRequests, kv: Any, limits: Any) -> None:
        original(self, kv, limits)
        self._group_parts = {key: replace(one, group=one.own) for key, one in self._group_parts.items()}

    return mock.patch.object(RemoteRequests, "__init__", begin)


# ---- window groups ----


@mutation
def a_block_is_freed_while_the_window_reaches_it() -> Any:
    original = KvCacheManager._slide

    def slide(self: KvCacheManager, request: Any, *, in_prompt: bool) -> None:
        original(self, request, in_prompt=in_prompt)
        table = request.tables[-1]
        if table:
            self.pools[-1].release(table[:1])
            request.seq.first_blocks = (*request.seq.first_blocks[:-1], request.seq.first_blocks[-1] + 1)
            del table[:1]

    return mock.patch.object(KvCacheManager, "_slide", slide)


@mutation
def prefill_frees_what_it_has_yet_to_send() -> Any:
    return mock.patch.object(KvCacheManager, "_seen_from", lambda self, request, num_tokens: num_tokens)


@mutation
def a_window_group_is_sent_whole() -> Any:
    """And kept whole by prefill, and expected whole by decode: nothing but the bytes shows it."""
    patched = ExitStack()
    for module in (kv_groups, kv_cache_manager):
        patched.enter_context(mock.patch.object(module, "hit_end", return_value=0))
    return patched


@mutation
def decode_begins_before_every_group_is_in() -> Any:
    def complete(self: KvCoverage) -> bool:
        return next((one.complete for one in self._groups.values()), True)

    return mock.patch.object(KvCoverage, "complete", property(complete))


@mutation
def a_hit_ends_where_the_full_group_has_it() -> Any:
    return mock.patch.object(KvCacheManager, "num_cached_blocks", lambda self, keys: len(self.pool.find(keys)))


@mutation
def a_block_that_has_not_arrived_makes_a_hit() -> Any:
    return mock.patch.object(KvCacheManager, "trim_front", return_value=None)


# ---- pulls ----


@mutation
def a_pull_counts_blocks_that_have_not_arrived() -> Any:
    """As where what a stale holder lacks, or what was lost on the way, counts as pulled."""
    return mock.patch.object(RemoteRequests, "arrived_until", lambda self, request: request.kv_target)


@mutation
def a_pull_counts_blocks_behind_a_gap() -> Any:
    def arrived_until(self: RemoteRequests, request: Any) -> int:
        covered = [block for group, block in self._arriving[request.attempt].covered if not group]
        return max([request.num_computed, *((block + 1) * BLOCK for block in covered)])

    return mock.patch.object(RemoteRequests, "arrived_until", arrived_until)


@mutation
def a_pull_counts_blocks_of_one_group() -> Any:
    def arrived_until(self: RemoteRequests, request: Any) -> int:
        covered, block = self._arriving[request.attempt].covered, request.num_computed // BLOCK
        while (0, block) in covered:
            block += 1
        return min(block * BLOCK, request.kv_target)

    return mock.patch.object(RemoteRequests, "arrived_until", arrived_until)


@mutation
def a_read_names_a_place_and_no_identity() -> Any:
    """The holder sends what it has at these places of a sequence, whichever it is: history may have been rewritten."""
    original = scheduler.publish_cached

    def publish_cached(live: Any, command: Any, *args: Any) -> None:
        held = tuple(live.kv.pool.dump().tiers[0].keys)[: len(command.keys)]
        original(live, replace(command, keys=held or command.keys), *args)

    return mock.patch.object(scheduler, "publish_cached", publish_cached)


@mutation
def a_holder_evicts_what_it_is_sending() -> Any:
    """Blocks are free as soon as they were found, and not when they are packed."""
    original = KvCacheManager.adopt

    def adopt(self: KvCacheManager, request: Any, keys: Any) -> None:
        original(self, request, keys)
        for pool, table in zip(self.pools, request.tables, strict=True):
            pool.release(reversed(table))

    return mock.patch.object(KvCacheManager, "adopt", adopt)


@mutation
def a_worker_that_drains_takes_prompts() -> Any:
    return mock.patch.object(PrefillSessions, "_check_accepting", return_value=None)


@mutation
def a_worker_that_drains_serves_no_reads() -> Any:
    def stop_accepting(self: PrefillSessions, service: str) -> None:
        self._refused |= {PREFILL, SOURCE}

    return mock.patch.object(PrefillSessions, "stop_accepting", stop_accepting)


@mutation
def a_pull_that_failed_is_never_ended() -> Any:
    original = scheduler.end_pull

    def end_pull(live: Any, attempt: str) -> Any:
        request = live.remote.pull(attempt)
        if request is not None and live.remote.missing(request):
            return None
        return original(live, attempt)

    return mock.patch.object(scheduler, "end_pull", end_pull)
