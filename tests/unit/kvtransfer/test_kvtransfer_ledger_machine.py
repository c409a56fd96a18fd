"""Random histories. What is watched is the network's side: a slab that it may still touch is in nobody else's hands."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.common.errors import TransferError
from diptych.kvtransfer.ledgers import publisher_ledger as pub
from diptych.kvtransfer.ledgers import reader_ledger as rd
from diptych.kvtransfer.ledgers.ledger import DropPeer
from diptych.kvtransfer.slabs.handle import SlabHandle

NUM_SLABS = 4
LEASE_S = 5.0
PEERS = st.sampled_from(["d0#1", "d1#2"])
ATTEMPTS = st.sampled_from(["a", "b", "c"])


class PublisherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = pub.PublisherLedger(
            num_slabs=NUM_SLABS, payload_bytes=1000, worker_id="p0", incarnation="i", layout_hash=7,
            lease_s=LEASE_S, quarantine_cap=2,
        )  # fmt: skip
        self.granted: dict[int, int] = {}
        self.sending: dict[tuple[int, int], str] = {}
        """(slab, generation) that the network may still read -> the connection."""
        self.handles: list[SlabHandle] = []
        self.outstanding: dict[tuple[str, int, int], bool] = {}
        self.feed(pub.GrantAsked())

    def feed(self, event: pub.Event) -> None:
        for action in self.ledger.on_event(event, self.now):
            match action:
                case pub.Grant(slab, generation):
                    assert slab not in {s for s, _ in self.sending}, "granted while the network reads it"
                    assert slab not in self.granted
                    self.granted[slab] = generation
                case pub.Send(conn, _, slab, generation, _):
                    assert (slab, generation) not in self.sending
                    self.sending[slab, generation] = conn
                case DropPeer(peer, _):
                    self.lose(peer)

    def lose(self, conn: str) -> None:
        for slab, generation in [k for k, c in self.sending.items() if c == conn]:
            del self.sending[slab, generation]
            self.feed(pub.SendDone(slab, generation, False))
        self.feed(pub.PeerGone(conn))

    @precondition(lambda self: self.granted)
    @rule(attempt=ATTEMPTS, data=st.data())
    def publish(self, attempt, data):
        slab = data.draw(st.sampled_from(sorted(self.granted)))
        handle = SlabHandle("p0", "i", attempt, slab, self.granted.pop(slab), 0, 1, 0, 1, 7, 100, 5, 0)
        self.handles.append(handle)
        self.feed(pub.Published("d", handle))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_back(self, data):
        slab = data.draw(st.sampled_from(sorted(self.granted)))
        self.feed(pub.GrantReturned(slab, self.granted.pop(slab)))

    @precondition(lambda self: self.handles)
    @rule(conn=PEERS, data=st.data(), authentic=st.booleans())
    def read(self, conn, data, authentic):
        self.feed(pub.ReadAsked(conn, 1, data.draw(st.sampled_from(self.handles)), authentic))

    @precondition(lambda self: self.sending)
    @rule(data=st.data(), ok=st.booleans())
    def send_completes(self, data, ok):
        slab, generation = data.draw(st.sampled_from(sorted(self.sending)))
        del self.sending[slab, generation]
        self.feed(pub.SendDone(slab, generation, ok))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), authentic=st.booleans())
    def acknowledge(self, data, authentic):
        self.feed(pub.Acked(data.draw(st.sampled_from(self.handles)), authentic))

    @rule(attempt=ATTEMPTS)
    def release(self, attempt):
        self.feed(pub.Released(attempt))

    @rule(conn=PEERS)
    def peer_dies(self, conn):
        self.lose(conn)

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S]))
    def time_passes(self, seconds):
        self.now += seconds
        self.feed(pub.Tick())

    @invariant()
    def laws(self):
        assert self.ledger.check() == []
        counts = self.ledger.counts()
        assert counts.in_flight + counts.quarantined == len(self.sending)
        assert counts.free == len(self.granted)

    def teardown(self):
        for _ in range(3):  # nothing new arrives, and every slab comes home
            self.now += LEASE_S
            self.feed(pub.Tick())
        assert self.ledger.counts().free == NUM_SLABS


class ReaderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = 0
        self.ledger = rd.ReaderLedger(num_slabs=NUM_SLABS, peer_quota=3, quarantine_cap=2, quarantine_s=LEASE_S)
        self.peer_of: dict[int, str] = {}
        self.posted: dict[int, int] = {}
        """Receives that the network may still write: read -> slab."""
        self.lent: dict[int, int] = {}
        self.answered: set[int] = set()
        self.losing = ""

    def feed(self, event: rd.Event) -> None:
        for action in self.ledger.on_event(event, self.now):
            match action:
                case rd.StartRead(read_id, slab):
                    assert slab not in self.posted.values(), "reused while the network writes it"
                    assert slab not in self.lent.values(), "reused while the engine reads it"
                    if self.peer_of[read_id] == self.losing:  # the transport makes no endpoint of that name yet
                        self.feed(rd.Received(read_id, TransferError("peer lost")))
                    else:
                        self.posted[read_id] = slab
                case rd.Deliver(read_id, slab):
                    self.answer(read_id)
                    self.lent[read_id] = slab
                case rd.FailRead(read_id, _):
                    self.answer(read_id)
                case DropPeer(peer, _):
                    self.lose(peer)

    def answer(self, read_id: int) -> None:
        assert read_id not in self.answered, "a read is answered once"
        self.answered.add(read_id)

    def lose(self, peer: str) -> None:
        self.losing = peer
        for read_id in [i for i in self.posted if self.peer_of[i] == peer]:
            del self.posted[read_id]
            self.feed(rd.Received(read_id, TransferError("peer lost")))
        self.feed(rd.PeerGone(peer, "lost"))
        self.losing = ""

    @rule(peer=st.sampled_from(["p0", "p1"]), patience=st.sampled_from([1.0, 3.0, 9.0]))
    def want(self, peer, patience):
        self.ids += 1
        self.peer_of[self.ids] = peer
        self.feed(rd.ReadWanted(self.ids, peer, self.now + patience))

    @precondition(lambda self: self.posted)
    @rule(data=st.data(), intact=st.booleans())
    def receive_completes(self, data, intact):
        read_id = data.draw(st.sampled_from(sorted(self.posted)))
        del self.posted[read_id]
        self.feed(rd.Received(read_id, None if intact else TransferError("damaged")))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def finish(self, data):
        read_id = data.draw(st.sampled_from(sorted(self.lent)))
        del self.lent[read_id]
        self.feed(rd.Finished(read_id))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data):
        read_id = data.draw(st.integers(1, self.ids))
        self.lent.pop(read_id, None)
        self.answered.add(read_id) if read_id not in self.answered else None
        self.feed(rd.Finished(read_id))

    @rule(peer=st.sampled_from(["p0", "p1"]))
    def peer_dies(self, peer):
        self.lose(peer)

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S]))
    def time_passes(self, seconds):
        self.now += seconds
        self.feed(rd.Tick())

    @invariant()
    def laws(self):
        assert self.ledger.check() == []
        counts = self.ledger.counts()
        assert counts.in_flight + counts.quarantined == len(self.posted)
        assert counts.settled == len(self.lent)
        assert counts.free == NUM_SLABS - len(self.posted) - len(self.lent)

    def teardown(self):
        for read_id in list(self.lent):
            del self.lent[read_id]
            self.feed(rd.Finished(read_id))
        for _ in range(8):
            self.now += LEASE_S + 4.0
            self.feed(rd.Tick())
        assert self.ledger.counts().free == NUM_SLABS
        assert self.answered == set(range(1, self.ids + 1))


TestPublisherMachine = PublisherMachine.TestCase
TestReaderMachine = ReaderMachine.TestCase
TestPublisherMachine.settings = TestReaderMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
