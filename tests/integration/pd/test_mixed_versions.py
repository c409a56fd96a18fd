"""Decode asks no prefill worker of an older version to draw with a parameter that it does not know."""

from __future__ import annotations

from types import ModuleType

import pytest

from diptych.rpc import convert
from diptych.worker import wire

LATER = "include_stop_str_in_output"
PROMPT = [(7 * i + 3) % 1000 for i in range(40)]


@pytest.mark.parametrize("known", [False, True])
async def test_a_prefill_worker_that_does_not_announce_it_is_passed_over(
    pd: ModuleType, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(convert, "LATER_FIELDS", (LATER,))
    if known:
        monkeypatch.setattr(wire, "REQUEST_FIELDS", (LATER,))
    async with pd.cluster() as cluster, pd.FakeRouter(cluster.decode.address) as router:
        assert cluster.prefill[0].record().request_fields == ((LATER,) if known else wire.MESSAGE_FIELDS)
        message = cluster.submit_message(attempt="a", prompt=PROMPT)
        message.sampling.include_stop_str_in_output = True
        answer = await router.run(message)
        assert len(answer.token_ids) == 8
        assert answer.explanation.local_prefill != known
        assert any(f"does not know {LATER}" in note for note in answer.explanation.notes) != known
        # Without the parameter both are what they were.
        plain = await router.run(cluster.submit_message(attempt="b", prompt=PROMPT[::-1]))
        assert not plain.explanation.local_prefill
        message = cluster.submit_message(attempt="c", prompt=PROMPT)
        message.sampling.MergeFromString(b"\xb8\x3e\x01")
        refused = await router.run(message)
        assert refused.error is not None
        assert refused.error.reason == "INCOMPATIBLE_WORKERS"
        await cluster.nothing_left()
