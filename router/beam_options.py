"""Beam search as requests ask for it: vLLM's fields, old and new, turned into those of SamplingParams."""

from __future__ import annotations

from diptych.common.errors import InvalidRequestError
from diptych.router.messages import GenerateSpec

DRAWS_NOTHING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
"""What stands in for the model's own defaults: they are made for drawing."""


def wants_beams(spec: GenerateSpec) -> bool:
    """`use_beam_search`, or a `beam_width` alone. Raises: InvalidRequestError naming the field."""
    wanted, width = spec.use_beam_search, spec.beam_width
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequestError("use_beam_search must be true or false", param="use_beam_search")
    if wanted is False and width:
        raise InvalidRequestError(
            "beam_width is for beam search only, and use_beam_search is false", param="beam_width"
        )
    return bool(wanted or width)


def beam_fields(spec: GenerateSpec) -> dict[str, object]:
    """Arguments of check_sampling. With beam search but no beam_width, best_of is the width, as it used to be in vLLM, or n."""
    fields: dict[str, object] = {}
    for name in ("length_penalty", "early_stopping"):
        if getattr(spec, name) is not None:
            fields[name] = getattr(spec, name)
    if wants_beams(spec):
        fields["beam_width"] = next((v for v in (spec.beam_width, spec.best_of, spec.n) if v is not None), 1)
        if spec.beam_width is None:
            fields["best_of"] = 0
    return fields
