"""`load_tokenizer` loads a tokenizer from a path, or from a URL through the node's cache; never from a hub."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.copies import copy_of
from megatron_packed_sft.support.paths import is_url

_HUGGINGFACE_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def load_tokenizer(path: str | os.PathLike[str], *, kind: str = "auto", fast: bool = True) -> Tokenizer:
    """Load a tokenizer from a file or folder.

    Args:
        path: a SentencePiece .model file, a folder with one, or a Hugging Face tokenizer folder; or the URL of one of
            these, of which only the tokenizer's own files are fetched.
        kind: sentencepiece, huggingface, or auto to decide by the files.
        fast: for Hugging Face, use gigatoken if it gives the same ids.
    """
    if kind not in ("auto", "sentencepiece", "huggingface"):
        raise InvalidInputError(f"tokenizer.kind {kind!r} is unknown; use one of auto, sentencepiece, huggingface")
    location = local_tokenizer(path)
    if not location.exists():
        raise InvalidInputError(
            f"{path} does not exist; give a local tokenizer folder or .model file (nothing is downloaded from a hub, "
            "so fetch a tokenizer from there first)"
        )
    models = [location] if location.is_file() else sorted(location.glob("*.model"))
    if kind == "auto":
        kind = "huggingface" if _looks_like_huggingface(location) else "sentencepiece"
    if kind == "huggingface":
        from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(location, fast=fast)
    if len(models) != 1:
        if not models:
            raise InvalidInputError(
                f"{path} has no tokenizer.json and no SentencePiece .model file; give the folder or file of a tokenizer"
            )
        names = ", ".join(model.name for model in models)
        raise InvalidInputError(f"{path} holds several SentencePiece models ({names}); give the path of one of them")
    from megatron_packed_sft.encode.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(models[0])


def _looks_like_huggingface(location: Path) -> bool:
    if location.is_file():
        return location.name in _HUGGINGFACE_FILES
    return any((location / name).is_file() for name in _HUGGINGFACE_FILES)


# What a tokenizer in an object store consists of: its own files, not the weights beside them.
_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_MOST_BYTES = 512 << 20


def local_tokenizer(path: str | os.PathLike[str]) -> Path:
    """Return the local path of a tokenizer, fetching it if it is a URL."""
    if not is_url(path):
        return Path(path)
    return copy_of(os.fspath(path), wanted=belongs_to_tokenizer, most_bytes=_MOST_BYTES, kind="a tokenizer")


def belongs_to_tokenizer(name: str) -> bool:
    """Return whether a file of a folder is one of its tokenizer's."""
    return "/" not in name and name.endswith(_SUFFIXES) and not name.endswith(".index.json")
