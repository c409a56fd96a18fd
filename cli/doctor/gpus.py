"""Verdicts of `diptych doctor` on GPUs: idle in spite of work, clocks held down, KV that does not use NVLink. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.cli.doctor.facts import Facts, Gpu, Worker
from diptych.cli.doctor.serving import BUSY, utilization
from diptych.cli.doctor.verdict import Verdict, amount, bad, info, ok, warn

MIN_OBSERVED_S = 0.5
UNDERUSED = 0.6
"""A GPU with work runs kernels in a larger share of the time than this."""
THROTTLED, MOSTLY = 0.05, 0.5
LOW_CLOCK = 0.85
"""A power cap is normal under full load; it costs throughput where it lowers the clock below this share of the highest."""
MIN_KV_BYTES = 64e6
"""KV read during the sample. With less, NVLink's counters say nothing."""
POWER_CAP = "sw_power_cap"
STEPS_FOR = {
    POWER_CAP: "it draws all the power that it may: compare `nvidia-smi -q -d POWER` with the card's maximum",
    "hw_power_brake": "the host's power supply asks for less: look at its power supplies and the rack's limit",
    "hw_slowdown": "the card protects itself from heat or power: `nvidia-smi -q -d PERFORMANCE` names which",
    "sw_thermal": "it is too hot: look at the fans, the inlet's temperature, and the cards beside it",
    "hw_thermal": "it is too hot: look at the fans, the inlet's temperature, and the cards beside it",
}


def gpus(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.answering:
        if not worker.on_gpu:
            continue
        now = worker.gpu
        if now is None:
            yield info("gpu", f"{worker.id}: NVML does not answer there: nothing is known of its GPU")
            continue
        before = worker.gpu_before or Gpu()
        observed_s = now.observed_s - before.observed_s
        if observed_s < MIN_OBSERVED_S:
            yield info("gpu", f"{worker.id}: its GPU was observed for {observed_s:.1f} s: too short")
            continue
        yield _use(worker, (now.busy_s - before.busy_s) / observed_s, facts.interval_s)
        for reason, seconds in sorted(now.throttled_s.items()):
            share = (seconds - before.throttled_s.get(reason, 0.0)) / observed_s
            yield from _throttled(worker, now, reason, share)
        yield from _nvlink(worker, now, before, facts)


def _use(worker: Worker, busy: float, interval_s: float) -> Verdict:
    work = utilization(worker, interval_s)
    gpu = worker.gpu or Gpu()
    seen = f"{worker.id}: a kernel ran in {100 * min(busy, 1):.0f}% of the sample"
    if gpu.sm_clock_hz and gpu.max_sm_clock_hz:
        seen += f", at {gpu.sm_clock_hz / 1e6:.0f} of {gpu.max_sm_clock_hz / 1e6:.0f} MHz"
    waiting = min(worker.before.get("num_waiting", 0.0), worker.now("num_waiting"))
    if busy < UNDERUSED and work is not None and work > BUSY:
        return warn(
            "gpu",
            f"{seen}, though steps took {100 * min(work, 1):.0f}% of it",
            "the host launches steps too slowly: see cores below; other processes on that host's cores, or a router in "
            "the same process (`diptych serve`) under many requests, take the time",
        )
    if busy < UNDERUSED and waiting > 0:
        return warn(
            "gpu",
            f"{seen}, though {waiting:.0f} requests wait there",
            "they wait for something else than the GPU: see batch, kv and transport",
        )
    return ok("gpu", seen)


def _throttled(worker: Worker, gpu: Gpu, reason: str, share: float) -> Iterator[Verdict]:
    if share < THROTTLED:
        return
    now, most = gpu.sm_clock_hz or 0.0, gpu.max_sm_clock_hz or 0.0
    low = 0 < now < LOW_CLOCK * most
    if reason == POWER_CAP and not low:
        return
    clock = f"; {now / 1e6:.0f} of {most / 1e6:.0f} MHz" if low else ""
    report = bad if share > MOSTLY and reason != POWER_CAP else warn
    yield report(
        "gpu clocks",
        f"{worker.id}: its GPU's clocks were held down in {100 * min(share, 1):.0f}% of the sample by {reason}{clock}",
        STEPS_FOR.get(reason, "`nvidia-smi -q -d PERFORMANCE` there names the cause"),
    )


def _nvlink(worker: Worker, now: Gpu, before: Gpu, facts: Facts) -> Iterator[Verdict]:
    """For decode, and a prefill worker on another GPU of its host."""
    peers = [
        peer.gpu.uuid
        for peer in facts.of("prefill")
        if peer.gpu is not None and peer.host.hostname == worker.host.hostname
    ]
    moved = worker.rise("kv_bytes_received")
    if worker.num_ranks > 1 or any(peer.num_ranks > 1 for peer in facts.of("prefill")):
        return  # their KV goes through host memory
    if worker.role != "decode" or not peers or now.uuid in peers or moved < MIN_KV_BYTES or "tcp" in worker.path:
        return
    if not now.nvlinks:
        yield info("nvlink", f"{worker.id}: its GPU has no active NVLink: KV crosses PCIe")
    elif now.nvlink_bytes is not None and before.nvlink_bytes is not None:
        over = now.nvlink_bytes - before.nvlink_bytes
        seen = f"{worker.id}: {amount(over)}B over NVLink while it read {amount(moved)}B of KV"
        if over < 0.5 * moved:
            yield warn(
                "nvlink",
                f"{seen} ({worker.path}): KV crosses PCIe instead of NVLink",
                "the GPUs cannot access each other's memory: see `nvidia-smi topo -m`, give containers the host's IPC "
                "namespace and all GPUs of the pair, and let UCX use cuda_ipc (UCX_TLS unset)",
            )
        else:
            yield ok("nvlink", seen)
