"""Draw tokens. A draw depends on (seed, choice, output index) only: not on the batch, the worker, the device or a retry.

Gumbel-max: the drawn token is argmax(logit / temperature + g(token)), g from a counter-based hash of (seed, choice, output
index, token id). Chosen over inverting the cumulative distribution because it hardly feels noise: two workers whose
logits differ by 1e-6 disagree only where two scores lie within 1e-6 of each other (about once in a million draws), while
the cumulative sum over a vocabulary has tens of thousands of borders to fall across.

Constraints first (engine.constraints), then filters in the order temperature, min_p, top_k, top_p (as vLLM does); they keep
ties at their border, so that the kept set does not depend on a sort's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.common.sampling import SamplingParams
from diptych.engine.constraints import Constraint
from diptych.engine.exec.constrain import EMPTY_CHOICE, constrain

SAMPLER_VERSION = "gumbel-2"
"""Changes whenever a draw may change."""

MIN_TEMPERATURE = 1e-6
"""Below it logits / temperature overflow fp32; the draw is greedy long before."""
NUCLEUS_WINDOW = 256
"""top_p looks at this many candidates first, then at 16 times as many: a full sort costs far more than a partial one."""
_COLUMNS = 256

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row needs.

    Args:
        output_index: index of the token among the request's outputs.
        constraint: what changes its logits first, advanced to this token; None: nothing.
        num_draws: tokens to draw, for choices choice, choice + 1, ...
    """

    sampling: SamplingParams
    output_index: int
    choice: int = 0
    constraint: Constraint | None = None
    num_draws: int = 1


@dataclass(slots=True)
class Drawn:
    """Token ids aligned with the rows, -1 for a row that is in `bad` or `refused`; `more`: row -> its draws after the
    first."""

    token_ids: list[int]
    bad: dict[int, str]
    refused: dict[int, str]
    more: dict[int, list[int]]


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def draw_key(seed: int, choice: int, output_index: int) -> int:
    """64 bits that name one draw."""
    return _splitmix64(_splitmix64(_splitmix64(seed) ^ choice) ^ output_index)


def _signed32(x: int) -> int:
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def _mix(x: Tensor, shift: int, factor: int) -> Tensor:
    """One round of an integer hash in wrapping int32: x ^= x >>> shift; x *= factor. torch's >> keeps the sign."""
    x = x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))
    return x.mul_(_signed32(factor))


def uniforms(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """A uniform number in (0, 1) for each key and token id: [len(keys), vocab_size] float32, equal bits on every device."""
    low = torch.tensor([[_signed32(key)] for key in keys], dtype=torch.int32, device=device)
    high = torch.tensor([[_signed32(key >> 32)] for key in keys], dtype=torch.int32, device=device)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    x = _mix(ids * _signed32(0x9E3779B1) + low, 16, 0x21F0AAAD)
    x = _mix(x ^ high, 15, 0x735A2D97)
    x = _mix(x ^ low, 16, 0x21F0AAAD)
    x = _mix(x, 15, 0x735A2D97)
    # 23 bits and a half: every value and its distance to 0 and 1 are exact in fp32.
    bits = (x ^ ((x >> 15) & 0x1FFFF)) >> 9 & 0x7FFFFF
    return (bits.to(torch.float32) + 0.5) * (1.0 / (1 << 23))


def _thresholds(logits: Tensor, params: Sequence[SamplingParams], window: int) -> tuple[Tensor, Tensor]:
    """Least logit that top_k and top_p keep, [rows]; and whether `window` candidates sufficed to tell."""
    vocab_size, device = logits.shape[1], logits.device
    values = torch.topk(logits, window, dim=-1).values
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device).clamp(max=vocab_size)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
    rank = torch.arange(window, device=device)
    in_k = rank < top_k[:, None]
    limited = top_k <= window
    top = values.masked_fill(~in_k, float("-inf"))
    total = torch.where(limited, torch.logsumexp(top, -1), torch.logsumexp(logits, -1))
    probability = torch.exp(top - total[:, None])
    # A token stays while the mass before it is below top_p; the first one always does.
    before = probability.cumsum(-1) - probability
    kept = in_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1.0))
    kept[:, 0] = True
    count = kept.sum(-1)
    threshold = values.gather(1, (count - 1)[:, None])[:, 0]
    sure = limited | (count < window)
    return threshold, sure | (window == vocab_size)


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set what min_p, top_k and top_p drop to -inf, in place. scaled: logits / temperature less each row's maximum."""
    vocab_size = scaled.shape[1]
    if any(p.min_p > 0.0 for p in params):  # the likeliest token stands at 0
        least = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
        bound = torch.tensor(least, dtype=torch.float32, device=scaled.device)
        scaled.masked_fill_(scaled < bound[:, None], float("-inf"))
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    window = min(vocab_size, max([NUCLEUS_WINDOW, *(params[i].top_k for i in rows)]))
    while rows:
        threshold, sure = _thresholds(scaled[rows], [params[i] for i in rows], window)
        known = sure.tolist()
        done = [i for i, ok in zip(rows, known, strict=True) if ok]
        if done:
            some = scaled[done]
            scaled[done] = some.masked_fill_(some < threshold[sure][:, None], float("-inf"))
        rows = [i for i, ok in zip(rows, known, strict=True) if not ok]
        window = min(vocab_size, 16 * window)
    return scaled


