import random
from dataclasses import replace

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError
from diptych.common.secret import further_salt, tenant_of, tenant_salt
from diptych.common.text.tokenizer import GenerationDefaults
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.requests import chat_call, completion_call
from diptych.router.preprocess.preprocessor import PreprocessLimits, RequestPreprocessor
from diptych.router.requests.messages import ModelFeatures, UncheckedRequest
from diptych.rpc.v1 import router_pb2


class Words:
    """One token a word."""

    vocab_size = 100
    calls = 0

    def encode(self, text, add_special_tokens=True, *, param="prompt"):
        self.calls += 1
        return [min(len(word), 99) for word in text.split()]

    def encode_chat(self, messages, add_generation_prompt=True, *, tools=None, extra=None):
        return self.encode(" ".join(message["content"] for message in messages))

    def spans(self, text, add_special_tokens=True):
        """A word, with the space before it."""
        ends = [at for at, character in enumerate(text) if character == " "] + [len(text)]
        return list(zip([0, *ends], ends, strict=False))

    def decode(self, token_ids, *, skip_special_tokens=True):
        return " ".join("x" * token_id for token_id in token_ids)


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def intake(words):
    limits = PreprocessLimits(
        model="tiny",
        max_model_len=lambda: 20,
        max_prompt_bytes=100,
        local_prefill_max_tokens=64,
        request_timeout_s=600.0,
    )
    intake = RequestPreprocessor(
        words,
        limits,
        defaults=GenerationDefaults(temperature=0.6, top_k=40),
        salt=lambda tenant: tenant.encode(),
        clock=FakeClock(50.0),
        rng=random.Random(7),
    )
    yield intake
    intake.close()


async def test_defaults_are_filled_in(intake):
    request = await intake.prepare(UncheckedRequest(prompt="a bb ccc", tenant="x"))
    assert request.prompt.token_ids == (1, 2, 3)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.6, 40, 1.0, 17)
    assert request.prompt.cache_salt == b"x"
    assert (request.arrived, request.deadline) == (50.0, 650.0)
    assert request.local_prefill_max_tokens == 64
    assert request.request_id.startswith("req-")
    again = await intake.prepare(UncheckedRequest(prompt="a"))
    assert again.sampling.seed != sampling.seed


async def test_completions_have_16_tokens_by_default(intake):
    call = completion_call({"prompt": "a bb"}, features=ModelFeatures(), unknown=UnknownFields())
    assert (await intake.prepare(call.spec)).sampling.max_tokens == 16
    null = completion_call({"prompt": "a bb", "max_tokens": None}, features=ModelFeatures(), unknown=UnknownFields())
    assert (await intake.prepare(null.spec)).sampling.max_tokens == 16
    little_room = replace(call.spec, prompt="x " * 15)
    assert (await intake.prepare(little_room)).sampling.max_tokens == 5
    given = completion_call({"prompt": "a bb", "max_tokens": 17}, features=ModelFeatures(), unknown=UnknownFields())
    assert (await intake.prepare(given.spec)).sampling.max_tokens == 17
    cut = replace(call.spec, prompt="x " * 19, truncate_prompt_tokens=-1)
    assert len((await intake.prepare(cut)).prompt.token_ids) == 4
    messages = [{"role": "user", "content": "a bb"}]
    chat = chat_call({"messages": messages}, features=ModelFeatures(), unknown=UnknownFields())
    assert (await intake.prepare(chat.spec)).sampling.max_tokens == 18


