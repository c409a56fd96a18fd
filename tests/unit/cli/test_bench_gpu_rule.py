"""Assignment of a short prompt: the router's costs at the rates of two GPUs."""

from __future__ import annotations

from diptych.bench.gpu.rule import CostRule


def test_a_short_prompt_stays_with_decode_until_it_would_hold_up_others() -> None:
    rule = CostRule(most_tokens=512, prefill_per_s=40_000.0)
    assert rule.place("idle", 256), "nobody waits for it, and no KV has to move"
    rule.first_token("idle")
    for i in range(8):  # each of those that decode by now would wait for it
        rule.place(f"running-{i}", 2000)
        rule.first_token(f"running-{i}")
    assert not rule.place("short", 256)
    assert rule.place("tiny", 8), "less than the hand-off costs, even so"
    for i in range(8):
        rule.ended(f"running-{i}")
    for attempt in ("idle", "short", "tiny"):
        rule.ended(attempt)
    assert rule.place("again", 256)


def test_a_long_prompt_never_stays() -> None:
    rule = CostRule(most_tokens=512, prefill_per_s=40_000.0)
    assert not rule.place("long", 513)


def test_long_prompts_at_prefill_hold_a_short_one_up_by_its_own_length_each() -> None:
    """Workers compute in equal shares: the 1.2 s that these would take are not the short one's to wait."""
    rule = CostRule(most_tokens=512, prefill_per_s=40_000.0)
    assert rule.place("first", 300)
    assert not rule.place("second", 300), "the first one decodes, or will soon"
    for i in range(6):
        rule.place(f"queued-{i}", 8000)
    assert not rule.place("third", 300)
