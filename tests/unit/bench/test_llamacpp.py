"""What the comparison with llama.cpp does besides measuring."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from diptych.bench.peers import llamacpp
from diptych.common.errors import ConfigError


def answer(index, tokens, *, prompt_ms=100.0, predicted_ms=1000.0, cached=0):
    timings = {
        "prompt_n": 4, "prompt_ms": prompt_ms, "predicted_n": len(tokens), "predicted_ms": predicted_ms, "cache_n": cached,
    }  # fmt: skip
    return {"index": index, "tokens": tokens, "timings": timings}


def test_rates_are_of_all_requests_and_the_slowest_of_them():
    answers = [answer(1, [7, 8, 9], predicted_ms=500.0), answer(0, [1, 2, 3], prompt_ms=200.0, predicted_ms=400.0)]
    run = llamacpp.run_of(answers, 2, 3, 0.6)
    assert run.ids == [[1, 2, 3], [7, 8, 9]]
    assert run.decode == pytest.approx(2 * 2 / 0.5)  # the first token of each belongs to its prompt
    assert run.prompt == pytest.approx(8 / 0.2)
    assert run.cpu_ms == pytest.approx(100.0)


@pytest.mark.parametrize(
    "answers",
    [
        [answer(0, [1, 2])],
        [answer(0, [1, 2, 3]), answer(1, [1, 2])],
        [answer(0, [1, 2, 3]), answer(1, [1, 2, 3], cached=2)],
    ],
    ids=["one is missing", "one ended early", "a part was cached"],
)
def test_what_is_no_like_for_like_answer_is_refused(answers):
    with pytest.raises(ConfigError, match="peer"):
        llamacpp.run_of(answers, 2, 3, 1.0)


def test_tokens_agree_up_to_the_first_that_differs():
    assert llamacpp.agreement([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]]) == 1 + 3


def test_both_sides_go_first_in_turn_and_the_peer_rests_in_ours():
    seen = []

    class Process:
        def suspend(self):
            seen.append("rests")

        def resume(self):
            seen.append("goes on")

    def side(name, rate):
        def run(prompts, new_tokens):
            seen.append(name)
            return llamacpp.Run(rate, 1.0, 2.0, [[5, 6]])

        return run

    runs = llamacpp.alternate(side("ours", 30.0), side("theirs", 20.0), Process(), [[1]], 2, 2)
    theirs = ["goes on", "theirs", "rests"]
    assert seen == ["ours", *theirs, *theirs, "ours"]
    point = llamacpp.point("Q8_0", 1, "batch 1", runs)
    assert (point.ours, point.theirs, point.ratio) == ([30.0, 30.0], [20.0, 20.0], 1.5)
    assert (point.same, point.of) == (2, 2)


def test_another_kind_keeps_metadata_and_values(tmp_path):
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    weights = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_uint32("llama.block_count", 3)
    writer.add_tensor("norm", np.ones(64, np.float32))
    writer.add_tensor(
        "layer", gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llamacpp.write_kind(source, "Q8_0", target)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    for key in ("general.architecture", "tokenizer.ggml.tokens", "llama.block_count"):
        assert after.fields[key].contents() == before.fields[key].contents()
    kinds = {tensor.name: tensor.tensor_type.name for tensor in after.tensors}
    assert kinds == {"norm": "F32", "layer": "Q8_0"}
    old, new = (gguf.quants.dequantize(one.tensors[1].data, one.tensors[1].tensor_type) for one in (before, after))
    assert np.abs(old - new).max() < np.abs(old).max() / 127


def test_a_folder_that_the_set_up_did_not_make_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="setup_llamacpp"):
        llamacpp.model_file(tmp_path)
