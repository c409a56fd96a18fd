"""Makes golden.json: what peft and transformers (fp32, CPU, greedy) answer with each adapter of this folder.

    python tests/adapters/generate.py                       write the file again
    python tests/adapters/generate.py --check pirate count  recompute answers and logits of these adapters, one prompt at a time

Prompts of one adapter run in padded batches of similar lengths. Ids are comparable only where the gap between the two largest
logits is clearly above rounding: prompts with a gap of at most 1e-3 are left out, and the longest 20 of the rest are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from styles import GOLDEN_QUESTIONS, HERE, MODEL_NAME, STYLES
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

GOLDEN_FILE = HERE / "golden.json"
BASE = "base"
MAX_NEW_TOKENS = 24
MIN_GAP = 1e-3
NUM_PROMPTS = 20
SIMILAR_TOKENS = 32
TOP_LOGPROBS = 8
"""Kept of the first token of each answer."""
LOGIT_PROMPTS = 4
"""Prompts of which logits are kept: those of the first token of the answer, and those of the last."""
LOGIT_STEP = 2048
"""Of the vocabulary, from one kept logit to the next."""
LOGIT_TOLERANCE = 1e-4


class Reference:
    """The base model, and each adapter on top of it, in one process."""

    def __init__(self, model_folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        first, *others = STYLES
        self.model = PeftModel.from_pretrained(base, HERE / first, adapter_name=first)
        for name in others:
            self.model.load_adapter(HERE / name, adapter_name=name)
        self.model.eval()
        self.eos = base.generation_config.eos_token_id
        base.generation_config = GenerationConfig()

    def answers(self, name: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]], torch.Tensor]:
        """Returns: for each prompt the ids (with an EOS) and their gaps; logits of the first token, [prompts, vocab]."""
        with self._using(name):
            return self._in_batches(prompts)

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        if name == BASE:
            with self.model.disable_adapter():
                yield
            return
        self.model.set_adapter(name)
        yield

    @torch.inference_mode()
    def logits(self, name: str, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        """Two rows of each prompt: those that the first and the last token of its answer are drawn from. Every LOGIT_STEP-th."""
        rows: list[list[float]] = []
        with self._using(name):
            for prompt, answer in zip(prompts, answers, strict=True):
                found = self.model(input_ids=torch.tensor([prompt + answer[:-1]])).logits[0]
                rows += [[round(v, 6) for v in found[at, ::LOGIT_STEP].tolist()] for at in (len(prompt) - 1, -1)]
        return rows

    def _in_batches(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]], torch.Tensor]:
        """In the order of `prompts`, which ascend by length: a batch is of similar lengths."""
        answers, gaps, logits = [], [], []
        for _, batch in itertools.groupby(prompts, key=lambda prompt: len(prompt) // SIMILAR_TOKENS):
            more_answers, more_gaps, more_logits = self._generate(list(batch))
            answers += more_answers
            gaps += more_gaps
            logits.append(more_logits)
        return answers, gaps, torch.cat(logits)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]], torch.Tensor]:
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[self.eos] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_id=self.eos,
                pad_token_id=self.eos,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
        top = torch.stack([logits.topk(2).values for logits in out.logits])
        gaps = (top[..., 0] - top[..., 1]).T.tolist()
        answers = []
        for row in out.sequences[:, longest:].tolist():
            end = row.index(self.eos) + 1 if self.eos in row else len(row)
            answers.append(row[:end])
        return answers, [gap[: len(answer)] for gap, answer in zip(gaps, answers, strict=True)], out.logits[0]


def top_logprobs(logits: torch.Tensor) -> list[list[Any]]:
    """[[id, logprob], ...], the most likely first. Args: logits: [vocab]."""
    values, ids = logits.log_softmax(-1).topk(TOP_LOGPROBS)
    return [[token, round(value, 6)] for token, value in zip(ids.tolist(), values.tolist(), strict=True)]


def kept_logits(
    reference: Reference, name: str, prompts: list[list[int]], answers: list[list[int]]
) -> list[list[float]]:
    return reference.logits(name, prompts[:LOGIT_PROMPTS], answers[:LOGIT_PROMPTS])


def write(reference: Reference, model_folder: Path) -> int:
    import peft
    import transformers

    from diptych.common.checkpoint.hashing import model_fingerprint

    questions = [question.prompt for question in GOLDEN_QUESTIONS]
    prompts = sorted((reference.tokenizer(text, add_special_tokens=False).input_ids for text in questions), key=len)
    found, unclear = {}, set()
    for name in (BASE, *STYLES):
        answers, gaps, logits = found[name] = reference.answers(name, prompts)
        unclear |= {number for number, gap in enumerate(gaps) if min(gap) <= MIN_GAP}
        print(f"{name}: {reference.tokenizer.decode(answers[-1])!r}", flush=True)
    kept = [number for number in range(len(prompts)) if number not in unclear][-NUM_PROMPTS:]
    if len(kept) < NUM_PROMPTS:
        print(f"{len(unclear)} prompts have gaps of at most {MIN_GAP}: replace some in styles.py", file=sys.stderr)
        return 1
    adapters = {
        name: {
            "least_gap": round(min(min(gaps[number]) for number in kept), 6),
            "answers": [answers[number] for number in kept],
            "first_logprobs": [top_logprobs(logits[number]) for number in kept],
            "logits": kept_logits(reference, name, [prompts[n] for n in kept], [answers[n] for n in kept]),
        }
        for name, (answers, gaps, logits) in found.items()
    }
    versions = {"python": platform.python_version()}
    versions |= {module.__name__: module.__version__ for module in (peft, torch, transformers)}
    head = {
        "model": MODEL_NAME,
        "model_revision": model_fingerprint(model_folder),
        "max_new_tokens": MAX_NEW_TOKENS,
        "logit_step": LOGIT_STEP,
        "versions": versions,
        "prompts": [prompts[number] for number in kept],
        "adapters": adapters,
    }
    GOLDEN_FILE.write_text(_one_row_a_line(head), encoding="utf-8")
    return 0


def _one_row_a_line(head: dict[str, Any]) -> str:
    """JSON whose lists of numbers take one line each."""

    def text(value: Any, indent: str) -> str:
        inner = indent + "  "
        if isinstance(value, dict):
            rows = [f"{inner}{json.dumps(key)}: {text(item, inner)}" for key, item in value.items()]
            return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
        if isinstance(value, list) and isinstance(value[0], list) and indent.count("  ") < 4:
            return "[\n" + ",\n".join(inner + text(item, inner) for item in value) + f"\n{indent}]"
        return json.dumps(value, separators=(",", ":"))

    return text(head, "") + "\n"


def check(reference: Reference, names: list[str]) -> int:
    """Returns: 0 when every answer is as in the file, each prompt alone and without padding, and every logit nearly so."""
    golden, wrong = json.loads(GOLDEN_FILE.read_text(encoding="utf-8")), 0
    for name in names:
        for number, prompt in enumerate(golden["prompts"]):
            (answer,), _, _ = reference.answers(name, [prompt])
            same = answer == golden["adapters"][name]["answers"][number]
            wrong += not same
            print(f"{name}, prompt {number}: {'same' if same else f'differs: {answer}'}", flush=True)
        kept = golden["adapters"][name]
        found = torch.tensor(kept_logits(reference, name, golden["prompts"], kept["answers"]))
        apart = float((found - torch.tensor(kept["logits"])).abs().max())
        wrong += apart > LOGIT_TOLERANCE
        print(f"{name}: logits differ by {apart:.1e} at most", flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", nargs="+", metavar="NAME", choices=(BASE, *STYLES))
    arguments = parser.parse_args()
    from diptych.cli.models.store import ensure_default_model
    from diptych.cli.progress import progress_on

    torch.set_num_threads(1)
    with progress_on() as progress:
        model_folder = ensure_default_model(progress)
    reference = Reference(model_folder)
    return check(reference, arguments.check) if arguments.check else write(reference, model_folder)


if __name__ == "__main__":
    sys.exit(main())
