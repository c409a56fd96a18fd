"""Ranks of one worker on several hosts: joining, signs of life, KV over the network, and every way in which it ends. The hosts
are loopback addresses; a node runs in a thread of this process, and its ranks in processes with fake runners."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.errors import ConfigError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.executor import ExecutorLost, LocalExecutor
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import EngineRequest, ScheduledSeq
from diptych.engine.offline import OfflineEngine
from diptych.engine.ranks.executor import RanksExecutor
from diptych.engine.ranks.frames import HEAD, Kind
from diptych.engine.ranks.nodes.joining import FROM_OTHER, NODE, RANK, Greeting, Group, Hello, check
from diptych.engine.ranks.nodes.links import RemoteEnd, RemoteRankEnd, TlsFiles, connect, greet_worker
from diptych.engine.ranks.nodes.node import Joining, Node
from diptych.engine.ranks.nodes.nodes import Nodes, RankPulse, decode_pulse, encode_pulse
from diptych.engine.ranks.starting import RankSpec
from diptych.engine.ranks.watch import ProcessState
from diptych_tests.waiting import wait_until

pytestmark = pytest.mark.multiproc
GENEROUS_S = 120.0
MASTER, OTHER = "127.0.0.2", "127.0.0.3"
KEY = b"k" * 32
FACTORY = "diptych.engine.fake_runner:FakeRunner"
POOL = {"num_blocks": 24, "block_size": 4, "vocab_size": 300, "num_host_blocks": 8}
ENV = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
GROUP = Group("1.0", 2, 2, 1, "this start", 3.0)
HELLO = Hello(NODE, "1.0", 1)
RANK_HELLO = Hello(RANK, "1.0", 1, rank=1, attempt="this start")


# ---- who is admitted ----


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"version": "0.9"}, "version"),
        ({"node_rank": 0}, "node_rank"),
        ({"node_rank": 2}, "node_rank"),
        ({"nnodes": 3}, "nnodes"),
        ({"tensor_parallel": 4}, "tensor_parallel_size"),
        ({"pipeline": 2}, "pipeline_parallel_size"),
        ({"kind": "router"}, "kind"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_by_the_settings_name(changed: dict[str, Any], field: str) -> None:
    check(HELLO, GROUP, (), ())
    check(msgspec.structs.replace(HELLO, nnodes=2, tensor_parallel=2, pipeline=1), GROUP, (), ())
    with pytest.raises(ConfigError) as caught:
        check(msgspec.structs.replace(HELLO, **changed), GROUP, (), ())
    assert caught.value.field == field


def test_a_number_is_given_to_one_host_only() -> None:
    with pytest.raises(ConfigError, match="node_rank=1: another host has joined with it"):
        check(HELLO, GROUP, (1,), ())


@pytest.mark.parametrize(
    ("changed", "nodes", "ranks"),
    [
        ({"attempt": "an earlier start"}, (1,), ()),
        ({}, (), ()),
        ({"rank": 0}, (1,), ()),
        ({"rank": 2}, (1,), ()),
        ({}, (1,), (1,)),
    ],
)
def test_a_rank_comes_once_after_its_node_and_for_this_start(
    changed: dict[str, Any], nodes: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    check(RANK_HELLO, GROUP, (1,), ())
    with pytest.raises(ConfigError):
        check(msgspec.structs.replace(RANK_HELLO, **changed), GROUP, nodes, ranks)


def test_hosts_have_equal_parts_of_the_ranks_in_their_order() -> None:
    group = Group("1.0", 4, 2, 4, "", 3.0)
    assert [list(group.ranks_of(node)) for node in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (group.welcome(3).first_rank, group.welcome(3).num_ranks) == (6, 2)


def test_what_one_connection_proved_proves_nothing_on_another() -> None:
    greeting = Greeting(KEY, b"w" * 32, b"o" * 32)
    sealed = greeting.sealed(FROM_OTHER, b"hello")
    assert greeting.opened(FROM_OTHER, sealed) == b"hello"
    for other in (
        Greeting(b"x" * 32, b"w" * 32, b"o" * 32),
        Greeting(KEY, b"W" * 32, b"o" * 32),
        Greeting(KEY, b"w" * 32, b"O" * 32),
    ):
        assert other.opened(FROM_OTHER, sealed) is None
    assert greeting.opened(b"worker", sealed) is None
    assert greeting.opened(FROM_OTHER, sealed[:-1]) is None
    assert greeting.opened(FROM_OTHER, b"") is None


def test_signs_of_life_are_what_was_sent() -> None:
    ranks = [
        RankPulse(2**40, True, ProcessState(cpu_s=1.5, runs=True)),
        RankPulse(0, False, ProcessState(ended=True)),
        RankPulse(7, False, ProcessState(stopped=True)),
    ]
    assert decode_pulse(encode_pulse(ranks)) == ranks


# ---- joining ----


class Running:
    """A node in a thread. `code`: what it ended with, or the error."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.code: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.code = self.node.run()
        except Exception as error:
            self.code = error

    def ended(self) -> Any:
        self._thread.join(GENEROUS_S)
        assert not self._thread.is_alive()
        assert all(rank.process.poll() is not None for rank in self.node._ranks), "its ranks are gone"
        return self.code


