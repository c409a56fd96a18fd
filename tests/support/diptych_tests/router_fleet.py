"""A router's frontend between decode workers without an engine and a store in memory."""

import json
import random
from contextlib import asynccontextmanager

from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.common.block_identity import IdentityHeader, identity_facts
from diptych.common.clock import FakeClock, MonotonicClock
from diptych.common.secret import create_secret, derive_key
from diptych.common.store.memory import MemoryStore
from diptych.common.text.revision import tokenizer_revision
from diptych.router.api.grpc.service import RouterService
from diptych.router.cluster.fake_decode import FakeDecode
from diptych.router.config import RouterConfig
from diptych.router.frontend import Frontend
from diptych.router.requests.messages import UncheckedRequest
from diptych.rpc.channels import bind, new_server
from diptych_tests import waiting
from diptych_tests.records import worker_record

BLOCK_SIZE = 16
VOCAB = 64


def make_model_folder(path, vocab=VOCAB, context=512):
    """A model folder without weights: 64 words, and a template that lists the messages."""
    path.mkdir()
    words = {f"w{i}": i for i in range(vocab - 1)} | {"[UNK]": vocab - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab, "max_position_embeddings": context}))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return path


class Fleet:
    """Workers, their leases, and a router that watches them."""

    def __init__(self, folder, tmp_path, settle_s=0.2, dead_s=3.0, **settings):
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.secret = create_secret(tmp_path / "secret")
        self.folder = folder
        self.workers = []
        config = RouterConfig(
            model=str(folder),
            secret_file=str(tmp_path / "secret"),
            worker_poll_s=0.02,
            worker_dead_s=dead_s,
            worker_settle_s=settle_s,
            local_prefill_max_tokens=0,
            **settings,
        )
        self.frontend = Frontend(config, store=self.store, clock=MonotonicClock(), rng=random.Random(1))
        self.header = self.header_of(folder)

    def header_of(self, folder, revision="m1"):
        return IdentityHeader(
            key=derive_key(self.secret, "block identity"),
            model_revision=revision,
            tokenizer_revision=tokenizer_revision(folder),
            kv_rule="float32",
            block_size=BLOCK_SIZE,
        )

    def record(self, worker, role="decode", header=None, **changes):
        header = header or self.header
        plain = {
            "incarnation": worker.incarnation, "role": role, "address": worker.address, "model": "tiny",
            "compat": identity_facts(header), "kv_bytes_per_token": 1024, "block_size": BLOCK_SIZE, "max_model_len": 256,
        }  # fmt: skip
        return worker_record(worker.worker_id, **(plain | changes))

    async def add(self, worker_id, role="decode", incarnation="i1", ticket_key=None, **changes):
        worker = await FakeDecode(worker_id=worker_id, incarnation=incarnation, ticket_key=ticket_key).start()
        self.workers.append(worker)
        await self.store.put_worker(self.record(worker, role, **changes), ttl_s=1000)
        return worker

    async def until(self, condition):
        await waiting.until(condition)

    async def cancelled(self, decode):
        """Until every attempt that reached the worker was cancelled there."""
        await self.until(lambda: len(decode.cancels) == len(decode.submits))

    async def until_ready(self, decode=1, prefill=1):
        cluster = self.frontend._cluster
        await self.until(lambda: (len(cluster.snapshot().decode), len(cluster.snapshot().prefill)) == (decode, prefill))

    async def ask(self, max_tokens=3, num_prompt=40, **changes):
        spec = UncheckedRequest(
            token_ids=[1] * num_prompt, sampling={"max_tokens": max_tokens}, explain=True, **changes
        )
        return [event async for event in self.frontend.generate(await self.frontend.prepare(spec))]

    def no_reservations(self):
        return len(self.frontend._cluster.reservations) == 0

    @asynccontextmanager
    async def served(self):
        """Over gRPC, at the address."""
        server = new_server()
        port = bind(server, "127.0.0.1", 0)
        server.add_generic_rpc_handlers((RouterService(self.frontend).handler(),))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


async def drain(events):
    async for _ in events:
        pass


@asynccontextmanager
async def running(folder, tmp_path, **settings):
    fleet = Fleet(folder, tmp_path, **settings)
    try:
        await fleet.frontend.start()
        yield fleet
    finally:
        await fleet.frontend.close()
        for worker in fleet.workers:
            await worker.kill()


@asynccontextmanager
async def other_router(fleet):
    """Another router of the fleet's cluster."""
    config = RouterConfig(
        model=str(fleet.folder),
        secret_file=fleet.frontend._config.secret_file,
        worker_poll_s=0.02,
        worker_dead_s=60.0,
        local_prefill_max_tokens=0,
    )
    frontend = Frontend(config, store=fleet.store, clock=MonotonicClock(), rng=random.Random(2))
    try:
        await frontend.start()
        await waiting.until(lambda: frontend._cluster.snapshot().decode)
        yield frontend
    finally:
        frontend._store = None  # it is the fleet's
        await frontend.close()
