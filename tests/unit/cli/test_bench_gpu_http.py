"""The client of bench/gpu/over_http.py: parsing of a stream, and the counts of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diptych.bench.gpu.checkouts import phases
from diptych.bench.gpu.http_client import Answer, read
from diptych.bench.gpu.over_http import percentiles, pull_row, summary
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
        (4.0, chunk(diptych={"kv_bytes": 9, "cached_tokens_prefill": 16, "pulls": [{"num_tokens": 16}]}) + DONE),
    ]
    answer = Answer(0.5)
    read(pieces, answer)
    assert (answer.times, answer.counts, answer.token_ids) == ([1.0, 3.0], [1, 2], [1, 2, 3])
    assert (answer.kv_bytes, answer.error) == (9, "")
    assert (answer.cached_prefill, answer.pulls) == (16, [{"num_tokens": 16}])


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


def turn(ids, cached=0, **pull):
    """A second turn of 24 tokens. `pull`: of prefill, if any."""
    facts = {
        "reader": "prefill-0",
        "note": "",
        "num_tokens": 96,
        "kv_bytes": 960,
        "duration_s": 0.02,
        "other_bits": False,
    }
    answer = Answer(0.0, [0.1] * 24, [1] * 24, ids, cached_prefill=cached, pulls=[facts | pull] if pull else [])
    return answer


def test_a_row_of_pulls_compares_with_an_empty_cache_and_with_the_other_direction():
    ids = list(range(24))
    rates = {"prefill-0": {"decode-0": 8e9}, "decode-0": {"prefill-0": 10e9}}
    right = turn(ids, 112, kv_bytes=1000), turn(ids), 113, 177
    row = pull_row([right, right], rates)
    assert (row["at_most_a_block_and_the_new_tokens_computed"], row["ids_as_with_an_empty_cache"]) == (2, 2)
    assert (row["pulled_tokens"], row["kv_bytes"], row["pull_ms"]["p50"]) == (96, 1000, 20.0)
    assert row["part_of_prefill_to_decode"] == 0.8
    # a part came; other ids; decode's other bits; a failed request
    cut = turn(ids, 64, note="d0 had 64 of 112 tokens"), turn(ids), 113, 177
    assert pull_row([cut], rates)["at_most_a_block_and_the_new_tokens_computed"] == 0
    other = turn(ids, 112, other_bits=True), turn(ids[::-1]), 113, 177
    assert pull_row([other], rates)["ids_as_with_an_empty_cache"] == 0
    assert pull_row([other], rates)["kv_of_decode_may_differ"] == 1
    failed = Answer(0.0, error="refused"), turn(ids), 113, 177
    assert pull_row([failed], {})["errors"] == ["refused"]
    # where more than a block of the history was computed
    assert (
        pull_row([(turn(ids, 80, kv_bytes=1), turn(ids), 113, 177)], rates)[
            "at_most_a_block_and_the_new_tokens_computed"
        ]
        == 0
    )


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
    """What the engine reads from the folder is at most half a code away from the same seed's weights, but for cut ranges."""
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
            ends = (nibbles == 0) | (nibbles == 15)  # of a group whose range is cut, for a smaller error of the rest
            meant, bound = (nibbles - 8) * scale, scale * torch.where(ends, 3.0, 0.5001)
        assert bool(((meant - weight).abs() <= bound).all())
    TorchModelRunner.load(folder, num_blocks=4, block_size=16, num_threads=1)


def ends_of(method: str) -> tuple[str, ...]:
    return ("weight", "weight_scale") if method == "fp8" else ("weight_packed", "weight_scale")