Start = Callable[..., Any]


@pytest.fixture
def stack(forked_ranks: None) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listen(stack: ExitStack) -> Start:
    def start(group: Group = GROUP, tls: TlsFiles | None = None) -> Nodes:
        nodes = Nodes(group, host=MASTER, port=0, key=KEY, tls=tls)
        stack.callback(nodes.close, orderly=False)
        return nodes

    return start


def node_for(
    nodes: Nodes,
    hello: Hello = HELLO,
    *,
    key: bytes = KEY,
    tls: TlsFiles | None = None,
    deadline_s: float = GENEROUS_S,
    fingerprint: str = "weights",
    refuses: str = "",
    factory: str = FACTORY,
) -> Running:
    def specs(told: Any, welcome: Any, own: str, worker: str) -> list[RankSpec]:
        assert worker == MASTER
        if refuses:
            raise ConfigError("model", refuses, "is not on this host")
        return [RankSpec(factory, told, ENV) for _ in range(welcome.num_ranks)]

    joining = Joining(MASTER, nodes.address[1], hello, key, "secret.file", tls, deadline_s)
    return Running(Node(joining, specs, lambda told: fingerprint))


def test_a_host_with_another_secret_is_refused_on_both_sides(listen: Start) -> None:
    nodes = listen()
    error = node_for(nodes, key=b"x" * 32).ended()
    assert isinstance(error, ConfigError)
    assert (error.field, error.value) == ("secret_file", "secret.file")
    with pytest.raises(ConfigError, match=r"nnodes=2: nodes \[1\] did not join at .*secret_file") as caught:
        nodes.gather(0.01)
    assert caught.value.field == "nnodes"


def test_a_refused_host_says_why(listen: Start) -> None:
    nodes = listen()
    error = node_for(nodes, msgspec.structs.replace(HELLO, version="0.9")).ended()
    assert isinstance(error, ConfigError)
    assert str(error) == "version='0.9': the worker runs Diptych 1.0: use the same everywhere"


def test_a_host_that_left_before_the_start_may_join_again(listen: Start) -> None:
    nodes = listen()
    first = node_for(nodes)
    nodes.gather(GENEROUS_S)
    error = node_for(nodes).ended()
    assert isinstance(error, ConfigError)
    assert error.field == "node_rank"
    first.node.ask_to_end()
    assert first.ended() == 1
    wait_until(lambda: not nodes.pulses(), what="the worker noticed it")
    second = node_for(nodes)
    nodes.gather(GENEROUS_S)
    nodes.close(orderly=True)
    assert second.ended() == 0


def test_one_who_says_nothing_or_nonsense_is_in_nobodys_way(listen: Start, stack: ExitStack) -> None:
    nodes = listen()
    silent = stack.enter_context(socket.create_connection(nodes.address))
    loud = stack.enter_context(socket.create_connection(nodes.address))
    loud.sendall(HEAD.pack(Kind.HELLO, 0, 1 << 31))
    running = node_for(nodes)
    nodes.gather(GENEROUS_S)
    loud.settimeout(GENEROUS_S)
    with suppress(ConnectionResetError):
        while loud.recv(1 << 16):
            pass  # its challenge; then the connection is closed
    nodes.close(orderly=True)
    assert running.ended() == 0
    silent.close()


def test_where_no_worker_listens_the_address_is_named() -> None:
    with socket.create_server((MASTER, 0)) as unused:
        port = unused.getsockname()[1]
    joining = Joining(MASTER, port, HELLO, KEY, "secret.file", None, 0.01)
    with pytest.raises(ConfigError, match=rf"master_addr='{MASTER}': no worker answered at port {port}"):
        Node(joining, lambda *told: [], lambda told: "").run()


