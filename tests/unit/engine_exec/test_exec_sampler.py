from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.sampling import SamplingParams
from diptych.engine.exec.sampler import Draw, argmax_rows, draw_key, sample, uniforms

CPU = torch.device("cpu")


def draw(index=0, **kwargs) -> Draw:
    return Draw(SamplingParams(max_tokens=1, **kwargs), index)


def logits_of(rows, vocab=1000, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_greedy_takes_the_first_maximum():
    logits = torch.zeros(2, 700)
    logits[0, 699] = 1.0
    logits[1, [5, 300]] = 2.0
    assert sample(logits, [draw(temperature=0.0)] * 2) == ([699, 5], {})


@given(rows=st.integers(1, 4), columns=st.integers(1, 1100), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_argmax_equals_torch(rows, columns, seed):
    x = torch.randint(0, 50, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(argmax_rows(x), x.argmax(-1))


def test_a_draw_depends_on_seed_and_index_only():
    logits = logits_of(1)
    alone = sample(logits, [draw(4, seed=9)])[0][0]
    crowd = torch.cat([logits_of(5, seed=1), logits, logits_of(2, seed=2)])
    others = [draw(0, seed=1, top_k=3), draw(1, temperature=0.0), *[draw(2, seed=s, top_p=0.5) for s in range(3)]]
    assert sample(crowd, [*others, draw(4, seed=9), draw(), draw()])[0][5] == alone
    tokens = {sample(logits / 3, [draw(i, seed=s)])[0][0] for i in range(20) for s in range(5)}
    assert len(tokens) > 20


def test_keys_use_all_64_bits_of_the_seed():
    keys = {draw_key(seed, 0, i) for seed in (0, 1, 2**32, 2**63, 2**64 - 1) for i in range(50)}
    assert len(keys) == 250
    assert all(0 <= key < 2**64 for key in keys)


def test_hash_values_are_pinned():
    """Other devices and later versions must draw the same numbers; a change needs a new SAMPLER_VERSION."""
    bits = (uniforms([draw_key(42, 0, 7)], 4, CPU) * (1 << 23)).int().tolist()
    assert bits == [[882174, 1547618, 4549945, 7860703]]


def test_uniforms_are_uniform_and_independent():
    u = uniforms([draw_key(s, 0, i) for s in range(8) for i in range(8)], 4096, CPU)
    assert u.min() > 0.0
    assert u.max() < 1.0
    flat = u.flatten()
    counts = torch.histc(flat, 64, 0.0, 1.0)
    expected = flat.numel() / 64
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert chi2 < 120  # 63 degrees of freedom; 1 in 10^5
    centered = u - 0.5
    for lag in (1, 2, 17):  # along the vocabulary
        assert abs((centered[:, lag:] * centered[:, :-lag]).mean().item()) * 12 < 0.01
    assert abs((centered[1:] * centered[:-1]).mean().item()) * 12 < 0.01  # from draw to draw


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 20_000
    draws = [draw(i, seed=5, temperature=1.3) for i in range(count)]
    ids, _ = sample(logits.expand(count, 4), draws)
    got = torch.bincount(torch.tensor(ids), minlength=4) / count
    expected = torch.softmax(logits[0] / 1.3, -1)
    torch.testing.assert_close(got, expected, atol=0.012, rtol=0)


def kept_by_definition(logits, top_k, top_p):
    """Obviously right filter of one row."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < len(logits):
        kept &= logits >= logits.sort(descending=True).values[top_k - 1]
    if top_p < 1.0:
        p = torch.softmax(logits.masked_fill(~kept, float("-inf")).double(), -1)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        last = order[before < top_p][-1]
        kept &= logits >= logits[last]
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (7, 1.0), (0, 0.3), (0, 0.9), (0, 0.9999), (40, 0.8), (600, 0.99), (5000, 1.0)]
)
@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_filters_keep_the_right_tokens(top_k, top_p, spread):
    logits = logits_of(1, 1000) / 3 * spread
    kept = kept_by_definition(logits[0], top_k, top_p)
    ids, _ = sample(logits.expand(400, -1), [draw(i, seed=3, top_k=top_k, top_p=top_p) for i in range(400)])
    assert all(kept[i] for i in ids)
    if kept.sum() <= 10:
        assert set(ids) == set(kept.nonzero()[:, 0].tolist())


def test_filters_of_neighbours_do_not_mix():
    logits = logits_of(1).expand(4, -1)
    draws = [draw(0, seed=1, top_k=2), draw(0, seed=1, top_p=0.9), draw(0, seed=1), draw(0, seed=1, top_p=0.99999)]
    together, _ = sample(logits, draws)
    assert together == [sample(logits[:1], [d])[0][0] for d in draws]


def test_tiny_temperature_is_greedy():
    logits = logits_of(3)
    assert sample(logits, [draw(seed=s, temperature=1e-30) for s in range(3)])[0] == logits.argmax(-1).tolist()


def test_small_noise_rarely_changes_a_draw():
    logits = logits_of(1, 5000)
    noisy = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 1e-6
    draws = [draw(i, seed=2) for i in range(500)]
    assert sample(logits.expand(500, -1), draws) == sample(noisy.expand(500, -1), draws)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_rows_are_named_and_neighbours_untouched(bad):
    logits = logits_of(3)
    draws = [draw(1, seed=1), draw(1, seed=2, top_p=0.5), draw(1, temperature=0.0)]
    clean, _ = sample(logits, draws)
    spoiled = logits.clone()
    spoiled[1, 77] = bad
    ids, rows = sample(spoiled, draws)
    assert ids == [clean[0], -1, clean[2]]
    assert list(rows) == [1]
