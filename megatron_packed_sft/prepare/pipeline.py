"""The stages of a preparation, one after the other.

    scan ─▶ encode ─▶ plan ─▶ publish
    files    token     plan    shards
             stores    files

Every stage leaves a receipt in the work directory with the fingerprint of all that decides its result. A stage whose
receipt matches, and whose result is whole, is not done again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, load_tokenizer
from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.array import ArrayCall, InputListing, Share, ShareReport
from megatron_packed_sft.prepare.audit import Audit
from megatron_packed_sft.prepare.config import PrepareConfig, configured_sources
from megatron_packed_sft.prepare.counts import Counts, SplitCounts, total_of
from megatron_packed_sft.prepare.encode_stage import (
    EncodedSources,
    audit_sources,
    encode_fingerprint,
    encode_share,
    encode_sources,
    estimate,
)
from megatron_packed_sft.prepare.encode_worker import EncodeSettings, try_first_records
from megatron_packed_sft.prepare.executor import create_executor
from megatron_packed_sft.prepare.plan_stage import (
    PackedSequences,
    Planned,
    check_packing,
    estimated_trained_of_items,
    pack_split,
    packed_by_source,
    plan_splits,
    trained_of_items,
)
from megatron_packed_sft.prepare.publish_stage import (
    MADE_BY,
    PublishRequest,
    is_published,
    num_shards,
    publish,
    refuse_other_files,
    refuse_replacing,
    stored_bytes,
)
from megatron_packed_sft.prepare.rejects import refuse_other_file, rejects_place, write_rejects
from megatron_packed_sft.prepare.remote_work import RemoteWorkDirectory
from megatron_packed_sft.prepare.report import PrepareReport, SourceReport, SplitReport, card
from megatron_packed_sft.prepare.sources import SPLITS, ScannedSource, scan
from megatron_packed_sft.prepare.work_directory import WorkDirectory, places_of
from megatron_packed_sft.remote.filesystem import is_of_one_process
from megatron_packed_sft.storage.registry import dataset_storage
from megatron_packed_sft.support.paths import is_url, redacted
from megatron_packed_sft.support.processes import LocalExecutor
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.support.terminal import is_terminal
from megatron_packed_sft.support.wording import byte_count, plural


class Pipeline:
    """A preparation: `run` does it, `estimate` counts what it would do.

    Making one checks the configuration, so that no mistake shows only after hours of work.
    """

    def __init__(self, config: PrepareConfig) -> None:
        _check(config)
        self.config = config
        self.places = places_of(config.output, config.work_dir, config.executor.kind)
        self.rejects = rejects_place(config.rejects) if config.rejects else None
        self.packed_storage = dataset_storage(config.packed_storage).name
        self._sources = configured_sources(config)
        self._executor = create_executor(config.executor)
        if any(is_of_one_process(url) for url in (self.places.url, self.places.work_url) if url is not None):
            self._executor = LocalExecutor(1)
        self._array = ArrayCall.of(config)
        self._packing = config.packing.options()
        check_packing(self._packing)
        if not config.dry_run:
            refuse_other_files(self.places.target)
            if self.rejects is not None:
                refuse_other_file(self.rejects)

    @property
    def is_share(self) -> bool:
        """Whether this is a call of an array that only encodes: `run_share` does it."""
        return self._array is not None and self._array.index is not None

    def run_share(self) -> ShareReport:
        """Encode this call's share of the slices, while other calls may do theirs."""
        assert self._array is not None
        tokenizer = self._tokenizer()
        if self._array.index == 0:  # the others open only files of their own
            self._try_first_records(tokenizer)
        with self._work(shared=True) as work:
            settings = self._encode_settings(tokenizer, work.tokens)
            share = self._join_array(work, settings)
            made_from = self._made_from(share.listing.sources, settings)
            refuse_replacing(self.places.target, made_from, overwrite=self.config.overwrite, by_size=True)
            if self.config.deduplicate:  # every record is compared with all others
                sources = self._scan()
            else:
                with self._progress("scan", None, "B") as progress:
                    sources = share.scan_own(work, progress.update)
            with self._progress("encode", None, "B") as progress:
                return encode_share(sources, settings, work, self._executor, progress, share)

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()

    def run(self) -> PrepareReport:
        """Run the stages that are not done yet, and return the report."""
        tokenizer = self._tokenizer()
        if self._array is None:  # the last call of an array encodes nothing
            self._try_first_records(tokenizer)
        scanned = None if self._array is not None else self._scan()
        with self._work() as work:
            settings = self._encode_settings(tokenizer, work.tokens)
            share = None
            if scanned is None:
                share = self._join_array(work, settings)
                scanned = self._scan() if self.config.deduplicate else share.scanned_by_all(work)
            sources = scanned
            made_from = self._made_from(sources, settings)
            refuse_replacing(self.places.target, made_from, overwrite=self.config.overwrite)
            encoded = self._encode(sources, settings, work, share)
            try:
                planned, report = self._planned(encoded, work, tokenizer)
            except ShardError:  # a sequence does not match its checksum
                if not encoded.num_reused or not self._remove_damaged(encoded, work):
                    raise
                encoded = self._encode(sources, settings, work, share)
                planned, report = self._planned(encoded, work, tokenizer)
            plans = {split: one.plan for split, one in planned.items()}
            if self.rejects is not None:
                write_rejects(self.rejects, sources, encoded, plans, self._packing, work)
            report.refuse_large_loss(self.config.max_drop_share)
            publication = self._publication(tokenizer, report, made_from)
            reused = is_published(publication, work)
            if not reused:
                if encoded.num_reused and self._remove_damaged(encoded, work):
                    # The same tokens again, so the plans still hold.
                    encoded = self._encode(sources, settings, work, share)
                num_bins = sum(plan.num_bins for plan in plans.values())
                with self._progress("publish", num_bins, "bin") as progress:
                    publish(publication, plans, encoded.stores, work, progress.update)
        stages = [_scan_line(sources), _encode_line(encoded), _plan_line(planned), self._publish_line(reused)]
        return replace(report, stages=stages, audits=self._audit(sources, settings) if self.config.audit else None)

    def _planned(
        self, encoded: EncodedSources, work: WorkDirectory, tokenizer: Tokenizer
    ) -> tuple[dict[str, Planned], PrepareReport]:
        planned = plan_splits(_in_order(encoded.stores), self._packing, work, self._executor)
        plans = {split: one.plan for split, one in planned.items()}
        weighted = {split for split, store in encoded.stores.items() if store.has_weights}
        return planned, self._report(encoded.counts, plans, self._packed(encoded, plans), tokenizer, weighted)

    def _remove_damaged(self, encoded: EncodedSources, work: WorkDirectory) -> int:
        return work.remove_damaged_parts(encoded.stores.values(), progress=self._shows_bars)

    def estimate(self) -> PrepareReport:
        """Return the report that a run would give, as an estimate; write nothing."""
        tokenizer = self._tokenizer()
        self._try_first_records(tokenizer)
        sources = self._scan()
        names = [one.source.name for one in sources]
        with self._progress("dry run", sum(one.num_bytes for one in sources), "B") as progress:
            found = estimate(sources, self._encode_settings(tokenizer, None), self._executor, progress)
        options = self._packing
        splits = _in_order(found.splits)
        plans = {split: pack_split(split, options, one.lengths, one.trained) for split, one in splits.items()}
        packed = {}
        for split, one in splits.items():
            trained = estimated_trained_of_items(plans[split], one.lengths, one.trained)
            packed[split] = packed_by_source(plans[split], one.lengths, options, one.sources, names, trained)
        report = self._report(found.counts, plans, packed, tokenizer)
        dry_run = f"{plural(found.num_slices, 'slice')} encoded; nothing was written"
        stages = [_scan_line(sources), ("dry run", dry_run)]
        return replace(report, stages=stages, looked_at=found.looked_at, audits=found.audits)

    def _work(self, *, shared: bool = False) -> WorkDirectory:
        places = self.places
        if places.work_url is not None:
            return RemoteWorkDirectory(places.work_url, places.work_dir)
        return WorkDirectory(places.work_dir, shared=shared)

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.config.tokenizer
        return load_tokenizer(tokenizer.path, fast=tokenizer.fast)

    @property
    def _tokenizer_path(self) -> str:
        """The path of the tokenizer, for receipts: absolute, or a URL without credentials."""
        path = self.config.tokenizer.path
        return redacted(path) if is_url(path) else os.path.abspath(path)

    def _try_first_records(self, tokenizer: Tokenizer) -> None:
        """Report mistakes in the first records before all files are read and processes are started."""
        for warning in try_first_records(self._sources, self._encode_settings(tokenizer, None)):
            if not self.config.quiet:
                print(f"packed-sft prepare: warning: {warning}", file=sys.stderr)

    def _scan(self) -> list[ScannedSource]:
        with self._progress("scan", None, "B") as progress:
            return scan(self._sources, progress.update)

    def _encode_settings(self, tokenizer: Tokenizer, tokens: Path | None) -> EncodeSettings:
        config = self.config
        return EncodeSettings(
            tokenizer=tokenizer,
            template=config.template,
            options=config.encode,
            split_rule=config.split,
            tokens=tokens,
            max_errors=config.max_errors,
            deduplicate=config.deduplicate,
            limit=config.limit,
            audit=config.audit and tokens is None,
        )

    def _encode(
        self, sources: Sequence[ScannedSource], settings: EncodeSettings, work: WorkDirectory, share: Share | None
    ) -> EncodedSources:
        with self._progress("encode", sum(one.num_bytes for one in sources), "B") as progress:
            return encode_sources(sources, settings, work, self._executor, progress, share)

    def _join_array(self, work: WorkDirectory, settings: EncodeSettings) -> Share:
        """Agree with the other calls of an array on their shares, without reading any input."""
        assert self._array is not None
        listing = InputListing.of(self._sources)
        call = self._array.join(work, encode_fingerprint(listing.sources, settings))
        assert call.count is not None
        return Share(listing, call.count, call.index)

    def _audit(self, sources: Sequence[ScannedSource], settings: EncodeSettings) -> dict[str, Audit]:
        with self._progress("audit", sum(one.num_bytes for one in sources), "B") as progress:
            return audit_sources(sources, settings, self._executor, progress)

    @property
    def _shows_bars(self) -> bool:
        return not self.config.quiet and is_terminal(sys.stderr)

    def _progress(self, stage: str, total: int | None, unit: str) -> Progress:
        return Progress(stage, total, unit, quiet=self.config.quiet)

    def _packed(self, encoded: EncodedSources, plans: Mapping[str, PackPlan]) -> dict[str, dict[str, PackedSequences]]:
        """Return split -> source -> what is in the bins; this reads tokens only if a plan left some out."""
        packed = {}
        for split, plan in plans.items():
            if plan.chunks is None and not plan.accounting.dropped_sequences:
                packed[split] = {
                    name: PackedSequences(replace(counts.splits.get(split, SplitCounts())))
                    for name, counts in encoded.counts.items()
                }
                continue
            store = encoded.stores[split]
            trained, sources = trained_of_items(plan, store, self._executor), encoded.sources_of(split)
            lengths = store.lengths
            packed[split] = packed_by_source(plan, lengths, self._packing, sources, list(encoded.counts), trained)
        return packed

    def _report(
        self,
        counts: Mapping[str, Counts],
        plans: Mapping[str, PackPlan],
        packed: Mapping[str, Mapping[str, PackedSequences]],
        tokenizer: Tokenizer,
        weighted: Collection[str] = (),
    ) -> PrepareReport:
        encoded = total_of(counts.values())
        splits = {}
        for split, plan in plans.items():
            in_bins = SplitCounts()
            for one in packed[split].values():
                in_bins.add(one.counts)
            splits[split] = SplitReport(
                encoded=encoded.split(split),
                packed=in_bins,
                plan=plan,
                num_shards=num_shards(
                    plan, self.packed_storage, self._shard_bytes, tokenizer.vocab_size, has_weights=split in weighted
                ),
                num_bytes=stored_bytes(plan, self.packed_storage, tokenizer.vocab_size, has_weights=split in weighted),
            )
        sources = {
            name: SourceReport(one, {split: by_source[name] for split, by_source in packed.items()})
            for name, one in counts.items()
        }
        report = PrepareReport(self.places.shown, self.packed_storage, self._tokenizer_path, sources, splits)
        report.check()
        return report

    def _made_from(self, sources: Sequence[ScannedSource], settings: EncodeSettings) -> dict[str, Any]:
        """Return everything that decides the bytes of the output, in plain values."""
        description = settings.to_json()
        return {
            "made_by": MADE_BY,
            "tokenizer": description["tokenizer"],
            "chat_template": description["chat_template"],
            "sources": {one.source.name: one.to_json() for one in sources},
            "settings": {
                "encode": description["encode"],
                "split": description["split"],
                "packing": asdict(self._packing),
                "deduplicate": self.config.deduplicate,
                "limit": self.config.limit,
                "packed_storage": self.packed_storage,
                "shard_megabytes": self.config.shard_megabytes,
            },
        }

    def _publication(self, tokenizer: Tokenizer, report: PrepareReport, made_from: Mapping[str, Any]) -> PublishRequest:
        provenance = {
            **made_from,
            "sources": {
                name: {**source, **report.sources[name].to_json()} for name, source in made_from["sources"].items()
            },
            "splits": {split: one.to_json() for split, one in report.splits.items()},
        }
        return PublishRequest(
            output=self.places.output,
            url=self.places.url,
            packed_storage=self.packed_storage,
            shard_bytes=self._shard_bytes,
            pad_id=next((one for one in (tokenizer.pad_id, tokenizer.eos_id) if one is not None), 0),
            provenance=provenance,
            card=card(report, provenance),
            executor=self._executor,
            tokenizer_path=self._tokenizer_path,
        )

    @property
    def _shard_bytes(self) -> int:
        return self.config.shard_megabytes << 20

    def _publish_line(self, reused: bool) -> tuple[str, str]:
        what = "is up to date" if reused else "published"
        return "publish", f"{self.places.shown} ({self.packed_storage}) {what}"


