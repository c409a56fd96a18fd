"""A decode worker is killed between the bytes of a character: the joined stream is the undisturbed text, byte for byte."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import ask, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
DECODES = ("decode-0", "decode-1")
EOS = 256


def byte_folder(folder: Path) -> Path:
    """A model folder whose tokens are single bytes: every character that is not ASCII takes two to four of them."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)} | {"<end>": EOS}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": EOS + 1, "max_position_embeddings": 512, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


async def test_killed_in_the_middle_of_a_character(tmp_path: Path) -> None:
    fake = {"vocab_size": EOS + 1, "eos_token_ids": (EOS,)}
    async with (
        fake_model_cluster(
            tmp_path, decode=2, model_folder=byte_folder(tmp_path / "bytes"), fake=fake, grammar_backend="auto"
        ) as cluster,
        cluster.client() as client,
    ):
        asked = ask(num_prompt=40, max_tokens=200, regex="[漢字😀é]{24}", ignore_eos=False)
        asked["token_ids"] = [token % EOS for token in asked["token_ids"]]
        whole = await client.generate(**asked)
        assert whole.finish_reason == "stop"
        assert len(whole.text) == 24
        ends = {len(whole.text[:i].encode()) for i in range(25)}
        cuts = [count for count in range(20, 60) if count not in ends]
        for cut in (cuts[0], cuts[len(cuts) // 2], cuts[-1]):
            await cluster.until_usable()
            for name in DECODES:
                await cluster.hold(name, after_steps=cut - 1)
            tokens, text, killed = 0, "", None
            async with client.stream(**asked) as stream:
                async for delta in stream:
                    tokens += len(delta.token_ids)
                    text += delta.text
                    if tokens == cut and killed is None:
                        await waiting.until(lambda: any(cluster.gates.held(name) for name in DECODES), every_s=0.01)
                        killed = next(name for name in DECODES if cluster.gates.held(name))
                        cluster.kill_hard(killed)
                        for name in DECODES:
                            cluster.gates.open(name)
            assert killed is not None, f"token {cut} did not come by itself"
            assert text == whole.text
            cluster.start(killed)
        await cluster.until_usable()
        await cluster.idle_again()
