from diptych.cli.explain import lines_of
from diptych.rpc.v1 import types_pb2


def test_an_explanation_on_a_terminal():
    why = types_pb2.Explanation(
        policy="cost",
        index_mode="EXACT",
        predicted_ttft_s=0.25,
        ttft_s=0.31,
        predicted_cached_tokens=48,
        cached_tokens=32,
        prefill="p0",
        decode="d0",
        transport="ucx:tcp",
        kv_bytes=4096,
        backend="native (layers 0-2), torch (layer 3)",
        notes=["one thing"],
        candidates=[
            types_pb2.PlacementTerms(prefill_worker_id="p0", decode_worker_id="d0", total_ms=12.5, chosen=True),
            types_pb2.PlacementTerms(decode_worker_id="d1", total_ms=99.0, decode_hit_tokens=16),
        ],
    )
    lines = lines_of(why)
    assert lines[0] == "policy cost, index EXACT"
    assert "0.250 s, 48 tokens" in lines[1]
    assert "0.310 s, 32 tokens" in lines[2]
    assert "4096 bytes over ucx:tcp" in lines[2]
    assert lines[3] == "computed: by native (layers 0-2), torch (layer 3)"
    assert lines[4] == "note: one thing"
    why.total_s, why.longest_gap_s = 2.81, 2.25
    assert lines_of(why)[3].strip() == "the rest in 2.500 s, the longest gap between tokens 2.250 s"
    why.attempts.add(decode="d1", prefill="p0", submitted_s=0.1, num_tokens=7, failure="WORKER_LOST")
    why.attempts.add(decode="d0", submitted_s=1.25)
    assert lines_of(why)[5:7] == [
        "attempt 1: prefill p0, decode d1, submitted after 0.100 s: WORKER_LOST after 7 tokens",
        "attempt 2: prefill (local), decode d0, submitted after 1.250 s: the rest",
    ]
    assert lines[-2].startswith("> p0")
    assert lines[-1].startswith("  (local)")
    assert lines[-1].endswith("16")


def test_an_answer_that_was_never_run_shows_no_facts():
    assert not any(line.startswith("seen") for line in lines_of(types_pb2.Explanation(policy="cost")))


def test_the_time_to_the_first_token_is_split() -> None:
    why = types_pb2.Explanation(decode="d0", prefill="p0", ttft_s=0.5, first_token_s=0.47)
    why.prefill_queue_s, why.prefill_compute_s = 0.1, 0.35
    assert [line.strip() for line in lines_of(why) if "of that" in line] == [
        "of that: prefill's queue 0.100 s, computing 0.350 s, between prefill and decode 0.020 s, router 0.030 s"
    ]
    why.local_prefill, why.prefill, why.reserved_s = True, "d0", 0.2
    assert [line.strip() for line in lines_of(why) if "of that" in line] == [
        "of that: waiting for KV blocks 0.200 s, computing 0.270 s, router 0.030 s"
    ]
    why.attempts.add(decode="d1", failure="WORKER_LOST")
    assert not any("of that" in line for line in lines_of(why)), "its parts are of one attempt, and the time of both"


def test_a_pull_names_the_tiers_that_its_holder_had_it_in() -> None:
    why = types_pb2.Explanation(decode="d0", prefill="p0")
    why.pulls.add(reader="p0", holder="d1", first_token=16, num_tokens=96, kv_bytes=960, duration_s=0.25)
    assert lines_of(why)[-2] == "pulled:   KV of 96 tokens behind 16, 960 bytes in 0.250 s, from d1 to p0"
    why.pulls[0].source_tiers.add(tier="host", tokens=32)
    why.pulls[0].source_tiers.add(tier="disk", tokens=48)
    assert lines_of(why)[-2].endswith("from d1, 32 of its tier host, 48 of its tier disk to p0")
