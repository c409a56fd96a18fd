"""Which keys of a config.json were read: one that nothing reads is refused by its name, unless it changes no number.

A checkpoint of a known architecture may hold a key of a newer or another model, as Granite's multipliers. Whoever leaves
it out serves fluent, wrong answers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from diptych.common.errors import ConfigError

_NAMES = """
    _name_or_path name_or_path model_type auto_class _commit_hash transformers_version transformers.js_config
    torch_dtype dtype unsloth_version unsloth_fixed is_llama_config finetuning_task
"""
_TOKENS = """
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id prefix tokenizer_class
    tokenizer_model_max_length tokenizer_padding_side model_max_length max_sequence_length seq_length
"""
_TRAINING = """
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop classifier_dropout problem_type num_labels
    id2label label2id task_specific_params gradient_checkpointing neftune_noise_alpha
"""
_FORM_OF_COMPUTATION = """
    use_cache cache_implementation chunk_size_feed_forward pretraining_tp output_attentions output_hidden_states
    return_dict torchscript use_bfloat16 tf_legacy_loss is_decoder tie_encoder_decoder attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset _experts_implementation_internal
    _flash_attn_2_enabled use_flash_attn
"""
"""How transformers computes, in which order and what it returns besides."""
_GENERATION = """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p
"""
"""Defaults of a request are generation_config.json's; transformers 5 drops these, too."""

WITHOUT_EFFECT = frozenset((_NAMES + _TOKENS + _TRAINING + _FORM_OF_COMPUTATION + _GENERATION).split())
"""On the logits of any family. What one family alone has is in its Family.without_effect."""
OFF = frozenset({
    "add_cross_attention", "attention_bias", "is_encoder_decoder", "mlp_bias", "rope_interleaved", "use_mrope",
})  # fmt: skip
"""Keys that are known as false to every family, and as true only to one that reads them."""


class TrackedConfig(Mapping[str, Any]):
    """A decoded JSON object that notes which of its keys are read, as do the objects in it. What lies in a list is read with
    the list."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._read: set[str] = set()
        self._inner: dict[str, TrackedConfig] = {}

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        value = self._raw[key]
        if not isinstance(value, Mapping):
            return value
        return self._inner.setdefault(key, TrackedConfig(value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return repr(self._raw)

    def refuse_unread(self, known: Container[str], architecture: str, prefix: str = "") -> None:
        """Args: known: keys of the whole config that need not be read. prefix: of the names of the keys.

        Raises: ConfigError naming a key that was not read and is not empty; null is, as transformers writes it.
        """
        for key, value in self._raw.items():
            if key in self._inner:
                self._inner[key].refuse_unread((), architecture, f"{prefix}{key}.")
            elif key not in self._read and key not in known and value not in (None, {}, []):
                if key in OFF and value is False:
                    continue
                reason = f"nothing of {architecture} reads it here, and it may change what the model computes"
                raise ConfigError(f"{prefix}{key}", value, f"{reason}; remove it only if it changes nothing")
