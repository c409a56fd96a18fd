"""Every parser of bytes that come from outside: it returns a value or raises its typed error, whatever it gets.

Inputs are bytes at random, and valid inputs that were cut, doubled, flipped and spliced. CI runs a few, always the same;
`make fuzz MINUTES=10` runs as many as fit, at random. A parser that is added belongs into PARSERS.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pkgutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.cli.models.gguf_convert import GgufModel
from diptych.cli.settings.merge import read_file
from diptych.common.checkpoint.manifest import read_manifest
from diptych.common.errors import AuthenticationError, ConfigError, DiptychError, TransferError
from diptych.common.grammar import Grammar, GrammarKind, Tags, check_escapes, check_grammar, choices_of
from diptych.common.store.codec import (
    BadRowError,
    decode_event,
    decode_pending,
    decode_record,
    encode_event,
    encode_pending,
    encode_record,
)
from diptych.common.store.interface import KvEvent
from diptych.common.store.redis_url import parse_sentinel_url
from diptych.common.ticket import seal, unseal
from diptych.engine.exec.checkpoint import Checkpoint
from diptych.engine.exec.models.registry import describe
from diptych.engine.grammar.compiler import ChildProcess, GrammarCompiler, GrammarLimits
from diptych.engine.grammar.program import FirstToken
from diptych.kvtransfer.fabric.peer_book import PeerBook, pack_parts, unpack_parts
from diptych.kvtransfer.slabs.handle import SlabHandle, decode_note, encode, encode_renewal, sign
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, check_slab, message_bytes, read_refusal, write_frame
from diptych.kvtransfer.transports import nixl, ucx
from diptych.kvtransfer.wrappers import encryption
from diptych.loadtest.targets.openai import OpenAITarget
from diptych.loadtest.targets.target import TargetError
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import KeySet, load_keys
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.api.grpc.requests import parse
from diptych.router.api.json_body import parse_object
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.requests import chat_call, completion_call
from diptych.router.api.openai.responses import responses_call
from diptych.router.preprocess.structured import grammar_request
from diptych.router.requests.messages import ModelFeatures
from diptych.router.tools.reasoning import ReasoningSplitter
from diptych.router.tools.registry import BUILT_IN
from diptych.rpc import convert, v1
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import decode_pb2, prefill_pb2, router_pb2, types_pb2, worker_pb2
from diptych.worker import wire
from diptych_tests.http_api import api_servers
from diptych_tests.quantized import AWQ, COMPRESSED_INT4, COMPRESSED_INT8, FP8, GPTQ
from diptych_tests.records import worker_record

SECONDS = float(os.environ.get("DIPTYCH_TEST_FUZZ_S", "0"))
"""For all parsers together; 0: what CI runs."""
EXAMPLES = 400 if SECONDS else 30
TYPED = (DiptychError, ConfigError)
KEY = bytes(32)
WAIT_S = 60.0
Input = bytes
Parser = Callable[[bytes], object]


def profile(**more: Any) -> settings:
    return settings(
        max_examples=EXAMPLES, deadline=None, derandomize=not SECONDS, database=None,
        suppress_health_check=list(HealthCheck), **more,
    )  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A valid input, changed in one to six places; or bytes at random."""
    if draw(st.integers(0, 7)) == 0:
        return draw(st.binary(max_size=300))
    raw = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at, to = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
        match draw(st.integers(0, 6)):
            case 0:
                del raw[at:to]
            case 1:
                raw[at:at] = raw[at:to][:2000]
            case 2 if raw:
                raw[min(at, len(raw) - 1)] ^= 1 << draw(st.integers(0, 7))
            case 3:
                raw[at:to] = draw(st.binary(max_size=12))
            case 4:
                raw[at:at] = draw(st.sampled_from(ODD))
            case 5:
                other = draw(st.sampled_from(seeds))
                raw[at:] = other[min(at, len(other)) :]
            case 6:
                raw[at : at + 8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    return bytes(raw)


ODD = [
    b"NaN", b"-1", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 2000, b"\xff\xfe", b"\0", b"\\ud800", b"null", b'""', b"true",
    b"18446744073709551616", b"-0.0", b"\r\n\r\n", b"data: ", b"<tool_call>", b"[TOOL_CALLS]", b"(a+)+$", b"\xf0\x9f\x98\x80",
]  # fmt: skip


def as_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


# ---- what is parsed, and valid inputs of it ----

HANDLE = sign(KEY, SlabHandle("p0", "life1", "att", 0, 1, 0, 16, 0, 2, 7, 64, 5, 99))
FEATURES = ModelFeatures("hermes", reasoning=True, takes_tools=True)
BODIES = [
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0.5, "seed": 7, "n": 2, "stop": ["a"]},
    {"prompt": [1, 2, 3], "logit_bias": {"5": 1.0}, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": "a", "guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}, "bad_words": ["x"]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tool_choice": "auto",
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    {"prompt": "a", "structured_outputs": {"regex": "(a|b)+"}, "min_p": 0.1, "top_k": 3, "cache_salt": "x"},
    {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "string"}}}},
    {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}, "priority": 1},
]  # fmt: skip
JSONS = [json.dumps(body).encode() for body in BODIES]
DEEP = [b'{"prompt":' * 3000, b'{"messages": ' + b"[" * 3000]


