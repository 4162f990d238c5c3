"""Whether transformers would take a tokenizer.json as it is.

Since version 5 it does so only for classes without an `__init__` of their own. The others (LlamaTokenizer,
GPT2Tokenizer, ...) take vocabulary, merges and added tokens from the file and build everything else anew, as their
`tokenizer_class` says; so the ids of a file with another pre-tokenizer are not those of the file. Where the file holds
what its class would build, it can be used as it is; otherwise transformers is asked for what it built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_packed_sft.encode.tokenizers.control_tokens import SPACE_MARK

MODEL_FILE = "config.json"
# Files that transformers reads besides, or instead.
_OTHER_FILES = ("tekken.json",)
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
# Classes that take the file as it is.
_GENERIC = frozenset({"PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"})
# Models for which transformers puts a class of its own in place of the one that the folder names.
_CLASS_OF_MODEL = {
    "qwen2": "Qwen2Tokenizer",
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
    "siglip2": "Siglip2Tokenizer",
}
_USUAL = frozenset({"bos_token", "eos_token", "pad_token", "unk_token"})
_NFC = {"type": "NFC"}
_END_OF_TEXT = "<|endoftext|>"
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Built(NamedTuple):
    """What a class builds: the parts that decide ids, and the special tokens that it has if the folder names none."""

    normalizer: Any
    pre_tokenizer: Any
    special_tokens: dict[str, str]
    model: Mapping[str, Any] = MappingProxyType({})  # settings that are neither absent nor false


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


_BUILT = {
    "GPT2Tokenizer": _Built(
        None, _byte_level(use_regex=True), dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT)
    ),
    "Qwen2Tokenizer": _Built(
        _NFC,
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}, "behavior": "Isolated", "invert": False},
                _byte_level(use_regex=False),
            ],
        },
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT),
    ),
    "CohereTokenizer": _Built(
        _NFC,
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
        },
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "GemmaTokenizer": _Built(
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    ),
}


def chosen_class(document: dict[str, Any], config: dict[str, Any], model_config: dict[str, Any]) -> str | None:
    """Return the class that transformers would choose, without `Fast`; None if the folder leaves it open.

    Example:
        >>> chosen_class({}, {"tokenizer_class": "GPT2TokenizerFast"}, {})
        'GPT2Tokenizer'
    """
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if named is None:
        return None
    name = str(named).removesuffix("Fast")
    if name == "LlamaTokenizer" and _is_byte_level(document):
        return "TokenizersBackend"
    return _CLASS_OF_MODEL.get(str(model_config.get("model_type")), name)


def default_special_tokens(tokenizer_class: str | None) -> dict[str, str]:
    """Return the special tokens that a class has where its folder names none.

    Example:
        >>> default_special_tokens("GPT2Tokenizer")["eos_token"]
        '<|endoftext|>'
    """
    return _BUILT[tokenizer_class].special_tokens if tokenizer_class in _BUILT else {}


def why_transformers_decides(
    folder: Path, document: dict[str, Any], config: dict[str, Any], model_config: dict[str, Any]
) -> str | None:
    """Return why only transformers can say which ids a folder gives, or None if they are those of its tokenizer.json.

    Args:
        folder: the tokenizer's folder.
        document: its parsed tokenizer.json.
        config: its tokenizer_config.json, or nothing.
        model_config: the config.json of the model beside it, or nothing.
    """
    name, model_type = chosen_class(document, config, model_config), model_config.get("model_type")
    if config.get("auto_map"):
        return f"its tokenizer_class {name} comes with code of its own"
    if config.get("fix_mistral_regex") is not None:
        return "it sets fix_mistral_regex"
    others = (*_OTHER_FILES, *(() if "added_tokens_decoder" in config else _LEGACY_FILES))
    for other in others:
        if (folder / other).is_file():
            return f"it also holds {other}"
    if name is None:
        return None if model_type is None else f"it names no tokenizer_class for its model_type {model_type}"
    if name in _GENERIC:
        return None
    built = _BUILT.get(name)
    if built is None or not _holds(document, config, built):
        return f"transformers builds its tokenizer_class {name} in its own way"
    # With some models it takes the file as it is, and then there are no defaults.
    if model_type is not None and any(token not in config for token in built.special_tokens.keys() & _USUAL):
        return f"it leaves special tokens to its tokenizer_class {name}"
    return None


def _holds(document: dict[str, Any], config: dict[str, Any], built: _Built) -> bool:
    """Return whether a file holds the parts that its class would build."""
    pre_tokenizer = _comparable(document.get("pre_tokenizer"))
    model = {name: value for name, value in document["model"].items() if value and name not in ("vocab", "merges")}
    kind = model.pop("type", "BPE")
    listed = config.get("added_tokens_decoder")
    contents = {token["content"] for token in listed.values()} if listed is not None else set()
    return (
        kind == "BPE"
        and model == dict(built.model)
        and not config.get("add_prefix_space")
        and document.get("normalizer") == built.normalizer
        # Gemma's splits at spaces, of which its normalizer leaves none.
        and (pre_tokenizer == built.pre_tokenizer or (pre_tokenizer is None and "byte_fallback" in built.model))
        # If the configuration lists added tokens, those are all that there are.
        and (listed is None or all(token["content"] in contents for token in document["added_tokens"]))
    )


def _comparable(part: Any) -> Any:
    """Return a pre-tokenizer without what does not decide ids, and with what old files leave out."""
    if not isinstance(part, dict):
        return part
    found = {name: value for name, value in part.items() if name != "trim_offsets"}
    if found.get("type") == "ByteLevel":
        found.setdefault("use_regex", True)
    if "pretokenizers" in found:
        found["pretokenizers"] = [_comparable(one) for one in found["pretokenizers"]]
    return found


def _is_byte_level(document: dict[str, Any]) -> bool:
    pre_tokenizer = document.get("pre_tokenizer") or {}
    steps = [pre_tokenizer, *pre_tokenizer.get("pretokenizers", [])]
    return any(step.get("type") == "ByteLevel" for step in steps)
