"""Trains the adapters of styles.py with peft and writes each into a folder beside this file.

    python tests/adapters/train.py [NAME ...]       minutes on one thread of a CPU

The same machine and versions give the same files. Other ones give other files, and then `make golden-adapters` has to be
run again, too. Needs peft: `make adapters` makes an environment that has it.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from styles import HERE, MODEL_NAME, STYLES, Question, Style, training_questions
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 4
MAX_BYTES = 300_000
_IGNORED = -100


def batch_of(tokenizer: Any, style: Style, questions: list[Question]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask, labels: [questions, longest]; labels are ids where the model has to answer, else -100."""
    rows = []
    for question in questions:
        prompt = tokenizer(question.prompt, add_special_tokens=False).input_ids
        answer = tokenizer(style.answer_about(question.topic) + "<|im_end|>", add_special_tokens=False).input_ids
        rows.append((prompt + answer, [_IGNORED] * len(prompt) + answer))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [_IGNORED] * (longest - len(row)) for _, row in rows])
    return ids, mask, labels


def loss_of(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy; logits are computed only where there is a label."""
    causal = model.base_model.model
    hidden = causal.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    chosen = wanted != _IGNORED
    return torch.nn.functional.cross_entropy(causal.lm_head(hidden[chosen]), wanted[chosen])


def train(name: str, style: Style, model_folder: Path) -> None:
    torch.manual_seed(sum(name.encode()))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)  # adapters stay in float32
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **style.config))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=style.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, style.learning_rate, total_steps=style.steps)
    questions, started = training_questions(), time.perf_counter()
    order = torch.randperm(len(questions)).tolist() * (1 + style.steps * BATCH // len(questions))
    model.train()
    for step in range(style.steps):
        rows = [questions[index] for index in order[step * BATCH : (step + 1) * BATCH]]
        loss = loss_of(model, *batch_of(tokenizer, style, rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 7 == 6:
            print(f"{name}: step {step + 1}, loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    write(model, HERE / name, style.dtype)


def write(model: Any, folder: Path, dtype: str) -> None:
    """Only what a user's folder needs: the configuration and the tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config_file, tensors_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = MODEL_NAME
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {key: tensor.to(getattr(torch, dtype)) for key, tensor in load_file(tensors_file).items()}
    save_file(tensors, tensors_file, metadata={"format": "pt"})
    if (size := tensors_file.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"{folder.name}: {size} bytes, more than {MAX_BYTES}")
    print(f"wrote {folder.name}: {len(tensors)} tensors, {size} bytes")


def main() -> int:
    from diptych.cli.models.store import ensure_default_model
    from diptych.cli.progress import progress_on

    torch.set_num_threads(1)
    with progress_on() as progress:
        model_folder = ensure_default_model(progress)
    for name in sys.argv[1:] or STYLES:
        train(name, STYLES[name], model_folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