def body_parser(build: Callable[..., Any]) -> Parser:
    return lambda raw: build(parse_object(raw), features=FEATURES, unknown=UnknownFields(refuse=False))


def structured(raw: bytes) -> None:
    """Also the grammar's checks that a worker makes again."""
    found = grammar_request(parse_object(raw))
    if found is not None:
        check_grammar(found.grammar)
        check_escapes(found.grammar.source)
        if found.grammar.kind is GrammarKind.CHOICE:
            choices_of(found.grammar.source)


def sse(raw: bytes) -> None:
    """A peer's stream, in pieces of any size."""

    class Stream:
        async def iter_any(self) -> Any:
            size = 1 + len(raw) % 17
            for at in range(0, len(raw), size):
                yield raw[at : at + size]

    async def read() -> None:
        async for _ in OpenAITarget("http://x")._events(Stream()):  # type: ignore[arg-type]
            pass

    run(read())


def run(work: Any) -> None:
    """Without an event loop of its own: nothing in it waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def tool_parser(name: str) -> Parser:
    def read(raw: bytes) -> None:
        text, count = as_text(raw), itertools.count()
        whole = [BUILT_IN[name](("f", "add"), lambda: f"id{next(count)}") for _ in range(2)]
        assert whole[0].feed(text) is not None
        whole[0].end()
        for char in text:
            whole[1].feed(char)
        whole[1].end()

    return read


def reasoning(raw: bytes) -> None:
    splitter = ReasoningSplitter(thinking=bool(raw) and raw[0] % 2 == 1)
    for char in as_text(raw):
        splitter.feed(char)
    splitter.end()


def slab(raw: bytes) -> None:
    view = memoryview(bytearray(raw.ljust(message_bytes(HANDLE.size_bytes), b"\0")))
    error = check_slab(view, HANDLE)
    assert error is not None or bytes(view[: message_bytes(64)]) == GOOD_SLAB
    read_refusal(view)


def _good_slab() -> bytes:
    view = memoryview(bytearray(message_bytes(64)))
    write_frame(view, HANDLE)
    return bytes(view)


GOOD_SLAB = _good_slab()
TOKEN = b"t" * 16


class _Nobody:
    """In place of a library: it knows no peer."""

    def add_remote_agent(self, metadata: bytes) -> Any:
        raise RuntimeError("no such agent")


def no_endpoint(address: bytes) -> Any:
    raise TransferError("no such endpoint")


def ucx_message(raw: bytes) -> None:
    made = object.__new__(ucx.UcxTransport)
    made._token, made._events = TOKEN, []  # type: ignore[attr-defined]
    made._book = PeerBook("ucx", "h", lambda peer, why: None)  # type: ignore[attr-defined]
    made._book.incoming[1] = ucx._Endpoint("d0@1#1", None, 1)  # type: ignore[attr-defined]
    made._endpoint_to = no_endpoint  # type: ignore[attr-defined]
    made._on_control(raw.ljust(4096, b"\0")[:4096])  # type: ignore[attr-defined]


def nixl_message(raw: bytes) -> None:
    made = object.__new__(nixl.NixlTransport)
    made._token, made._events, made._reads, made._answers = TOKEN, [], {}, {}
    made._book = PeerBook("nixl", "h", lambda peer, why: None)
    made._book.incoming[1] = nixl.Peer("d0@1#1", "agent", 1, TOKEN)
    made._agent = _Nobody()
    made._on_message(raw)


def envelope(raw: bytes) -> None:
    opener = encryption.Opener(KEY, "aes-gcm", "p@1", "d@1")
    assert not opener.open(raw, b"", bytearray(max(0, len(raw) - encryption.OVERHEAD_BYTES)))


def greeting(raw: bytes) -> None:
    parts = unpack_parts(raw, 4)
    assert parts is None or raw.startswith(pack_parts(*parts))


def event_row(raw: bytes) -> None:
    names = [b"i", b"e", b"s", b"k", b"b", b"t"]
    decode_event(dict(zip(names, raw.split(b"|", 5), strict=False)))


def pending_row(raw: bytes) -> None:
    decode_pending(dict(itertools.zip_longest(*[iter(raw.split(b"|"))] * 2, fillvalue=b"")))


def in_file(name: str, read: Callable[[Path], object]) -> Parser:
    def parse_file(raw: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(raw)
            read(path)

    return parse_file


def checkpoint(path: Path) -> None:
    import torch

    Checkpoint(path.parent, dtype=torch.float32, device=torch.device("cpu"))


def _gguf_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_head_count(2)
        writer.add_embedding_length(4)
        writer.add_block_count(1)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def gguf_model(path: Path) -> None:
    model = GgufModel(path)
    model.config()
    model.tensors()


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": [1, 2],
}  # fmt: skip


def config_json(raw: bytes) -> None:
    """As the loader reads it: JSON that is no object is refused before."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        describe(value)


