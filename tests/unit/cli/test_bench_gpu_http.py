"""The client of bench/gpu/over_http.py: parsing of a stream, and the counts of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diptych.bench.gpu.checkouts import phases
from diptych.bench.gpu.http_client import Answer, read
from diptych.bench.gpu.over_http import percentiles, summary
from diptych.bench.gpu.random_model import TINY, write_model
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.exec.model_runner import TorchModelRunner

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(*ids, **more):
    event = {"choices": [{"index": 0, "text": "t", "token_ids": list(ids)}], **more}
    return wire(b"data: " + json.dumps(event).encode() + b"\n\n")


def wire(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE = wire(b"data: [DONE]\n\n")


def test_each_message_has_the_time_at_which_it_was_whole():
    second = chunk(2, 3)
    pieces = [
        (1.0, HEAD + chunk(1)),
        (2.0, second[:20]),
        (3.0, second[20:]),
        (4.0, chunk(diptych={"kv_bytes": 9}) + DONE),
    ]
    answer = Answer(0.5)
    read(pieces, answer)
    assert (answer.times, answer.counts, answer.token_ids) == ([1.0, 3.0], [1, 2], [1, 2, 3])
    assert (answer.kv_bytes, answer.error) == (9, "")


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\nno such model", "404"),
        (b"", "no answer"),
        (HEAD + chunk(1), "cut"),
        (HEAD + chunk(1) + wire(b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
    ],
)
def test_what_is_no_answer_is_an_error(raw, error):
    answer = Answer(0.0)
    read([(1.0, raw)], answer)
    assert error in answer.error


def test_a_row_counts_failures_and_gaps():
    good = Answer(0.0, [0.1, 0.11, 0.13], [1, 1, 2], [1, 2, 3, 4])
    short = Answer(0.0, [0.1], [1], [1])
    row = summary([good, short, Answer(0.0, error="refused")], 4, span_s=2.0)
    assert (row["requests"], row["failed"], row["errors"]) == (3, 2, ["1 tokens", "refused"])
    assert row["ttft_ms"]["p50"] == 100.0
    assert row["second_gap_ms"]["p50"] == 10.0
    assert row["itl_ms"]["p99"] == 20.0
    assert row["tpot_ms"]["p50"] == 10.0
    assert (row["output_tokens_per_s"], row["tokens_per_message"]) == (2.0, 1.333)
    assert percentiles([]) == {}


def test_the_model_is_one_that_the_tokenizer_reads(tmp_path):
    folder = write_model(tmp_path / "m", TINY, "cpu")
    assert write_model(folder, TINY, "cpu") == folder
    tokenizer = ModelTokenizer(folder)
    assert tokenizer.vocab_size == TINY.vocab
    assert tokenizer.eos_token_ids == (2,)


def test_18_phases_of_a_start_are_counted_from_the_first_line_of_their_process():
    def line(second, event):
        return json.dumps({"event": event, "timestamp": f"2026-11-29T10:00:{second:09.6f}Z"})

    logs = [
        ("server.log", [line(1.5, "gpu memory: a step takes 1.00 GiB"), "not JSON", line(4.0, "ready")]),
        ("decode-0.log", [line(2.0, "by default"), line(2.25, "weights loaded in 0.7 s"), '{"event": "ready"}']),
    ]
    text = "\n".join(f"== {name}\n" + "\n".join(lines) for name, lines in logs)
    assert phases(text) == {
        "server.log: gpu memory: a step takes 1.00 GiB": 0.0,
        "server.log: ready": 2.5,
        "decode-0.log: weights loaded in 0.7 s": 0.25,
    }


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_quantized_weights_are_the_nearest_codes(tmp_path: Path, method: str) -> None:
    """What the engine reads from the folder is at most half a code away from the same seed's weights."""
    plain = load_file(write_model(tmp_path / "plain", TINY, "cpu") / "model-00000.safetensors")
    folder = write_model(tmp_path / method, TINY, "cpu", method)
    stored = load_file(folder / "model-00000.safetensors")
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        weight = plain[f"model.layers.1.{name}.weight"]
        codes = {end: stored[f"model.layers.1.{name}.{end}"] for end in ends_of(method)}
        if method == "fp8":
            scale = codes["weight_scale"]
            meant, bound = codes["weight"].float() * scale, torch.maximum(weight.abs() / 16, scale / 512)
        else:
            words = codes["weight_packed"]
            scale = codes["weight_scale"].repeat_interleave(128, 1)
            nibbles = torch.stack([words >> 4 * i & 15 for i in range(8)], 2).flatten(1)
            meant, bound = (nibbles - 8) * scale, scale * 0.5001
        assert bool(((meant - weight).abs() <= bound).all())
    TorchModelRunner.load(folder, num_blocks=4, block_size=16, num_threads=1)


def ends_of(method: str) -> tuple[str, ...]:
    return ("weight", "weight_scale") if method == "fp8" else ("weight_packed", "weight_scale")
