"""`packed-sft compare`: are two pieces of packed data the same, and if not, what differs and what moved?

sides         packed data of any storage as a stream of flat chunks, one shard open at a time
differences   two streams in step: the first differing position of every bin
moved         sequences by a hash of their content: in another bin, with another mask, or on one side only
comparison    the three together, as facts for programs
view          the facts as text
"""
