"""The process of one rank; engine.ranks starts it.

    python -m diptych.engine.rank_process MODULE:CALLABLE ARGUMENTS_AS_JSON SAMPLES

Its standard input is the socket to the engine, see engine.ranks. It ends when that is closed.
"""

from __future__ import annotations

import importlib
import json
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from diptych.engine import step_codec
from diptych.engine.messages import ScheduledSeq
from diptych.engine.rank_adapters import AdaptersOfRank
from diptych.engine.ranks import (
    ADAPTER_READ,
    COPY,
    EXECUTE,
    FAILED,
    FORGET_ADAPTERS,
    HEAD,
    INSTALL_ADAPTER,
    NO_MEMORY,
    OK,
    PACK,
    PULLED,
    READ_ADAPTER,
    READY,
    UNPACK,
)
from diptych.engine.runner import ModelRunner, OutOfDeviceMemory, RunnerLost

_log = logging.getLogger(__name__)


class Rank:
    """Args: samples: the step's result is this rank's. The others get the same step all the same: where ranks compute the logits
    together, each must know which rows are sampled."""

    def __init__(self, runner: ModelRunner, *, samples: bool) -> None:
        self._runner, self._samples = runner, samples
        self._memos: dict[str, object | None] = {}
        self._adapters = AdaptersOfRank(runner)

    def answer(self, kind: int, body: bytes) -> bytes:
        """Carry out one frame. Raises: what the runner raises."""
        match kind:
            case k if k == READY:
                able = self._runner.capabilities
                if able.kv is not None and not able.kv.has_one_full_group:
                    raise ValueError("a runner in a process of its own has one KV group, which keeps every token")
                return json.dumps(asdict(replace(able, kv=None, group_blocks=()))).encode()
            case k if k == EXECUTE:
                return self._execute(step_codec.decode_seqs(body))
            case k if k == COPY:
                self._runner.copy_blocks(step_codec.decode_copies(body))
                return b""
            case k if k == PACK:
                block_ids, num_tokens = json.loads(body)
                out = bytearray(num_tokens * self._runner.capabilities.kv_bytes_per_token)
                self._runner.pack(block_ids, num_tokens, memoryview(out))
                return bytes(out)
            case k if k == UNPACK:
                head, _, data = body.partition(b"\n")
                block_ids, num_tokens = json.loads(head)
                self._runner.unpack(block_ids, num_tokens, memoryview(data))
                return b""
            case k if k == PULLED:
                self._runner.note_pulled(*json.loads(body))
                return b""
            case k if k == READ_ADAPTER:
                self._adapters.begin(body)
                return b""
            case k if k == ADAPTER_READ:
                return self._adapters.answer(json.loads(body))
            case k if k == INSTALL_ADAPTER:
                self._adapters.install(*json.loads(body))
                return b""
            case k if k == FORGET_ADAPTERS:
                self._adapters.forget(json.loads(body))
                return b""
        raise ValueError(f"no frame has kind {kind}")

    def _execute(self, seqs: Sequence[ScheduledSeq]) -> bytes:
        for seq in seqs:
            seq.memo = self._memos.get(seq.attempt)
        result = self._runner.execute(seqs)
        self._memos = {seq.attempt: seq.memo for seq in seqs}
        return step_codec.encode_result(result) if self._samples else b""


def serve(connection: socket.socket, rank: Rank) -> None:
    """Until the engine closes the connection."""
    stream = connection.makefile("rwb")
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        kind, size = HEAD.unpack(head)
        body = stream.read(size)
        if len(body) < size:
            return
        try:
            code, answer = OK, rank.answer(kind, body)
        except OutOfDeviceMemory as error:
            code, answer = NO_MEMORY, str(error).encode()
        except RunnerLost:
            raise  # this rank can compute nothing any more: the executor finds it ended
        except Exception as error:  # the engine ends the step's requests, as it does for a runner of its own
            _log.exception("a frame of kind %d failed", kind)
            code, answer = FAILED, f"{type(error).__name__}: {error}".encode()
        stream.write(HEAD.pack(code, len(answer)) + answer)
        stream.flush()


def main(factory: str, arguments: str, samples: str) -> None:
    module, _, name = factory.partition(":")
    make = getattr(importlib.import_module(module), name)
    serve(socket.socket(fileno=0), Rank(make(**json.loads(arguments)), samples=samples == "1"))


if __name__ == "__main__":
    main(*sys.argv[1:])