def bad_rows(logits: Tensor) -> dict[int, str]:
    """Rows that hold NaN or Inf, with the reason. logits: [rows, vocab_size] float32."""
    # The sum is not finite if a summand is not; finite logits would have to reach 1e33 to overflow it.
    finite = logits.sum(-1).isfinite().tolist()
    return {i: "logits hold NaN or Inf" for i, ok in enumerate(finite) if not ok}


def argmax_rows(x: Tensor) -> Tensor:
    """Index of each row's first maximum. [rows, columns] -> [rows] int64.

    On the CPU in two levels: torch's amax is vectorized and its argmax is not (32 x 49,152: 0.2 ms against 1.8).
    """
    if x.device.type != "cpu":
        return x.argmax(-1)
    rows, columns = x.shape
    if columns % _COLUMNS:
        x = torch.nn.functional.pad(x, (0, -columns % _COLUMNS), value=float("-inf"))
    tiles = x.view(rows, -1, _COLUMNS)
    tile = tiles.amax(-1).argmax(-1)
    return tile * _COLUMNS + tiles[torch.arange(rows), tile].argmax(-1)


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], dict[int, str]]:
    """One token a row, for draws without constraints. Returns: token ids (-1 for a bad row), and bad rows with the reason."""
    drawn = draw_tokens(logits, draws)
    return drawn.token_ids, drawn.bad


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draw the tokens of every row.

    Args:
        logits: [len(draws), vocab_size], any float dtype; not changed.
    """
    logits = logits.float()
    out = Drawn([], bad_rows(logits), {}, {})
    constrained = [i for i, draw in enumerate(draws) if draw.constraint is not None and i not in out.bad]
    if constrained:
        logits = logits.clone()
        constrain(logits, constrained, [c for i in constrained if (c := draws[i].constraint) is not None])
        left = (logits[constrained].amax(-1) > float("-inf")).tolist()
        for i, any_left in zip(constrained, left, strict=True):
            constraint = draws[i].constraint
            if not any_left and constraint is not None:
                out.refused[i] = constraint.trouble or EMPTY_CHOICE
    ids = argmax_rows(logits)
    drawn = [i for i, d in enumerate(draws) if not d.sampling.greedy and i not in out.bad and i not in out.refused]
    if drawn:
        params = [draws[i].sampling for i in drawn]
        some = logits[drawn]
        temperature = torch.tensor([max(p.temperature, MIN_TEMPERATURE) for p in params], dtype=torch.float32)
        some = (some - some.amax(-1, keepdim=True)).div_(temperature.to(some.device)[:, None])
        scores = _filter(some, params)
        if any(draws[i].num_draws > 1 for i in drawn):
            out.more = _draw_more(scores, [(i, draws[i]) for i in drawn])
        keys = [draw_key(draws[i].sampling.seed, draws[i].choice, draws[i].output_index) for i in drawn]
        ids[drawn] = argmax_rows(scores.sub_(_noise(keys, scores)))
    out.token_ids = ids.tolist()
    for i, draw in enumerate(draws):
        if draw.num_draws > 1 and draw.sampling.greedy:
            out.more[i] = [out.token_ids[i]] * (draw.num_draws - 1)
    for i in (*out.bad, *out.refused):
        out.token_ids[i] = -1
    return out


def _noise(keys: Sequence[int], like: Tensor) -> Tensor:
    return uniforms(keys, like.shape[1], like.device).log_().neg_().log_()


def _draw_more(scores: Tensor, rows: Sequence[tuple[int, Draw]]) -> dict[int, list[int]]:
    """The draws after the first of each row's."""
    more: dict[int, list[int]] = {}
    for at, (i, draw) in enumerate(rows):
        if draw.num_draws > 1:
            choices = range(draw.choice + 1, draw.choice + draw.num_draws)
            keys = [draw_key(draw.sampling.seed, choice, draw.output_index) for choice in choices]
            more[i] = argmax_rows(scores[at] - _noise(keys, scores)).tolist()
    return more
