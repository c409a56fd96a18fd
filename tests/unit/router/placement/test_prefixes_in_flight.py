import random

from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.router.trace import BLOCK_SIZE, HEADER
from diptych.common.block_identity import BlockHasher
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.prefixes_in_flight import GRACE_S, STRIDE, PrefixesInFlight


def keys_of(tokens):
    hasher = BlockHasher(HEADER)
    hasher.update(tokens)
    return as_keys(hasher.keys)


def add(flight, name, tokens, max_answer=0):
    flight.add(name, keys_of(tokens), BLOCK_SIZE, len(tokens), max_answer)


def shared(flight, tokens):
    return flight.shared_tokens(keys_of(tokens), BLOCK_SIZE)


def test_only_what_is_in_flight_is_shared():
    flight, prompt = PrefixesInFlight(), list(range(1000))
    assert shared(flight, prompt) == 0
    add(flight, "a", prompt)
    assert shared(flight, [5, *prompt]) == 0
    assert 192 <= shared(flight, prompt[:200] + [7] * 300) < 192 + STRIDE * BLOCK_SIZE
    assert shared(flight, prompt) >= 1000
    flight.end("a", 10.0)
    assert shared(flight, prompt) >= 1000  # the news of its blocks may be on their way
    flight.end("unknown", 10.0 + GRACE_S)
    assert shared(flight, prompt) == 0
    assert len(flight) == 0


def test_an_answer_is_shared_by_the_next_turn():
    flight, prompt = PrefixesInFlight(), list(range(100))
    add(flight, "a", prompt, max_answer=500)
    assert shared(flight, list(range(2000))) == 600
    flight.end("a", 0.0)
    add(flight, "short", [1, 2, 3], max_answer=100)
    assert shared(flight, [9] * 50) == 103  # it may answer with 9s


@given(seed=st.integers(0, 10**6))
def test_it_never_says_less_than_is_shared(seed):
    rng = random.Random(seed)
    flight, alive, now = PrefixesInFlight(), {}, 0.0
    for i in range(30):
        base = list(rng.choice(list(alive.values()))) if alive and rng.random() < 0.7 else []
        tokens = base[: rng.randint(0, len(base))] + [rng.randrange(4) for _ in range(rng.randint(1, 200))]
        answer = rng.randint(0, 100)
        whole = tokens + [rng.randrange(4) for _ in range(answer)]
        add(flight, str(i), tokens, max_answer=answer)
        alive[str(i)] = whole
        if rng.random() < 0.4:
            gone = rng.choice(list(alive))
            now += 2 * GRACE_S
            flight.end(gone, now)
            flight.end("", now + GRACE_S)
            del alive[gone]
        query = (rng.choice(list(alive.values())) if alive else []) + [rng.randrange(4) for _ in range(50)]
        query = query[: rng.randint(0, len(query))]
        most = max(
            (next((k for k, (a, b) in enumerate(zip(query, one, strict=False)) if a != b), min(len(query), len(one)))
             for one in alive.values()),
            default=0,
        )  # fmt: skip
        assert min(shared(flight, query), len(query)) >= most // BLOCK_SIZE * BLOCK_SIZE
