"""Packed bins on disk: memmap_v1 shards and the legacy pickled .npy.

    bins ── writers ──▶ staged files ── one rename ──▶ shard ── readers ──▶ read-only arrays
            every invariant checked      atomic.py       │      all checks before the first map
                                                         ├─ validate: every byte, every row
                                                         └─ convert:  legacy, Parquet <-> memmap_v1

Where to look: `layout` (names, dtypes, headers), `manifest` and `json_document` (manifest.json), `dataset_directory`
(dataset.json), `atomic` (publish), `bins` (what a bin is and must obey), `memmap_*` and `legacy_*` (the two storages).
"""
