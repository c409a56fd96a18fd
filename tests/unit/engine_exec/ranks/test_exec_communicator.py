"""HostCommunicator over gloo: sums in the order of the ranks, and a deadline for every operation. Ranks are threads here; each
has its own sockets."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from diptych.common.errors import ConfigError
from diptych.engine.exec.parallel import communicator
from diptych.engine.exec.parallel.communicator import HostCommunicator
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.runner import RunnerLost
from diptych_tests.rank_threads import places

GENEROUS_S = 60.0
SHORT_S = 0.5
"""Of peers that are known to be gone: nobody is waited for who may yet come."""


@pytest.fixture
def meet(tmp_path):
    """meet(tensor_parallel, pipeline, work) -> what work(communicator) returns on each rank."""
    made, folders = [], iter(range(100))

    def make(tensor_parallel, pipeline, work, deadline_s=GENEROUS_S):
        meeting = f"file://{tmp_path}/{next(folders)}"

        def one(place):
            made.append(HostCommunicator(place, rendezvous=meeting, deadline_s=deadline_s))
            return work(made[-1])

        with ThreadPoolExecutor(tensor_parallel * pipeline) as threads:
            return list(threads.map(one, places(tensor_parallel, pipeline)))

    yield make
    for one in made:
        one.close()


def addends(rank, rows=5, columns=7, dtype=torch.float32):
    """Of very different sizes: every order of adding has other bits."""
    generator = torch.Generator().manual_seed(rank)
    sizes = 10.0 ** torch.randint(-3, 4, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * sizes).to(dtype)


@pytest.fixture(params=["memory", "sockets"])
def way(request, monkeypatch):
    """How rows go from rank to rank."""
    if request.param == "sockets":
        monkeypatch.setattr(communicator, "can_share", lambda: False)
    elif not communicator.can_share():
        pytest.skip("not on this machine")
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_the_order_of_the_ranks_on_every_rank_whatever_the_rows(meet, dtype):
    def work(one):
        x = addends(one.place.rank, dtype=dtype)
        alone = [one.all_reduce(row.unsqueeze(0)) for row in x]
        return one.all_reduce(x.clone()), torch.cat(alone)

    parts = [addends(rank, dtype=dtype).float() for rank in range(3)]
    expected = ((parts[0] + parts[1]) + parts[2]).to(dtype)
    if dtype == torch.float32:
        assert not torch.equal(expected, parts[0] + (parts[1] + parts[2])), "the order is seen in the bits"
    for together, alone in meet(3, 1, work):
        assert together.dtype == dtype
        assert torch.equal(together, expected)
        assert torch.equal(alone, expected)


@pytest.mark.usefixtures("way")
def test_columns_stages_and_agreement(meet):
    """On two stages of two ranks; sums are of one stage, sizes of all ranks."""

    def work(one):
        place = one.place
        x = addends(place.rank)
        total, columns = one.all_reduce(x.clone()), one.gather_columns(x)
        sent = addends(10 + place.rank, dtype=torch.bfloat16)
        if place.first_stage:
            for _ in range(20):  # more than are on their way at one time
                one.send(sent)
            came = [sent]
        else:
            came = [one.receive(5, 7, torch.bfloat16) for _ in range(20)]
        return total, columns, came, one.agree_min(100 - 7 * place.rank)

    found = meet(2, 2, work)
    for stage in (0, 1):
        mine = [addends(2 * stage), addends(2 * stage + 1)]
        for total, columns, _, _ in found[2 * stage : 2 * stage + 2]:
            assert torch.equal(total, mine[0] + mine[1])
            assert torch.equal(columns, torch.cat(mine, 1))
    for rank in (2, 3):
        assert all(torch.equal(rows, addends(10 + rank - 2, dtype=torch.bfloat16)) for rows in found[rank][2])
    assert [agreed for *_, agreed in found] == [79] * 4


def sends(communicator):
    for _ in range(20):
        communicator.send(torch.zeros(1 << 10, 1 << 12))  # together more than sockets hold


OPERATIONS = {
    "all_reduce": ((2, 1), 0, lambda one: one.all_reduce(torch.ones(1, 2))),
    "gather_columns": ((2, 1), 1, lambda one: one.gather_columns(torch.ones(1, 2))),
    "send": ((1, 2), 0, sends),
    "receive": ((1, 2), 1, lambda one: one.receive(1, 2, torch.float32)),
    "agree_min": ((1, 2), 0, lambda one: one.agree_min(3)),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_whose_peer_is_silent_has_a_deadline(meet, name):
    """The other rank is there and answers nothing: no operation waits for ever."""
    degrees, rank, operation = OPERATIONS[name]
    communicators = meet(*degrees, lambda communicator: communicator, SHORT_S)
    calls = []
    communicators[rank].on_progress = lambda: calls.append(name)
    with pytest.raises(RunnerLost, match=f"rank {rank} waited for its peers in vain"):
        operation(communicators[rank])
    assert len(calls) >= 2, "before and after"


def test_columns_of_a_rank_that_has_closed(meet, way):
    first, second = meet(2, 1, lambda communicator: communicator)
    second.close()
    second.close()
    with pytest.raises(RunnerLost, match="in vain: tensor-parallel rank 1 has closed|in vain: Connection"):
        first.gather_columns(torch.ones(1, 2))


def test_many_exchanges_of_all_sizes_are_never_mixed_up(meet):
    """Ranks that hurry and ranks that dawdle; rows that the shared memory does not hold go over sockets in between."""

    def work(one):
        rng = random.Random(one.place.rank)
        for number in range(300):
            rows = 70 if number % 100 == 50 else 1 + number % 3
            if rng.random() < 0.05:
                torch.randn(50_000).sort()
            found = one.gather_columns(torch.full((rows, 4096), 1000.0 * number + one.place.rank))
            expected = torch.tensor([1000.0 * number + rank for rank in range(3)]).repeat_interleave(4096)
            assert torch.equal(found, expected.expand(rows, -1))
        return one._inboxes is not None

    assert meet(3, 1, work) == [communicator.can_share()] * 3


def test_memory_that_one_rank_cannot_map_is_used_by_none(meet, monkeypatch):
    opened = communicator.Inboxes.__init__

    def refused(self, rank, *arguments, **fields):
        if rank == 2:
            raise PermissionError("not here")
        opened(self, rank, *arguments, **fields)

    monkeypatch.setattr(communicator, "can_share", lambda: True)
    monkeypatch.setattr(communicator.Inboxes, "__init__", refused)
    found = meet(3, 1, lambda one: (one._inboxes, one.all_reduce(addends(one.place.rank))))
    assert [inboxes for inboxes, _ in found] == [None] * 3
    assert all(torch.equal(total, addends(0) + addends(1) + addends(2)) for _, total in found)


def test_ranks_that_do_not_come(tmp_path):
    with pytest.raises(RunnerLost, match="rank 1 waited"):
        HostCommunicator(RankPlace(1, 2), rendezvous=f"file://{tmp_path}/alone", deadline_s=SHORT_S)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RunnerLost):
            HostCommunicator(RankPlace(1, 2), rendezvous=where, deadline_s=SHORT_S)


def test_an_address_that_is_taken_or_not_of_this_machine_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, reason in (("127.0.0.1", "in use"), ("192.0.2.1", "assign")):
            where = f"tcp://{host}:{taken.getsockname()[1]}"
            with pytest.raises(ConfigError, match=f"rendezvous='{where}': cannot listen there: .*{reason}"):
                HostCommunicator(RankPlace(0, 2), rendezvous=where, deadline_s=SHORT_S)


@pytest.mark.parametrize("wrong", ["", "file://relative", "tcp://host", "tcp://host:x", "redis://h:1", "/folder/file"])
def test_a_rendezvous_of_another_form_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match="rendezvous") as error:
        HostCommunicator(RankPlace(0, 2), rendezvous=wrong, deadline_s=SHORT_S)
    assert error.value.field == "rendezvous"


def test_over_tcp_ranks_meet_at_an_address(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    make = partial(HostCommunicator, rendezvous=f"tcp://127.0.0.1:{port}", deadline_s=GENEROUS_S, host="127.0.0.1")

    def one(place):
        communicator = make(place)
        assert not communicator.stage_on_one_host
        with pytest.raises(ConnectionRefusedError):  # the store listens on no other address of this machine
            socket.create_connection(("127.0.0.2", port), GENEROUS_S)
        total = communicator.all_reduce(addends(place.rank))
        communicator.close()
        return total

    with ThreadPoolExecutor(2) as threads:
        assert all(torch.equal(total, addends(0) + addends(1)) for total in threads.map(one, places(2)))


def test_23_over_tcp_the_ranks_of_a_stage_on_one_host_share_memory():
    """Stages are on several hosts, and what is exchanged in each layer is within one of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    make = partial(HostCommunicator, rendezvous=where, deadline_s=GENEROUS_S, host="127.0.0.1", stage_on_one_host=True)

    def one(place):
        ranks = make(place)
        if communicator.can_share():
            ranks._by_gloo = None  # no way but memory
        total = ranks.all_reduce(addends(place.rank))
        if not place.last_stage:
            ranks.send(total)
        else:
            total = ranks.receive(*total.shape, total.dtype)
        assert ranks.agree_min(place.rank) == 0
        ranks.close()
        return total

    with ThreadPoolExecutor(4) as threads:
        totals = list(threads.map(one, places(2, 2)))
    assert all(torch.equal(total, addends(0) + addends(1)) for total in totals)
