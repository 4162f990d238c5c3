"""Reading a Hugging Face tokenizer folder, without transformers unless its files leave something open."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from megatron_packed_sft.encode.tokenizers.gigatoken_path import recall, remember
from megatron_packed_sft.encode.tokenizers.interface import belongs_to_tokenizer
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError, PackedSFTError
from megatron_packed_sft.support.paths import refuse_special_file

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MODEL_FILE = "config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
GENERATION_FILE = "generation_config.json"
INSTALL = "install it with pip install 'megatron-packed-sft[hf]'"
_LONGEST_TOKEN = 10_000  # characters
_ID_LIMIT = (1 << 31) - 1
# Settings of an added token that determine where it is recognised.
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
# Classes for which transformers takes tokenizer.json as it is.
_GENERIC = frozenset({"PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"})
# Files that transformers reads besides tokenizer.json, or instead of it.
_OTHER_FILES = ("tekken.json",)
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")


class TokenizerFolder(NamedTuple):
    """The content of a tokenizer folder.

    Args:
        document: the parsed tokenizer.json, with the added tokens of all files.
        special_tokens: bos_token, eos_token, ... -> text; `additional_special_tokens` -> a list of texts.
        chat_template: Jinja, if there is one.
        tool_template: a separate one for chats with tools, if there is one.
        stop_tokens: texts at which generation stops.
        reason: why transformers was asked, if it was.
        keeps_file: whether the document is that of tokenizer.json.
    """

    document: dict[str, Any]
    special_tokens: dict[str, Any]
    chat_template: str | None
    tool_template: str | None
    stop_tokens: tuple[str, ...]
    reason: str | None = None
    keeps_file: bool = True


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """Read a tokenizer folder; transformers is imported only if tokenizer.json leaves something open."""
    if not (folder / TOKENIZER_FILE).is_file():
        return _ask_transformers(folder, f"{folder} has no {TOKENIZER_FILE}")
    try:
        return _read(folder)
    except PackedSFTError:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"the files in {folder} differ from what Hugging Face writes ({type(error).__name__}: {error}); download "
            "the tokenizer again"
        ) from None


def _read(folder: Path) -> TokenizerFolder:
    for name in (CONFIG_FILE, MODEL_FILE, TEMPLATE_FILE, GENERATION_FILE):
        refuse_special_file(folder / name)
    document = _read_json(folder / TOKENIZER_FILE)
    if not isinstance(document.get("model"), dict):
        raise InvalidInputError(f"{folder / TOKENIZER_FILE} has no model; save the tokenizer again")
    document.setdefault("added_tokens", [])
    if problem := _problem(document):
        raise InvalidInputError(f"{folder / TOKENIZER_FILE} {problem}; download the tokenizer again")
    config, model_config = (_read_json_if_any(folder / name) for name in (CONFIG_FILE, MODEL_FILE))
    if config.get("split_special_tokens"):
        raise InvalidInputError(
            f"{folder / CONFIG_FILE} sets split_special_tokens, which turns control tokens into ordinary text; set it "
            "to false"
        )
    _merge_added_tokens(document, config)
    if reason := _why_transformers_decides(folder, config, model_config):
        return _recall_or_ask(folder, document, reason)
    special_tokens = _special_tokens(config)
    if reason := _left_open(document, config, special_tokens):
        return _ask_transformers(folder, reason)
    templates = _chat_templates(folder, config)
    return TokenizerFolder(
        document,
        special_tokens,
        templates.get("default"),
        templates.get("tool_use"),
        _stop_tokens(folder, document, special_tokens),
    )


def document_of_folder(folder: Path) -> dict[str, Any]:
    """Return the document of a folder of which tokenizer.json is known to be right."""
    document = _read_json(folder / TOKENIZER_FILE)
    document.setdefault("added_tokens", [])
    _merge_added_tokens(document, _read_json_if_any(folder / CONFIG_FILE))
    return document


def _recall_or_ask(folder: Path, document: dict[str, Any], reason: str) -> TokenizerFolder:
    """Return what transformers makes of a folder; if it builds what tokenizer.json says, remember the rest."""
    digest = xxhash.xxh3_128()
    for path in sorted((*folder.glob("*"), *(folder / TEMPLATES_FOLDER).glob("*"))):
        if belongs_to_tokenizer(path.name) and path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    key = f"transformers-{digest.hexdigest()}"
    try:
        installed = version("transformers")
        known = orjson.loads(recall(key) or "{}")
    except (PackageNotFoundError, orjson.JSONDecodeError):
        installed, known = "", {}
    if installed and known.pop("version", None) == installed:
        return TokenizerFolder(document, **{**known, "stop_tokens": tuple(known["stop_tokens"])}, reason=reason)
    found = _ask_transformers(folder, reason)
    if what_decides_ids(found.document) != what_decides_ids(document):
        return found
    names = ("special_tokens", "chat_template", "tool_template", "stop_tokens")
    answer = {"version": installed, **{name: getattr(found, name) for name in names}}
    remember(key, orjson.dumps(answer).decode())
    return found._replace(document=document, keeps_file=True)


def what_decides_ids(document: dict[str, Any]) -> Any:
    """Return the parts of a document that decide ids, without settings that are absent or have no effect.

    Example:
        >>> level = {"type": "ByteLevel", "use_regex": True, "trim_offsets": False}
        >>> what_decides_ids({"model": {"dropout": None}, "pre_tokenizer": level, "added_tokens": []})
        [{}, None, {'type': 'ByteLevel'}, []]
    """
    model = {name: value for name, value in document["model"].items() if value}
    if "merges" in model:
        model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    # Whether a token is special decides only what decoding may skip.
    added = [{name: value for name, value in token.items() if name != "special"} for token in document["added_tokens"]]
    added.sort(key=lambda token: int(token["id"]))
    return [model, document.get("normalizer"), _without_defaults(document.get("pre_tokenizer")), added]


def _without_defaults(part: Any) -> Any:
    """Return a pre-tokenizer without offsets, which decide no ids, and without what old files leave out."""
    if isinstance(part, list):
        return [_without_defaults(one) for one in part]
    if not isinstance(part, dict):
        return part
    defaults = {"use_regex": True} if part.get("type") == "ByteLevel" else {}
    return {
        name: _without_defaults(value)
        for name, value in part.items()
        if name != "trim_offsets" and (name not in defaults or value != defaults[name])
    }


def _why_transformers_decides(folder: Path, config: dict[str, Any], model_config: dict[str, Any]) -> str | None:
    """Return why only transformers can say which ids a folder gives; None if they are those of its tokenizer.json.

    Since version 5, transformers takes a tokenizer.json as it is only for its generic classes. The others
    (LlamaTokenizer, Qwen2Tokenizer, ...) take vocabulary, merges and added tokens from the file and build everything
    else anew, so a file with another pre-tokenizer does not give the ids of the file. And the type of the model beside
    it may replace the class that the folder names.
    """
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    model_type = model_config.get("model_type")
    if config.get("auto_map"):
        return f"its tokenizer_class {name} comes with code of its own"
    if config.get("fix_mistral_regex") is not None:
        return "it sets fix_mistral_regex"
    for other in (*_OTHER_FILES, *(() if "added_tokens_decoder" in config else _LEGACY_FILES)):
        if (folder / other).is_file():
            return f"it also holds {other}"
    if model_type is not None:
        return f"the class that it gets depends on its model_type {model_type}"
    return (
        None if name is None or name in _GENERIC else f"transformers builds its tokenizer_class {name} in its own way"
    )


def _problem(document: dict[str, Any]) -> str | None:
    """Return what is wrong with a document that `tokenizers` would load nevertheless, or None."""
    model, added = document["model"], document["added_tokens"]
    if not model.get("vocab", "missing"):
        return "has an empty vocabulary"
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        return "has added_tokens that are not a list of objects"
    if not all(isinstance(one.get("content"), str) and type(one.get("id")) is int for one in added):
        return "has an added token without a text or an id"
    longest = max((len(one["content"]) for one in added), default=0)
    if longest > _LONGEST_TOKEN:
        return f"has an added token of {longest:,} characters"
    merges = model.get("merges", [])
    if not isinstance(merges, list) or not all(isinstance(one, str | list) for one in merges):
        return "has merges that are not a list of texts or pairs"
    vocabulary = model.get("vocab")
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    if any(type(one) is int and one >= _ID_LIMIT for one in (*ids, *(token["id"] for token in added))):
        return f"has an id of {_ID_LIMIT:,} or more"
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read ({error.strerror}); check the tokenizer folder") from None
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"{path} is not JSON ({error}); download the tokenizer again") from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"{path} is not a JSON object; download the tokenizer again")
    return found


def _read_json_if_any(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _merge_added_tokens(document: dict[str, Any], config: dict[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json; its flags take precedence, as in transformers."""
    known = {token["content"]: token for token in document["added_tokens"]}
    for number, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        flags = {name: token[name] for name in _FLAGS if name in token}
        if token["content"] in known:
            known[token["content"]].update(flags)
        else:
            defaults = dict.fromkeys(_FLAGS, False)
            document["added_tokens"].append({"id": int(number), "content": token["content"], **defaults, **flags})


