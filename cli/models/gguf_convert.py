"""Converts the GGUF file of any registered family into a Hugging Face folder, with the `gguf` package alone: in float32, or
with the blocks of its linear layers as they are (see engine.exec.formats.gguf).

How files hold a family is part of its description (engine/exec/models). Tokenizers are rebuilt from the file: byte-level BPE
with a known pre-tokenizer, and SentencePiece BPE. Everything else is rejected. The tensors equal those of transformers' GGUF
loader, bit for bit. The tokenizer differs where that loader is wrong: a file with `pre = smollm` splits digits before the
byte level, and SentencePiece merges the pair with the best score.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from diptych.common.errors import ConfigError
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.models.registry import describe, gguf_family

CONVERTER_VERSION = 1
"""Raise it whenever the written files change; folders of an older version are then converted again."""

NO_KINDS: Mapping[str, str] = MappingProxyType({})
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Of tokenizer.ggml.token_type."""
_SPACE = "\u2581"
"""SentencePiece's mark for a space."""


@dataclass(frozen=True)
class _Tensor:
    """dtype: as safetensors calls it. load: returns an array of this shape."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    dtype: str = "F32"

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.dtype == "F32" else 1)


_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a GGUF value by its type; 8 is a text, 9 an array."""


def check_lengths(path: Path) -> None:
    """The reader of the `gguf` package believes every count in a file: it would read beyond its end, for as long as the count
    says. Raises: ValueError, struct.error (an end in the middle of a number), OSError."""
    raw: Any = np.memmap(path, mode="r") if path.stat().st_size else b""
    at = 24
    magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", raw)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}: must be GGUF of version 2 or 3, little-endian")

    def skip(size: int) -> None:
        nonlocal at
        at += size
        if at > len(raw):
            raise ValueError(f"a length at byte {at - size} leads beyond its end")

    def skip_text() -> None:
        (length,) = struct.unpack_from("<Q", raw, at)
        skip(8 + length)

    def skip_value(kind: int, depth: int = 0) -> None:
        if kind == 8:
            skip_text()
        elif kind == 9 and depth < 4:
            inner, count = struct.unpack_from("<IQ", raw, at)
            skip(12)
            if inner in _FIXED:
                skip(count * _FIXED[inner])
            else:
                for _ in range(count):  # each takes 8 bytes at least, or ends this
                    skip_value(inner, depth + 1)
        elif kind in _FIXED:
            skip(_FIXED[kind])
        else:
            raise ValueError(f"a value of unknown type {kind}")

    for _ in range(num_fields):
        skip_text()
        (kind,) = struct.unpack_from("<I", raw, at)
        skip(4)
        skip_value(kind)
    for _ in range(num_tensors):
        skip_text()
        (num_dims,) = struct.unpack_from("<I", raw, at)
        skip(4 + 8 * num_dims + 12)


