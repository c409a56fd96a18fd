"""Tokens go out at once while the event loop keeps up and merge once it does not; nothing that was put is ever forgotten.

Everything runs on an event loop whose time is virtual: it jumps to the next timer, and stands still while anything runs.
"""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.router.cluster.decode_stream import Attempt, DecodeStream
from diptych.router.cluster.token_pace import MAX_GAP_S, TokenPace
from diptych.rpc.v1 import decode_pb2, router_pb2


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a Clock. `call_later`, which the stream uses, is late by `late_s`, as real timers are."""

    def __init__(self, late_s):
        self._now = 1000.0
        self._late_s = late_s
        super().__init__()

    def time(self):
        return self._now

    now = time

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self._now + delay + self._late_s, callback, *args, context=context)

    async def pause(self, seconds):
        """As asyncio.sleep, and exact."""
        over = self.create_future()
        self.call_at(self._now + seconds, over.set_result, None)
        await over

    def block(self, seconds):
        """Nothing else runs for so long."""
        self._now += seconds

    def _run_once(self):
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def run_virtually(main, late_s=0.0):
    loop = VirtualLoop(late_s)
    try:
        return loop.run_until_complete(asyncio.wait_for(main(loop), 10_000))
    finally:
        loop.close()


class SetPace(TokenPace):
    """As after a certain load, which a test need not bring about."""

    def __init__(self, gap_s):
        super().__init__()
        self._gap_s = gap_s

    def wait_s(self, last, now):
        return max(0.0, last + self._gap_s - now)


class Answer:
    """One attempt, its reader, and when each token was put, could be taken and was seen."""

    def __init__(self, stream, name, write_s):
        self.name = name
        self.write_s = write_s
        self.stream = stream
        self.attempt = stream._attempts[name] = Attempt(stream, name, 10**6)
        self.put_at = []
        self.seen_at = []
        self.events = 0
        self.busy = []
        """(from, until) of each write."""
        self.ended = False

    def tell(self, **event):
        self.stream._deliver(decode_pb2.Event(attempt=self.name, **event))

    def put(self, now):
        offset = len(self.put_at)
        self.put_at.append(now)
        self.tell(tokens=router_pb2.TokenDelta(offset=offset, token_ids=[offset], text=f"{offset} "))

    async def read(self, loop):
        while not self.ended:
            event = await self.attempt.next()
            if event.HasField("end"):
                self.ended = True
            elif event.HasField("tokens"):
                assert event.tokens.offset == len(self.seen_at)
                self.seen_at += [loop.time()] * len(event.tokens.token_ids)
                self.events += 1
                begun = loop.time()
                blocked_s, waited_s = self.write_s
                loop.block(blocked_s)  # what the loop computes for it
                if waited_s:
                    await loop.pause(waited_s)  # what the client lets it wait for
                self.busy.append((begun, loop.time()))


END_S = 60.0
"""Long after the last token: a reader still waiting has waited too long."""
LATE_S = (0.0, 0.0004, 0.001)
"""Lateness of timers."""


async def play(loop, schedules, writes, pace=None):
    """Steps of `schedules[i]` seconds give answer i a token each; then nothing for END_S, then the end."""
    pace = pace or TokenPace()
    streams = [DecodeStream(None, f"d{i}", pace=pace, clock=loop) for i in range(2)]
    answers = [Answer(streams[i % 2], f"a{i}", writes[i % len(writes)]) for i in range(len(schedules))]
    readers = [asyncio.create_task(answer.read(loop)) for answer in answers]

    async def feed(answer, steps):
        answer.tell(accepted=decode_pb2.Accepted())
        for step_s in steps:
            await loop.pause(step_s)
            answer.put(loop.time())

    await asyncio.gather(*(feed(answer, steps) for answer, steps in zip(answers, schedules, strict=True)))
    await loop.pause(END_S)
    seen = [len(answer.seen_at) for answer in answers]
    for answer in answers:
        answer.tell(end=decode_pb2.End())
    await asyncio.gather(*readers)
    for stream in streams:
        stream._down("the test is over")
    return answers, seen


def test_15_3_1_a_timer_that_finds_nothing_to_wake_for_does_not_end_the_stream():
    """The timer is slightly late, after the next step's tokens, which were due at once and took the held ones along."""
    one, seen = run_virtually(lambda loop: play(loop, [[0.0003] * 60], [(0.0, 0.0)], SetPace(0.0004)), late_s=0.0004)
    assert seen == [60]
    assert one[0].events > 20


step = st.sampled_from([0.0, 0.0001, 0.0003, 0.001, 0.002, 0.0043, 0.005, 0.008, 0.02, 0.3])
write = st.tuples(st.sampled_from([0.0, 0.00005, 0.0003, 0.002, 0.03]), st.sampled_from([0.0, 0.0, 0.0004, 0.01, 0.5]))


