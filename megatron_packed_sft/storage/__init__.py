"""Packed bins on disk, in one of several storages.

    bins ── writers ──▶ staged files ── one rename ──▶ shard ── readers ──▶ read-only arrays
            every invariant checked      support.atomic     │      all checks before the first read
                                                         ├─ validate: every byte, every bin
                                                         └─ convert:  from any storage to any other

Where to look: `interface` (what a storage is), `registry` (the storages by name), `memmap_v1`, `legacy` and `parquet`
(the storages), `bins` (what a bin is and must obey), `dataset_directory` (datasets), `dataset_document`
(dataset.json), `testing` (checks to run).
"""