def with_pool(intake, blocks, size=4):
    intake._limits = replace(intake._limits, pool_tokens=lambda num_beams: blocks // num_beams * size)


async def test_a_default_for_max_tokens_fits_the_pools(intake):
    """With a pool below the context, a default is limited to what fits; an explicit value is left for decode to refuse."""
    with_pool(intake, 3)
    for spec in (UncheckedRequest(prompt="a bb ccc"), UncheckedRequest(prompt="a bb ccc", default_max_tokens=16)):
        assert (await intake.prepare(spec)).sampling.max_tokens == 12 + 1 - 3
    assert (await intake.prepare(UncheckedRequest(prompt="a bb", default_max_tokens=5))).sampling.max_tokens == 5
    assert (
        await intake.prepare(UncheckedRequest(prompt="a bb ccc", sampling={"max_tokens": 17}))
    ).sampling.max_tokens == 17
    beams = UncheckedRequest(prompt="a bb ccc", sampling={"beam_width": 3}, use_beam_search=True)
    assert (await intake.prepare(beams)).sampling.max_tokens == 4 + 1 - 3
    assert (
        await intake.prepare(UncheckedRequest(prompt="x " * 15))
    ).sampling.max_tokens == 1  # decode reports the error
    cut = UncheckedRequest(prompt="x " * 19, truncate_prompt_tokens=-1, sampling={"max_tokens": 4})
    prepared = await intake.prepare(cut)
    assert (len(prepared.prompt.token_ids), prepared.sampling.max_tokens) == (9, 4)
    with_pool(intake, 100)
    assert (await intake.prepare(UncheckedRequest(prompt="a bb ccc"))).sampling.max_tokens == 17


async def test_calls_and_tools_count_as_text(intake):
    """A conversation whose text stands in calls or tools is as long as any other: it has the long texts' thread and the cap."""
    sizes = []
    run = intake._lanes.run

    async def noted(work, size=0):
        sizes.append(size)
        return await run(work, size)

    intake._lanes.run = noted
    features = ModelFeatures(tool_parser="hermes", takes_tools=True)

    def chat(arguments="{}", description=""):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
        tools = [{"type": "function", "function": {"name": "f", "description": description}}]
        return chat_call({"messages": messages, "tools": tools}, features=features, unknown=UnknownFields()).spec

    large = PreprocessLimits("tiny", lambda: 20, 1 << 20, 64, 600.0)
    small, intake._limits = intake._limits, large
    for spec in (chat(), chat("x" * 100_000), chat('{"a": "%s"}' % ("x" * 100_000)), chat(description="x" * 100_000)):
        await intake.tokenize(spec)
    assert sizes[0] < 1000
    assert min(sizes[1:]) > 100_000
    intake._limits = small
    for spec in (chat("x" * 200), chat(description="x" * 200)):
        with pytest.raises(PromptTooLongError, match="messages"):
            await intake.prepare(spec)


async def test_what_is_given_wins(intake):
    spec = UncheckedRequest(
        model="tiny",
        token_ids=[5],
        sampling={"temperature": 0, "top_k": 0, "seed": 3, "max_tokens": 19, "stop": ["x"], "ignore_eos": True},
        timeout_s=2,
        request_id="mine",
        local_prefill_max_tokens=0,
        failure_policy="recompute",
        explain=True,
    )
    request = await intake.prepare(spec)
    assert request.sampling.greedy
    assert (request.sampling.top_k, request.sampling.seed, request.sampling.max_tokens) == (0, 3, 19)
    assert (request.label, request.local_prefill_max_tokens, request.deadline) == ("mine", 0, 52.0)
    assert request.failure_policy == router_pb2.FAILURE_POLICY_RECOMPUTE
    assert (await intake.prepare(UncheckedRequest(token_ids=[5], timeout_s=1e9))).deadline == 650.0


@pytest.mark.parametrize(
    ("fields", "param", "error"),
    [
        ({"prompt": "a", "model": "other"}, "model", ModelNotFoundError),
        ({"prompt": "a", "model": 3}, "model", InvalidRequestError),
        ({}, "prompt", InvalidRequestError),
        ({"prompt": "a", "token_ids": [1]}, "prompt", InvalidRequestError),
        ({"prompt": ""}, "prompt", InvalidRequestError),
        ({"prompt": 5}, "prompt", InvalidRequestError),
        ({"prompt": "x " * 20}, "prompt", PromptTooLongError),
        ({"prompt": "x" * 101}, "prompt", PromptTooLongError),
        ({"messages": [{"role": "user", "content": "x " * 20}]}, "messages", PromptTooLongError),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 101}]}]},
            "messages",
            PromptTooLongError,
        ),
        ({"messages": "hello"}, "messages", InvalidRequestError),
        ({"token_ids": []}, "token_ids", InvalidRequestError),
        ({"token_ids": "12"}, "token_ids", InvalidRequestError),
        ({"token_ids": [100]}, "token_ids", InvalidRequestError),
        ({"token_ids": [-1]}, "token_ids", InvalidRequestError),
        ({"token_ids": [True]}, "token_ids", InvalidRequestError),
        ({"token_ids": [1.0]}, "token_ids", InvalidRequestError),
        ({"token_ids": [1] * 20}, "token_ids", PromptTooLongError),
        ({"prompt": "a", "sampling": {"max_tokens": 20}}, "max_tokens", InvalidRequestError),
        ({"prompt": "a", "sampling": {"max_tokens": 0}}, "max_tokens", InvalidRequestError),
        ({"prompt": "a", "sampling": {"max_tokens": -1}}, "max_tokens", InvalidRequestError),
        ({"prompt": "a", "sampling": {"max_tokens": 2**63}}, "max_tokens", InvalidRequestError),
        ({"prompt": "a", "sampling": {"temperature": float("nan")}}, "temperature", InvalidRequestError),
        ({"prompt": "a", "sampling": {"temperature": "hot"}}, "temperature", InvalidRequestError),
        ({"prompt": "a", "sampling": {"top_p": 0}}, "top_p", InvalidRequestError),
        ({"prompt": "a", "sampling": {"stop": [""]}}, "stop", InvalidRequestError),
        ({"prompt": "a", "sampling": {"stop": ["\ud800"]}}, "stop", InvalidRequestError),
        ({"prompt": "a", "sampling": {"stop_token_ids": [100]}}, "stop_token_ids", InvalidRequestError),
        ({"prompt": "a", "request_id": "é"}, "request_id", InvalidRequestError),
        ({"prompt": "a", "request_id": "x" * 129}, "request_id", InvalidRequestError),
        ({"prompt": "a", "request_id": "a\nb"}, "request_id", InvalidRequestError),
        ({"prompt": "a", "local_prefill_max_tokens": -1}, "local_prefill_max_tokens", InvalidRequestError),
        ({"prompt": "a", "failure_policy": "pray"}, "failure_policy", InvalidRequestError),
        ({"prompt": "a", "failure_policy": []}, "failure_policy", InvalidRequestError),
        ({"prompt": "a", "timeout_s": 0}, "timeout_s", InvalidRequestError),
        ({"prompt": "a", "timeout_s": float("inf")}, "timeout_s", InvalidRequestError),
    ],
)
async def test_bad_input_names_the_parameter(intake, fields, param, error):
    with pytest.raises(error) as caught:
        await intake.prepare(UncheckedRequest(**fields))
    assert caught.value.param == param
    assert type(caught.value) is error