class GgufModel:
    """One opened GGUF file. Raises: ConfigError unless it is of a registered family, with a known kind of tokenizer."""

    def __init__(self, path: Path) -> None:
        try:
            check_lengths(path)
            self._reader = GGUFReader(path)
        except (OSError, ValueError, LookupError, OverflowError, struct.error) as error:
            raise ConfigError("gguf", str(path), f"not a readable GGUF file: {error}") from error
        self._path = path
        self._family, self._gguf = gguf_family(self.field("general.architecture"))
        if self.field("tokenizer.ggml.model") not in ("gpt2", "llama"):
            raise ConfigError("tokenizer.ggml.model", self.field("tokenizer.ggml.model"), "supported: gpt2, llama")

    def field(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise ConfigError(key, None, f"missing in {self._path.name}")
        return value

    def own(self, name: str, default: Any = None) -> Any:
        """A field of the architecture; without a default it must be there. Raises: ConfigError."""
        key = f"{self._gguf.architecture}.{name}"
        return self.required(key) if default is None else self.field(key, default)

    # ---- weights ----

    def tensors(self, kinds: Mapping[str, str] = NO_KINDS) -> list[_Tensor]:
        """Tensors under their Hugging Face names, in file order; each is computed when `load` is called. Raises:
        ConfigError naming a tensor that is missing, not the model's, or of another shape than the metadata say.

        Args: kinds: of layers whose blocks are kept, see `packed_kinds`; all others are float32.
        """
        config = self.config()
        description = describe(config)
        wanted = description.plain_tensors()
        tied = description.head.linear.parts[0].name if description.head.tied else ""
        table = self._names(config)
        names = {table.get_name(name, (".weight", ".bias")): name for name in wanted}
        found = []
        for tensor in self._reader.tensors:
            name = names.pop(tensor.name, None)
            if name is None:
                raise ConfigError("gguf", tensor.name, f"a tensor that {config['architectures'][0]} does not have")
            shape = tuple(int(n) for n in reversed(tensor.shape))
            if shape != wanted[name]:
                raise ConfigError("gguf", tensor.name, f"has shape {shape}, where the metadata ask for {wanted[name]}")
            if name.removesuffix(".weight") in kinds:
                found.append(self._packed(tensor, name, config))
                continue
            found.append(_Tensor(name, shape, self._loader(tensor, name, shape, config)))
            if tied in kinds and name == f"{description.embedding.name}.weight":
                found.append(self._packed(tensor, f"{tied}.weight", config))
        if names:
            raise ConfigError("gguf", min(map(str, names)), f"missing in {self._path.name}, one of {len(names)}")
        return found

    def packed_kinds(self) -> dict[str, str]:
        """The kind of blocks of every linear layer, for `tensors`. The head has one where the file has packed it, also where it
        is the embedding, which then is there twice. Raises: ConfigError naming a tensor of another kind."""
        config = self.config()
        description = describe(config)
        table = self._names(config)
        types = {tensor.name: tensor.tensor_type.name for tensor in self._reader.tensors}

        def kind(layer: str) -> str:
            name: str | None = table.get_name(f"{layer}.weight", (".weight", ".bias"))
            return "" if name is None else types.get(name, "")

        kinds = {
            part.name: kind(part.name) for block in description.blocks for one in block.linears for part in one.parts
        }
        for layer, found in kinds.items():
            if found not in KINDS:
                rule = f"{layer} cannot stay packed: supported are {', '.join(KINDS)}"
                raise ConfigError("gguf", found or None, rule)
        head = description.head.linear.parts[0].name
        of_head = kind(description.embedding.name if description.head.tied else head)
        return {**kinds, head: of_head} if of_head in KINDS else kinds

    def _names(self, config: Mapping[str, Any]) -> Any:
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self._gguf.architecture)
        return get_tensor_name_map(architecture, config["num_hidden_layers"])

    def _packed(self, tensor: Any, name: str, config: dict[str, Any]) -> _Tensor:
        def load() -> np.ndarray:
            return np.ascontiguousarray(self._gguf.restore(name, tensor.data, config))  # it moves rows only

        return _Tensor(name, tuple(tensor.data.shape), load, "U8")

    def _loader(
        self, tensor: Any, name: str, shape: tuple[int, ...], config: dict[str, Any]
    ) -> Callable[[], np.ndarray]:
        def load() -> np.ndarray:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
            return np.ascontiguousarray(self._gguf.restore(name, weight, config))

        return load

    def config(self) -> dict[str, Any]:
        """config.json as transformers 5 reads it. Raises: ConfigError."""
        heads, hidden = int(self.own("attention.head_count")), int(self.own("embedding_length"))
        family = dict(self._gguf.config(self.own))
        head_dim = self.own("attention.key_length", self.own("rope.dimension_count", hidden // heads))
        return {
            "architectures": [self._family.architectures[0]],
            "model_type": self._gguf.model_type,
            "dtype": "float32",
            "vocab_size": int(self.own("vocab_size", len(self.required("tokenizer.ggml.tokens")))),
            "hidden_size": hidden,
            "intermediate_size": int(self.own("feed_forward_length")),
            "num_hidden_layers": int(self.own("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.own("attention.head_count_kv", heads)),
            "head_dim": int(head_dim),
            **{key: family.pop(key) for key in ("hidden_act", "hidden_activation") if key in family},
            "max_position_embeddings": int(self.own("context_length")),
            # The file keeps epsilon as fp32; its shortest decimal is the number the model was trained with.
            "rms_norm_eps": float(str(np.float32(self.own("attention.layer_norm_rms_epsilon")))),
            **({} if "rope_parameters" in family else self._rope()),
            **family,
            "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in self._reader.tensors},
            **self._token_ids(),
        }

    def _rope(self) -> dict[str, Any]:
        scaling = self.own("rope.scaling.type", "none")
        if scaling != "none":
            raise ConfigError(f"{self._gguf.architecture}.rope.scaling.type", scaling, "must be absent")
        theta = float(self.own("rope.freq_base"))
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}

    def _token_ids(self) -> dict[str, int]:
        keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {name: self.field(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        return {name: int(value) for name, value in found.items() if value is not None}

    # ---- tokenizer ----

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the model was trained with. Raises: ConfigError."""
        return self._sentencepiece() if self.field("tokenizer.ggml.model") == "llama" else self._byte_level()

    def _byte_level(self) -> Tokenizer:
        """Bytes missing in the vocabulary are dropped, as there."""
        pre = self.field("tokenizer.ggml.pre")
        if pre != "smollm":
            raise ConfigError("tokenizer.ggml.pre", pre, "this converter supports 'smollm' only")
        tokens: list[str] = self.required("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self.required("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.required("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """BPE whose merges follow from the scores of the pieces; what the vocabulary lacks becomes bytes."""
        kinds = self.required("tokenizer.ggml.token_type")
        # The file holds the visible space as a space, and the tab under the name of its byte.
        tokens = [
            {"<0x09>": "\t"}.get(token, token.replace(" ", _SPACE)) for token in self.required("tokenizer.ggml.tokens")
        ]
        unknown = tokens[int(self.required("tokenizer.ggml.unknown_token_id"))]
        merges = merges_of(tokens, self.required("tokenizer.ggml.scores"), kinds)
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = bool(self.field("tokenizer.ggml.add_space_prefix", True))
        replace = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        if self.field("tokenizer.ggml.add_bos_token", True):
            begin = int(self.required("tokenizer.ggml.bos_token_id"))
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[begin]} $A",
                pair=f"{tokens[begin]} $A {tokens[begin]} $B",
                special_tokens=[(tokens[begin], begin)],
            )
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json. The class makes transformers use tokenizer.json unchanged instead of building its own."""
        tokens: list[str] = self.required("tokenizer.ggml.tokens")
        named = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self.field(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                named[f"{name}_token"] = tokens[int(token_id)]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self.own("context_length")),
            **named,
        }


def merges_of(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that together are a piece, the best score first: SentencePiece merges in this order. Pieces that
    users defined come before all others, whatever their score."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for i, token in enumerate(tokens):
        if kinds[i] not in (_NORMAL, _USER_DEFINED):
            continue
        order = -np.inf if kinds[i] == _USER_DEFINED else -float(scores[i])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((order, i, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _write_safetensors(path: Path, tensors: list[_Tensor], progress: Callable[[int, int], None]) -> None:
    """Header size, JSON header, raw data; written tensor by tensor, so that the whole model is never in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        done = 0
        for tensor in tensors:
            file.write(tensor.load().astype("<f4" if tensor.dtype == "F32" else "u1", copy=False).data)
            done += tensor.size_bytes
            progress(done, offset)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(
    gguf_path: Path,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    packed: bool = False,
) -> None:
    """Write the Hugging Face files of `gguf_path` into the existing `folder`.

    Args:
        progress: called with (bytes written, total bytes) of the weights.
        packed: keep the blocks of linear layers; False: all weights as fp32.
    Raises: ConfigError when this converter does not support the file.
    """
    model = GgufModel(gguf_path)
    config = model.config()
    kinds = model.packed_kinds() if packed else NO_KINDS
    tensors = model.tensors(kinds)
    if packed:
        head = describe(config).head.linear.parts[0].name in kinds
        config["tie_word_embeddings"] &= not head
        config["quantization_config"] = {"quant_method": "gguf", "lm_head": head, "kinds": kinds}
    _write_json(folder / "config.json", config)
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    model.tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", model.tokenizer_config())
    template = model.field("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", tensors, progress)