def authorization(raw: bytes) -> None:
    made = object.__new__(Authenticator)
    made._keys, made._checked, made._now = KeySet(KEY), 0.0, lambda: 0.0
    made.identify(raw.decode("latin-1"))


def messages() -> Iterator[tuple[str, Parser, list[bytes]]]:
    """What is made of a message of the wire, behind protobuf's own parser."""
    submit = decode_pb2.Submit(attempt="a", prompt_token_ids=[1, 2], remaining_s=3.0, cache_salt=b"x")
    handle = wire.handle_to_proto(HANDLE)
    address = worker_pb2.KvAddress(transport="ucx", host="h", port=1, blob=b"b")
    for name, kind, read, seed in (
        ("GenerateRequest", router_pb2.GenerateRequest, lambda m: m, router_pb2.GenerateRequest(model="m")),
        ("Submit", decode_pb2.Submit, lambda m: convert.prompt_from_proto(m, vocab_size=1000), submit),
        ("SamplingParams", types_pb2.SamplingParams, lambda m: convert.sampling_from_proto(m, vocab_size=1000),
         types_pb2.SamplingParams(temperature=1.0, max_tokens=3)),
        ("SlabHandle", prefill_pb2.SlabHandle, wire.handle_from_proto, handle),
        ("KvAddress", worker_pb2.KvAddress, wire.kv_address_from_proto, address),
        ("Compat", worker_pb2.Compat, convert.compat_from_proto, worker_pb2.Compat(model="m", protocol_version=4)),
        ("Failure", types_pb2.Failure, from_failure, types_pb2.Failure(reason="WORKER_LOST", message="m")),
    ):  # fmt: skip
        yield f"message {name}", (lambda raw, kind=kind, read=read: read(parse(kind, raw))), [seed.SerializeToString()]


