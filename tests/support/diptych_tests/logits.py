"""Logits of a runner, as its kernels compute them."""

from __future__ import annotations

from typing import Any

import torch


def logits_of(driver: Any, prompts: list[list[int]], following: list[int], chunk: int = 9) -> torch.Tensor:
    """Of each prompt's last token, and of given tokens after it, decoded together: [n, vocabulary] on the CPU."""
    runner, found = driver.runner, list[torch.Tensor]()
    owner, name, place = (runner._decoder, "forward", 0) if runner._fused is None else (runner._fused, "execute", 1)
    compute = getattr(owner, name)

    def watched(*args: Any) -> Any:
        out = compute(*args)
        if out is not None:
            order = sorted(range(len(out)), key=args[place].sample_seqs.__getitem__)
            found.append(out[order].detach().float().cpu())
        return out

    setattr(owner, name, watched)
    tables = [driver.table(len(prompt) + len(following)) for prompt in prompts]
    for prompt, table in zip(prompts, tables, strict=True):
        driver.prefill(prompt, table, chunk=chunk)
    for index, token in enumerate(following):
        pairs = zip(prompts, tables, strict=True)
        runner.execute([driver.seq([token], len(p) + index, t, index=index + 1) for p, t in pairs])
    return torch.cat(found)
