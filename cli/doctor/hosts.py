"""Verdicts of `diptych doctor` on hosts and paths: reachability, transport, RDMA, clocks, limits, cores. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from diptych.cli.doctor.facts import UNLIMITED, Facts, Worker
from diptych.cli.doctor.verdict import Level, Verdict, amount, bad, info, ok, warn

MIN_OPEN_FILES = 4096
MAX_SKEW_S = 1.0
BAD_SKEW_S = 60.0
SLOW_LINK = 0.3
"""A measured link below this share of the self-test's speed is slow."""
MIN_LOOPBACK_BYTES_PER_S = 200e6
MIN_GPU_BYTES_PER_S = 5e9


MIN_LINK_BYTES = 8e6
"""KV bytes during the sample. Below this the fixed cost of small reads hides the link's speed."""

STEPS_FOR = (
    (
        "another cluster secret",
        "give it the router's file: the same --secret-file (one `make secrets`, copied to every host), then restart it; "
        "if the files are the same, the versions differ",
    ),
    (
        "the store",
        "is Redis up at --redis-url, and does it accept writes (`redis-cli -u URL ping`, `info replication`)? "
        "Serving goes on with what is known; new workers are not found meanwhile",
    ),
    (
        "has no lease",
        "it answers but cannot write its lease to Redis: see its log for the reason; compare --redis-url",
    ),
    (
        "cache",
        "is --enable-prefix-caching on there, and does it reach Redis (--redis-url)? Placement there goes by load",
    ),
    ("_revision", "start router and workers from the same model folder or revision"),
    (
        "is stalled",
        "one step of it has been running for more than 10 s: look for a starved CPU or a hung device in its log; "
        "it is used again once a step ends",
    ),
    ("is draining", "it is being stopped: it finishes running requests and exits"),
    (
        "no usable",
        "start one with the router's --redis-url, --cluster and --secret-file, or check a running one: `diptych health ADDRESS`",
    ),
)
"""Reason that the router gives (a substring) -> the next step."""


def _step_for(reason: str) -> str:
    known = (step for words, step in STEPS_FOR if words in reason)
    return next(known, "see that worker's log; check it with `diptych health ADDRESS`")


def cluster(facts: Facts) -> Iterator[Verdict]:
    status, found = facts.status, facts.cluster
    pairs = [
        f"{pair['prefill']} and {pair['decode']} are incompatible: {'; '.join(pair['why'])}"
        for pair in found.get("incompatible", [])
    ]
    for reason in status.get("reasons", []):
        if reason not in pairs:
            yield bad("cluster", reason, _step_for(reason))
    for pair in pairs:
        yield bad(
            "cluster",
            pair,
            "start both with the same model, revision, block size and dtype; the router does not use such a pair",
        )
    for worker in facts.workers:
        if "refused" in worker.error:
            yield bad(
                "cluster",
                f"{worker.id} is not running: nothing listens at {worker.address}",
                "it was killed or crashed: see the end of its log, and `dmesg` for the out-of-memory killer; `diptych up` "
                "restarts its workers, and the lease expires within seconds",
            )
        elif worker.error:
            yield Verdict(
                "cluster",
                Level.UNKNOWN,
                f"{worker.id} at {worker.address} cannot be reached: {worker.error}",
                "run the doctor where workers can be reached (inside the cluster's private network), with the cluster's "
                "--secret-file; with mTLS, pass --cluster-ca, --cluster-cert and --cluster-key instead",
            )
        for violation in worker.violations:
            yield bad("cluster", f"{worker.id}: {violation}", "an invariant is violated: keep its log, restart it")
    if facts.one_process:
        if status.get("ready") and not status.get("reasons"):
            yield ok("cluster", "one process, colocated")
        yield info(
            "worker", "its batches, memory and host are not examined: the server lets no one else call its worker"
        )
    elif status.get("ready") and not status.get("reasons"):
        roles = Counter(worker.role for worker in facts.workers)
        yield ok("cluster", f"ready: {roles['prefill']} prefill, {roles['decode']} decode")