CONTROL = [
    struct.pack("<16sBQQ", TOKEN, kind, 1, 5) + body
    for kind in range(5)
    for body in (b"", b"\x05\0hello", pack_parts(b"addr", b"d0", b"1"), encode(HANDLE))
]
NOTIFICATIONS = [b"DKVn" + raw for raw in CONTROL]

PARSERS: dict[str, tuple[Parser, list[bytes], tuple[type[BaseException], ...]]] = {
    "HTTP body": (parse_object, JSONS + DEEP, TYPED),
    "chat completions": (body_parser(chat_call), JSONS, TYPED),
    "completions": (body_parser(completion_call), JSONS, TYPED),
    "responses": (body_parser(responses_call), JSONS, TYPED),
    "grammars of a body": (structured, JSONS, TYPED),
    "tags of a grammar": (lambda raw: Tags.load(as_text(raw)),
                          [b'{"tags": [{"begin": "a", "schema": "{}", "end": "b"}]}'], TYPED),
    "choices of a grammar": (lambda raw: choices_of(as_text(raw)), [b'["a", "b"]'], TYPED),
    "Authorization": (authorization, [b"Bearer dpk-000000000000-" + b"A" * 43, b"Basic x"], (AuthenticationError,)),
    "SSE of a peer": (sse, [b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
                            b': ping\r\n\r\ndata: {"usage": {"prompt_tokens": 1}, "choices": []}\r\n\r\n'], (TargetError,)),
    "reasoning": (reasoning, [b"<think>a</think>b", b"</think>"], ()),
    **{f"tool calls, {name}": (tool_parser(name), [
        b'<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>', b'[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        b'{"name": "f", "parameters": {"a": 1}}; {"name": "add"', b'[TOOL_CALLS]f[ARGS]{"a": "b"}', b"<|python_tag|>{",
    ], ()) for name in BUILT_IN},
    "handle in a note": (decode_note, [encode(HANDLE), encode_renewal(HANDLE)], (ValueError,)),
    "placement ticket": (lambda raw: unseal(KEY, raw), [seal(b"k" * 32, b"claims")], TYPED),
    "slab": (slab, [GOOD_SLAB, GOOD_SLAB[:HEADER_BYTES]], ()),
    "encrypted message": (envelope, [bytes(200)], ()),
    "parts of a greeting": (greeting, [pack_parts(b"a", b"b", b"c", b"d")], ()),
    "control message of UCX": (ucx_message, CONTROL, ()),
    "notification of NIXL": (nixl_message, NOTIFICATIONS, ()),
    "lease in Redis": (decode_record, [encode_record(worker_record())], (BadRowError,)),
    "event in Redis": (event_row, [b"|".join(encode_event(KvEvent("a", 1, 2, "stored", (bytes(16),))).values())], (BadRowError,)),
    "pending in Redis": (pending_row, [b"|".join(itertools.chain.from_iterable(
        (name.encode(), row) for name, row in encode_pending({"p0": (1, 2)}).items()))], (BadRowError,)),
    "Sentinel URL": (lambda raw: parse_sentinel_url(as_text(raw)), [b"redis+sentinel://u:p@a:1,[::1]:2/m/0"], TYPED),
    "config.json": (config_json, [json.dumps(LLAMA).encode(), *(
        json.dumps({**LLAMA, "quantization_config": config}).encode()
        for config in (AWQ, GPTQ, FP8, COMPRESSED_INT8, COMPRESSED_INT4)
    )], TYPED),
    "safetensors": (in_file("model.safetensors", checkpoint), [save({"a": np.zeros((2, 3), np.float32)})], TYPED),
    "GGUF": (in_file("m.gguf", gguf_model), [_gguf_file()], TYPED),
    "manifest": (in_file("diptych-manifest.json", lambda path: read_manifest(path.parent)),
                 [b'{"version": 1, "fingerprint": "x", "files": {"config.json": {"size_bytes": 1, "blake3": "00"}}}'], TYPED),
    "file of API keys": (in_file("keys.json", load_keys),
                         [b'{"version": 1, "hash_key": "' + b"00" * 32 + b'", "keys": []}'], TYPED),
    "settings in YAML": (in_file("c.yaml", read_file), [b"a: 1\nb: [x, y]\n"], TYPED),
    "settings in TOML": (in_file("c.toml", read_file), [b'a = 1\n[b]\nc = "x"\n'], TYPED),
    **{name: (read, seeds, TYPED) for name, read, seeds in messages()},
}  # fmt: skip


GRAMMARS: dict[GrammarKind, list[bytes]] = {
    GrammarKind.JSON_SCHEMA: [
        b'{"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}',
        b'{"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "$ref": "#/$defs/n"}',
        b'{"type": "array", "items": {"enum": ["a", 1, null]}, "maxItems": 3}', b'{"type": "string", "pattern": "^[a-z]+$"}',
    ],
    GrammarKind.REGEX: [b"[a-z]+@(x|yy){1,3}", b"(a+)+$", b"\\d{2,5}\\p{L}*"],
    GrammarKind.CHOICE: [b'["a", "b"]'],
    GrammarKind.EBNF: [b'root ::= "a" [0-9]+ | b\nb ::= "b" root?', b'start: "a" DIGITS\nDIGITS: /[0-9]{2}/'],
    GrammarKind.TAGS: [b'{"tags": [{"begin": "<a>", "schema": "{}", "end": "</a>"}], "trigger": "<a>"}'],
}  # fmt: skip


def until_the_time_is_up(check: Callable[[], None], share: int) -> None:
    """Once in CI; in the long run again and again, each time with other inputs."""
    end = time.monotonic() + SECONDS / share
    check()
    while time.monotonic() < end:
        check()


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_returns_or_raises_its_typed_error(name: str) -> None:
    read, seeds, typed = PARSERS[name]

    @profile()
    @given(raw=damaged(seeds))
    def check(raw: bytes) -> None:
        try:
            read(raw)
        except typed:
            return

    until_the_time_is_up(check, len(PARSERS) + 2)


def test_what_is_valid_is_parsed() -> None:
    """Else the errors above would be all that was tried."""
    for name in (
        "HTTP body",
        "completions",
        "lease in Redis",
        "event in Redis",
        "config.json",
        "handle in a note",
        "safetensors",
    ):
        read, seeds, _ = PARSERS[name]
        read(seeds[1 if name == "completions" else 0])
    assert unseal(KEY, seal(KEY, b"claims")) == b"claims"


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    """A model's folder with one token for each byte."""
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 257, "eos_token_id": 256}))
    return str(tmp_path)