async def test_bad_numbers_are_refused_before_the_tokenizer_works(intake, words):
    with pytest.raises(InvalidRequestError):
        await intake.prepare(UncheckedRequest(prompt="a b", sampling={"temperature": -1}))
    assert words.calls == 0


async def test_words_that_are_bad_are_banned_in_both_places_of_a_text(intake, words):
    words.encode = lambda text, add=True, *, param="prompt": [len(text)]
    request = await intake.prepare(UncheckedRequest(prompt="a", sampling={"bad_words": ["sky "]}))
    assert request.sampling.bad_words == ((3,), (4,))
    for bad in ("sky", [1], [" "], ["x" * 300], ["a"] * 200):
        with pytest.raises(InvalidRequestError) as caught:
            await intake.prepare(UncheckedRequest(prompt="a", sampling={"bad_words": bad}))
        assert caught.value.param == "bad_words"


@pytest.mark.parametrize("field", ["n", "best_of", "beam_width"])
async def test_choices_are_capped(intake, field):
    with pytest.raises(InvalidRequestError) as caught:
        await intake.prepare(UncheckedRequest(prompt="a", sampling={field: 17}))
    assert caught.value.param == field


async def test_the_priority_is_a_32_bit_number(intake):
    assert (await intake.prepare(UncheckedRequest(prompt="a"))).priority == 0
    assert (await intake.prepare(UncheckedRequest(prompt="a", priority=-7))).priority == -7
    for bad in (2**31, "high", 1.5, True):
        with pytest.raises(InvalidRequestError) as caught:
            await intake.prepare(UncheckedRequest(prompt="a", priority=bad))
        assert caught.value.param == "priority"


