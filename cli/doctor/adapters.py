"""Verdicts of `diptych doctor` on LoRA adapters: slots, and which workers take adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.cli.doctor.facts import Facts, Worker
from diptych.cli.doctor.verdict import Verdict, bad, ok, warn

MORE_SLOTS = "raise --max-loras"


def takes_adapters(worker: Worker) -> bool:
    return worker.settings.get("enable_lora") == "True"


def slots_are_short(worker: Worker) -> bool:
    """Its adapters took slots from one another during the sample, and none is free."""
    full = worker.now("adapters_in_slots") >= worker.setting("max_loras", 1)
    return takes_adapters(worker) and full and worker.rise("adapter_evictions") > 0


def waiting(facts: Facts) -> int:
    """Requests that wait at the router for a slot of their adapter."""
    return int(facts.status.get("adapters_waiting", 0))


def slots_explain_the_queue(facts: Facts) -> bool:
    return waiting(facts) > 0 or any(slots_are_short(worker) for worker in facts.answering)


def adapters(facts: Facts) -> Iterator[Verdict]:
    """Nothing where no worker takes adapters, and none is registered."""
    names, taking = len(facts.status.get("adapters", ())), [one for one in facts.answering if takes_adapters(one)]
    if not names and not taking:
        return
    seen = f"{names} registered, {waiting(facts)} requests wait for a slot of theirs"
    if waiting(facts):
        yield warn("adapters", seen, f"{MORE_SLOTS} of the workers, or add workers with --enable-lora")
    else:
        yield ok("adapters", seen)
    yield from _pools(facts)
    for worker in taking:
        installs, evictions = worker.rise("adapter_installs"), worker.rise("adapter_evictions")
        slots = f"{worker.now('adapters_in_slots'):.0f} of {worker.setting('max_loras', 1)} slots in use"
        seen = f"{worker.id}: {slots}, {installs:.0f} installs and {evictions:.0f} evictions during the sample"
        if slots_are_short(worker):
            yield warn("adapters", seen, f"adapters take turns in its slots: {MORE_SLOTS}")
        else:
            yield ok("adapters", seen)


def _pools(facts: Facts) -> Iterator[Verdict]:
    """Workers without adapters beside others that take them."""
    as_others = "start with --enable-lora, and the --lora-dir and --max-lora-rank of the other workers"
    for role, meaning in (
        ("prefill", "the prompts of their requests are computed elsewhere"),
        ("decode", "requests of adapters are not answered there"),
    ):
        workers = facts.of(role)
        without = [worker.id for worker in workers if not takes_adapters(worker)]
        if without:
            report = bad if role == "decode" and len(without) == len(workers) else warn
            verb = "takes" if len(without) == 1 else "take"
            yield report("adapters", f"{', '.join(without)} {verb} no adapters: {meaning}", as_others)
