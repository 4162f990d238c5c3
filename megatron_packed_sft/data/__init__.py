"""From packed rows to batches, in an order that can be resumed anywhere.

    sources ─▶ datasets ─ collate (kernel, contracts) ─▶ batch
    order, blend ─▶ stream, samplers ─▶ loader (prefetch thread) ─ state ─▶ the training loop

`factory` opens whatever lies at a path; `sample_packs` packs samples of any other map-style dataset.
"""