def transport(facts: Facts) -> Iterator[Verdict]:
    hosts = {worker.host.hostname for worker in facts.answering}
    for worker in facts.answering:
        path, speed = worker.path, f"{amount(worker.bytes_per_s)}B/s"
        slow_path = "tcp" in path
        through_host = any(one.num_ranks > 1 for one in facts.answering)
        if worker.on_gpu and slow_path and not through_host:
            missing = "; ".join(worker.host.rdma_missing) or "the transport found no better path"
            yield bad(
                "transport",
                f"{worker.id}: KV of a GPU crosses over {path} at {speed} ({missing})",
                "install what is missing, or --transport nixl; --require-transport makes a slow path an error at the start",
            )
            continue
        floor = MIN_GPU_BYTES_PER_S if worker.on_gpu and not through_host else MIN_LOOPBACK_BYTES_PER_S
        if 0 < worker.bytes_per_s < floor:
            yield warn(
                "transport",
                f"{worker.id}: {path} moves {speed}, less than {amount(floor)}B/s",
                "look for loaded cores (the transfer thread needs one), a small MTU, or a slow interface behind --host",
            )
        else:
            yield ok("transport", f"{worker.id}: {path} at {speed}")
        if slow_path and len(hosts) > 1 and worker.host.rdma_devices:
            yield warn(
                "rdma",
                f"{worker.id} has {', '.join(worker.host.rdma_devices)} but KV crosses over {path}"
                + "".join(f"; {why}" for why in worker.host.rdma_missing),
                "load the modules named, give the devices to the container, use --transport nixl (its wheel has verbs)",
            )
    yield from _links(facts)
    if facts.answering and not any(worker.host.rdma_devices for worker in facts.answering):
        yield info("rdma", "no RDMA device on these hosts")
    elif facts.answering and not any("tcp" in worker.path for worker in facts.answering):
        yield ok("rdma", "every worker's path is faster than TCP")


