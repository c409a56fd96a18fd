"""Another salt reuses nothing and the same one does: at the router's index, on prefill and on decode. Each pair is tried in both
directions, so that a cache that does nothing passes no more than one that is shared."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.block_identity import IdentityHeader, block_keys, header_of_request
from diptych.common.errors import InvalidRequestError
from diptych.common.request import Prompt
from diptych.common.secret import further_salt, tenant_of, tenant_salt
from diptych.common.store.interface import KvEvent
from diptych.router.requests.messages import UncheckedRequest
from diptych_tests.router_fleet import make_model_folder, running

SECRET = b"s" * 32
ACME, OTHER, DEFAULT = (tenant_salt(SECRET, name) for name in ("acme", "other", ""))
SALTS = {
    "acme": ACME, "other": OTHER, "the default tenant": DEFAULT, "none": b"",
    "acme, further": further_salt(ACME, "x"), "acme, another": further_salt(ACME, "y"),
    "other, further": further_salt(OTHER, "x"),
}  # fmt: skip
PAIRS = [(one, other) for one in SALTS for other in SALTS]
HELD = 96
"""Of a prompt of 100 tokens, the whole blocks."""


async def cached(pd: ModuleType, cluster: object, router: object, name: str, salt: bytes, token: int) -> int:
    message = cluster.submit_message(  # type: ignore[attr-defined]
        attempt=name,
        prompt=[token] * 100,
        max_tokens=1,
        local=not cluster.prefill,  # type: ignore[attr-defined]
    )
    message.cache_salt = salt
    answer = await router.run(message)  # type: ignore[attr-defined]
    assert answer.error is None
    return answer.finished.usage.cached_tokens


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["decode computes", "prefill computes"])
async def test_engines_reuse_within_a_salt_only(pd: ModuleType, num_prefill: int) -> None:
    model = lambda: pd.fake_model(num_blocks=1024)  # noqa: E731
    async with (
        pd.cluster(num_prefill=num_prefill, decode=model, prefill=model) as cluster,
        pd.FakeRouter(cluster.decode.address) as router,
    ):
        for number, (one, other) in enumerate(PAIRS):
            assert await cached(pd, cluster, router, f"{number}-first", SALTS[one], number) == 0
            again = await cached(pd, cluster, router, f"{number}-again", SALTS[other], number)
            assert again == (HELD if one == other else 0), (one, other)


@pytest.fixture
async def fleet(tmp_path: Path):
    async with running(make_model_folder(tmp_path / "tiny"), tmp_path) as found:
        yield found


async def test_the_router_expects_a_hit_within_a_salt_only(fleet) -> None:
    """By what a worker would announce: the keys of its own header with the salt of the submission."""
    await fleet.add("p0", "prefill")
    await fleet.add("d0", event_epoch=0)
    await fleet.until_ready()
    callers = [("acme", None), ("other", None), ("", None), ("acme", "x"), ("acme", "y"), ("other", "x")]
    index = fleet.frontend._cluster._index
    for number, (tenant, text) in enumerate(callers, 1):
        tokens = [number] * 64

        async def expected(tenant: str, text: str | None, tokens: list[int] = tokens) -> tuple[int, bytes]:
            spec = UncheckedRequest(token_ids=tokens, sampling={"max_tokens": 1}, explain=True, tenant=tenant)
            spec.cache_salt = text
            events = [event async for event in fleet.frontend.generate(await fleet.frontend.prepare(spec))]
            salt = fleet.workers[1].submits[-1].cache_salt
            return events[-1].explanation.candidates[0].decode_hit_tokens, salt

        hit, salt = await expected(tenant, text)
        assert hit == 0
        owner = tenant_salt(fleet.secret, tenant)
        assert salt == (further_salt(owner, text) if text else owner)
        keys = tuple(block_keys(header_of_request(fleet.header, Prompt(tuple(tokens), salt)), tokens))
        await fleet.store.append_events("d0", [KvEvent("i1", 0, number, "stored", keys)])
        await fleet.until(lambda keys=keys: index.hit_blocks("d0", keys) == 4)
        for other in callers:
            hit, _ = await expected(*other)
            assert hit == (48 if other == (tenant, text) else 0), ((tenant, text), other)  # the last token is computed


HEADER = IdentityHeader(bytes(32), "m", "t", "float32", 16)
TEXTS = st.text(max_size=6)
NAMES = [field.name for field in fields(IdentityHeader) if field.type == "str"]


@given(adapter=st.text(min_size=1, max_size=8), tokens=st.lists(st.integers(0, 999), min_size=16, max_size=40))
def test_a_salt_is_no_adapter_and_no_other_part_of_the_identity(adapter: str, tokens: list[int]) -> None:
    """The same bytes in another place are another identity."""
    keys = {
        tuple(block_keys(replace(HEADER, **{name: adapter if name != "salt" else adapter.encode()}), tokens))
        for name in (*NAMES, "salt")
    }
    assert len(keys) == len(NAMES) + 1


@given(one=TEXTS, moved=st.text(min_size=1, max_size=4), other=TEXTS)
def test_no_byte_moves_from_one_part_of_the_identity_to_another(one: str, moved: str, other: str) -> None:
    """Whatever parts are neighbours in what is hashed."""
    for first, second in itertools.permutations((*NAMES, "salt"), 2):
        openings = set()
        for left, right in ((one + moved, other), (one, moved + other)):
            values = {
                name: text.encode() if name == "salt" else text for name, text in ((first, left), (second, right))
            }
            openings.add(replace(HEADER, **values).opening)
        assert len(openings) == 2, (first, second)


@given(
    tenants=st.lists(TEXTS, min_size=2, max_size=4, unique=True),
    texts=st.lists(TEXTS, min_size=2, max_size=3, unique=True),
)
def test_no_text_of_a_caller_reaches_another_tenants_cache(tenants: list[str], texts: list[str]) -> None:
    salts = {(tenant, text): further_salt(tenant_salt(SECRET, tenant), text) for tenant in tenants for text in texts}
    assert len({*salts.values(), *(tenant_salt(SECRET, tenant) for tenant in tenants)}) == len(salts) + len(tenants)
    # Whoever a worker charges for the cache is the tenant, whatever text its client chose.
    assert {tenant_of(salt) for salt in salts.values()} == {
        tenant_of(tenant_salt(SECRET, tenant)) for tenant in tenants
    }


async def test_a_tenant_is_never_taken_from_the_body(fleet) -> None:
    """`cache_salt` is text that parts the caller's own cache; bytes, numbers and long texts are refused by name."""
    for bad in (b"bytes", 7, ["x"], "x" * 129, "\ud800"):
        spec = UncheckedRequest(token_ids=[1], sampling={"max_tokens": 1})
        spec.cache_salt = bad
        with pytest.raises(InvalidRequestError) as caught:
            await fleet.frontend.prepare(spec)
        assert caught.value.param == "cache_salt"
