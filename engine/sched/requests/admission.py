"""Which requests can run on this engine: checked once, before anything is allocated for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.common.errors import DiptychError, InternalError, InvalidRequestError, PromptTooLongError
from diptych.common.kv_format import KvFormat
from diptych.common.kv_groups import holds
from diptych.common.kv_parts import GroupPart, group_parts
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.messages import EngineRequest, KvMode
from diptych.engine.sched.requests.output import DetokenizerFactory, LateStops, OutputProcessor, RequestDetokenizer


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the scheduler must know about the model and the runner."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_bytes_per_token: int
    num_layers: int = 1
    grammars: bool = True
    """The runner can sample under a grammar."""
    kv: KvFormat | None = None
    """None: one group, which keeps every token."""
    group_blocks: tuple[int, ...] = ()
    """Of each group's pool; empty: the configured number."""
    rank_sizes: tuple[tuple[int, int], ...] = ()
    """Layers, and bytes of a token's KV, of each rank; empty: one rank."""
    parts: tuple[KvFormat, ...] = ()
    """Of several ranks with several groups."""
    max_loras: int = 0
    """See RunnerCapabilities."""

    @property
    def group_parts(self) -> tuple[GroupPart, ...]:
        """Of which a block consists: each KV group of each rank."""
        if self.rank_sizes and not self.parts:
            return tuple(GroupPart(0, part, 0, *sizes) for part, sizes in enumerate(self.rank_sizes))
        if self.kv is None:
            return (GroupPart(0, 0, 0, self.num_layers, self.kv_bytes_per_token),)
        return group_parts(self.kv, self.parts or (self.kv,))


def check_request(
    request: EngineRequest,
    config: EngineConfig,
    limits: ModelLimits,
    detokenizer_factory: DetokenizerFactory | None,
) -> OutputProcessor | None:
    """Returns: the request's output processor, primed with its forced tokens; None for PREFILL, whose text is decode's.

    Raises: InvalidRequestError naming the parameter; PromptTooLongError for a prompt beyond the context or the KV pool.
    """
    prompt, forced = request.prompt.token_ids, request.output_token_ids
    _check_ids(prompt, forced, limits.vocab_size)
    _check_parameter_ids(request.sampling, limits.vocab_size)
    beam_width = request.sampling.beam_width
    if forced and beam_width:
        raise InvalidRequestError("beam search cannot go on where another attempt ended", param="beam_width")
    if forced and request.sampling.num_choices > 1:
        raise InvalidRequestError("a request with several choices cannot go on where another ended", param="n")
    num_prompt = len(prompt)
    if num_prompt >= limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens; the context of {limits.max_model_len} must leave room for one more",
            param="prompt",
        )
    if request.sampling.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
    if request.sampling.grammar is not None and request.grammar is None:
        raise InvalidRequestError("grammar: this engine was given none that is compiled", param="grammar")
    if request.grammar is not None and not limits.grammars:
        raise InvalidRequestError("grammar: this engine's runner samples without grammars only", param="grammar")
    total = min(num_prompt + request.sampling.max_tokens, limits.max_model_len)
    if num_prompt + len(forced) > total:
        raise InvalidRequestError(
            f"{len(forced)} output tokens were sent already, more than the {total - num_prompt} that may come",
            param="output_token_ids",
        )
    size, pool_tokens = config.block_size, config.num_blocks * config.block_size
    kv_tokens = num_prompt + max(0, len(forced) - 1)
    if not _pools_hold(kv_tokens, config, limits):
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
    if not _pools_hold(total - 1, config, limits):
        raise InvalidRequestError(
            f"prompt and max_tokens need KV of {total - 1} tokens; this worker's pool holds {pool_tokens}",
            param="max_tokens",
        )
    if beam_width:
        _check_beams(beam_width, total - 1, config, limits)
    output = make_output(request.sampling, prompt, limits, total - num_prompt, detokenizer_factory)
    output.prime(forced)
    return output


def _pools_hold(num_tokens: int, config: EngineConfig, limits: ModelLimits, num_seqs: int = 1) -> bool:
    """Whether empty pools could hold `num_seqs` sequences of so many tokens, if they share no block."""
    if limits.kv is None or limits.kv.has_one_full_group:
        return num_seqs * -(-num_tokens // config.block_size) <= config.num_blocks
    counts = limits.group_blocks or (config.num_blocks,) * len(limits.kv.groups)
    return holds(limits.kv, counts, num_tokens, config.max_num_batched_tokens, num_seqs)


def _check_beams(width: int, num_tokens: int, config: EngineConfig, limits: ModelLimits) -> None:
    """All beams run at one time, and at worst they share no block. Raises: InvalidRequestError."""
    if width > config.max_num_seqs:
        raise InvalidRequestError(
            f"beam_width={width}: this worker runs {config.max_num_seqs} sequences at a time", param="beam_width"
        )
    if not _pools_hold(num_tokens, config, limits, width):
        raise InvalidRequestError(
            f"beam_width={width} times the {-(-num_tokens // config.block_size)} KV blocks of prompt and max_tokens is more "
            f"than this worker's {config.num_blocks}",
            param="beam_width",
        )


def make_output(
    sampling: SamplingParams,
    prompt: Sequence[int],
    limits: ModelLimits,
    max_outputs: int,
    detokenizer_factory: DetokenizerFactory | None,
) -> OutputProcessor:
    """The output processor of one choice. Raises: InvalidRequestError for stop strings without a detokenizer;
    InternalError when the detokenizer cannot be made."""
    detokenizer: RequestDetokenizer | None = None
    try:
        if detokenizer_factory is not None and sampling.min_tokens and sampling.stop:
            inner = detokenizer_factory(replace(sampling, stop=()), prompt)
            detokenizer = LateStops(inner, sampling.stop, sampling.min_tokens)
        elif detokenizer_factory is not None:
            detokenizer = detokenizer_factory(sampling, prompt)
    except DiptychError:
        raise
    except Exception as error:
        raise InternalError(f"making text of the tokens failed: {type(error).__name__}: {error}") from error
    return OutputProcessor(sampling, limits.eos_token_ids, max_outputs, detokenizer)


def _check_ids(prompt: Sequence[int], forced: tuple[int, ...], vocab_size: int) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    for name, ids in (("prompt_token_ids", prompt), ("output_token_ids", forced)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequestError(f"{name} must be between 0 and {vocab_size - 1}", param=name)


def _check_parameter_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """The router checks them, too; here because one id outside the vocabulary would fail a whole batch."""
    lists = {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logit_bias": tuple(token for token, _ in sampling.logit_bias),
        "bad_words": tuple(token for word in sampling.bad_words for token in word),
    }
    for name, ids in lists.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequestError(f"{name} must be below the vocabulary size {vocab_size}", param=name)
