"""How to read a token stream: the user's `StreamOptions`, and the `StreamMetadata` recorded in a file beside it.

That file is tatm's metadata.yaml, or the meta.json of a token cache.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, ManifestError
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.paths import refuse_special_file

DEFAULT_SEQ_LENGTH = 2048  # that of `create_sft_dataset`
_ID_LIMIT = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """How to read a token stream.

    Args:
        seq_length: predictions per window; a window holds one token more.
        pack_sequences: treat each document of a window as a sequence of its own; needs an EOS id.
        eos_id: the token that ends a document; None uses the one recorded beside the files.
        tokenizer_eos_id: the EOS of the tokenizer in use, for files without recorded metadata.
        file_pattern: which files of the directory; None uses all .npy files, or all .bin files.
        file_names: exactly these files of the directory, instead of a pattern.
        dtype: the dtype of .bin files, such as `uint16`; None uses the recorded one, or else a guess from their sizes.
        vocab_size: an id outside it is an error; None uses the one recorded beside the files.
        documents: for Megatron's indexed datasets: a bin is a whole document instead of a window.
        overlap: consecutive windows share one token, so that every token but a file's first is predicted once. Without
            it, the first token of each window has no prediction.
        spelling: how messages write these options: as an `argument`, a `key` of the recipe or a `flag`.

    Example:
        >>> StreamOptions(seq_length=4, dtype="uint16-le").window_length
        5
    """

    seq_length: int = DEFAULT_SEQ_LENGTH
    pack_sequences: bool = False
    eos_id: int | None = None
    tokenizer_eos_id: int | None = None
    file_pattern: str | None = None
    file_names: tuple[str, ...] | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    documents: bool = False
    overlap: bool = True
    spelling: Literal["argument", "key", "flag"] = "argument"

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise InvalidInputError(
                f"{self.spelled('seq_length')} is {self.seq_length}; a window predicts at least 1 token"
            )
        if self.eos_id is not None and not 0 <= self.eos_id < _ID_LIMIT:
            raise InvalidInputError(
                f"{self.spelled('eos_id')} is {self.eos_id}; it must be a token id, in 0..{_ID_LIMIT - 1}"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise InvalidInputError(f"{self.spelled('vocab_size')} is {self.vocab_size}; it must be at least 1")
        if self.file_pattern is not None and (not self.file_pattern or os.sep in self.file_pattern):
            raise InvalidInputError(
                f"{self.spelled('file_pattern')} is {self.file_pattern!r}; it must match file names, such as *.npy"
            )
        if self.documents and self.pack_sequences:
            raise InvalidInputError(
                f"{self.spelled('documents')} and {self.spelled('pack_sequences')} cannot be combined: a document is "
                "one sequence; leave one of them out"
            )
        if self.dtype is not None:
            parse_dtype(self.dtype, self.spelled("dtype"))

    def spelled(self, name: str) -> str:
        """Return one of these options as the user writes it.

        Example:
            >>> StreamOptions(spelling="key").spelled("seq_length"), StreamOptions(spelling="flag").spelled("eos_id")
            ('data.sequence_length', '--eos-id')
        """
        if self.spelling == "key":
            return f"data.{'sequence_length' if name == 'seq_length' else name}"
        return f"--{name.replace('_', '-')}" if self.spelling == "flag" else name

    @property
    def window_length(self) -> int:
        """Tokens per window."""
        return self.seq_length + 1

    @property
    def stride(self) -> int:
        """Tokens from the start of one window to that of the next."""
        return self.seq_length if self.overlap else self.window_length


# In a directory of tokens, tried in this order. A token cache keeps its meta.json above its splits' directories.
_NAMES = ("metadata.yaml", "metadata.yml", "metadata.json", "meta.json")
_PARENT_NAME = "meta.json"
_SECTIONS = ("tokenized_info",)  # tatm's section about the tokens
_DTYPE_KEYS = ("token_dtype", "dtype")
_EOS_KEYS = ("eos_id", "eos_token_id", "eod_id", "eod")
_SPECIAL_EOS_KEYS = ("eos", "eot", "eod")
_MAX_BYTES = 16 << 20  # the meta.json of a token cache lists its shards

_SPELLED = re.compile(r"(?:np\.|numpy\.)?(u?)int(8|16|32|64)(?:[-_ ]?(le|be|little|big))?")
_CODE = re.compile(r"([<>|=]?)([ui])([1248])")


class StreamMetadata(NamedTuple):
    """The recorded metadata; None where it is missing."""

    path: Path | None = None  # the file it was read from
    dtype: str | None = None
    vocab_size: int | None = None
    eos_id: int | None = None
    tokenizer: Mapping[str, Any] | None = None  # with a fingerprint; a mere name cannot be compared


def parse_dtype(text: str, where: str) -> str:
    """Return the NumPy code of an integer dtype in any usual spelling; `where` names it in messages.

    Example:
        >>> parse_dtype("uint16-le", "token_dtype"), parse_dtype("np.int32", "dtype"), parse_dtype(">u4", "dtype")
        ('<u2', '<i4', '>u4')
    """
    lowered = text.strip().lower()
    if spelled := _SPELLED.fullmatch(lowered):
        order = ">" if (spelled[3] or "").startswith("b") else "<"
        return f"{order}{'u' if spelled[1] else 'i'}{int(spelled[2]) // 8}"
    if code := _CODE.fullmatch(lowered):
        order = ">" if code[1] == ">" else "<"
        return f"{order}{code[2]}{code[3]}"
    raise InvalidInputError(f"{where} is {text!r}, which is not an integer dtype; write uint16 or uint32")


def read_metadata(directory: Path) -> StreamMetadata:
    """Return the metadata from the first known file beside the tokens."""
    candidates = [directory / name for name in _NAMES]
    candidates.append(directory.parent / _PARENT_NAME)
    for path in candidates:
        if path.is_file():
            found = _parse(path, in_parent=path.parent != directory)
            if found is not None:
                return found
    return StreamMetadata()


def _parse(path: Path, *, in_parent: bool) -> StreamMetadata | None:
    document = _load(path)
    if not isinstance(document, dict):
        return None  # such as the list that Megatron-Bridge keeps in metadata.json
    sections = [section for name in _SECTIONS if isinstance(section := document.get(name), dict)]
    if in_parent and _DTYPE_KEYS[0] not in document:
        return None
    values = {**document, **{key: value for section in sections for key, value in section.items()}}
    dtype = next((values[key] for key in _DTYPE_KEYS if values.get(key) is not None), None)
    if dtype is not None and not isinstance(dtype, str):
        raise ManifestError(f"{path}: the dtype is {dtype!r}; write uint16 or uint32")
    special = values.get("special_token_ids")
    eos_id = _integer(path, values, _EOS_KEYS)
    if eos_id is None and isinstance(special, dict):
        eos_id = _integer(path, special, _SPECIAL_EOS_KEYS)
    tokenizer = values.get("tokenizer")
    return StreamMetadata(
        path,
        None if dtype is None else parse_dtype(dtype, f"{path}: the dtype"),
        _integer(path, values, ("vocab_size",)),
        eos_id,
        tokenizer if isinstance(tokenizer, dict) and tokenizer.get("fingerprint") else None,
    )


def _load(path: Path) -> Any:
    refuse_special_file(path)
    with os_errors("read", path), open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ManifestError(f"{path} has more than {_MAX_BYTES:,} bytes; metadata of tokens is smaller: move it away")
    if path.suffix == ".json":
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is not valid JSON ({error}); repair it or move it away") from None
    import yaml

    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ManifestError(f"{path} is not valid YAML ({reason}); repair it or move it away") from None


def _integer(path: Path, values: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = values.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise ManifestError(f"{path}: {key} is {value!r}, not a whole number; repair it or remove the key")
        return value
    return None
