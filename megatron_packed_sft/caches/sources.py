"""The sources of a cache, opened: texts for pretrain, lists of messages for SFT, read one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_packed_sft.caches.config import SFT, CacheSource
from megatron_packed_sft.caches.sft_cache import ROLE_TOKENS, Message
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.records.files import InputFile, find_files
from megatron_packed_sft.records.hub_datasets import stream_dataset
from megatron_packed_sft.records.message_trees import conversations_in_trees
from megatron_packed_sft.records.record import Conversation, Location, RecordError, kind_of, too_deep
from megatron_packed_sft.records.schemas.registry import Adapter, adapter
from megatron_packed_sft.records.slices import read_slice, scan_slices
from megatron_packed_sft.records.text_files import TextFile, find_text_files, read_text_file
from megatron_packed_sft.support.checksum import checksum

_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSIONS = (".gz", ".zst")
Numbered = tuple[Location, dict[str, Any] | RecordError]


class OpenedSource:
    """A source whose files were found.

    Args:
        source: with its own settings or those of all, see `CacheConfig.resolved`.
        seed: of the shuffle of a streamed dataset.

    Attributes:
        num_skipped: records left out so far, with `on_error: skip`.
    """

    def __init__(self, source: CacheSource, seed: int) -> None:
        self._source, self._seed = source, seed
        self._found = {name: _find(source, name) for name in ("path", "val_path") if getattr(source, name) is not None}
        self.num_skipped = 0

    @property
    def files(self) -> dict[str, Any]:
        """What the files are, by name and content: their folder does not matter, and it is short for many files."""
        listed = [(name, file.name, file.size, file.checksum) for name, files in self._found.items() for file in files]
        return {
            "num_files": len(listed),
            "bytes": sum(size for _, _, size, _ in listed),
            "checksum": checksum(json.dumps(listed).encode()),
        }

    def texts(self, *, val: bool = False) -> Iterator[str]:
        """Yield the documents for train, or those of val's own files or split."""
        for where, record in self._records(val=val):
            if isinstance(record, RecordError):
                self._skip_or_raise(record)
            elif type(text := record.get(self._source.field)) is str:
                yield text
            else:
                problem = f"is {kind_of(text)}, and the record has {', '.join(map(str, record))}; set field to its text"
                self._skip_or_raise(RecordError(self._source.field, problem, where))

    def examples(self) -> Iterator[list[Message]]:
        """Yield the chats as lists of messages."""
        if self._source.message_trees:
            for messages in conversations_in_trees(self._sound_records()):
                yield [{"role": message["role"], "content": message["content"]} for message in messages]
            return
        adapt = adapter(self._source.schema, self._source.mapping or None, self._source.take)
        for where, record in self._records():
            try:
                if isinstance(record, RecordError):
                    raise record
                yield _messages(adapt, record)
            except RecordError as error:
                self._skip_or_raise(error if error.where else error.at(where))
            except RecursionError:
                self._skip_or_raise(too_deep().at(where))

    def _sound_records(self) -> Iterator[dict[str, Any]]:
        for _, record in self._records():
            if isinstance(record, RecordError):
                self._skip_or_raise(record)
            else:
                yield record

    def _skip_or_raise(self, error: RecordError) -> None:
        if self._source.on_error == "stop":
            raise error
        self.num_skipped += 1

    def _records(self, *, val: bool = False) -> Iterator[Numbered]:
        source = self._source
        if source.dataset is not None:
            split = source.val_split if val and source.val_split else source.split
            rows = stream_dataset(
                source.dataset,
                source.config,
                split,
                streaming=source.streaming,
                seed=self._seed,
                shuffle_buffer=source.shuffle_buffer or None if source.kind != SFT else None,
            )
            return ((Location(f"{source.dataset}, {split}", number), row) for number, row in enumerate(rows, 1))
        return self._file_records(self._found["val_path" if val else "path"])

    def _file_records(self, files: Iterable[InputFile | TextFile]) -> Iterator[Numbered]:
        for file in files:
            if isinstance(file, TextFile):
                texts = read_text_file(file.path, self._source.documents)  # type: ignore[arg-type]
                for number, text in enumerate(texts, 1):
                    yield Location(file.path, number, "document"), {self._source.field: text}
            else:
                for file_slice in scan_slices(file):
                    for raw in read_slice(file_slice):
                        yield raw.where, raw.value
                file.refuse_changed()


def _find(source: CacheSource, name: str) -> list[InputFile] | list[TextFile]:
    """Find files: records by their suffix or as a saved dataset, everything else as text."""
    paths = source.paths(name)
    if source.kind == SFT or all(_holds_records(path) for path in paths):
        return find_files(paths)
    if any(_holds_records(path) for path in paths):
        raise InvalidInputError(f"{name} mixes text files and files of records ({', '.join(paths)}); make two sources")
    try:
        return find_text_files(paths)
    except PackedSFTError:
        if len(paths) == 1 and "*" not in paths[0]:
            return find_files(paths)  # a folder that `datasets` saved, or the better message
        raise


def _holds_records(path: str) -> bool:
    lowered = path.lower()
    for suffix in _COMPRESSIONS:
        lowered = lowered.removesuffix(suffix)
    return lowered.endswith(_RECORD_SUFFIXES)


def _messages(adapt: Adapter | Callable[[dict[str, Any]], Any], record: dict[str, Any]) -> list[Message]:
    found = adapt(record)
    if not isinstance(found, Conversation):
        raise RecordError("", "is not a chat; set kind: pretrain for texts, or schema or mapping for chats")
    if found.tools:
        raise RecordError("tools", "have no token in an SFT cache; use packed-sft prepare for chats with tools")
    messages: list[Message] = []
    for number, message in enumerate(found.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLE_TOKENS:
            raise RecordError(f"messages[{number}].role", f"is {role!r}; use system, user or assistant")
        if type(content) is not str or set(message) - {"role", "content", "name"}:
            problem = "is not plain text, or comes with calls or reasoning, which an SFT cache cannot hold"
            raise RecordError(f"messages[{number}].content", f"{problem}; use packed-sft prepare for such chats")
        messages.append({"role": role, "content": content})
    return messages
