"""From bins to batches, in an order that can be resumed anywhere.

    readers/ ─▶ datasets ─ batch/ (collate, contracts) ─▶ batch
    order/ (sample_order, blend) ─▶ samplers ─▶ loading/ (loader, prefetch thread) ─ state ─▶ the training loop

`factory` opens whatever is at a path; `static_packs` packs raw samples when they are opened; `sample_packs` does so for
samples of any kind; `huggingface/` packs texts inside `datasets.map`.
"""
