"""The stages of a preparation, one after the other.

    scan ─▶ encode ─▶ plan ─▶ publish
    files    token     plan    shards
             stores    files

Every stage leaves a receipt in the work directory with the fingerprint of all that decides its result. A stage whose
receipt matches, and whose result is whole, is not done again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.load import load_template_if_any
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.counts import Counts, SplitCounts
from megatron_packed_sft.prepare.encode_stage import EncodedSources, EncodeRequest, encode_sources
from megatron_packed_sft.prepare.encode_worker import EncodeSettings
from megatron_packed_sft.prepare.estimate import estimate
from megatron_packed_sft.prepare.executor import Executor
from megatron_packed_sft.prepare.plan_stage import PackingOptions, Planned, plan_splits
from megatron_packed_sft.prepare.progress import Progress
from megatron_packed_sft.prepare.publish_stage import (
    MADE_BY,
    PublishRequest,
    is_published,
    may_replace,
    num_shards,
    publish,
    stored_bytes,
)
from megatron_packed_sft.prepare.report import PrepareReport, SplitReport
from megatron_packed_sft.prepare.sources import ScannedSource, Source, scan
from megatron_packed_sft.prepare.splits import SPLITS, SplitRule
from megatron_packed_sft.prepare.summary import card
from megatron_packed_sft.prepare.token_stores import remove_damaged_parts
from megatron_packed_sft.prepare.work_directory import WorkDirectory
from megatron_packed_sft.storage.writers import LEGACY, MEMMAP_V1
from megatron_packed_sft.support.wording import byte_count, counted


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything a preparation needs to know, in plain values; the settings are described in conf/prepare.yaml.

    Example:
        >>> Preparation(output=Path("my_dataset"), ...).run()  # doctest: +SKIP
    """

    output: Path
    work_dir: Path
    sources: Sequence[Source]
    tokenizer_path: str
    tokenizer_kind: str = "auto"
    tokenizer_fast: bool = True
    template: TemplateOptions = field(default_factory=TemplateOptions)
    options: EncodeOptions
    packing: PackingOptions
    split_rule: SplitRule
    executor: Executor
    packed_storage: str = MEMMAP_V1
    shard_bytes: int = 256 << 20
    deduplicate: bool = False
    skip_errors: bool = False
    max_errors: int = 100
    limit: int | None = None
    force: bool = False
    quiet: bool = False
    log_interval: float = 30.0

    def run(self) -> PrepareReport:
        """Do what has to be done, and say what was."""
        tokenizer = self._checked_tokenizer()
        scanned = self._scan()
        with WorkDirectory(self.work_dir) as work:
            if self.force:
                work.forget()
            request = self._encode_request(scanned, tokenizer, work.tokens)
            encoded = self._encode(request, work)
            planned = plan_splits(_in_order(encoded.stores), self.packing, work)
            plans = {split: one.plan for split, one in planned.items()}
            report = self._report(encoded.counts, plans, tokenizer)
            report.check()
            provenance = self._provenance(scanned, request, report)
            publication = PublishRequest(
                output=self.output,
                packed_storage=self.packed_storage,
                shard_bytes=self.shard_bytes,
                pad_id=next((one for one in (tokenizer.pad_id, tokenizer.eos_id) if one is not None), 0),
                provenance=provenance,
                card=card(report, provenance),
                num_workers=self.executor.num_workers,
            )
            reused = is_published(publication, work)
            if not reused:
                if encoded.num_reused and remove_damaged_parts(encoded.stores.values(), progress=self._shows_bars):
                    encoded = self._encode(request, work)  # the same tokens again, so that the plans still hold
                num_bins = sum(plan.num_bins for plan in plans.values())
                with Progress("publish", num_bins, "bin", quiet=self.quiet, interval=self.log_interval) as progress:
                    publish(publication, plans, encoded.stores, work, progress.update)
        stages = [self._scan_line(scanned), _encode_line(encoded), _plan_line(planned), self._publish_line(reused)]
        return replace(report, stages=stages)

    def estimate(self) -> PrepareReport:
        """Count and estimate, and write nothing."""
        tokenizer = self._checked_tokenizer()
        scanned = self._scan()
        with self._progress("dry run", scanned) as progress:
            request = self._encode_request(scanned, tokenizer, None)
            found = estimate(request, self.executor, progress)
        plans = {split: self.packing.pack(split, lengths) for split, lengths in _in_order(found.lengths).items()}
        dry_run = f"{counted(found.num_units, 'unit')} encoded; nothing was written"
        stages = [self._scan_line(scanned), ("dry run", dry_run)]
        report = self._report(found.counts, plans, tokenizer)
        report.check()
        return replace(report, stages=stages, looked_at=found.looked_at)

    def _checked_tokenizer(self) -> Tokenizer:
        """The tokenizer, and no mistake left that would only be found after hours of work."""
        if not self.sources:
            raise InvalidInputError("no input: give input=FILES, or sources.NAME.path=FILES for several")
        if self.work_dir == self.output:
            raise InvalidInputError(f"work_dir and output are both {self.output}; choose two directories")
        may_replace(self.output)
        self.packing.check()
        return load_tokenizer(self.tokenizer_path, kind=self.tokenizer_kind, fast=self.tokenizer_fast)

    def _scan(self) -> list[ScannedSource]:
        with Progress("scan", None, "B", quiet=self.quiet, interval=self.log_interval) as progress:
            return scan(self.sources, progress.update)

    def _encode(self, request: EncodeRequest, work: WorkDirectory) -> EncodedSources:
        with self._progress("encode", request.sources) as progress:
            return encode_sources(request, work, self.executor, progress)

    @property
    def _shows_bars(self) -> bool:
        return not self.quiet and sys.stderr.isatty()

    def _encode_request(
        self, scanned: Sequence[ScannedSource], tokenizer: Tokenizer, tokens: Path | None
    ) -> EncodeRequest:
        template = load_template_if_any(self.template.name, tokenizer)
        return EncodeRequest(
            sources=scanned,
            settings=EncodeSettings(
                tokenizer=tokenizer,
                template=self.template,
                options=self.options,
                split_rule=self.split_rule,
                skip_errors=self.skip_errors,
                tokens=tokens,
            ),
            description={
                "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
                "chat_template": template and {"name": template.name, "fingerprint": template.fingerprint},
                "encode": {**self.options.to_json(), **self.template.to_json()},
                "split": asdict(self.split_rule),
            },
            deduplicate=self.deduplicate,
            limit=self.limit,
            max_errors=self.max_errors if self.skip_errors else 0,
        )

    def _progress(self, stage: str, scanned: Sequence[ScannedSource]) -> Progress:
        total = sum(one.num_bytes for one in scanned)
        return Progress(stage, total, "B", quiet=self.quiet, interval=self.log_interval)

    def _report(
        self,
        counts: Mapping[str, Counts],
        plans: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> PrepareReport:
        encoded = Counts()
        for one in counts.values():
            encoded.add(one)
        vocab_size = tokenizer.vocab_size
        splits = {
            split: SplitReport(
                counts=encoded.splits.get(split, SplitCounts()),
                plan=plan,
                num_shards=num_shards(plan, self.shard_bytes, vocab_size) if self.packed_storage == MEMMAP_V1 else 1,
                num_bytes=stored_bytes(plan, self.packed_storage, vocab_size),
            )
            for split, plan in plans.items()
        }
        return PrepareReport(self.output, self.packed_storage, self.tokenizer_path, counts, splits, stages=[])

    def _provenance(
        self, scanned: Sequence[ScannedSource], request: EncodeRequest, report: PrepareReport
    ) -> dict[str, Any]:
        description = request.description
        return {
            "made_by": MADE_BY,
            "tokenizer": description["tokenizer"],
            "chat_template": description["chat_template"],
            "sources": {
                one.source.name: {**one.to_json(), **_without_examples(report.sources[one.source.name])}
                for one in scanned
            },
            "splits": {split: one.to_json() for split, one in report.splits.items()},
            "settings": {
                "encode": description["encode"],
                "split": description["split"],
                "packing": asdict(self.packing),
                "deduplicate": self.deduplicate,
                "limit": self.limit,
                "on_error": "skip" if self.skip_errors else "raise",
            },
        }

    def _scan_line(self, scanned: Sequence[ScannedSource]) -> tuple[str, str]:
        num_files = sum(len(one.files) for one in scanned)
        num_bytes = sum(one.num_bytes for one in scanned)
        return "scan", f"{counted(num_files, 'file')}, {byte_count(num_bytes)}, in {counted(len(scanned), 'source')}"

    def _publish_line(self, reused: bool) -> tuple[str, str]:
        what = "is up to date; left as it is" if reused else "published"
        return "publish", f"{self.output} ({'legacy' if self.packed_storage == LEGACY else self.packed_storage}) {what}"


def _encode_line(encoded: EncodedSources) -> tuple[str, str]:
    made = encoded.num_units - encoded.num_reused
    return "encode", f"{counted(encoded.num_units, 'unit')}: {encoded.num_reused:,} reused, {made:,} encoded"


def _plan_line(planned: Mapping[str, Planned]) -> tuple[str, str]:
    return "plan", ", ".join(f"{split}: {'reused' if one.reused else 'made'}" for split, one in planned.items())


def _in_order(by_split: Mapping[str, Any]) -> dict[str, Any]:
    """Train first, then the held-out splits."""
    return {split: by_split[split] for split in SPLITS if split in by_split}


def _without_examples(counts: Counts) -> dict[str, Any]:
    """Examples of dropped rows name files by their path; what is published does not depend on where they lay."""
    document = counts.to_json()
    del document["examples"]
    return document
