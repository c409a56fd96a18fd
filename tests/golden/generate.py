"""Makes smollm2.json: what transformers' greedy decoding (fp32, CPU, one thread) answers to the prompts in prompts.py.

    python tests/golden/generate.py                  write the file again (some minutes)
    python tests/golden/generate.py --check 3        recompute the three cheapest cases, compare, write nothing
    python tests/golden/generate.py --check chat_sum block_17

Every step also records the gap between the two largest logits: ids are comparable only where it is clearly above
rounding, so a prompt with a gap of at most 1e-3 is refused here; replace it.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOLDEN_FILE = HERE / "smollm2.json"
MAX_NEW_TOKENS = 64
MIN_GAP = 1e-3


def load_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference(model: Any, prompt_ids: list[int], *, ignore_eos: bool) -> tuple[list[int], list[float]]:
    """Greedy ids after `prompt_ids` (including an EOS) and the top-1/top-2 logit gap of each."""
    import torch
    from transformers import GenerationConfig

    eos = None if ignore_eos else model.generation_config.eos_token_id
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=eos,
        pad_token_id=model.generation_config.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    model.generation_config, former = config, model.generation_config  # else its EOS fills the gap we left on purpose
    try:
        with torch.inference_mode():
            ids = torch.tensor([prompt_ids])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.generation_config = former
    gaps = []
    for logits in out.logits:
        best, second = torch.topk(logits[0], 2).values.tolist()
        gaps.append(round(best - second, 6))
    return out.sequences[0, len(prompt_ids) :].tolist(), gaps


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    ids: list[int] = tokenizer.encode_chat(prompt.messages) if prompt.messages else tokenizer.encode(prompt.text)
    return ids if prompt.num_tokens is None else ids[: prompt.num_tokens]


def _versions() -> dict[str, str]:
    import tokenizers
    import torch
    import transformers

    modules = (tokenizers, torch, transformers)
    return {"python": platform.python_version(), **{m.__name__: m.__version__ for m in modules}}


def write(path: Path) -> int:
    from diptych.common.checkpoint.hashing import model_fingerprint
    from diptych.common.text.revision import tokenizer_revision
    from diptych.common.text.tokenizer import ModelTokenizer

    tokenizer, model = ModelTokenizer(path), load_model(path)
    prompts = runpy.run_path(str(HERE / "prompts.py"))["PROMPTS"]
    cases, refused = [], []
    for i, prompt in enumerate(prompts):
        started = time.perf_counter()
        prompt_ids = encode(tokenizer, prompt)
        if prompt.num_tokens not in (None, len(prompt_ids)):
            print(f"{prompt.name}: only {len(prompt_ids)} tokens, not {prompt.num_tokens}", file=sys.stderr)
            return 1
        output_ids, gaps = reference(model, prompt_ids, ignore_eos=prompt.ignore_eos)
        print(
            f"[{i + 1}/{len(prompts)}] {prompt.name}: {len(prompt_ids)} -> {len(output_ids)} tokens, least gap "
            f"{min(gaps):.4f}, {time.perf_counter() - started:.1f} s",
            flush=True,
        )
        if min(gaps) <= MIN_GAP:
            refused.append(prompt.name)
        cases.append(
            {
                "name": prompt.name,
                "ignore_eos": prompt.ignore_eos,
                "prompt_ids": prompt_ids,
                "output_ids": output_ids,
                "gaps": gaps,
            }
        )
    if refused:
        print(f"gaps not above {MIN_GAP}: replace {', '.join(refused)}", file=sys.stderr)
        return 1
    head = {
        "model": path.name,
        "model_revision": model_fingerprint(path),
        "tokenizer_revision": tokenizer_revision(path),
        "max_new_tokens": MAX_NEW_TOKENS,
        "versions": _versions(),
    }
    lines = ",\n".join("    " + json.dumps(case, separators=(",", ":")) for case in cases)
    GOLDEN_FILE.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    print(f"wrote {GOLDEN_FILE.name}: {len(cases)} cases")
    return 0


def check(path: Path, chosen: list[str]) -> int:
    """Recompute cases (names, or one number: that many of the cheapest). Returns: 0 when all agree."""
    cases = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["cases"]
    if len(chosen) == 1 and chosen[0].isdigit():
        cases = sorted(cases, key=lambda case: len(case["prompt_ids"]) + 10 * len(case["output_ids"]))[: int(chosen[0])]
    else:
        cases = [case for case in cases if case["name"] in chosen]
    if not cases:
        print(f"no such case: {' '.join(chosen)}", file=sys.stderr)
        return 1
    model, wrong = load_model(path), 0
    for case in cases:
        output_ids, _ = reference(model, case["prompt_ids"], ignore_eos=case["ignore_eos"])
        same = output_ids == case["output_ids"]
        wrong += not same
        print(f"{case['name']}: {'same' if same else f'differs: {output_ids}'}", flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", nargs="+", metavar="NAME", help="recompute these cases, or this many of the cheapest"
    )
    arguments = parser.parse_args()
    from diptych.cli.models.store import ensure_default_model
    from diptych.cli.progress import progress_on

    with progress_on() as progress:
        path = ensure_default_model(progress)
    return check(path, arguments.check) if arguments.check else write(path)


if __name__ == "__main__":
    sys.exit(main())
