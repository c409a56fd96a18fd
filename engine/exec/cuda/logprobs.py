"""Logprobs of drawn tokens, worked out where the tokens are, and read with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.exec.cuda.upload import Upload
from diptych.engine.messages import TokenLogprobs


class LogprobsOut:
    """On their way to the host; `take` once what is on the stream by now has ended.

    Args:
        rows: of logits [num_rows, vocab_size] and drawn [num_rows] int32. tops: of each, how many of the likeliest are wanted.
    """

    def __init__(self, upload: Upload, rows: Sequence[int], tops: Sequence[int], logits: Tensor, drawn: Tensor) -> None:
        self._tops = list(tops)
        [there] = upload.send((rows,))
        index = there.long()
        logprobs = torch.log_softmax(logits.index_select(0, index).float(), dim=-1)
        tokens = drawn.index_select(0, index).clamp(min=0)  # without a token there is no entry either
        own = logprobs.gather(1, tokens.long()[:, None])
        ranks = (logprobs > own).sum(-1, keepdim=True) + 1
        best = torch.topk(logprobs, min(max(1, *tops), logits.shape[1]) if tops else 1, dim=-1)
        self._values = _to_host(torch.cat((own, best.values), 1))
        self._ids = _to_host(torch.cat((tokens[:, None], ranks.int(), best.indices.int()), 1))

    def take(self) -> list[TokenLogprobs]:
        """In the order of `rows`."""
        out = []
        for top, (own, *values), (token, rank, *ids) in zip(
            self._tops, self._values.tolist(), self._ids.tolist(), strict=True
        ):
            out.append(TokenLogprobs(token, own, rank, tuple(zip(ids[:top], values[:top], strict=True))))
        return out


def _to_host(x: Tensor) -> Tensor:
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return here.copy_(x, non_blocking=True)