@settings(max_examples=150, deadline=None)
@given(
    schedules=st.lists(st.lists(step, min_size=1, max_size=40), min_size=1, max_size=6),
    writes=st.lists(write, min_size=1, max_size=3),
    late_s=st.sampled_from(LATE_S),
    gap_s=st.sampled_from([None, 0.0, 0.001, 0.005, MAX_GAP_S]),
)
def test_15_3_1_whatever_was_put_is_seen_within_the_bound(schedules, writes, late_s, gap_s):
    pace = None if gap_s is None else SetPace(gap_s)
    answers, seen = run_virtually(lambda loop: play(loop, schedules, writes, pace), late_s)
    blocked_s = sum(answer.write_s[0] * len(answer.busy) for answer in answers)
    for answer, steps, count in zip(answers, schedules, seen, strict=True):
        assert count == len(steps), "tokens were seen only with the end"
        for put, saw in zip(answer.put_at, answer.seen_at, strict=True):
            ready = max([put, *(until for begun, until in answer.busy if begun < saw and until <= saw)])
            assert saw - ready <= MAX_GAP_S + late_s + blocked_s + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(step.filter(bool), min_size=1, max_size=60), min_size=1, max_size=4))
def test_15_3_2_an_idle_loop_hands_every_token_on_at_once(schedules):
    answers, _ = run_virtually(lambda loop: play(loop, schedules, [(0.0, 0.0)]))
    for answer in answers:
        assert answer.seen_at == answer.put_at


def test_15_3_2_steps_of_five_milliseconds_are_not_merged_for_eight_answers():
    """Eight writes of 60 us are a tenth of a step."""
    answers, _ = run_virtually(lambda loop: play(loop, [[0.005] * 100] * 8, [(0.00006, 0.0)]))
    assert all(answer.events == 100 for answer in answers)


def test_a_loop_that_cannot_write_every_token_merges_and_keeps_up():
    """64 answers of a token each millisecond, and 100 us for each write: six times what the loop can do one by one."""
    answers, seen = run_virtually(lambda loop: play(loop, [[0.001] * 300] * 64, [(0.0001, 0.0)]))
    assert seen == [300] * 64
    assert sum(answer.events for answer in answers) < 64 * 150
    late = max(saw - put for answer in answers for put, saw in zip(answer.put_at, answer.seen_at, strict=True))
    assert late < 2 * MAX_GAP_S


def serve(pace, seconds):
    pace.on_wake()
    pace.on_served(seconds)


def test_one_long_pause_and_one_slow_client_hold_up_no_other():
    pace = TokenPace()
    pace.on_wake()  # the slow one
    for i in range(1000):
        serve(pace, 20.0 if i % 4 == 0 else 0.0002)
    assert pace.wait_s(last=100.0, now=100.001) == 0.0


def test_what_waits_follows_the_load_within_a_few_bursts_and_is_bounded():
    pace = TokenPace()
    pace.on_wake()
    for _ in range(5):
        for i in range(64):
            serve(pace, 0.0001 * (i + 1))
    assert pace.wait_s(last=100.0, now=100.001) > 0.003
    assert pace.wait_s(last=100.0, now=100.025) == 0.0
    for _ in range(10_000):
        serve(pace, 100.0)
    assert MAX_GAP_S / 2 < pace.wait_s(last=100.0, now=100.0) < MAX_GAP_S + 1e-6
    assert pace.wait_s(last=100.0, now=100.0 + MAX_GAP_S) == 0.0
    for _ in range(500):
        serve(pace, 0.00001)
    assert pace.wait_s(last=100.0, now=100.0001) == 0.0


def test_15_3_2_nothing_waits_for_an_idle_writer_however_slow_the_machine_is():
    """One answer, steps of 1.5 ms, and a write that takes a whole step: tokens that arrived meanwhile are sent then."""
    answers, seen = run_virtually(lambda loop: play(loop, [[0.0015] * 200], [(0.0, 0.0015)]))
    assert seen == [200]
    late = max(saw - put for put, saw in zip(answers[0].put_at, answers[0].seen_at, strict=True))
    assert late <= 0.0015 + 1e-6


def test_readers_that_leave_are_no_longer_busy():
    async def main(loop):
        pace = TokenPace()
        stream = DecodeStream(None, "d0", pace=pace, clock=loop)
        for when in ("before it was told", "told", "busy", "at the end"):
            answer = Answer(stream, when, (0.0, 1.0))
            reader = asyncio.create_task(answer.read(loop))
            await asyncio.sleep(0)
            if when != "before it was told":
                answer.put(loop.time())
            if when in ("busy", "at the end"):
                await asyncio.sleep(0)
                assert pace.num_busy == 1
            if when == "at the end":
                answer.tell(end=decode_pb2.End())
                await reader
            else:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
                answer.attempt.cancel()
            assert pace.num_busy == 0

    run_virtually(main)
