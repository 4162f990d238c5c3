"""The settings of `packed-sft prepare`, with their types, defaults and meaning: the schema of conf/prepare.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.parallel_layout import ParallelLayout
from megatron_packed_sft.prepare.sources import Source, SplitRule
from megatron_packed_sft.records.record import MAX_RECORD_BYTES

REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given
INPUT = "input"  # the source that input= stands for


@dataclass
class SourceConfig:
    """One named source of records.

    Args:
        path: a file, glob or URL, or a list of them; the source called input may take its files from input instead.
        schema: auto, messages, sharegpt, alpaca, prompt_completion, question_answer, text, tokenized, dialog, gemini,
            openai_batch, trajectory or mapping.
        mapping: dotted keys of your own, for schema=mapping.
        weight: how often its training records are packed; 2 packs them twice, 0.5 a stable half of them.
        split: the split that all of its records go to; null decides by the hash of their content.
        take: chosen takes the chosen side of preference data; null refuses such data.
    """

    path: Any = None
    schema: str = "auto"
    mapping: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    split: str | None = None
    take: str | None = None


@dataclass
class TokenizerConfig:
    """What turns text into ids.

    Args:
        path: a SentencePiece .model file, or a local folder with a Hugging Face tokenizer.
        fast: encode with gigatoken where a self-check proves it exact.
    """

    path: str = REQUIRED
    fast: bool = True


@dataclass(kw_only=True)
class PackingConfig(PackOptions):
    """How sequences are packed: the options of `pack`, and one that computes another.

    Args:
        for_parallel: how the ranks that will train share a bin, such as {tensor: 2, context: 2, sequence_parallel:
            true}, also fp8; sets packing.pad_seq_to_mult to what they need.
    """

    for_parallel: ParallelLayout | None = None

    def options(self) -> PackOptions:
        """Return the options of `pack`, with `for_parallel` turned into the multiple that it asks for.

        Example:
            >>> PackingConfig(for_parallel=ParallelLayout(context=4)).options().pad_seq_to_mult
            8
        """
        given = {option.name: getattr(self, option.name) for option in fields(PackOptions)}
        if self.for_parallel is not None:
            needed = self.for_parallel.sequence_multiple
            if self.pad_seq_to_mult != 1 and self.pad_seq_to_mult % needed:
                raise InvalidInputError(
                    f"packing.pad_seq_to_mult is {self.pad_seq_to_mult}, but packing.for_parallel needs a multiple of "
                    f"{needed}; leave packing.pad_seq_to_mult out"
                )
            given["pad_seq_to_mult"] = max(needed, self.pad_seq_to_mult)
        return PackOptions(**given)


@dataclass
class ExecutorConfig:
    """What does the work.

    Args:
        kind: set by choosing executor=NAME: local (processes of this machine), array (one of many calls that share the
            slices) or ray (tasks of a Ray cluster).
        num_workers: how many processes, or Ray tasks at a time; null takes one per core, fewer for little input.
        index: with executor=array, which share of the slices this call encodes, from 0; null plans and publishes what
            the others encoded.
        count: with executor=array, how many shares there are; the same in every call.
        address: with executor=ray, the cluster to join, such as auto or host:6379; null starts one on this machine.
        num_cpus: with executor=ray, the CPUs that each task asks the cluster for; null is 1.
    """

    kind: str = "local"
    num_workers: int | None = None
    index: int | None = None
    count: int | None = None
    address: str | None = None
    num_cpus: float | None = None


@dataclass
class PrepareConfig:
    """The settings of `packed-sft prepare`.

    Args:
        output: the dataset directory to publish, or its URL, such as s3://bucket/my_dataset.
        input: a file, glob or URL, or a list of them; one source, called input, whose other keys are sources.input.
        sources: several sources by name, such as {maths: {path: maths.jsonl, weight: 2}}.
        work_dir: where token stores, plans and receipts are kept; null is OUTPUT.work, or a directory in the user's
            cache for an output that is a URL. At a URL it keeps them between runs; the work is done locally.
        packed_storage: set by choosing storage=NAME.
        shard_megabytes: about the size of a shard.
        deduplicate: keep the first of records with equal content.
        max_errors: the most records that may be dropped because they cannot be read or encoded; one more stops the
            run.
        max_record_bytes: a larger record is not parsed, and counts as one that cannot be read.
        max_drop_share: the largest share of records or of tokens that may be lost (too long, nothing to train); if more
            would be lost, nothing is published.
        rejects: a file for the records that were lost: JSON lines with file, line, reason and detail.
        audit: also show what is trained of each source, by kind, and records with odd masks; reads the input again.
        limit: prepare the first records of each source only, for a trial.
        dry_run: count and estimate, write nothing.
        overwrite: replace an output that was made with other settings or from other files.
        quiet: print errors only.
        json: print the summary as JSON on stdout; progress and warnings go to stderr.
    """

    output: str = REQUIRED
    input: Any = None
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    work_dir: str | None = None
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    encode: EncodeOptions = field(default_factory=EncodeOptions)
    split: SplitRule = field(default_factory=SplitRule)
    # Long sequences are dropped and counted, within max_drop_share; `pack` itself refuses them.
    packing: PackingConfig = field(default_factory=lambda: PackingConfig(overflow="drop", shuffle_output=True))
    packed_storage: str = "memmap_v1"
    shard_megabytes: int = 256
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    deduplicate: bool = False
    max_errors: int = 0
    max_record_bytes: int = MAX_RECORD_BYTES
    max_drop_share: float = 0.2
    rejects: str | None = None
    audit: bool = False
    limit: int | None = None
    dry_run: bool = False
    overwrite: bool = False
    quiet: bool = False
    json: bool = False


def configured_sources(config: PrepareConfig) -> list[Source]:
    """Return the sources that a configuration names, in its order; input= is one of them."""
    given: dict[str, SourceConfig] = dict(config.sources)
    if config.input is not None:
        if set(given) - {INPUT} or (INPUT in given and given[INPUT].path is not None):
            raise InvalidInputError("input and sources were both given; name all of the input in sources")
        given = {INPUT: replace(given.get(INPUT, SourceConfig()), path=config.input)}
    if not given:
        raise InvalidInputError("no input: give input=FILES, or sources.NAME.path=FILES for several sources")
    return [
        Source(
            name=name,
            paths=_paths("input" if config.input is not None else f"sources.{name}.path", source.path),
            schema=source.schema,
            mapping=source.mapping,
            weight=source.weight,
            split=source.split,
            take=source.take,
            max_record_bytes=config.max_record_bytes,
        )
        for name, source in given.items()
    ]


def _paths(key: str, given: Any) -> tuple[str, ...]:
    if given is None:
        raise InvalidInputError(f"{key} has no value; add {key}=...")
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise InvalidInputError(f"{key} is {given!r}; give a path, or a list of paths")
    return tuple(paths)
