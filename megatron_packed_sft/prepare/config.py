"""The settings of `packed-sft prepare`, with their types, defaults and meaning: the schema of conf/prepare.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions

REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given


@dataclass
class SourceConfig:
    """One named source of records.

    Args:
        path: a file, glob or URL, or a list of them.
        schema: auto, messages, sharegpt, alpaca, prompt_completion, text, tokenized or mapping.
        mapping: dotted keys of your own, for schema=mapping.
        weight: how often its training records are packed; 2 packs them twice, 0.5 a stable half of them.
        split: the split that all of its records go to; null decides by the hash of their content.
    """

    path: Any = REQUIRED
    schema: str = "auto"
    mapping: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    split: str | None = None


@dataclass
class TokenizerConfig:
    """What turns text into ids.

    Args:
        path: a SentencePiece .model file, or a local folder with a Hugging Face tokenizer.
        kind: auto, sentencepiece or huggingface.
        fast: encode byte-level BPE with tiktoken where a self-check proves it exact.
    """

    path: str = REQUIRED
    kind: str = "auto"
    fast: bool = True


@dataclass
class SplitConfig:
    """Which records are held out.

    Args:
        validation_fraction: share of the records, drawn by the hash of their content: adding or sorting records moves
            none to another split.
        test_fraction: the same for the test split.
        seed: of the draw.
    """

    validation_fraction: float = 0.0
    test_fraction: float = 0.0
    seed: int = 0


@dataclass
class PackingConfig:
    """Arguments of `megatron_packed_sft.pack`.

    Args:
        pack_size: tokens of a bin.
        strategy: set by choosing packing=NAME.
        overflow: what to do with sequences longer than the pack size; drop, split or error.
        stride: tokens that neighbouring chunks of a split sequence share.
        min_len: shorter sequences are dropped.
        max_len: longer sequences are dropped.
        max_seqs_per_bin: the most sequences in a bin; null sets no limit.
        pad_seq_to_mult: round every sequence up to this multiple; 2 * context_parallel_size for context parallelism.
        order_window: mix the order of the data within so many sequences only.
        shuffle_output: shuffle the bins.
        global_batch: group training bins into steps of this size.
        balance: what the bins of a step have alike; none, attention or trained_tokens.
        whole_batches: hold back the emptiest bins, so that no step is short.
        seed: of everything that is shuffled.
    """

    pack_size: int = 4096
    strategy: str = "optimal"
    overflow: str = "drop"
    stride: int = 0
    min_len: int = 1
    max_len: int | None = None
    max_seqs_per_bin: int | None = None
    pad_seq_to_mult: int = 1
    order_window: int | None = None
    shuffle_output: bool = True
    global_batch: int | None = None
    balance: str = "none"
    whole_batches: bool = False
    seed: int = 0


@dataclass
class ExecutorConfig:
    """Who does the work.

    Args:
        kind: local, processes of this machine.
        num_workers: how many; null takes one per core, fewer for little input.
    """

    kind: str = "local"
    num_workers: int | None = None


@dataclass
class PrepareConfig:
    """Everything `packed-sft prepare` can be told.

    Args:
        output: the dataset directory to publish.
        input: a file, glob or URL, or a list of them; one source, called input.
        sources: several sources by name, such as {maths: {path: maths.jsonl, weight: 2}}.
        work_dir: where token stores, plans and receipts are kept; null is OUTPUT.work.
        packed_storage: set by choosing storage=NAME.
        shard_megabytes: about the size of a shard.
        deduplicate: keep the first of records with equal content.
        on_error: what to do with a record that cannot be read or encoded; raise or skip.
        max_errors: with on_error=skip, the most such records.
        limit: prepare the first records of each source only, for a trial.
        dry_run: count and estimate, write nothing.
        force: redo every stage and replace the output.
        quiet: print errors only.
        log_interval: seconds between lines where no terminal shows a bar.
    """

    output: str = REQUIRED
    input: Any = None
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    work_dir: str | None = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    encode: EncodeOptions = field(default_factory=EncodeOptions)
    split: SplitConfig = field(default_factory=SplitConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    packed_storage: str = "memmap_v1"
    shard_megabytes: int = 256
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    deduplicate: bool = False
    on_error: str = "raise"
    max_errors: int = 100
    limit: int | None = None
    dry_run: bool = False
    force: bool = False
    quiet: bool = False
    log_interval: float = 30.0
