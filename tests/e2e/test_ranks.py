"""`diptych up` and `diptych serve` with workers of several ranks answer over HTTP as one process does that computes alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.cli.up.processes import spawn
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.common.secret import create_secret
from diptych.engine.messages import EngineRequest
from diptych_tests.clusters import free_port_pair
from diptych_tests.lora import adapter_engine, keep_adapter, linear_shapes, write_adapter
from diptych_tests.quantized import write_windowed

pytestmark = pytest.mark.multiproc
VOCAB, NEW = 320, 20
PROMPTS = [[(7 * i + 31 * n) % VOCAB for i in range(length)] for n, length in enumerate((90, 150, 77))]
FLAGS = ("--num-blocks", "96", "--max-model-len", "512")
PATIENT = ("--startup-timeout-s", "1800", "--local-prefill-max-tokens", "0")
ANSWER_S = 600.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers, four heads and two KV heads. The second one of two pipeline stages has windows only."""
    folder = write_windowed(tmp_path_factory.mktemp("ranks") / "tiny", window=24, full_layers=2, layers=4, vocab=VOCAB)
    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(VOCAB - 1)} | {"[UNK]": VOCAB - 1}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """Of all linear layers, so of every rank's."""
    return write_adapter(model.parent / "lora" / "poems", linear_shapes(model), rank=3, seed=4)


def ids_alone(model: Path, adapter: Path | None = None) -> list[list[int]]:
    """The ids of one process, with plain torch."""
    engine, runner = adapter_engine(model, "torch", 0 if adapter is None else 1)
    adapter_id = "" if adapter is None else keep_adapter(engine, runner, adapter)
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    requests = [EngineRequest(f"r{n}", Prompt(tuple(p), adapter=adapter_id), sampling) for n, p in enumerate(PROMPTS)]
    return [result.token_ids for result in engine.generate(requests)]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    return ids_alone(model)


@pytest.fixture(scope="module")
def adapted(model: Path, adapter: Path) -> list[list[int]]:
    return ids_alone(model, adapter)


