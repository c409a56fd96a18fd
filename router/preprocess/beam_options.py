"""Beam search options of requests: vLLM's fields, old and new, converted to those of SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import SamplingParams, check_sampling
from diptych.router.requests.messages import UncheckedRequest

DRAWS_NOTHING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
"""Replaces the model's defaults, which are for sampling."""


def uses_beam_search(spec: UncheckedRequest) -> bool:
    """`use_beam_search`, or a `beam_width` alone. Raises: InvalidRequestError naming the field."""
    wanted, width = spec.use_beam_search, spec.sampling.get("beam_width")
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequestError("use_beam_search must be true or false", param="use_beam_search")
    if wanted is False and width:
        raise InvalidRequestError("beam_width requires beam search, but use_beam_search is false", param="beam_width")
    return bool(wanted or width)


def beam_fields(spec: UncheckedRequest) -> dict[str, object]:
    """Arguments of check_sampling, replacing the given ones. Without beam_width, best_of is the width, as formerly in
    vLLM, or n."""
    if not uses_beam_search(spec) or "beam_width" in spec.sampling:
        return {}
    return {"beam_width": spec.sampling.get("best_of", spec.sampling.get("n", 1)), "best_of": 0}


def sampling_of(
    spec: UncheckedRequest,
    *,
    vocab_size: int,
    seed: int,
    max_tokens: int,
    defaults: Mapping[str, object],
    bad_words: object = None,
) -> SamplingParams:
    """The spec's sampling values, checked and complete.

    Args:
        seed, max_tokens, defaults: for missing values; the defaults are for sampling.
        bad_words: as token ids; None: none.
    Raises: InvalidRequestError naming the parameter.
    """
    values = {
        "seed": seed,
        "max_tokens": max_tokens,
        **(DRAWS_NOTHING if uses_beam_search(spec) else defaults),
        **spec.sampling,
        **beam_fields(spec),
        "bad_words": () if bad_words is None else bad_words,
        "grammar": spec.grammar,
    }
    return check_sampling(vocab_size=vocab_size, **values)