def _check(config: PrepareConfig) -> None:
    if config.max_errors < 0:
        raise InvalidInputError(f"max_errors is {config.max_errors}; it must be 0 or more")
    for name in ("shard_megabytes", "limit"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InvalidInputError(f"{name} is {value}; it must be a positive integer")
    if not 0 <= config.max_drop_share <= 1:
        raise InvalidInputError(f"max_drop_share is {config.max_drop_share:g}; it must be from 0 to 1")
    for key, path in (("output", config.output), ("tokenizer.path", config.tokenizer.path)):
        if not path:
            raise InvalidInputError(f"{key} is empty; give a path")


def _scan_line(sources: Sequence[ScannedSource]) -> tuple[str, str]:
    num_files = sum(len(one.files) for one in sources)
    num_bytes = sum(one.num_bytes for one in sources)
    return "scan", f"{plural(num_files, 'file')}, {byte_count(num_bytes)}, in {plural(len(sources), 'source')}"


def _encode_line(encoded: EncodedSources) -> tuple[str, str]:
    num_slices = len(encoded.slice_sources)
    made = num_slices - encoded.num_reused
    return "encode", f"{plural(num_slices, 'slice')}: {encoded.num_reused:,} reused, {made:,} encoded"


def _plan_line(planned: Mapping[str, Planned]) -> tuple[str, str]:
    made = {split: "reused" if one.reused else plural(one.plan.num_bins, "bin") for split, one in planned.items()}
    return "plan", ", ".join(f"{split}: {what}" for split, what in made.items())


def _in_order(by_split: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits, train first."""
    return {split: by_split[split] for split in SPLITS if split in by_split}
