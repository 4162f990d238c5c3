"""From bins to batches, in an order that can be resumed anywhere.

    readers/ ─▶ datasets ─ batch/ (collate, contracts) ─▶ batch
    order/ (sample_order, blend) ─▶ samplers ─▶ loader ─ state ─▶ the training loop

`factory` opens a path of any kind; `static_packs` packs raw samples when they are opened; `sample_packs` does so for
samples of any kind; `huggingface/` packs texts inside `datasets.map`. `options` are the objects that users pass.
"""
