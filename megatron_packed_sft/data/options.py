"""What users choose about a dataset, as objects: how it is opened, what its batches hold, how raw samples are packed.

    create_sft_dataset(path, tokenizer, seq_length, contract=BatchOptions("hf", compact=True),
                       opening=OpenOptions(cache_size="200GB"), packing_mode=StaticPacking(world_size=8))

Nothing heavy is imported here, because settings are checked before anything slow is.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.interface import FIRST_READ, ReadOptions

AUTO: Final = "auto"
PREPARED: Final = "prepared"  # bins that were packed before
STATIC: Final = "static"  # raw samples, packed when they are opened by a plan that stays
MODES: Final = (PREPARED, STATIC)

SampleLength = Callable[[Any], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Which differences between the parts of the data are accepted.

    Args:
        tokenizer: other tokenizers.
        template: other chat templates.
        spelling: how the caller's users write one of these, for messages.
    """

    tokenizer: bool = False
    template: bool = False
    spelling: str = "{argument}=True"

    def switch(self, name: str) -> str:
        """Return what to write to accept such a difference.

        Example:
            >>> Tolerance(spelling="data.{argument}=true").switch("tokenizer")
            'data.allow_tokenizer_mismatch=true'
        """
        field = "chat_template" if name == "template" else name  # of a loader's state
        return self.spelling.format(argument=f"allow_{name}_mismatch", field=field)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenOptions:
    """How data is found, checked and read.

    Args:
        storage: `auto`, or the storage that the data must have: `memmap_v1`, `legacy`, `parquet`, `token_stream`,
            `megatron_indexed` or a registered one.
        verify: compare a bin with its checksum at the `first_read` by a process, `always` or `never`.
        allow_tokenizer_mismatch: accept a tokenizer that did not make the data, and parts made with different ones.
        allow_template_mismatch: accept parts made with different chat templates.
        cache_dir, cache_size: of URLs such as s3://bucket/dataset: the node's cache that shards are fetched to, and how
            large it may become, such as 200GB; see `node_cache` for the defaults.
        shard_window: shuffle this many shards at a time, for data larger than its cache; see `ShardOrder`.
        spelling: how the caller's users write these options, for messages: as an `argument` or a `key` of the recipe.

    Example:
        >>> OpenOptions(verify="sometimes")
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: verify is 'sometimes'; choose from first_read, always, never
    """

    storage: str = AUTO
    verify: str = FIRST_READ
    allow_tokenizer_mismatch: bool = False
    allow_template_mismatch: bool = False
    cache_dir: str | os.PathLike[str] | None = None
    cache_size: str | int | None = None
    shard_window: int | None = None
    spelling: Literal["argument", "key"] = "argument"

    def __post_init__(self) -> None:
        _ = self.reading

    @property
    def reading(self) -> ReadOptions:
        """How the files of shards are read."""
        return ReadOptions(self.verify)

    @property
    def tolerance(self) -> Tolerance:
        """Which parts may be opened together."""
        spelling = "data.allow_mismatch=[{field}]" if self.spelling == "key" else "{argument}=True"
        return Tolerance(
            tokenizer=self.allow_tokenizer_mismatch, template=self.allow_template_mismatch, spelling=spelling
        )


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What batches hold. Names and meanings are those of Megatron-Bridge's packed dataset.

    Args:
        contract: whose keys a batch has: `mcore`, `bridge_0_6`, `bridge_main` or `hf`.
        loss: `per_token` is the mean over trained tokens, by their weights. `per_conversation` is the mean over
            sequences of each one's own mean: its weights are divided by their sum when a batch is made.
        pad_to_max_length: pad every bin to the dataset's length; otherwise to the longest bin of the batch.
        pad_seq_length_to_mult: round the longest bin's length up to a multiple; None means 16, and 1 for `hf`, which
            needs no padding. `hf` pads the whole batch, with one sequence at its end.
        ceil_to_power_2: round up to a power of two instead.
        return_cu_seqlen: return the sequences' boundaries; otherwise a dense mask [B, 1, L, L], True where a key is
            hidden. Bridge's mask hides only the future, so sequences see each other; that of `mcore` separates them.
        pad_cu_seqlens: give the boundaries the same shape in every batch, for CUDA graphs. Needs `pad_to_max_length`.
        pad_seq_to_mult: the multiple to which the data's sequences were padded with EOS, for context parallelism. Above
            1, boundaries with and without that padding are returned. None takes what the data says, else 1.
        answer_only_loss: the loss counts where the stored mask says so; otherwise at every token.
        compact: ids and positions as int32 and the loss mask as uint8, to be cast on the device; see `widen`.
        return_doc_ids: also return `doc_ids`, int32: which sequence each position belongs to; see model_helpers.py.
    """

    contract: str = "mcore"
    _: dataclasses.KW_ONLY
    loss: str = "per_token"
    pad_to_max_length: bool = False
    pad_seq_length_to_mult: int | None = None
    ceil_to_power_2: bool = False
    return_cu_seqlen: bool = True
    pad_cu_seqlens: bool = False
    pad_seq_to_mult: int | None = None
    answer_only_loss: bool = True
    compact: bool = False
    return_doc_ids: bool = False

    @staticmethod
    def of(given: str | BatchOptions) -> BatchOptions:
        """Return the options of a contract that is given by name, or the options themselves.

        Example:
            >>> BatchOptions.of("hf") == BatchOptions("hf")
            True
        """
        return BatchOptions(given) if isinstance(given, str) else given

    def values(self) -> dict[str, Any]:
        """Return the options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(BatchOptions)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticPacking:
    """How raw samples are packed when they are opened.

    Args:
        dataloader_drop_last: drop the last packs so that their number is a multiple of `world_size`; else repeat the
            first ones.
        packing_allow_single_long: an oversized sample is a pack of its own; else it is left out.
        packing_full_is_oversized: a sample that fills a pack exactly is oversized, too.
        world_size: data-parallel ranks.
        strategy: of `pack`.
        pad_seq_to_mult: let every sequence take a multiple of this many inputs, for context parallelism.
        length_of: the positions a sample takes; by default the number of its input_ids.
        length_cache: a directory for the lengths of datasets, each under its fingerprint; ranks may share a new one.
        fingerprint: of the dataset and whatever changes its samples; by default the dataset's own `fingerprint`.
        progress: show a progress bar while lengths are computed.
        text_only: refuse samples with images, videos or sounds, which a trainer of text would lose; otherwise batches
            pass them on.
    """

    dataloader_drop_last: bool = False
    packing_allow_single_long: bool = True
    packing_full_is_oversized: bool = False
    world_size: int = 1
    strategy: str = "optimal"
    pad_seq_to_mult: int = 1
    length_of: SampleLength | None = None
    length_cache: str | os.PathLike[str] | None = None
    fingerprint: str | None = None
    progress: bool = False
    text_only: bool = False


