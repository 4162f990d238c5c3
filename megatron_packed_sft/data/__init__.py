"""From bins to batches, in an order that can be resumed anywhere.

    bin_readers ─▶ datasets ─ batch/ (collate, contracts) ─▶ batch
    order/ (sample_order, blend) ─▶ samplers ─▶ loading/ (loader, prefetch thread) ─ state ─▶ the training loop

`factory` opens whatever is at a path; `sample_packs` packs the samples of any other map-style dataset; `huggingface/`
packs texts inside `datasets.map`.
"""
