"""kill -9 of workers under sixteen streams of the openai client, each in another phase of a request: every answer is that of
the undisturbed run, and nothing is left. How a phase is found: `diptych_tests.kill_run`.

DIPTYCH_TEST_KILLS sets the number of kills (default: one in each phase), DIPTYCH_TEST_SEED their order. `make chaos-kill` is
the same run with a result file.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import kill_parts, kill_run, waiting

KILLS = int(os.environ.get("DIPTYCH_TEST_KILLS", str(len(kill_run.PHASES))))
SEED = int(os.environ.get("DIPTYCH_TEST_SEED", "1"))


@pytest.mark.multiproc
@pytest.mark.slow
async def test_every_answer_is_that_of_the_undisturbed_run(cluster_module: Any, tmp_path: Path) -> None:
    with cluster_module.running_cluster(tmp_path, *kill_run.flags(tmp_path, "smollm2")) as cluster:
        done = kill_run.Run(SEED)
        await kill_run.run(done, cluster, kills=KILLS)
    record = done.record()
    print({name: record[name] for name in ("by_phase", "replace_s", "gap_s", "gap_less_recompute_s")})
    assert not done.failed, f"seed {SEED}"
    assert not done.wrong, f"seed {SEED}"
    assert done.moved, "no answer was moved: the test shows nothing"


def part(seed: int, phase: str, missed: str, replace_s: float) -> dict[str, Any]:
    return kill_run.summed(
        {
            "seeds": [seed], "phases": [phase], "streams": 16, "seconds": [10.0], "references": ["a1"], "answers": 5,
            "moved": 1, "failed": [], "wrong": [], "logprobs": {"compared": 4, "equal to the bit": 3}, "resources": [{}],
            "kills": [{"phase": phase, "victim": "decode-1", "seen": {}, "missed": missed, "back_s": None}],
            "losses": [{"kill": 0, "kind": "plain", "had": 3, "replace_s": replace_s}],
            "gaps": [{"kill": 0, "gap_s": 1.5, "recompute_s": 0.5, "queue_s": 0.0, "kind": "plain"}],
            "broken": "",
        }
    ) | {"environment": {"cores": seed}}  # fmt: skip


def test_parts_of_a_run_make_one_record() -> None:
    first, second = part(1, "decoding", "", 0.1), part(2, "queued", "it had 3 tokens", 0.3)
    whole = kill_parts.merged([first, second])
    assert kill_parts.merged([kill_parts.merged([first]), second]) == whole
    assert (whole["num_kills"], whole["answers"], whole["phases"]) == (2, 10, ["queued", "decoding"])
    assert whole["by_phase"]["decoding"] == {"hit": 1, "missed": 0, "decode": 1, "prefill": 0}
    assert whole["by_phase"]["queued"] == {"hit": 0, "missed": 1, "decode": 0, "prefill": 0}
    assert whole["replace_s"] == {"n": 2, "p50": 0.1, "p99": 0.3, "max": 0.3}
    assert whole["gap_less_recompute_s"]["max"] == 1.0
    assert [*whole["holds"].values()] == [True, False, True, True]  # 15 kills in each phase: there were two
    slow = kill_parts.merged([*[first] * 15, *[part(1, "decoding", "", 1.1)] * 5])
    slow["gaps"][0]["gap_s"] = 4.6
    slow["failed"] = ["a"]
    assert [*kill_parts.merged([slow])["holds"].values()] == [False, True, False, False]
    nothing = kill_parts.merged([first | {"kills": [], "losses": [], "gaps": []}])
    assert [*nothing["holds"].values()] == [True, False, False, False]
    assert [one["kill"] for one in whole["losses"]] == [one["kill"] for one in whole["gaps"]] == [0, 1]
    assert whole["logprobs"] == {"compared": 8, "equal to the bit": 6}
    assert [one["cores"] for one in whole["parts"]] == [1, 2]
    assert (whole["seconds"], whole["references"], whole["broken"]) == ([10.0, 10.0], ["a1"], "")
    assert whole["lost_requests"] == {"first token": 2}


def flight(**attempts: Any) -> kill_run.Flight:
    told = {"total_s": 9.0, "ttft_s": 1.0, "notes": ["prefill prefill-1 failed (WORKER_LOST: gone): local prefill"]}
    one = kill_run.Flight("a", "plain", 0, 100.0, ended_at=109.5, first_at=101.2)
    one.why = told | {"attempts": attempts.get("attempts", [])}
    return one


LOST = [
    {"decode": "decode-0", "num_tokens": 5, "failure": "WORKER_LOST", "submitted_s": 0.0},
    {"decode": "decode-1", "num_tokens": 2, "failure": "WORKER_LOST", "submitted_s": 4.0},
    {"decode": "decode-2", "num_tokens": 0, "failure": "", "submitted_s": 6.0},
]


@pytest.mark.parametrize(
    ("phase", "victim", "at", "why"),
    [
        ("decoding", "decode-0", 103.0, ""),
        ("decoding", "decode-1", 105.0, ""),
        ("decoding", "decode-2", 105.0, "the request had left the worker"),
        ("decoding", "decode-0", 104.5, "the request had left the worker"),
        ("first token", "decode-0", 103.0, "it had 5 tokens"),
        ("queued", "decode-0", 103.0, "it had 5 tokens"),
        ("prefill running", "prefill-1", 103.0, ""),
        ("queued", "prefill-1", 103.0, "the prefill worker had done its part: 1 requests lost it"),
        ("prefill running", "prefill-0", 103.0, "the prefill worker had done its part: 0 requests lost it"),
    ],
)
def test_a_kill_counts_only_where_the_explanation_says_so(phase: str, victim: str, at: float, why: str) -> None:
    """The request arrived at 100.2 at the latest, so its attempts were submitted by 100.2, 104.2 and 106.2."""
    target, seen = flight(attempts=LOST), {"num_waiting": 1, "num_running": 1}
    assert kill_run.hit(kill_run.Kill(0, phase, victim, target, seen, [target], at)) == why


def test_the_time_until_it_is_placed_again_is_counted_from_the_latest_arrival() -> None:
    (first, second) = flight(attempts=LOST).lost
    assert (first["had"], round(first["again_at"], 3)) == (5, 104.2)
    assert (second["had"], round(second["again_at"], 3)) == (7, 106.2)


def test_a_record_has_each_kill_and_what_it_cost() -> None:
    target, once = flight(attempts=LOST), flight(attempts=[LOST[0], LOST[2] | {"submitted_s": 4.0}])
    once.why |= {
        "first_token_s": 1.5, "reserved_s": 0.1, "local_prefill": False, "prefill_compute_s": 0.7, "prefill_queue_s": 0.2,
        "longest_gap_s": 2.0, "kv_complete_s": 1.6, "pulls": [{"holder": "decode-1", "duration_s": 0.05, "note": ""}],
    }  # fmt: skip
    done = kill_run.Run(seed=3, phases=["decoding"], answers=[target, once])
    done.kills = [
        kill_run.Kill(0, "decoding", "decode-0", target, {"tokens": 5}, at=104.0, back_s=9.5),
        kill_run.Kill(1, "first token", "decode-1", target, {"tokens": 2}, at=105.0),
    ]
    record = done.record()
    assert [(kill["phase"], kill["missed"], kill["back_s"]) for kill in record["kills"]] == [
        ("decoding", "", 9.5), ("first token", "it had 7 tokens", None),
    ]  # fmt: skip
    assert record["by_phase"]["decoding"] == {"hit": 1, "missed": 0, "decode": 1, "prefill": 0}
    assert [(one["kill"], one["had"], one["replace_s"]) for one in record["losses"]] == [
        (0, 5, 0.2),
        (1, 7, 1.2),
        (0, 5, 0.2),
    ]
    assert record["gaps"] == [
        {"kill": 0, "gap_s": 2.0, "recompute_s": 0.7, "queue_s": 0.2, "reserved_s": 0.1, "kind": "plain"}
        | {"first_token_s": 1.5, "kv_complete_s": 1.6, "pulls": [("decode-1", 0.05, "")]}
    ]
    assert (record["gap_less_recompute_s"]["max"], record["back_s"]["p50"]) == (1.3, 9.5)


class FakeWatch:
    """Of a cluster in which every request is on decode-1, and prefill-0 computes a prompt."""

    usable: set[str] = set(kill_run.WORKERS)
    waiting = 1.0
    running = 1.0

    async def decode_of(self, flight: kill_run.Flight) -> str:
        return "decode-1"

    async def placements(self) -> dict[str, tuple[str, str]]:
        return {"long": ("prefill-0", "decode-1")}

    num_looks = 0

    async def stats(self, name: str) -> dict[str, float]:
        self.num_looks += 1
        return {"num_running": self.running * (name == "prefill-0"), "num_waiting": self.waiting}


def aim_at(watch: Any, *flights: kill_run.Flight) -> kill_run.Aim:
    return kill_run.Aim(watch, flights, random.Random(1), {(one.kind, one.number): 10 for one in flights})


def flying(kind: str, number: int = 0, **progress: int) -> kill_run.Flight:
    return kill_run.Flight(kind, kind, number, 0.0, progress=Counter({int(key[1:]): n for key, n in progress.items()}))


async def test_a_phase_is_found_at_the_message_with_which_it_begins() -> None:
    several = flying("several", c0=7, c1=7)
    aim = aim_at(FakeWatch(), several)
    finding = asyncio.create_task(aim.at({"n = 3": 0, "decoding": 0}))
    await asyncio.sleep(0)  # it looks, and finds no token of the third choice
    several.progress[2] = 7
    aim.on_message()
    assert await finding == ("n = 3", ("decode-1", several, {"tokens": 7}, ()))


async def test_what_the_pool_does_not_allow_is_not_waited_for() -> None:
    """decode-1 is the only one left: it may not die, and the prefill worker that serves it may."""
    watch, plain, long = FakeWatch(), flying("plain", c0=7), flying("long")
    watch.usable = {"prefill-0", "prefill-1", "decode-1"}
    aim = aim_at(watch, plain, long)
    phase, (victim, target, _, beside) = await aim.at({"decoding": 0, "prefill running": 0})
    assert (phase, victim, target, beside) == ("prefill running", "prefill-0", long, [long])
    finding = asyncio.create_task(aim.at({"decoding": 0}))
    await asyncio.sleep(0)
    watch.usable = set(kill_run.WORKERS)  # while it is aimed
    aim.on_message()
    assert await finding == ("decoding", ("decode-1", plain, {"tokens": 7}, ()))


async def test_a_prompt_that_runs_alone_has_just_begun() -> None:
    watch, long = FakeWatch(), flying("long")
    watch.waiting = 0.0
    aim = aim_at(watch, long)
    finding = asyncio.create_task(aim.at({"prefill running": 0}))
    for running in (1.0, 0.0):  # what runs at the first look may end any moment
        watch.running, looks = running, watch.num_looks
        await waiting.until(lambda looks=looks: watch.num_looks >= looks + 4)
        assert not finding.done()
    watch.running = 1.0
    _, (victim, target, seen, _) = await finding
    assert (victim, target, seen["num_running"]) == ("prefill-0", long, 1.0)


async def test_the_phase_with_the_fewest_kills_is_first() -> None:
    aim = aim_at(FakeWatch(), flying("plain", c0=7), flying("logprobs", c0=7))
    assert (await aim.at({"decoding": 3, "logprobs": 2}))[0] == "logprobs"
    assert (await aim.at({"decoding": 3, "logprobs": 2}))[0] == "decoding", "none is left in the other"


def test_when_the_router_noticed_is_in_its_log(tmp_path: Path) -> None:
    line = '{"event": "stream to decode went down", "worker": "%s", "timestamp": "2026-11-29T10:00:0%d.250000Z"}\n'
    log = tmp_path / "router.log"
    log.write_text("not JSON\n" + line % ("decode-0", 1) + line % ("decode-1", 2) + line % ("decode-0", 3))
    began = datetime(2026, 11, 29, 10, tzinfo=UTC).timestamp()
    kills = [
        kill_run.Kill(number, "decoding", victim, flight(), {}, at_unix=began + at)
        for number, (victim, at) in enumerate([("decode-0", 1.0), ("decode-0", 2.0), ("prefill-0", 0.0)])
    ]
    kill_run.note_when_noticed(kills, log)
    assert [kill.noticed_s for kill in kills] == [0.25, 1.25, None]
