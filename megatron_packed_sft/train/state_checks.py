"""Whether a training_state.json says what can be: a forged one must not reach a model, an optimizer or an export.

The loader's state is checked by the loader, and the names of files by `TrainingState.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_packed_sft.megatron.lora_settings import TARGETS
from megatron_packed_sft.support.json_document import Fields

_LARGEST: Final = (1 << 31) - 1
_MANY: Final = 1 << 16  # layers, or heads: whoever reads weights makes a list of them
_REQUIRED: Final = {
    "num_layers": _MANY, "num_attention_heads": _MANY, "hidden_size": _LARGEST, "ffn_hidden_size": _LARGEST,
    "vocab_size": _LARGEST,
}  # fmt: skip
_OPTIONAL: Final = {"num_query_groups": _MANY, "head_dim": _LARGEST, "sequence_length": _LARGEST}
_NUMBERS: Final = ("rotary_base", "rotary_scaling_factor", "layernorm_epsilon")
_FLAGS: Final = ("tie_embeddings", "qk_layernorm", "qkv_bias")


def refuse_impossible(sections: Mapping[str, Mapping[str, Any]], file: str) -> None:
    """Refuse values that no run writes, naming the key.

    Args:
        sections: the objects of the document by name.
        file: its path, for messages.

    Example:
        >>> refuse_impossible({"scheduler": {"num_steps": -1}, "model": {}, "pretrained": {}, "peft": {}}, "state.json")
        Traceback (most recent call last):
        megatron_packed_sft.errors.ManifestError: state.json, scheduler: num_steps is -1, not an integer in \
0..4611686018427387904; restore the file from the original
    """
    fields = {name: Fields(section, f"{file}, {name}") for name, section in sections.items()}
    fields["scheduler"].integer("num_steps", 0, 1 << 62)
    _refuse_impossible_model(sections["model"], fields["model"])
    if sections["pretrained"]:
        for name in ("path", "family", "dtype", "checksum"):
            fields["pretrained"].text(name)
    if sections["peft"]:
        _refuse_impossible_adapters(sections["peft"], fields["peft"])


def _refuse_impossible_model(model: Mapping[str, Any], fields: Fields) -> None:
    for name, most in _REQUIRED.items():
        fields.integer(name, 1, most)
    for name, most in _OPTIONAL.items():
        fields.optional_integer(name, 1, most)
    if model["num_attention_heads"] % (model.get("num_query_groups") or 1):
        raise fields.error("num_attention_heads", "is not a multiple of num_query_groups")
    fields.optional_text("family")
    for name in _NUMBERS:
        _refuse_no_number(model, name, fields)
    for name in _FLAGS:
        if not isinstance(model.get(name, False), bool):
            raise fields.error(name, "is neither true nor false")


def _refuse_impossible_adapters(peft: Mapping[str, Any], fields: Fields) -> None:
    if fields.text("method") != "lora":
        raise fields.error("method", "is not lora")
    fields.integer("rank", 1, _LARGEST)
    for name in ("alpha", "dropout"):
        _refuse_no_number(peft, name, fields, is_required=True)
    modules = peft.get("target_modules")
    if not isinstance(modules, list) or not all(one in TARGETS for one in modules):
        raise fields.error("target_modules", f"is not a list out of {', '.join(TARGETS)}")


def _refuse_no_number(section: Mapping[str, Any], name: str, fields: Fields, *, is_required: bool = False) -> None:
    value = section.get(name)
    if value is None and not is_required:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise fields.error(name, "is not a number of at least 0")