def test_an_address_of_another_machine_and_a_used_port_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Nodes(GROUP, host="192.0.2.1", port=0, key=KEY)
    assert caught.value.field == "master_addr"
    with socket.create_server((MASTER, 0)) as used, pytest.raises(ConfigError) as caught:
        Nodes(GROUP, host=MASTER, port=used.getsockname()[1], key=KEY)
    assert caught.value.field == "master_port"


def tls_files(folder: Path, authority: trustme.CA, name: str) -> TlsFiles:
    own = authority.issue_cert(name)
    ca, cert, key = (folder / f"{name}-{part}.pem" for part in ("ca", "cert", "key"))
    authority.cert_pem.write_to_path(str(ca))
    own.private_key_pem.write_to_path(str(key))
    for blob in own.cert_chain_pems:
        blob.write_to_path(str(cert), append=True)
    return TlsFiles(str(ca), str(cert), str(key))


def test_with_certificates_both_sides_must_have_one_of_the_authority(listen: Start, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    worker, mine = tls_files(tmp_path, authority, MASTER), tls_files(tmp_path, authority, OTHER)
    nodes = listen(tls=worker)
    foreign = tls_files(tmp_path, stranger, "foreign")
    renamed = msgspec.structs.replace(mine, name="another.name")
    for files in (foreign, msgspec.structs.replace(foreign, ca=mine.ca), renamed):
        error = node_for(nodes, tls=files).ended()
        assert isinstance(error, ConfigError)
        assert (error.field, error.value) == ("cluster_cert", files.cert)
    error = node_for(nodes, deadline_s=0.01).ended()
    assert isinstance(error, ConfigError), "without certificates"
    assert error.field == "master_addr"
    assert nodes.pulses() == {}
    running = node_for(nodes, tls=mine)
    nodes.gather(GENEROUS_S)
    nodes.start(POOL)
    executor = executor_over(nodes)
    try:
        seq = ScheduledSeq("a", list(range(40, 51)), 0, ([3, 5, 7],), True, SamplingParams(9, seed=1), 0)
        assert executor.execute([seq], lambda: False) == FakeRunner(**POOL).execute([seq])
        check_kv(executor)
    finally:
        executor.close()
    assert running.ended() == 0


# ---- an executor over two hosts ----


def executor_over(
    nodes: Nodes, *, sampler: int = 0, factory: str = FACTORY, pool: Any = POOL, silence_s: float = GENEROUS_S
) -> RanksExecutor:
    specs = [RankSpec(factory, pool, ENV)]
    return RanksExecutor(specs, sampler=sampler, deadline_s=GENEROUS_S, silence_s=silence_s, nodes=nodes)


@pytest.fixture
def two_hosts(listen: Start, stack: ExitStack) -> Start:
    """two_hosts() -> (executor, nodes, the running node)."""

    def start(silence_s: float = GENEROUS_S, **more: Any) -> tuple[RanksExecutor, Nodes, Running]:
        nodes = listen()
        running = node_for(nodes, **more)
        nodes.gather(GENEROUS_S)
        nodes.start(POOL)
        executor = executor_over(nodes, silence_s=silence_s)
        stack.callback(executor.close)
        return executor, nodes, running

    return start


def check_kv(executor: RanksExecutor) -> None:
    """KV of both ranks is what the step wrote, and what is unpacked is packed again."""
    alone = FakeRunner(**POOL)
    tokens = list(range(40, 51))
    seq = ScheduledSeq("a", tokens, 0, ([3, 5, 7],), True, SamplingParams(9, seed=1), 0)
    alone.execute([seq])
    executor.execute([seq], lambda: False)
    size = alone.kv_bytes_per_token * len(tokens)
    want = bytearray(size)
    checksum = alone.pack([3, 5, 7], len(tokens), memoryview(want))
    for part in range(2):
        got = bytearray(size + 5)
        assert executor.pack([3, 5, 7], len(tokens), memoryview(got), part=part) == checksum
        assert got[:size] == want
        assert not any(got[size:])
        executor.unpack([8, 9, 10], len(tokens), memoryview(want), part=part)
        again = bytearray(size)
        assert executor.pack([8, 9, 10], len(tokens), memoryview(again), part=part) == checksum
        assert again == want


def answers_of(executor: Any, **more: Any) -> list[Any]:
    """A tight pool, so that sequences are preempted and swapped."""
    settings: dict[str, Any] = {"max_step_time_s": None, "mixed_step_time_s": None, "check_invariants": True, **more}
    config = EngineConfig(24, 4, num_host_blocks=8, preemption_mode="swap", **settings)
    engine = OfflineEngine(executor, config, IdentityHeader(b"k" * 32, "m", "t", "uint8", 4), clock=FakeClock())
    requests = [
        EngineRequest(f"r{i}", Prompt(tuple(range(10 + i, 22 + 2 * i))), SamplingParams(12, seed=i, ignore_eos=True))
        for i in range(5)
    ]
    found = [(result.token_ids, result.error) for result in engine.generate(requests)]
    assert engine.stats().preemptions_total > 0
    assert bool(engine.core.steps_ahead) == bool(more)
    return found


def test_23_ranks_on_two_hosts_compute_what_one_runner_does(two_hosts: Start) -> None:
    executor, _, running = two_hosts()
    assert answers_of(executor) == answers_of(LocalExecutor(FakeRunner(**POOL)))
    check_kv(executor)
    executor.check_models("weights", GENEROUS_S)
    executor.close()
    assert running.ended() == 0


def test_15_nothing_listens_once_all_hosts_have_come(two_hosts: Start) -> None:
    """At once, though a thread polls the listener just then."""
    executor, nodes, running = two_hosts()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(nodes.address, GENEROUS_S)
    executor.close()
    assert running.ended() == 0


def test_23_a_host_with_other_weights_is_named_on_both_sides(two_hosts: Start) -> None:
    executor, _, running = two_hosts(fingerprint="others")
    with pytest.raises(ConfigError, match=r"model='others': of node 1 \(127.0.0.1\) has other content .* mine"):
        executor.check_models("mine", GENEROUS_S)
    executor.close()
    error = running.ended()
    assert isinstance(error, ConfigError)
    assert str(error) == "model='others': has other content than the worker's folder, mine"


def test_23_the_last_stage_on_a_third_host_samples_and_steps_run_ahead(listen: Start, stack: ExitStack) -> None:
    """A step is launched on all hosts, and drawn and answered on the last one."""
    factory = "diptych.engine.fake_device:FakeDeviceRunner"
    nodes = listen(Group("1.0", 3, 1, 3, "this start", 3.0))
    running = [node_for(nodes, msgspec.structs.replace(HELLO, node_rank=rank), factory=factory) for rank in (2, 1)]
    nodes.gather(GENEROUS_S)
    nodes.start(POOL)
    executor = executor_over(nodes, sampler=2, factory=factory)
    stack.callback(executor.close)
    found = answers_of(executor, steps_ahead=True)
    assert found == answers_of(LocalExecutor(FakeDeviceRunner(**POOL)), steps_ahead=True)
    executor.close()
    assert [one.ended() for one in running] == [0, 0]


def test_23_kv_of_a_computed_layer_crosses_while_the_others_are_computed(
    listen: Start, stack: ExitStack, tmp_path: Path
) -> None:
    factory = "rank_runner:RankRunner"
    nodes = listen()
    running = node_for(nodes, factory=factory)
    nodes.gather(GENEROUS_S)
    pool = {**POOL, "num_layers": 4, "notes": str(tmp_path / "notes"), "go": str(tmp_path / "go")}
    nodes.start(pool)
    executor = executor_over(nodes, factory=factory, pool=pool)
    stack.callback(executor.close)
    seq = ScheduledSeq("a", list(range(40, 51)), 0, ([3, 5, 7],), True, SamplingParams(9, seed=1), 0)
    seen: list[tuple[int, int, bytes]] = []

    def on_layers(num_layers: int) -> None:
        (tmp_path / "go").touch()
        some, slab = range(num_layers - 1, num_layers), memoryview(bytearray(11 * 8))
        seen.append((num_layers, executor.pack([3, 5, 7], 11, slab, some, part=1), bytes(slab)))

    executor.execute([seq], lambda: False, on_layers)
    assert seen
    for num_layers, checksum, data in seen:
        again = memoryview(bytearray(11 * 8))
        some = range(num_layers - 1, num_layers)
        assert executor.pack([3, 5, 7], 11, again, some, part=1) == checksum
        assert bytes(again) == data
    executor.close()
    assert running.ended() == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_23_a_lost_rank_of_another_host_ends_all_of_them(two_hosts: Start, signum: int) -> None:
    executor, _, running = two_hosts(silence_s=3.0)
    reasons: list[str] = []
    executor.on_lost(reasons.append)
    [own] = [rank.process for rank in executor._started()]
    running.node._ranks[0].process.send_signal(signum)
    wait_until(lambda: bool(reasons), what="the executor noticed it")
    assert "rank 1" in reasons[0]
    with pytest.raises(ExecutorLost):
        executor.copy_blocks([])
    assert own.poll() is not None
    assert running.ended() == 1


def test_23_a_host_that_ends_is_a_lost_rank(two_hosts: Start) -> None:
    executor, _, running = two_hosts()
    reasons: list[str] = []
    executor.on_lost(reasons.append)
    running.node.ask_to_end()
    running.node.ask_to_end()
    assert running.ended() == 1
    wait_until(lambda: bool(reasons), what="the executor noticed it")
    with pytest.raises(ExecutorLost):
        executor.copy_blocks([])


def test_23_one_signal_lets_the_worker_end_first(two_hosts: Start) -> None:
    """A host gets it together with the worker, which drains: running requests need its ranks."""
    executor, nodes, running = two_hosts()
    running.node.ask_to_end()
    seen = nodes.pulses()[1]
    wait_until(lambda: nodes.pulses()[1] > seen + 3, what="it goes on")
    check_kv(executor)
    executor.close()
    assert running.ended() == 0


def test_23_what_a_host_lacks_is_told_by_the_worker_and_a_failure_for_all_hosts(listen: Start) -> None:
    """One that lacks nothing ends with an error, too: it is to be started again with the worker."""
    nodes = listen(Group("1.0", 3, 3, 1, "this start", 3.0))
    lacking = node_for(nodes, refuses="/models/m")
    other = node_for(nodes, msgspec.structs.replace(HELLO, node_rank=2))
    nodes.gather(GENEROUS_S)
    nodes.start(POOL)
    with pytest.raises(ConfigError, match=r"model='/models/m': on node 1 \(127.0.0.1\): is not on this host"):
        executor_over(nodes)
    assert isinstance(lacking.ended(), ConfigError)
    assert other.ended() == 1


def test_23_a_worker_that_vanishes_ends_its_ranks_elsewhere(two_hosts: Start) -> None:
    executor, nodes, running = two_hosts()
    nodes.close(orderly=False)
    assert running.ended() == 1
    with pytest.raises(ExecutorLost):
        executor.copy_blocks([])


# ---- frames ----


def test_kv_of_any_size_goes_both_ways_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    engine, rank = RemoteEnd(ours), RemoteRankEnd(theirs)
    sent = bytes(range(256)) * (1 << 14)  # 4 MiB: more than the socket holds
    target = bytearray(len(sent))
    engine.expect_bytes(7, memoryview(target))

    def answer() -> None:
        kind, call, body, _ = rank.receive()
        assert (kind, call, body) == (Kind.UNPACK, 7, b"which blocks")
        rank.send_bytes(7, rank.room(len(sent)))
        rank.send(Kind.OK, 7, b"checksum")

    with ours, theirs:
        engine.put_bytes(7, memoryview(sent))
        engine.put(Kind.UNPACK, 7, b"which blocks")
        assert engine.outgoing
        other = threading.Thread(target=answer)
        other.start()
        found: list[Any] = []
        until = time.monotonic() + GENEROUS_S
        while not found and time.monotonic() < until:
            engine.send()
            found += engine.receive()
        other.join(GENEROUS_S)
        assert found == [(Kind.OK, 7, b"checksum")]
        assert target == sent


def test_kv_that_nobody_asked_for_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = RemoteEnd(ours)
        engine.expect_bytes(7, memoryview(bytearray(8)))
        theirs.sendall(HEAD.pack(Kind.BYTES, 7, 9) + bytes(9))
        with pytest.raises(EOFError, match="9 bytes of KV came for call 7"):
            list(engine.receive())


def test_what_is_no_worker_is_not_greeted() -> None:
    with socket.create_server((MASTER, 0)) as server:
        sock = connect(MASTER, server.getsockname()[1], MASTER, None, GENEROUS_S)
        with sock, server.accept()[0] as other:
            other.sendall(HEAD.pack(Kind.WELCOME, 0, 2) + b"{}")
            with pytest.raises(EOFError, match="no part of a worker with several hosts"):
                greet_worker(sock, KEY, HELLO, "")
