"""Does an answer tell that somebody else sent the same prompt before? By what is computed for it, which is what its time
follows: 200 probes, half of prompts that the victim has sent. (bench/router/prefix_timing.py measures the time itself.)"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType

import pytest

from diptych.common.secret import further_salt, tenant_salt

PROBES, FEWER = 200, 60
SECRET = b"s" * 32
VICTIM, ATTACKER = (tenant_salt(SECRET, name) for name in ("victim", "attacker"))
MOST = 0.6
"""Of AUC. 0.5: a guess; 1.0: every probe tells."""


def auc(of_hits: Sequence[float], of_misses: Sequence[float]) -> float:
    """Probability that a probe of a prompt that was sent shows less work than one that was not; ties count half."""
    pairs = [(hit < miss) + 0.5 * (hit == miss) for hit in of_hits for miss in of_misses]
    return sum(pairs) / len(pairs)


class Work:
    """Tokens that a worker computed and steps that it made, by attempt."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.steps: dict[str, int] = {}

    def __call__(self, seqs: Sequence[object]) -> None:
        for seq in seqs:
            name = seq.attempt.split("/")[0]  # type: ignore[attr-defined]
            self.tokens[name] = self.tokens.get(name, 0) + len(seq.token_ids)  # type: ignore[attr-defined]
            self.steps[name] = self.steps.get(name, 0) + 1


async def probe(pd: ModuleType, salt: bytes, num_prefill: int, probes: int) -> dict[str, float]:
    """AUC by kind of observation, of an attacker who probes with this salt."""
    rng = random.Random(7)
    work = Work()
    model = lambda: pd.fake_model(num_blocks=4096, before_execute=work)  # noqa: E731
    lengths = [rng.randrange(40, 120) for _ in range(probes // 2)]
    # Of two prompts of one length the victim sends one: a length tells nothing.
    prompts = [[rng.randrange(1000) for _ in range(lengths[n // 2])] for n in range(probes)]
    sent = {n + rng.randrange(2) for n in range(0, probes, 2)}
    seen: dict[int, tuple[int, int, int]] = {}
    async with (
        pd.cluster(num_prefill=num_prefill, decode=model, prefill=model) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):

        async def ask(name: str, number: int, salt: bytes) -> tuple[int, int, int]:
            message = cluster.submit_message(attempt=name, prompt=prompts[number], max_tokens=2, local=num_prefill == 0)
            message.cache_salt = salt
            answer = await router.run(message)
            assert answer.error is None
            return work.tokens[name], work.steps[name], -answer.finished.usage.cached_tokens

        for number in sorted(sent):
            await ask(f"victim-{number}", number, VICTIM)
        for number in rng.sample(range(probes), probes):
            seen[number] = await ask(f"probe-{number}", number, salt)
    assert len(seen) == probes
    split = {True: [seen[n] for n in sorted(sent)], False: [seen[n] for n in sorted(set(seen) - sent)]}
    return {
        what: auc([one[at] for one in split[True]], [one[at] for one in split[False]])
        for at, what in enumerate(("tokens computed", "steps", "cached tokens in usage"))
    }


@pytest.mark.parametrize(
    ("num_prefill", "probes"), [(0, PROBES), (1, FEWER)], ids=["decode computes", "prefill computes"]
)
async def test_another_tenants_probes_tell_nothing(pd: ModuleType, num_prefill: int, probes: int) -> None:
    found = await probe(pd, ATTACKER, num_prefill, probes)
    assert max(found.values()) < MOST, found
    assert min(found.values()) > 1 - MOST, found  # nor the other way round


async def test_a_part_of_the_tenants_own_cache_is_another_one(pd: ModuleType) -> None:
    assert max((await probe(pd, further_salt(VICTIM, "x"), 0, FEWER)).values()) < MOST


async def test_the_probes_would_tell_if_the_cache_were_shared(pd: ModuleType) -> None:
    """The same, with the victim's own salt: what the figure above is worth."""
    found = await probe(pd, VICTIM, 0, FEWER)
    assert found["cached tokens in usage"] > 0.99, found
    assert found["tokens computed"] > 0.9, found


def test_auc() -> None:
    assert auc([1, 2], [3, 4]) == 1.0
    assert auc([3, 4], [1, 2]) == 0.0
    assert auc([1, 1], [1, 1]) == 0.5
