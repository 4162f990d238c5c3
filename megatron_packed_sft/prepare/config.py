"""The settings of `packed-sft prepare`, with their types and defaults: the schema that conf/prepare.yaml must obey."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REQUIRED: Any = "???"  # OmegaConf's word for a value that must be given


@dataclass
class SourceConfig:
    """One named source of rows."""

    path: Any = REQUIRED  # a file, glob or URL, or a list of them
    schema: str = "auto"  # auto | messages | sharegpt | alpaca | prompt_completion | text | tokenized | mapping
    mapping: dict[str, Any] = field(default_factory=dict)  # dotted keys, for schema=mapping
    weight: float = 1.0  # how often its training rows are packed: 2 twice, 0.5 a stable half
    split: str | None = None  # all of its rows go there; null: by the hash of their content


@dataclass
class TokenizerConfig:
    """What turns text into ids."""

    path: str = REQUIRED
    kind: str = "auto"  # auto | sentencepiece | huggingface
    fast: bool = True  # the exact tiktoken path for byte-level BPE, where it passes its self-check


@dataclass
class TemplateConfig:
    """What turns a conversation into text."""

    name: str | None = None  # null: the tokenizer's own | chatml | llama3 | mistral | plain | a file
    date: str | None = None  # today's date for templates that ask for it, such as 2026-01-31
    header: str | None = None  # the text after which an assistant begins to write; null: found in the template
    end_of_turn: list[str] | None = None  # null: found in the template
    variables: dict[str, Any] = field(default_factory=dict)  # passed to the template, such as enable_thinking


@dataclass
class EncodeConfig:
    """What is trained on, and how long a row may be."""

    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    last_turn_only: bool = False
    train_on_eot: bool = True  # the end-of-turn token of a trained turn
    special_tokens_in_content: str = "escape"  # of messages: escape (never a control token) | allow
    special_tokens_in_text: str = "allow"  # of prompt, completion and text rows, which may be rendered chats
    add_bos: bool = False
    add_eos: bool | None = None  # null: after text rows only; templates end chats themselves
    max_len: int | None = None  # longer rows are cut there and counted
    truncation: str = "right"  # right | left | drop
    on_empty: str = "drop"  # a row without a trained token: drop | error


@dataclass
class SplitConfig:
    """Which rows are held out; by the hash of their content, so that adding or reordering rows moves none."""

    validation_fraction: float = 0.0
    test_fraction: float = 0.0
    seed: int = 0


@dataclass
class PackingConfig:
    """Arguments of `megatron_packed_sft.pack`."""

    pack_size: int = 4096
    strategy: str = "optimal"
    overflow: str = "drop"  # rows longer than the pack: drop | split | error
    stride: int = 0
    min_len: int = 1
    max_len: int | None = None
    max_seqs_per_bin: int | None = None
    pad_seq_to_mult: int = 1  # 2 * context_parallel_size, for context parallelism
    order_window: int | None = None
    shuffle_output: bool = True
    global_batch: int | None = None  # group training bins into steps of so many
    balance: str = "none"  # of the bins in a step: none | attention | trained_tokens
    whole_batches: bool = False  # hold back the emptiest bins, so that no step is short
    seed: int = 0


@dataclass
class ExecutorConfig:
    """Who does the work."""

    kind: str = "local"
    num_workers: int | None = None  # null: one per core, fewer for little input


@dataclass
class PrepareConfig:
    """Everything `packed-sft prepare` can be told."""

    output: str = REQUIRED
    input: Any = None  # a file, glob or URL, or a list of them: one source, called input
    sources: dict[str, SourceConfig] = field(default_factory=dict)  # or several, by name
    work_dir: str | None = None  # token store, plans and receipts; null: OUTPUT.work
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    packed_storage: str = "memmap_v1"  # memmap_v1 | legacy
    shard_megabytes: int = 256
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    deduplicate: bool = False  # keep the first of rows with equal content
    on_error: str = "raise"  # a row that cannot be read: raise | skip
    max_errors: int = 100  # with skip: more than so many are an error
    limit: int | None = None  # only the first rows of each source, for a trial
    dry_run: bool = False  # count and estimate, write nothing
    force: bool = False  # redo every stage and replace the output
    quiet: bool = False
    log_interval: float = 30.0  # seconds between lines where no terminal shows a bar