def options_of_bridge(contract: str, arguments: Mapping[str, Any]) -> tuple[BatchOptions, OpenOptions]:
    """Return the options in the arguments of Megatron-Bridge's dataset classes, as its recipes set them.

    An unknown argument is refused, and one that means nothing once data is packed is refused unless it has Bridge's
    default.

    Example:
        >>> options_of_bridge("bridge_0_6", {"chat": True, "pad_to_max_length": True})[0].pad_to_max_length
        True
    """
    batch: dict[str, Any] = {}
    opening: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in BatchOptions.__slots__ and name != "contract":
            batch[name] = value
        elif name in OpenOptions.__slots__:
            opening[name] = value
        else:
            _refuse_meaningless(name, value)
    return BatchOptions(contract, **batch), OpenOptions(**opening)


_TOKENIZED = "the data is already tokenized"
_PACKED = "the data is already packed"
_NO_PROMPT = "packed data has no prompt to continue"
_COMPUTED = "the order is computed, not stored"
# Name -> (values that Bridge passes by default and that change nothing, why another one cannot be honoured).
_MEANINGLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "min_seq_length": ((1,), _PACKED),
    "add_bos": ((False,), _TOKENIZED),
    "add_eos": ((True,), _TOKENIZED),
    "add_sep": ((False,), _TOKENIZED),
    "sep_id": ((None,), _TOKENIZED),
    "label_key": (("answer", "output"), _TOKENIZED),
    "truncation_field": (("text", "input"), _TOKENIZED),
    "truncation_method": (("right",), _TOKENIZED),
    "prompt_template": ((None, "{input} {output}"), _TOKENIZED),
    "special_tokens": ((None,), _TOKENIZED),
    "chat": ((False, True), _TOKENIZED),
    "use_hf_tokenizer_chat_template": ((False, True), _TOKENIZED),
    "tool_schemas": ((None,), _TOKENIZED),
    "virtual_tokens": ((0,), _PACKED),
    "tokens_to_generate": ((0,), _NO_PROMPT),
    "is_test": ((False,), _NO_PROMPT),
    "output_original_text": ((False,), "packed data has no text"),
    "index_mapping_dir": ((None,), _COMPUTED),
    "global_sample_mapping": ((False,), _COMPUTED),
    "memmap_workers": ((None, 2), "shards need no index"),
    "hf_dataset": ((False,), _PACKED),
    "get_attention_mask_from_fusion": ((True,), "boundaries replace the mask; set return_cu_seqlen=False to get one"),
}


def _refuse_meaningless(name: str, value: Any) -> None:
    if name not in _MEANINGLESS:
        raise InvalidInputError(f"{name} is not an argument of a packed dataset; check the spelling")
    defaults, reason = _MEANINGLESS[name]
    if not any(value is default or (type(value) is type(default) and value == default) for default in defaults):
        raise InvalidInputError(
            f"{name}={value!r} has no meaning for packed data: {reason}; leave it out, or prepare the data with it"
        )