async def test_beam_search_leaves_the_defaults_for_drawing_out(intake):
    drawn = (await intake.prepare(UncheckedRequest(prompt="a"))).sampling
    assert (drawn.temperature, drawn.beam_width) != (0.0, 3)
    sampling = (await intake.prepare(UncheckedRequest(prompt="a", use_beam_search=True, sampling={"n": 3}))).sampling
    assert (sampling.beam_width, sampling.n, sampling.best_of) == (3, 3, 0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
    with pytest.raises(InvalidRequestError) as caught:
        await intake.prepare(UncheckedRequest(prompt="a", use_beam_search=True, sampling={"temperature": 0.7}))
    assert caught.value.param == "temperature"


async def test_echo_and_reasoning_are_reported_to_the_apis(intake, words):
    request = await intake.prepare(UncheckedRequest(prompt="a bb", echo=True, tenant="t"))
    assert (request.echo, request.thinking, request.tenant) == ("a bb", False, "t")
    assert (await intake.prepare(UncheckedRequest(token_ids=[1, 2], echo=True))).echo == "x xx"
    words.decode = lambda ids, *, skip_special_tokens=True: "<|assistant|><think>\n"
    assert (await intake.prepare(UncheckedRequest(messages=[{"role": "user", "content": "a"}]))).thinking
    assert not (await intake.prepare(UncheckedRequest(prompt="a"))).thinking


async def test_tools_and_switches_reach_the_template(intake, words):
    seen = {}

    def encode_chat(messages, add_generation_prompt=True, *, tools=None, extra=None):
        seen.update(tools=tools, extra=extra)
        return [1]

    words.encode_chat = encode_chat
    tools, switches = [{"type": "function"}], {"enable_thinking": False}
    spec = UncheckedRequest(messages=[{"role": "user", "content": "a"}], tools=tools, chat_template_kwargs=switches)
    assert await intake.tokenize(spec) == [1]
    assert seen == {"tools": tools, "extra": switches}


async def test_detokenize(intake):
    assert await intake.detokenize("", [1, 2]) == "x xx"
    for tokens in ("a", [100], [-1], [True]):
        with pytest.raises(InvalidRequestError) as caught:
            await intake.detokenize("", tokens)
        assert caught.value.param == "tokens"
    with pytest.raises(ModelNotFoundError):
        await intake.detokenize("other", [1])


@pytest.mark.parametrize(
    ("wish", "ids"),
    [
        ({"truncate_prompt_tokens": 2}, (2, 3)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, (1, 2)),
        ({"truncate_prompt_tokens": 3}, (1, 2, 3)),
        ({"truncate_prompt_tokens": -1, "sampling": {"max_tokens": 18}}, (2, 3)),
        ({"truncate_prompt_tokens": -1}, (1, 2, 3)),
    ],
)
async def test_long_prompts_are_cut_where_that_is_asked_for(intake, wish, ids):
    for given in ({"prompt": "a bb ccc"}, {"token_ids": [1, 2, 3]}):
        assert (await intake.prepare(UncheckedRequest(**given, **wish))).prompt.token_ids == ids


async def test_ids_over_the_context_may_be_cut(intake):
    with pytest.raises(PromptTooLongError):
        await intake.prepare(UncheckedRequest(token_ids=[1] * 30))
    request = await intake.prepare(UncheckedRequest(token_ids=[1] * 30, truncate_prompt_tokens=5))
    assert request.prompt.token_ids == (1,) * 5


@pytest.mark.parametrize(
    "wish",
    [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 20},
        {"truncate_prompt_tokens": True},
        {"truncation_side": "middle"},
        {"cache_salt": "x" * 129},
        {"cache_salt": "ü" * 65},
        {"cache_salt": "\ud800"},
        {"cache_salt": 5},
    ],
)
async def test_bad_cuts_and_salts_name_the_field(intake, wish):
    with pytest.raises(InvalidRequestError) as error:
        await intake.prepare(UncheckedRequest(prompt="a", **wish))
    assert error.value.param == next(iter(wish))


async def test_a_salt_of_the_callers_parts_within_its_tenant(intake):
    async def salt(tenant, text=None):
        request = await intake.prepare(UncheckedRequest(prompt="a", tenant=tenant, cache_salt=text))
        assert request.owner == tenant.encode()
        return request.prompt.cache_salt

    salts = [
        await salt("a"),
        await salt("a", "b"),
        await salt("ab"),
        await salt("b"),
        await salt("b", "b"),
        await salt("a", "c"),
    ]
    assert len(set(salts)) == len(salts)
    assert await salt("a", "b") == salts[1]
    assert await salt("a", "") == salts[0]