def _links(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.of("decode"):
        for peer, rate in sorted(worker.links.items()):
            if worker.rise("kv_bytes_received") < MIN_LINK_BYTES:
                reported = f"{worker.id} read from {peer} at {amount(rate)}B/s at its last transfer"
                yield info("link", f"{reported}; (almost) idle during the sample")
            elif worker.bytes_per_s > 0 and rate < _slow_below(worker):
                yield warn(
                    "link",
                    f"{worker.id} reads from {peer} at {amount(rate)}B/s; its own path can do {amount(worker.bytes_per_s)}B/s",
                    "small prompts explain it (fixed cost a read); else look at that host's cores and at the network between",
                )
            else:
                yield ok("link", f"{worker.id} reads from {peer} at {amount(rate)}B/s")
        if worker.slabs_quarantined:
            yield warn(
                "link",
                f"{worker.id}: {worker.slabs_quarantined} of {worker.slabs_total} slabs are quarantined",
                "reads to a peer timed out; they return when it answers or is known to be dead. Look for a network partition",
            )


def _slow_below(worker: Worker) -> float:
    """Bytes/s of whole reads. A GPU's self-test copies within its own memory, ten times as fast as any link."""
    return MIN_GPU_BYTES_PER_S if worker.on_gpu and worker.num_ranks == 1 else SLOW_LINK * worker.bytes_per_s


def clocks(facts: Facts) -> Iterator[Verdict]:
    """Leases and deadlines do not depend on wall clocks; certificates, tickets and comparisons of logs do."""
    worst = 0.0
    for worker in facts.answering:
        skew = abs(worker.host.clock_ahead_s) - worker.host.clock_error_s
        worst = max(worst, skew)
        if skew > MAX_SKEW_S:
            report = bad if skew > BAD_SKEW_S else warn
            yield report(
                "clock",
                f"{worker.id}'s wall clock is {worker.host.clock_ahead_s:+.1f} s off ours",
                "start chrony or another NTP client on that host: TLS and signed tickets depend on it",
            )
    if facts.answering and worst <= MAX_SKEW_S:
        yield ok("clock", f"wall clocks agree within {MAX_SKEW_S:g} s")


def limits(facts: Facts) -> Iterator[Verdict]:
    fine = bool(facts.answering)
    for worker in facts.answering:
        host = worker.host
        ring = worker.setting("slab_bytes", 0) * worker.setting("num_slabs", 0)
        if host.max_open_files < MIN_OPEN_FILES or host.open_files > 0.8 * host.max_open_files:
            fine = False
            yield warn(
                "limits",
                f"{worker.id}: {host.open_files} of {host.max_open_files} open files",
                f"raise nofile to {MIN_OPEN_FILES} or more (ulimit -n, LimitNOFILE=, compose `ulimits`)",
            )
        pins = worker.on_gpu or "tcp" not in worker.path
        if pins and host.memlock_bytes != UNLIMITED and host.memlock_bytes < 2 * ring:
            fine = False
            yield bad(
                "limits",
                f"{worker.id} may lock {amount(host.memlock_bytes)}B; its ring of slabs takes {amount(ring)}B",
                "set memlock to unlimited (ulimit -l, LimitMEMLOCK=infinity, compose `ulimits: memlock: -1`)",
            )
        if host.shm_bytes and host.shm_free_bytes < 2 * ring:
            fine = False
            yield warn(
                "limits",
                f"{worker.id}: {amount(host.shm_free_bytes)}B left in /dev/shm; its ring takes {amount(ring)}B",
                "give the container a larger shm_size, or share the host's IPC namespace",
            )
    if fine:
        yield ok("limits", "open files, locked memory and /dev/shm suffice")


INSTALL_COMPILER = (
    "install gcc or clang there (`apt-get install gcc`), or name one in CC, and restart it: it compiles once"
)


def kernels(facts: Facts) -> Iterator[Verdict]:
    """C code compiled at the first start; without a compiler everything works at about half the speed."""
    fine = bool(facts.answering)
    lookup = facts.status.get("lookup", {})
    if lookup.get("backend") == "numpy" and lookup.get("wanted") != "numpy":
        fine = False
        step = INSTALL_COMPILER if not lookup.get("compiler") else "see its log for why the library is not available"
        why = "" if lookup.get("compiler") else ": there is no C compiler"
        yield warn("kernels", f"the router uses the numpy lookup of prompts{why}", step)
    for worker in facts.answering:
        used, refused = worker.settings.get("kernels", ""), worker.settings.get("kernels_refused", "")
        if "torch (" in used:
            fine = False
            yield warn("kernels", f"{worker.id} computes some blocks with plain torch: {used}", refused)
            continue
        if used != "torch" or worker.on_gpu or worker.settings.get("dtype") != "float32":
            continue
        fine = False
        slower = "about half as fast"
        if worker.settings.get("method", "plain") not in ("", "plain"):
            slower = "which unpacks quantized weights in every step"
        if worker.settings.get("compiler"):
            why, step = "", refused or "see its log for why the compiled kernels cannot be used"
        else:
            why, step = ": there is no C compiler", INSTALL_COMPILER
        yield warn("kernels", f"{worker.id} computes with plain torch, {slower}{why}", step)
    if fine:
        yield ok("kernels", "all native libraries are compiled")


def cores(facts: Facts) -> Iterator[Verdict]:
    by_host: dict[str, list[Worker]] = {}
    for worker in facts.answering:
        by_host.setdefault(worker.host.hostname, []).append(worker)
    for name, workers in by_host.items():
        host = workers[0].host
        on_cpu = any(not worker.on_gpu for worker in workers)
        threads = sum(max(worker.setting("threads", 1), worker.ranks_here) for worker in workers)
        if on_cpu and threads > host.cpus:
            # Each rank has at least one thread, whatever --threads says.
            ways = (
                ["lower --threads"]
                if any(worker.setting("threads", 1) > worker.ranks_here for worker in workers)
                else []
            )
            if any(worker.num_ranks > 1 for worker in workers):
                ways.append("give workers fewer ranks")
            ways.append("spread the workers over more hosts" if len(workers) > 1 else "use a host with more cores")
            yield warn(
                "cores",
                f"{name}: {threads} compute threads of {len(workers)} workers on {host.cpus} cores",
                f"{', or '.join(ways)}: threads that wait for a core spin and slow the others",
            )
        elif host.load_1m > 1.5 * host.cpus:
            yield warn(
                "cores",
                f"{name}: load {host.load_1m:.1f} on {host.cpus} cores",
                "another process uses these cores (see top); token times suffer first",
            )
        else:
            yield ok("cores", f"{name}: load {host.load_1m:.1f} on {host.cpus} cores")
