"""The token store: every sequence tokenized once, kept flat, and reused by every pack size.

    store/
      part_000000/                     written by one process, published by one rename
        ids.npy       <u2 or <i4       all token ids, one sequence after the other
        train.npy     |u1              1 where a token is one the model should learn to produce (not shifted)
        offsets.npy   <u8              sequence i is [offsets[i], offsets[i + 1])
        weights.npy   <f4              only if a trained token counts other than 1: above 0 where train is 1, else 0
        manifest.json                  counts, checksums, fingerprints of tokenizer and chat template
      part_000001/ ...
      store.json                       the parts in order, with the checksums of their manifests

Repacking for another pack size, rank count or context-parallel size reads this and never tokenizes again.
"""
