"""How to use published data: the command that trains on it, the lines of a recipe, and the call in Python."""

from __future__ import annotations

import json
import re
import shlex

_PLAIN_PATH = re.compile(r"(?:[a-z][a-z0-9+.-]*://)?[\w/.@%+-]+")  # a shell, Hydra and YAML take it as it is


def path_setting(path: str) -> str:
    """Return the setting of a path as a shell takes it, quoted where it must be.

    Example:
        >>> path_setting("s3://bucket/my_dataset")
        'data.path=s3://bucket/my_dataset'
    """
    if _PLAIN_PATH.fullmatch(path):
        return f"data.path={path}"
    return shlex.quote("data.path='" + path.replace("'", "\\'") + "'")


def path_line(path: str) -> str:
    """Return the line of a path in a recipe."""
    return f"    path: {path if _PLAIN_PATH.fullmatch(path) else json.dumps(path, ensure_ascii=False)}"


def how_to_use(
    path: str, *, packed_storage: str, pack_size: int | None, tokenizer_path: str | None, in_windows: bool = False
) -> list[str]:
    """Return the lines for a recipe, and the call that opens the data.

    Args:
        path: the published data.
        packed_storage: the name of its storage.
        pack_size: of its bins.
        tokenizer_path: where its tokenizer is, absolute or a URL; None if unknown.
        in_windows: whether bins are windows of that many predictions, which training must be told.

    Example:
        >>> lines = how_to_use("my_data", packed_storage="memmap_v1", pack_size=4096, tokenizer_path=None)
        >>> lines[1]
        '  torchrun --nproc-per-node 2 -m megatron_packed_sft train packed_storage=memmap_v1 data.path=my_data'
    """
    setting = path_setting(path)
    tokenizer = "path/to/its/tokenizer" if tokenizer_path is None else tokenizer_path
    length = "" if pack_size is None else f", seq_length={pack_size}"
    if in_windows:
        setting += f" data.sequence_length={pack_size}"
    return [
        "Train on it:",
        f"  torchrun --nproc-per-node 2 -m megatron_packed_sft train packed_storage={packed_storage} {setting}",
        "In a recipe:",
        f"  packed_storage: {packed_storage}",
        "  data:",
        path_line(path),
        *([f"    sequence_length: {pack_size}"] if in_windows else []),
        "In Python:",
        "  from megatron_packed_sft import create_sft_dataset, load_tokenizer",
        f"  tokenizer = load_tokenizer({json.dumps(tokenizer, ensure_ascii=False)})",
        f"  dataset = create_sft_dataset({json.dumps(path, ensure_ascii=False)}, tokenizer{length})",
    ]