async def ask(url: str, **fields: Any) -> list[list[int]]:
    """All prompts at once; the answers' ids."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": NEW, **fields}

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        answer = await client.post("/v1/completions", json={**body, "prompt": prompt})
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))


def degrees(prefill: tuple[int, int], decode: tuple[int, int]) -> tuple[str, ...]:
    """Flags of `up`. Each is (tensor parallel, pipeline)."""
    roles = {"prefill": prefill, "decode": decode}
    names = ("tensor-parallel-size", "pipeline-parallel-size")
    return tuple(f"--{role}-{name}={n}" for role, pair in roles.items() for name, n in zip(names, pair, strict=True))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, 2), (1, 1)),
        *(
            pytest.param(prefill, decode, marks=pytest.mark.slow)
            for prefill, decode in (
                ((1, 1), (2, 1)),
                ((2, 1), (2, 1)),
                ((4, 1), (2, 1)),
                ((2, 1), (4, 1)),
                ((2, 1), (1, 1)),
                ((2, 2), (2, 1)),
                ((2, 1), (2, 2)),
                ((1, 4), (1, 2)),
            )
        ),
    ],
    ids=lambda pair: "x".join(map(str, pair)),
)
async def test_23_a_cluster_of_ranks_answers_as_one_process(
    cluster_module: Any,
    tmp_path: Path,
    model: Path,
    adapter: Path,
    alone: list[list[int]],
    adapted: list[list[int]],
    prefill: tuple[int, int],
    decode: tuple[int, int],
) -> None:
    """Also with an adapter, of which each rank reads and adds its part, in the same steps as the base model."""
    lora = ("--enable-lora", "--lora-dir", str(adapter.parent), "--lora-modules", f"poems={adapter}")
    flags = ("--model", str(model), *FLAGS, *PATIENT, *degrees(prefill, decode), *lora)
    with cluster_module.running_cluster(tmp_path, *flags) as cluster:
        before = cluster.audit("decode-0", full=False).kv_bytes_received
        base, poems = await asyncio.gather(ask(cluster.http_url), ask(cluster.http_url, model="poems"))
        assert (base, poems) == (alone, adapted)
        assert all(one != other for one, other in zip(base, poems, strict=True)), "it changes every answer"
        assert await ask(cluster.http_url) == alone, "from the caches of both pools"
        assert await ask(cluster.http_url, model="poems") == adapted
        cluster.wait_idle()
        assert cluster.audit("decode-0", full=False).kv_bytes_received > before
        assert cluster.audit("prefill-0").violations == cluster.audit("decode-0").violations == []
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            workers = (await client.get(f"{cluster.http_url}/status.json")).json()["cluster"]["workers"]
        assert {w["role"]: (w["tensor_parallel"], w["pipeline"]) for w in workers} == {
            "prefill": prefill, "decode": decode,
        }  # fmt: skip


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of the ranks below this one."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if "diptych.engine.ranks.process" in process.cmdline()]


@pytest.mark.slow
def test_23_a_server_ends_with_any_of_its_ranks(
    cluster_module: Any, tmp_path: Path, model: Path, alone: list[list[int]]
) -> None:
    flags = ("--model", str(model), *FLAGS, "--tensor-parallel-size=2")
    with cluster_module.running_serve(tmp_path, *flags) as serving:
        ranks = ranks_of(serving.process.pid)
        assert len(ranks) == 2
        hosts = [one.laddr.ip for rank in ranks for one in rank.net_connections("inet") if one.status == "LISTEN"]
        assert set(hosts) == {"127.0.0.1"}, "only this machine reaches the ranks"
        for rank in ranks:  # as a terminal's Ctrl-C, and a service manager, do to every process
            rank.send_signal(signal.SIGINT)
            rank.send_signal(signal.SIGTERM)
        assert asyncio.run(ask(serving.http_url)) == alone
        ranks[1].kill()
        assert serving.process.wait(ANSWER_S) == 1, serving.log()
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--tensor-parallel-size=4", "--tensor-parallel-size=2 --pipeline-parallel-size=2"])
async def test_23_one_server_of_ranks_answers_as_one_process(
    cluster_module: Any, tmp_path: Path, model: Path, alone: list[list[int]], flags: str
) -> None:
    with cluster_module.running_serve(tmp_path, "--model", str(model), *FLAGS, *flags.split()) as serving:
        assert await ask(serving.http_url) == alone
        assert await ask(serving.http_url) == alone


def certificates(folder: Path) -> tuple[str, ...]:
    """Flags with one for all hosts."""
    authority = trustme.CA()
    own = authority.issue_cert("diptych", "127.0.0.1")
    files = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    own.private_key_pem.write_to_path(str(files["key"]))
    own.cert_chain_pems[0].write_to_path(str(files["cert"]))
    return *(f"--cluster-{name}={file}" for name, file in files.items()), "--cluster-tls-name=diptych"


@pytest.mark.slow
async def test_23_a_server_on_two_hosts_answers_over_tls_and_ends_with_both(
    cluster_module: Any, tmp_path: Path, model: Path, alone: list[list[int]]
) -> None:
    create_secret(tmp_path / "secret")
    port = free_port_pair("127.0.0.2")
    where = ("--master-addr=127.0.0.2", f"--master-port={port}", "--nnodes=2", f"--secret-file={tmp_path / 'secret'}")
    shared = (*where, "--tensor-parallel-size=2", "--pipeline-parallel-size=2", *certificates(tmp_path))
    command = [sys.executable, "-P", "-m", "diptych.cli", "rank", "--node-rank=1", "--host=127.0.0.3", *shared]
    other = spawn(command, log=tmp_path / "rank.log", env=dict(os.environ), cwd=tmp_path)
    try:
        more = (*FLAGS, *shared, "--rank-silence-s=240")
        with cluster_module.running_serve(tmp_path, "--model", str(model), *more) as serving:
            assert await ask(serving.http_url) == alone
            ranks = [*ranks_of(serving.process.pid), *ranks_of(other.pid)]
            assert len(ranks) == 4
            serving.process.terminate()
            assert await asyncio.to_thread(serving.process.wait, ANSWER_S) == 128 + signal.SIGTERM, serving.log()
        assert await asyncio.to_thread(other.wait, ANSWER_S) == 0, (tmp_path / "rank.log").read_text()
        assert not any(rank.is_running() for rank in ranks)
    finally:
        other.kill()
        other.wait()
