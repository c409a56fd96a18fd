"""Marks of tool calls and thoughts keep their text, also where a tokenizer calls them special."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diptych.common.text.detokenizer import IncrementalDetokenizer
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.router.tools.parsers import MistralParser
from diptych.router.tools.pieces import CallArguments, CallStart

CALL = '[TOOL_CALLS]add[ARGS]{"a": 1}'


@pytest.mark.parametrize("byte_level", [True, False])
def test_a_special_marker_reaches_the_parser(tmp_path: Path, byte_level: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else sorted({*CALL, "\u2581", "<", ">"})
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]", "</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 1}))
    model = ModelTokenizer(tmp_path)
    assert [model.raw.id_to_token(i) for i in model.special_token_ids] == ["</s>"]
    ids = model.encode(CALL + "</s>", add_special_tokens=False)
    assert model.raw.id_to_token(ids[0]) == "[TOOL_CALLS]"  # still one token
    detokenizer, parser, pieces = IncrementalDetokenizer(model), MistralParser(("add",), lambda: "call00001"), []
    text = ""
    for token_id in ids:
        text += (said := detokenizer.push(token_id))
        pieces += parser.feed(said)
    pieces += parser.feed(detokenizer.flush())
    assert text == CALL == model.decode(ids)
    assert pieces[0] == CallStart(0, "call00001", "add")
    assert "".join(piece.text for piece in pieces[1:] if isinstance(piece, CallArguments)) == '{"a": 1}'