@pytest.mark.multiproc
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_a_grammar_is_compiled_or_refused(vocabulary: str, backend: str) -> None:
    """By the real libraries, in the process that has them: whatever kills it there is a typed error here."""
    limits = GrammarLimits(num_processes=1, time_cap_s=2.0)
    started: list[ChildProcess] = []

    def start() -> ChildProcess:
        started.append(ChildProcess(backend, vocabulary, limits))
        return started[-1]

    async def made() -> GrammarCompiler:
        return GrammarCompiler(start, lambda _: FirstToken(bytes(64)), lambda program, text: program, limits)  # type: ignore[arg-type, return-value]

    with asyncio.Runner() as runner:
        compiler = runner.run(made())

        @profile()
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            kind = data.draw(st.sampled_from(list(GRAMMARS)))
            grammar = Grammar(kind, as_text(data.draw(damaged(GRAMMARS[kind]))))
            try:
                check_grammar(grammar)
                runner.run(compiler.compile(grammar))
            except TYPED:
                return

        try:
            until_the_time_is_up(check, len(PARSERS) + 2)
            assert runner.run(compiler.compile(Grammar(GrammarKind.REGEX, "after+")))
        finally:
            runner.run(compiler.close())
            for one in started:
                if one._process is not None:
                    one._process.wait(WAIT_S)


