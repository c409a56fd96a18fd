"""Which requests can run on this engine at all: checked once, before anything is held for them."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import DiptychError, InternalError, InvalidRequestError, PromptTooLongError
from diptych.engine.config import EngineConfig
from diptych.engine.messages import EngineRequest, KvMode
from diptych.engine.sched.output import DetokenizerFactory, OutputProcessor


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the scheduler must know of the model."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_bytes_per_token: int


def check_request(
    request: EngineRequest,
    config: EngineConfig,
    limits: ModelLimits,
    detokenizer_factory: DetokenizerFactory | None,
) -> OutputProcessor | None:
    """Returns: the request's output processor, primed with its forced tokens; None for PREFILL, whose text is decode's.

    Raises: InvalidRequestError naming the parameter; PromptTooLongError for a prompt beyond the context or the KV pool.
    """
    prompt, forced = request.prompt_token_ids, request.output_token_ids
    _check_ids(prompt, forced, limits.vocab_size)
    num_prompt = len(prompt)
    if num_prompt >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens; the context of {limits.max_model_len} must leave room for one more",
            param="prompt",
        )
    if request.sampling.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
    total = min(num_prompt + request.sampling.max_tokens, limits.max_model_len)
    if num_prompt + len(forced) > total:
        raise InvalidRequestError(
            f"{len(forced)} output tokens were sent already, more than the {total - num_prompt} that may come",
            param="output_token_ids",
        )
    size, pool_tokens = config.block_size, config.num_blocks * config.block_size
    kv_tokens = num_prompt + max(0, len(forced) - 1)
    if kv_tokens > pool_tokens:
        raise PromptTooLongError(
            f"the prompt has {kv_tokens} tokens; this worker's KV pool holds {pool_tokens}", param="prompt"
        )
    if request.mode is KvMode.PREFILL:
        held = request.decode_cached_tokens
        if held < 0 or held % size or held > kv_tokens:
            raise InvalidRequestError(
                f"decode_cached_tokens={held}: must be a multiple of {size} between 0 and {kv_tokens}",
                param="decode_cached_tokens",
            )
        return None
    if total - 1 > pool_tokens:
        raise InvalidRequestError(
            f"prompt and max_tokens need KV of {total - 1} tokens; this worker's pool holds {pool_tokens}",
            param="max_tokens",
        )
    try:
        detokenizer = detokenizer_factory(request.sampling) if detokenizer_factory is not None else None
        output = OutputProcessor(request.sampling, limits.eos_token_ids, total - num_prompt, detokenizer)
        output.prime(forced)
    except DiptychError:
        raise
    except Exception as error:  # one request's text must not end the engine
        raise InternalError(f"making text of the tokens failed: {type(error).__name__}: {error}") from error
    return output


def _check_ids(prompt: tuple[int, ...], forced: tuple[int, ...], vocab_size: int) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    for name, ids in (("prompt_token_ids", prompt), ("output_token_ids", forced)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequestError(f"{name} must be between 0 and {vocab_size - 1}", param=name)