def test_all_salts_of_a_tenant_are_one_tenant_to_workers():
    """Item 2.2: a tenant that sends each prompt with a salt of its own gets one share of a worker, not one for each."""
    one, other = (tenant_salt(b"s" * 32, tenant) for tenant in ("one", "other"))
    assert {tenant_of(further_salt(one, text)) for text in "abc"} == {tenant_of(one)}
    assert tenant_of(further_salt(other, "a")) != tenant_of(one)
    assert len({further_salt(one, text) for text in "abc"}) == 3


async def test_an_echo_is_of_the_tokens_that_are_kept(intake):
    """Issue 15, 4.9."""
    whole = UncheckedRequest(prompt="a bb ccc dddd", echo=True, sampling={"logprobs": 1})
    request = await intake.prepare(whole)
    assert (request.echo, request.echo_offsets) == ("a bb ccc dddd", (0, 1, 4, 8))
    request = await intake.prepare(replace(whole, sampling={}))
    assert (request.echo, request.echo_offsets) == ("a bb ccc dddd", ())
    request = await intake.prepare(replace(whole, truncate_prompt_tokens=2))
    assert (request.echo, request.echo_offsets) == (" ccc dddd", (0, 4))
    request = await intake.prepare(replace(whole, truncate_prompt_tokens=2, truncation_side="right", sampling={}))
    assert (request.echo, request.echo_offsets) == ("a bb", (0, 1))
    request = await intake.prepare(replace(whole, prompt=None, token_ids=[1, 2]))
    assert (request.echo, request.echo_offsets) == ("x xx", ())


@pytest.mark.parametrize("body", [{}, {"max_tokens": 3}, {"use_beam_search": True, "n": 2}])
async def test_values_that_were_checked_before_are_those_of_this_request(intake, body):
    """The same body of two APIs has another default, a seed is drawn for each request, and a beam is no option."""

    body = dict(body)

    async def sampled(call, **source):
        call = call(source | body, features=ModelFeatures(), unknown=UnknownFields())
        return (await intake.prepare(call.spec)).sampling

    for _ in range(2):
        completion = await sampled(completion_call, prompt=[5, 6])
        chat = await sampled(chat_call, messages=[{"role": "user", "content": "a b"}])
        assert (completion.max_tokens, chat.max_tokens) == (body.get("max_tokens", 16), body.get("max_tokens", 18))
        assert completion.seed != chat.seed
        assert completion.beam_width == chat.beam_width == (2 if "use_beam_search" in body else 0)
        assert replace(chat, seed=0, max_tokens=0) == replace(completion, seed=0, max_tokens=0)
    body.pop("use_beam_search", None)
    assert (await sampled(completion_call, prompt=[5, 6])).beam_width == 0


async def test_a_hint_is_the_next_requests_body_and_asks_for_no_answer(intake):
    body = {"prompt": "a bb ccc", "max_tokens": 5, "n": 3, "temperature": 99, "prefetch": True, "cache_ttl_s": 60}
    call = completion_call(body, features=ModelFeatures(), unknown=UnknownFields())
    request = await intake.prepare(call.spec)
    assert (request.prefetch, request.sampling.max_tokens, request.sampling.n) == (True, 1, 1)
    assert request.priority == 2**31 - 1, "it goes last among its tenant's"
    assert request.retention.claim.ttl_s == 60.0
    assert request.local_prefill_max_tokens == 64, "decode alone computes so short a prompt, the next time, too"
    longer = replace(call.spec, prompt=None, token_ids=[1] * 5, local_prefill_max_tokens=4)
    assert (await intake.prepare(longer)).local_prefill_max_tokens == 0
    request = replace(longer, prefetch=False, sampling={"max_tokens": 1})
    assert (await intake.prepare(request)).local_prefill_max_tokens == 4
    call.spec.resume_after = [1]
    with pytest.raises(InvalidRequestError, match="prefetch"):
        await intake.prepare(call.spec)
