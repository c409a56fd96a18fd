"""Small real tokenizers in model folders: byte-level BPE as Llama 3 and Qwen have, and SentencePiece style as Llama 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "def main(argument):\n    return argument + 1\n",
    "你好，世界！今日は良い天気ですね。안녕하세요",
    "🙂🎉🚀 naïve café Ångström",
] * 3


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("héllo→", special=False, normalized=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    pieces = ["▁", "▁the", "the", "a", "b", "▁a", "▁▁", "你", "🙂", "<", "0x41", "é", "\ufffd"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_model(kind="byte_level" | "sentencepiece", config={...}, generation={...}, tokenizer_config={...},
    template=...) -> folder."""
    makers = {"byte_level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}

    def make(
        kind: str = "byte_level",
        *,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
        tokenizer_config: dict[str, Any] | None = None,
        template: str | None = CHAT_TEMPLATE,
    ) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tokenizer = makers[kind]()
        tokenizer.save(str(folder / "tokenizer.json"))
        defaults = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 2, "model_type": "llama"}
        (folder / "config.json").write_text(json.dumps({**defaults, **(config or {})}))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **(tokenizer_config or {})}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def byte_level_model(make_model: MakeModel) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def sentencepiece_model(make_model: MakeModel) -> Path:
    return make_model("sentencepiece")