# ---- bytes to every method of every server ----


def rpcs(*files: Any) -> list[tuple[str, bytes]]:
    """(method, a valid request)."""
    return [
        (f"/{service.full_name}/{method.name}", method.input_type._concrete_class().SerializeToString())
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


async def send(channel: Any, method: str, raws: Iterable[bytes]) -> grpc.StatusCode:
    """The status of a call with these messages, which ends when there is an answer."""
    call = channel.stream_stream(method)(timeout=WAIT_S)
    try:
        for raw in raws:
            await call.write(raw)
        await call.done_writing()
        async with asyncio.timeout(1.0):  # short: a stream that waits for more is as good as an answer
            await call.read()
    except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
        pass
    if not call.done():
        call.cancel()
        return grpc.StatusCode.OK
    if "DecodeError" in str(await call.details()):
        return grpc.StatusCode.INVALID_ARGUMENT  # grpc.aio calls it UNKNOWN, before any code of ours
    found: grpc.StatusCode = await call.code()
    return found


def fuzz_methods(runner: asyncio.Runner, channel: Any, methods: list[tuple[str, bytes]]) -> None:
    @profile()
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        method, valid = data.draw(st.sampled_from(methods))
        raw = data.draw(damaged([valid, b"\x0a\x03abc", b"\x12\x02\x08\x01", bytes(40)]))
        code = runner.run(send(channel, method, [raw]))
        # UNKNOWN is an exception that nobody expected.
        assert code is not grpc.StatusCode.UNKNOWN, (method, raw)

    until_the_time_is_up(check, len(PARSERS) + 2)


def test_bytes_to_every_method_of_the_router() -> None:
    with asyncio.Runner() as runner:
        api = FakeRouterApi(hello_script())
        servers = api_servers(api)
        at = runner.run(servers.__aenter__())
        channel = runner.run(_open(at.grpc))
        try:
            fuzz_methods(runner, channel, rpcs(router_pb2))
            assert runner.run(send(channel, "/diptych.rpc.v1.Router/ListModels", [b""])) is grpc.StatusCode.OK
        finally:
            runner.run(channel.close())
            runner.run(servers.__aexit__(None, None, None))


async def _open(address: str) -> Any:
    from diptych.rpc.channels import open_channel

    return open_channel(address)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_bytes_to_every_method_of_a_worker(pd: ModuleType, role: str) -> None:
    """By one who has the token: afterwards the worker serves, and holds nothing."""
    with asyncio.Runner() as runner:
        workers = pd.cluster()
        cluster = runner.run(workers.__aenter__())
        worker = cluster.prefill[0] if role == "prefill" else cluster.decode

        async def channel() -> Any:
            return pd.worker_channel(worker.address)

        opened = runner.run(channel())
        files = [decode_pb2, worker_pb2] if role == "decode" else [prefill_pb2, worker_pb2]
        methods = [(name, raw) for name, raw in rpcs(*files) if "SetRole" not in name and "Lookaside" not in name]

        async def served() -> None:
            async with pd.FakeRouter(cluster.decode.address) as router:
                answer = await router.run(cluster.submit_message(attempt="after", prompt=pd.PROMPT))
                assert answer.error is None
            await cluster.nothing_left()

        try:
            fuzz_methods(runner, opened, methods)
            runner.run(served())
        finally:
            runner.run(opened.close())
            runner.run(workers.__aexit__(None, None, None))


def test_every_service_of_the_contract_is_tried() -> None:
    tried = {"router_pb2", "decode_pb2", "prefill_pb2", "worker_pb2"}
    no_service = {"types_pb2", "status_pb2"}
    within = {"router_process_pb2"}  # over Unix sockets of the router's user, between processes of one version
    files = {module.name for module in pkgutil.iter_modules(v1.__path__) if module.name.endswith("_pb2")}
    assert files == tried | no_service | within
    assert len(rpcs(router_pb2, decode_pb2, prefill_pb2, worker_pb2)) >= 15
