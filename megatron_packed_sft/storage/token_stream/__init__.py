"""Token streams: flat arrays of token ids, one per file, without any index beside them.

    tokens/shard_00000.npy   5 9 1 7 3 2 8 8 4 2 6 ...      documents end to end, each behind the EOS of the last
           shard_00001.npy   └ window 0 ┘
                                     └ window 1 ┘           they overlap by one token and never cross files

Tokens that users already have come like this, from tatm, nanoGPT-like scripts or a token cache. Nothing is packed or
copied to train on them: a window of seq_length + 1 tokens is a bin, and windows are cut when they are asked for.

Where to look: `files` (which files, of which dtype), `options` (what is said about them), `reader` (windows),
`validate` (checks every token), `writer` (for token caches).
"""