def _left_open(document: dict[str, Any], config: dict[str, Any], special_tokens: dict[str, Any]) -> str | None:
    """Return what only transformers can decide, or None."""
    known = {token["content"] for token in document["added_tokens"]}
    for name, value in special_tokens.items():
        for token in value if isinstance(value, list) else [value]:
            if token not in known:
                return f"{token!r}, one of its {name}, is not among its added tokens"
    pre_tokenizer = document.get("pre_tokenizer") or {}
    prefix = bool(config.get("add_prefix_space", False))
    if pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("add_prefix_space", prefix) != prefix:
        return "its files disagree on add_prefix_space"
    return None


def _text_of(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    named = {name: value for name, value in config.items() if name.endswith("_token") and not name.startswith("add_")}
    extra = config.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    found: dict[str, Any] = {name: text for name, value in named.items() if (text := _text_of(value)) is not None}
    additional = [text for token in config.get("additional_special_tokens") or extra if (text := _text_of(token))]
    if additional:
        found["additional_special_tokens"] = additional
    return found


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return templates by name, as transformers finds them: files before the configuration."""
    template = config.get("chat_template")
    found: dict[str, Any] = {"default": template}
    if isinstance(template, list):
        found = {one["name"]: one["template"] for one in template}
    if (folder / TEMPLATE_FILE).is_file():
        found = {"default": (folder / TEMPLATE_FILE).read_text(encoding="utf-8")}
    for path in sorted(one for one in (folder / TEMPLATES_FOLDER).glob("*.jinja") if one.is_file()):
        found[path.stem] = path.read_text(encoding="utf-8")
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _stop_tokens(folder: Path, document: dict[str, Any], special_tokens: dict[str, Any]) -> tuple[str, ...]:
    config = _read_json_if_any(folder / GENERATION_FILE)
    ids = config.get("eos_token_id")
    numbers = ids if isinstance(ids, list) else [ids]
    texts = {token["id"]: token["content"] for token in document["added_tokens"]}
    named = (special_tokens.get("eos_token"), *(texts.get(number) for number in numbers))
    return tuple(dict.fromkeys(token for token in named if isinstance(token, str) and token))


def _ask_transformers(folder: Path, reason: str) -> TokenizerFolder:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingDependencyError(f"{reason}, so reading {folder} needs transformers; {INSTALL}") from None
    remedy = f"add a {TOKENIZER_FILE}"
    if (folder / TOKENIZER_FILE).is_file():
        remedy = (
            f"if the ids of its {TOKENIZER_FILE} as it is are right, set tokenizer_class to PreTrainedTokenizerFast in "
            f"its {CONFIG_FILE}, and remove auto_map"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, use_fast=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise InvalidInputError(f"transformers cannot load {folder}: {reason} ({cause}); {remedy}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInputError(
            f"{folder} has no fast tokenizer in transformers, only {type(tokenizer).__name__}; {remedy}"
        )
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {"default": template}
    document = orjson.loads(backend.to_str())
    special_tokens = {name: value for name, value in tokenizer.special_tokens_map.items() if value}
    return TokenizerFolder(
        document,
        special_tokens,
        templates.get("default"),
        templates.get("tool_use"),
        _stop_tokens(folder, document, special_tokens),
        reason,
        keeps_file=False,
    )
