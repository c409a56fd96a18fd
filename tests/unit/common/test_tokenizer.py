from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers, processors

from diptych.common.errors import ConfigError, InvalidRequestError
from diptych.common.text.tokenizer import GenerationDefaults, ModelTokenizer, generation_defaults

MakeModel = Callable[..., Path]
TEXTS = ["", "The", "  two  spaces\n\n", "x = 42  # 1234", "你好，世界！", "🙂👩‍👩‍👧‍👦", "\x00\x04 nul", "héllo→"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_to_ids_and_back(byte_level_model: Path, text: str) -> None:
    tokenizer = ModelTokenizer(byte_level_model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_special_token_spelled_in_text_becomes_that_token(byte_level_model: Path) -> None:
    tokenizer = ModelTokenizer(byte_level_model)
    assert tokenizer.encode("a<|im_end|>")[-1] == 2
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b"), skip_special_tokens=False) == "a<|im_end|>b"


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff ok"])
def test_lone_surrogates_are_refused_with_the_field_named(byte_level_model: Path, text: str) -> None:
    tokenizer = ModelTokenizer(byte_level_model)
    with pytest.raises(InvalidRequestError) as error:
        tokenizer.encode(text)
    assert error.value.param == "prompt"
    with pytest.raises(InvalidRequestError) as error:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}, {"role": "user", "content": text}])
    assert error.value.param == "messages[1].content"


def test_a_token_without_an_embedding_is_refused(make_model: MakeModel) -> None:
    tokenizer = ModelTokenizer(make_model(config={"vocab_size": 300}))
    assert tokenizer.vocab_size == 300
    with pytest.raises(InvalidRequestError, match="without an embedding"):
        tokenizer.encode("héllo→")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [0, 2]}, (0, 2)),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 0}, (0, 1, 2)),
        ({"eos_token_id": None}, {}, (2,)),  # the tokenizer's own
    ],
)
def test_eos_ids(make_model: MakeModel, config: dict, generation: dict | None, expected: tuple[int, ...]) -> None:
    assert ModelTokenizer(make_model(config=config, generation=generation)).eos_token_ids == expected


def test_eos_outside_the_vocabulary_is_a_config_error(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        ModelTokenizer(make_model(config={"eos_token_id": 10**6}))


def test_missing_or_broken_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelTokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used"):
        ModelTokenizer(tmp_path)


def test_generation_defaults(make_model: MakeModel, byte_level_model: Path) -> None:
    assert generation_defaults(byte_level_model) == GenerationDefaults()
    folder = make_model(generation={"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True})
    assert generation_defaults(folder) == GenerationDefaults(0.6, 0.95, 20)
    with pytest.raises(ConfigError, match="temperature"):
        generation_defaults(make_model(generation={"temperature": "hot"}))


def test_neither_torch_nor_transformers_nor_what_compiles_templates_is_imported(byte_level_model: Path) -> None:
    """A worker and its grammar process have a tokenizer, and no chats."""
    code = (
        "import sys, diptych.common.text.tokenizer as module, diptych.common.text.detokenizer, diptych.common.text.revision;"
        f"module.ModelTokenizer({str(byte_level_model)!r}, chat=False);"
        "sys.exit(' '.join({'torch', 'transformers', 'numpy', 'jinja2'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_spans_of_a_text_that_is_normalized_and_gets_tokens_before_it(make_model) -> None:
    """Issue 15, 4.9: an echo's offsets are those of the text that the caller wrote."""
    folder = make_model()
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.normalizer = normalizers.NFC()
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = ModelTokenizer(folder)
    text = "e\u0301 \U0001f30d<|endoftext|>  b"
    ids, spans = tokenizer.encode(text), tokenizer.spans(text)
    assert len(ids) == len(spans)
    assert (spans[0], spans[-1]) == ((0, 0), (len(text), len(text)))
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert begin <= end
    special = ids.index(tokenizer.raw.token_to_id("<|endoftext|>"))
    assert text[slice(*spans[special])] == "<|endoftext|>"
    within = [span for token, span in zip(ids, spans, strict=True) if span[0] <= text.index("\U0001f30d") < span[1]]
    assert len(within) >= 1
    assert spans[1][0] == 0
    assert spans[special + 1][0] == spans[special][1]
