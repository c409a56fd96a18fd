"""A PrefillRequest, or a FetchRequest, after all checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.common.block_identity import KEY_BYTES
from diptych.common.errors import InvalidRequestError, PromptTooLongError
from diptych.common.secret import tenant_of
from diptych.engine.grammar.program import FirstToken, mask_words
from diptych.engine.messages import EngineRequest, KvMode, PublishCached
from diptych.rpc import convert
from diptych.rpc.v1 import prefill_pb2
from diptych.worker.incoming import Limits, check_addressed
from diptych.worker.reads.block_pulls import SOURCE_ATTEMPT, KvSource, parse_source
from diptych.worker.refs import WorkerRef
from diptych.worker.role_spec import PREFILL, SOURCE

MAX_ATTEMPT_ID = 160


@dataclass(frozen=True, slots=True)
class PrefillSessionRequest:
    """Args:
    decode: the worker that will read the KV.
    source: where leading blocks may be taken from before the prompt is computed.
    adapter_folder: where the prompt's adapter is loaded from by a worker that lacks it; empty: nowhere.
    """

    engine_request: EngineRequest | PublishCached
    request_id: str
    decode: WorkerRef
    remaining_s: float
    source: KvSource | None = None
    adapter_folder: str = ""

    @property
    def service(self) -> str:
        """That it came by."""
        return PREFILL if isinstance(self.engine_request, EngineRequest) else SOURCE

    @property
    def adapter(self) -> str:
        """Id of the prompt's adapter; empty: none is needed."""
        return self.engine_request.prompt.adapter if isinstance(self.engine_request, EngineRequest) else ""

    @property
    def samples(self) -> bool:
        """A token is sampled: it is a prompt, and the next token is not forced."""
        return isinstance(self.engine_request, EngineRequest) and not self.engine_request.output_token_ids


def parse_request(message: prefill_pb2.PrefillRequest, limits: Limits) -> PrefillSessionRequest:
    """Check everything in the message. Raises: InvalidRequestError or PromptTooLongError naming the field;
    StaleReferenceError for another incarnation of this worker."""
    check_addressed(message.attempt, message.prefill, limits, max_attempt_id=MAX_ATTEMPT_ID)
    if not message.decode.worker_id:
        raise InvalidRequestError("the decode worker is missing", param="decode")
    prompt = convert.prompt_from_proto(message, vocab_size=limits.vocab_size)
    outputs = convert.check_token_ids(message.output_token_ids, vocab_size=limits.vocab_size, param="output_token_ids")
    num_prompt, num_outputs = len(prompt.token_ids), len(outputs)
    if num_prompt + num_outputs >= limits.max_model_len + (1 if outputs else 0):
        raise PromptTooLongError(
            f"{num_prompt + num_outputs} tokens do not fit into the context of {limits.max_model_len}", param="prompt"
        )
    cached = message.decode_cached_tokens
    if cached % limits.block_size or cached >= num_prompt + max(1, num_outputs):
        raise InvalidRequestError(
            f"decode_cached_tokens={cached} must be a multiple of {limits.block_size} below the prompt's length",
            param="decode_cached_tokens",
        )
    sampling = convert.sampling_from_proto(message.sampling, vocab_size=limits.vocab_size)
    mask = message.first_token_mask
    if mask and len(mask) != 4 * mask_words(limits.vocab_size):
        raise InvalidRequestError(f"first_token_mask has {len(mask)} bytes", param="first_token_mask")
    return PrefillSessionRequest(
        engine_request=EngineRequest(
            attempt=message.attempt,
            prompt=prompt,
            sampling=sampling,
            output_token_ids=outputs,
            mode=KvMode.PREFILL,
            tenant=tenant_of(message.cache_salt),
            priority=message.priority,
            decode_cached_tokens=cached,
            want_kv=message.want_kv,
            peer=message.decode.worker_id,
            grammar=FirstToken(mask) if mask else None,
            layer_groups=message.layer_groups,
            link_bytes_per_s=_check_rate(message.link_bytes_per_s),
            reusable=message.reusable,
            ranks=_check_ranks(message.ranks, limits),
            claim=convert.claim_from_proto(message),
        ),
        request_id=message.request_id,
        decode=WorkerRef(message.decode.worker_id, message.decode.incarnation, message.decode.address),
        remaining_s=convert.check_remaining(message.remaining_s),
        source=parse_source(message.source, "source") if message.HasField("source") else None,
        adapter_folder=convert.adapter_folder_from_proto(message),
    )


def parse_fetch(message: prefill_pb2.FetchRequest, limits: Limits) -> PrefillSessionRequest:
    """Check everything in the message. Raises: InvalidRequestError naming the field; StaleReferenceError for another
    incarnation of this worker."""
    check_addressed(message.attempt, message.source, limits, max_attempt_id=MAX_ATTEMPT_ID)
    if not message.reader.worker_id:
        raise InvalidRequestError("the reading worker is missing", param="reader")
    blob = message.block_keys
    num_blocks, rest = divmod(len(blob), KEY_BYTES)
    if rest or not 0 < num_blocks * limits.block_size <= limits.max_model_len:
        raise InvalidRequestError(
            f"block_keys has {len(blob)} bytes: it must have {KEY_BYTES} for each of the blocks of a context of "
            f"{limits.max_model_len} tokens at most",
            param="block_keys",
        )
    cached = message.cached_tokens
    if cached % limits.block_size or cached >= num_blocks * limits.block_size:
        raise InvalidRequestError(
            f"cached_tokens={cached} must be a multiple of {limits.block_size} below the tokens of block_keys",
            param="cached_tokens",
        )
    keys = tuple(blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES))
    return PrefillSessionRequest(
        engine_request=PublishCached(
            SOURCE_ATTEMPT + message.attempt,
            keys,
            cached,
            message.reader.worker_id,
            _check_ranks(message.ranks, limits),
        ),
        request_id=message.request_id,
        decode=WorkerRef(message.reader.worker_id, message.reader.incarnation, message.reader.address),
        remaining_s=convert.check_remaining(message.remaining_s),
    )


def _check_ranks(ranks: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """Raises: InvalidRequestError."""
    found = tuple(ranks)
    if found != tuple(sorted(set(found))) or (found and found[-1] >= limits.num_ranks):
        raise InvalidRequestError(
            f"ranks={list(found)} must ascend, and be below this worker's {limits.num_ranks}", param="ranks"
        )
    return found


def _check_rate(bytes_per_s: float) -> float:
    """Raises: InvalidRequestError."""
    if not 0.0 <= bytes_per_s < float("inf"):
        raise InvalidRequestError(f"link_bytes_per_s={bytes_per_s} is not a rate", param="link_bytes_per_s")
    return bytes_per_s
