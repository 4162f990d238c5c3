"""Token streams: flat arrays of token ids, one per file, without any index beside them.

    tokens/shard_00000.npy   5 9 1 7 3 2 8 8 4 2 6 ...      documents end to end, separated by EOS
           shard_00001.npy   └ window 0 ┘
                                     └ window 1 ┘           they overlap by one token and never cross files

Tools such as tatm, nanoGPT-like scripts and token caches write tokens like this. Training on them packs and copies
nothing: a window of seq_length + 1 tokens is a bin, and windows are cut on demand.

Where to look: `files` (which files, of which dtype), `options` (how to read them; metadata), `reader` (windows),
`validate` (checks every token), `writer` (for token caches).
"""
