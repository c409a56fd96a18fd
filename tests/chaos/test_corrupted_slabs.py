"""A byte of KV that changes on the way: found by the checksum, and really harmful without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.client import AsyncClient, DiptychError

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

CASES = json.loads((Path(__file__).resolve().parent.parent / "golden" / "smollm2.json").read_text())["cases"]
LONG = next(case for case in CASES if case["name"] == "long_story")


async def generate(cluster, **more):
    async with AsyncClient(cluster.grpc_address, timeout_s=120.0) as client:
        return await client.generate(
            token_ids=LONG["prompt_ids"],
            max_tokens=64,
            temperature=0.0,
            ignore_eos=LONG["ignore_eos"],
            explain=True,
            local_prefill_max_tokens=0,
            **more,
        )


async def test_with_the_checksum_the_answer_is_right_and_says_what_happened(cluster_module, tmp_path: Path):
    with cluster_module.running_cluster(tmp_path, "--worker-args", "--fault-corrupt-every 3") as running:
        answer = await generate(running)
        assert list(answer.token_ids) == LONG["output_ids"]
        assert answer.explanation.notes, "the damaged slab is not mentioned"
        running.wait_idle()


async def test_without_it_the_answer_is_wrong(cluster_module, tmp_path: Path):
    """So the identity tests would notice: the KV that decode uses is the KV that crossed."""
    flags = ("--worker-args", "--fault-corrupt-every 1 --no-verify-checksum")
    try:
        with cluster_module.running_cluster(tmp_path, *flags) as running:
            try:
                ids = list((await generate(running)).token_ids)
            except DiptychError:
                ids = []  # logits that are no numbers are refused
            assert ids != LONG["output_ids"]
    except AssertionError as failed:
        # What a flipped bit makes of a number is another thing on each CPU: the start's own request may be refused so, too.
        if "unusable logits" not in str(failed):
            raise
