"""Chat templates: the tokenizer's own, a file, or a built-in one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.remote.objects import read_object
from megatron_packed_sft.support.paths import is_url

_MOST_BYTES = 16 << 20  # of a template file; a tokenizer_config.json can have several megabytes
_BUILTIN = Path(__file__).parent / "builtin"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template as text.

    Args:
        name: its name in errors and manifests.
        source: the Jinja text.
        tool_source: another one for chats with tools; transformers takes the template named `tool_use` for those.
    """

    name: str
    source: str
    tool_source: str | None = None

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: xxh3_128 of the sources."""
        return xxhash.xxh3_128((self.source + (self.tool_source or "")).encode()).hexdigest()


def builtin_template_names() -> list[str]:
    """Return the names of the built-in templates.

    Example:
        >>> builtin_template_names()
        ['chatml', 'llama3', 'mistral', 'plain']
    """
    return sorted(path.stem for path in _BUILTIN.glob("*.jinja"))


def load_template(name_or_path: str | None, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    """Load a chat template.

    Args:
        name_or_path: a built-in name, a Jinja file, a JSON file with a `chat_template` (such as tokenizer_config.json),
            the URL of such a file, the Jinja text itself, or None for the tokenizer's own.
        tokenizer: where to take the template from if no name is given.

    Example:
        >>> load_template("chatml").name
        'chatml'
    """
    names = builtin_template_names()
    if name_or_path is None:
        source = tokenizer.chat_template if tokenizer is not None else None
        if source is None:
            whose = f"tokenizer {tokenizer.name}" if tokenizer is not None else "no tokenizer was given, which"
            raise InvalidInputError(
                f"{whose} has no chat template; set template.name to a Jinja file, or to one of {', '.join(names)}"
            )
        return ChatTemplate("the tokenizer's template", source, tokenizer.tool_template if tokenizer else None)
    if name_or_path in names:
        return ChatTemplate(name_or_path, (_BUILTIN / f"{name_or_path}.jinja").read_text(encoding="utf-8"))
    if "{%" in name_or_path or "{{" in name_or_path:
        return ChatTemplate("chat template", name_or_path)
    if is_url(name_or_path):
        return _template(name_or_path, base_name(name_or_path), read_object(name_or_path, _MOST_BYTES))
    return _read(Path(name_or_path), names)


def load_template_if_any(name_or_path: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load a chat template as `load_template` does, or return None if none is named and the tokenizer has none.

    Text and tokenized records need no template.
    """
    if name_or_path is None and tokenizer.chat_template is None:
        return None
    return load_template(name_or_path, tokenizer)


def _read(path: Path, names: list[str]) -> ChatTemplate:
    if not path.is_file():
        raise InvalidInputError(f"template.name {path} is not a file; use a Jinja file, or one of {', '.join(names)}")
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StorageIOError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    if len(data) > _MOST_BYTES:
        raise InvalidInputError(
            f"{path} has more than {_MOST_BYTES:,} bytes, so it is not a chat template; give a Jinja file"
        )
    return _template(str(path), path.name, data)


def _template(path: str, name: str, data: bytes) -> ChatTemplate:
    try:
        text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is not UTF-8 text; give a Jinja file") from None
    return ChatTemplate(name, _template_in_json(path, text) if name.endswith(".json") else text)


def _template_in_json(path: str, text: str) -> str:
    try:
        source = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError):
        source = None
    if not isinstance(source, str):
        raise InvalidInputError(f"{path} has no text under the key chat_template; give a Jinja file")
    return source
