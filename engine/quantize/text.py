"""Text files as token ids, in pieces that fit into the model's context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from diptych.common.errors import ConfigError
from diptych.common.text.tokenizer import ModelTokenizer

HELD_OUT = Path(__file__).parent / "static" / "held_out.txt"
"""Of which perplexity is measured where no other text is named: see static/README.md."""
LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Text:
    """
    Args:
        name: of the file. blake3: 64 hexadecimal digits, of its bytes.
        prefix: special tokens in front of each piece, such as a BOS.
        pieces: the text's own tokens, in order.
    """

    name: str
    blake3: str
    prefix: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Without the prefix."""
        return sum(map(len, self.pieces))

    def prompts(self) -> list[list[int]]:
        return [[*self.prefix, *piece] for piece in self.pieces]

    def described(self) -> dict[str, object]:
        """Of a manifest."""
        return {"file": self.name, "blake3": self.blake3, "num_tokens": self.num_tokens, "num_pieces": len(self.pieces)}


def read_text(path: Path, field: str, tokenizer: ModelTokenizer, *, piece: int, most: int | None = None) -> Text:
    """
    Args:
        field: the setting that names the file.
        piece: tokens of a prompt, special ones included.
        most: pieces; None: all. With more, evenly spread ones are taken.
    Raises: ConfigError naming `field`, for a file that cannot be read, is not UTF-8, or holds fewer than 64 tokens.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(field, str(path), f"must be text in UTF-8: {error.reason} at byte {error.start}") from None
    prefix = tokenizer.encode("")
    ids = tokenizer.encode(text)[len(prefix) :]
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(field, str(path), f"holds {len(ids)} tokens of text, where {LEAST_TOKENS} are the least")
    size = piece - len(prefix)
    pieces = [tuple(ids[first : first + size]) for first in range(0, len(ids), size)]
    if len(pieces) > 1 and len(pieces[-1]) < LEAST_TOKENS:
        pieces.pop()
    if most is not None and len(pieces) > most:
        pieces = [pieces[i * len(pieces) // most] for i in range(most)]
    return Text(path.name, blake3(raw).hexdigest(), tuple(prefix), tuple(pieces))
