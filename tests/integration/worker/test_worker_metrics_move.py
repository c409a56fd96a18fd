"""Over HTTP from real workers: every series that a worker registers moves."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from types import ModuleType

PROMPT = [(7 * i + 3) % 1000 for i in range(150)]
# A state is a place, not an event: that the slabs move shows in `free`.
NEED_NOT_MOVE = {("diptych_kv_slabs", s) for s in ("packed", "in_flight", "settled", "quarantined")}
NEED_NOT_MOVE.add(("diptych_kv_expired_requests_total", ""))  # no lease ends here: test_kvtransfer_inproc moves it
RATES = {"diptych_prefill_tokens_per_second", "diptych_decode_step_seconds"}  # the warm-up measures them, too
FAMILY = re.compile(r"^# TYPE (\w+)", re.MULTILINE)
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
"""prometheus_client's parser takes ten times as long, for each of some hundred looks."""
CONSTANT = {"diptych_cache_config_info", "diptych_model_config_info"}  # constant by design: the labels are its content


class Watch:
    """The values that every series took, by (name, label value)."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self.seen: dict[tuple[str, str], set[float]] = {}
        self.families: set[str] = set()

    def look(self) -> None:
        with urllib.request.urlopen(self._url, timeout=300) as answer:
            text = answer.read().decode()
        self.families |= {name.removesuffix("_total") for name in FAMILY.findall(text)}
        for name, labels, value in SAMPLE.findall(text):
            if name.endswith(("_created", "_bucket")):
                continue
            label = next((v for k, v in LABEL.findall(labels) if k not in ("role", "worker")), "")
            # A labelled child that appears has moved: it was at nothing before.
            self.seen.setdefault((name, label), set() if not self.seen else {0.0}).add(float(value))

    def still(self) -> set[tuple[str, str]]:
        still = {key for key, values in self.seen.items() if len(values) < 2 and key[0] not in CONSTANT}
        return still - NEED_NOT_MOVE


class Looks:
    """Steps that wait until both workers' series were read since the step before: what a step shows for a moment is seen."""

    def __init__(self) -> None:
        self.awaited = False
        self._done, self._more = 0, threading.Condition()

    def add(self) -> None:
        with self._more:
            self._done += 1
            self._more.notify_all()

    def wait(self, seqs: object) -> None:
        with self._more:
            due = self._done + 2  # the one that runs now may have begun before
            assert self._more.wait_for(lambda: self._done >= due or not self.awaited, 60)


async def test_every_series_of_both_roles_moves(pd: ModuleType) -> None:
    looks = Looks()
    model = lambda: pd.fake_model(num_blocks=24, before_execute=looks.wait)  # noqa: E731
    async with (
        pd.cluster(
            num_prefill=1,
            decode=model,
            prefill=model,
            decode_config={"metrics_port": 0, "fault_corrupt_every": 5},
            prefill_config={"metrics_port": 0, "max_num_seqs": 1},
        ) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        watches = [Watch(cluster.prefill[0].metrics_port), Watch(cluster.decode.metrics_port)]

        async def look(ended: asyncio.Event) -> None:
            while not ended.is_set():
                for watch in watches:
                    await asyncio.to_thread(watch.look)
                looks.add()

        for watch in watches:
            await asyncio.to_thread(watch.look)
        assert all(
            values == {0.0}
            for watch in watches
            for (n, _), values in watch.seen.items()
            if "slabs" not in n and n not in CONSTANT | RATES
        )
        ended = asyncio.Event()
        looking = asyncio.create_task(look(ended))
        looks.awaited = True
        try:
            for turn in range(2):  # the second time both sides have seen the prompts
                for number in range(6):
                    prompt = [number + 1, *PROMPT[: 60 + 10 * number]]
                    # The first token alone moves no KV, so the second turn of it is prefill's cache hit.
                    router.submit(cluster.submit_message(attempt=f"one-{turn}-{number}", prompt=prompt, max_tokens=1))
                    await router.ended(f"one-{turn}-{number}")
            names = [f"many-{number}" for number in range(6)]
            for number, name in enumerate(names):
                prompt = [100 + number, *PROMPT[:40]]
                router.submit(cluster.submit_message(attempt=name, prompt=prompt, max_tokens=34, local=number == 5))
            for name in names:
                await router.ended(name)
            for number in range(2):
                again = cluster.submit_message(attempt=f"again-{number}", prompt=[200, *PROMPT[:40]], max_tokens=4)
                answer = await router.run(again)
                assert answer.finished is not None, answer.error
        finally:
            looks.awaited = False
            ended.set()
            await looking
        for watch in watches:
            await asyncio.to_thread(watch.look)
        prefill, decode = watches
        assert prefill.still() == set()
        assert decode.still() == set()
        assert "diptych_kv_transfer_failures" in decode.families
        assert {"diptych_kv_transfer_seconds", "diptych_num_preemptions"} <= decode.families - prefill.families
        await cluster.nothing_left()
