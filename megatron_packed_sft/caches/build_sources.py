"""`build_all`: every source of a YAML to a cache, whatever happens to the others.

    cache/tokenizer/spm.model, meta.json
    cache/pretrain/NAME/train/shard_00000.bin ..., val/..., meta.json
    cache/sft/NAME/train_tokens.bin, train_idx.npy, val_tokens.bin, val_idx.npy, meta.json

A source that cannot be read leaves a meta.json with `"built": false` and the reason. A cache that is complete and was
made from the same things is kept; one that was made from others is replaced only with `overwrite`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_packed_sft.caches.config import PRETRAIN, CacheConfig, CacheSource, source_json
from megatron_packed_sft.caches.meta import file_records
from megatron_packed_sft.caches.pretrain_cache import build_pretrain_cache
from megatron_packed_sft.caches.publishing import (
    common_meta,
    differences,
    is_published,
    publish,
    published_meta,
    staged,
)
from megatron_packed_sft.caches.sft_cache import build_sft_cache
from megatron_packed_sft.caches.sources import OpenedSource
from megatron_packed_sft.caches.text_encoder import TextEncoder, tokenizer_files
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError, NoSpaceError, PackedSFTError, TargetExistsError
from megatron_packed_sft.support.atomic import os_errors, write_file
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
Status = Literal["built", "kept", "not built", "left out"]
# Files that a Hugging Face tokenizer folder may have beside its tokenizer.json; never the weights of a model.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_SENTENCEPIECE = "spm.model"


class SourceResult(NamedTuple):
    """What became of a source."""

    name: str
    kind: str
    status: Status
    totals: dict[str, int]
    reason: str | None = None
    num_skipped: int = 0

    @property
    def failed(self) -> bool:
        """Whether it should have been built and was not."""
        return self.status == "not built"


def build_all(
    config: CacheConfig,
    cache_dir: str | os.PathLike[str],
    *,
    only: Collection[str] = (),
    overwrite: bool = False,
    on_tokens: Callable[[str, int], None] | None = None,
) -> list[SourceResult]:
    """Build the caches of all sources, one after the other.

    Args:
        config: from `read_config`.
        cache_dir: gets `tokenizer/`, `pretrain/NAME/` and `sft/NAME/`.
        only: the names of the sources to build; all if there are none.
        overwrite: replace caches that were made from other things.
        on_tokens: called with a source's name and the number of tokens after each batch.

    Returns:
        One result per source, in the order of the YAML; a source that cannot be read is not an exception.

    Raises:
        InvalidInputError: the tokenizer cannot be used, or `only` names no source.
        NoSpaceError: the disk is full.
    """
    unknown = sorted(set(only) - set(config.sources))
    if unknown:
        raise InvalidInputError(f"there is no source {unknown[0]!r}; the sources are {', '.join(config.sources)}")
    home = local_path(cache_dir, "cache_dir")
    tokenizer = load_tokenizer(config.tokenizer)
    encoder = TextEncoder(tokenizer, config.special_tokens)
    _copy_tokenizer(Path(tokenizer.path), home / TOKENIZER, encoder, overwrite=overwrite)
    builder = _Builder(config, home, tokenizer, encoder, overwrite)
    return [
        builder.build(name, config.resolved(source), on_tokens)
        for name, source in config.sources.items()
        if not only or name in only
    ]


class _Builder:
    def __init__(self, config: CacheConfig, home: Path, tokenizer: Any, encoder: TextEncoder, overwrite: bool) -> None:
        self._config, self._home, self._overwrite = config, home, overwrite
        self._tokenizer, self._encoder = tokenizer, encoder

    def build(self, name: str, source: CacheSource, on_tokens: Callable[[str, int], None] | None) -> SourceResult:
        folder = self._home / source.kind / name
        if not source.build:
            self._note_not_built(folder, name, source, "build is false")
            return SourceResult(name, source.kind, "left out", {}, "build is false")
        try:
            return self._build(folder, name, source, on_tokens)
        except NoSpaceError:
            raise
        except PackedSFTError as error:
            self._note_not_built(folder, name, source, str(error))
            return SourceResult(name, source.kind, "not built", {}, str(error))

    def _build(
        self, folder: Path, name: str, source: CacheSource, on_tokens: Callable[[str, int], None] | None
    ) -> SourceResult:
        opened = OpenedSource(source, self._config.seed)
        made_from = self._made_from(source, opened)
        if is_published(folder, made_from):
            totals = (published_meta(folder) or {}).get("totals", {})
            return SourceResult(name, source.kind, "kept", totals)
        before = published_meta(folder)
        if before is not None and before.get("built") and not self._overwrite:
            changed = ", ".join(differences(folder, made_from)) or "its files are incomplete"
            raise TargetExistsError(
                f"{folder} holds a cache that was made differently: {changed}; add --overwrite to replace it"
            )
        common = {
            "tokenizer": self._tokenizer,
            "seed": self._config.seed,
            "special_tokens": self._config.special_tokens,
            "dataset_name": source.dataset or name,
            "dataset_config": source.config,
            "overwrite": self._overwrite,
            "extra_meta": lambda: {
                "made_from": made_from,
                "streaming": source.is_streamed,
                "num_skipped": opened.num_skipped,
            },
            "on_tokens": None if on_tokens is None else lambda count: on_tokens(name, count),
        }
        if source.kind == PRETRAIN:
            self._build_pretrain(folder, source, opened, common)
        else:
            build_sft_cache(opened.examples(), folder, val_frac=source.val_frac or 0.0, **common)
        if opened.num_skipped:
            logger.warning(
                "%s: left out %s that cannot be used; on_error: stop names the first",
                name,
                plural(opened.num_skipped, "record"),
            )
        totals = (published_meta(folder) or {})["totals"]
        return SourceResult(name, source.kind, "built", totals, num_skipped=opened.num_skipped)

    def _build_pretrain(self, folder: Path, source: CacheSource, opened: OpenedSource, common: dict[str, Any]) -> None:
        takes_first = source.max_val_tokens is not None and not source.has_val
        build_pretrain_cache(
            opened.texts(),
            folder,
            max_train_tokens=source.max_train_tokens,
            max_val_tokens=source.max_val_tokens,
            shard_bytes=self._config.shard_bytes,
            # A streamed dataset was shuffled by `datasets`, with the same seed and buffer.
            shuffle_buffer=None if source.is_streamed else source.shuffle_buffer or None,
            val_texts=opened.texts(val=True) if source.has_val else None,
            val_frac=None if takes_first or source.has_val else source.val_frac,
            **common,
        )

    def _made_from(self, source: CacheSource, opened: OpenedSource) -> dict[str, Any]:
        return {
            "tokenizer_sha256": self._encoder.sha256(),
            "special_token_ids": self._encoder.special_ids,
            "seed": self._config.seed,
            **({"shard_bytes": self._config.shard_bytes} if source.kind == PRETRAIN else {}),
            **source_json(source),
            "files": opened.files,
        }

    def _note_not_built(self, folder: Path, name: str, source: CacheSource, reason: str) -> None:
        """Leave a meta.json that says why; an earlier cache stays."""
        before = published_meta(folder)
        is_foreign = before is None and folder.exists() and any(folder.iterdir())
        if is_foreign or (before is not None and before.get("built")):
            return
        nouns = "tokens" if source.kind == PRETRAIN else "examples"
        totals = {f"train_{nouns}": 0, f"val_{nouns}": 0}
        meta = {
            **common_meta(self._encoder, folder, source.dataset or name, source.config, self._config.seed),
            "built": False,
            "reason": reason,
            "split_rule": None,
            "streaming": source.is_streamed,
            **({"shard_bytes": self._config.shard_bytes} if source.kind == PRETRAIN else {}),
            **totals,
            "totals": totals,
        }
        with staged(folder, overwrite=False) as staging:
            if source.kind == PRETRAIN:
                for split in ("train", "val"):
                    with os_errors("create", folder / split):
                        os.mkdir(staging.path / split)
            publish(staging, meta)


def _copy_tokenizer(path: Path, target: Path, encoder: TextEncoder, *, overwrite: bool) -> None:
    """Copy the tokenizer's files; one that is there already must be the same."""
    sha256 = encoder.sha256()
    before = published_meta(target)
    if (
        before is not None
        and before.get("tokenizer_sha256") == sha256
        and before.get("special_token_ids") == (encoder.special_ids)
    ):
        return
    if before is not None and not overwrite:
        raise TargetExistsError(
            f"{target} holds another tokenizer; choose another cache_dir, or add --overwrite to build all caches again"
        )
    files = tokenizer_files(path)
    sources = {_SENTENCEPIECE if file.suffix == ".model" and len(files) == 1 else file.name: file for file in files}
    if path.is_dir():
        sources |= {name: path / name for name in _BESIDE if (path / name).is_file()}
    with staged(target, overwrite=overwrite) as staging:
        records = {}
        for name, source in sources.items():
            with os_errors("read", source):
                data = source.read_bytes()
            write_file(staging.path / name, data)
            records[name] = FileRecord(len(data), checksum(data, "sha256"))
        meta = {
            "tokenizer_sha256": sha256,
            "vocab_size": encoder.vocab_size,
            "special_tokens": encoder.special_tokens,
            "special_token_ids": encoder.special_ids,
            **({"tokenizer": identity} if (identity := encoder.identity()) else {}),
            **file_records(records),
        }
        publish(staging, meta)
