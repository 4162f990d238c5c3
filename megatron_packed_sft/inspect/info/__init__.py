"""`packed-sft info`: what a path is and what is recorded of it, as facts for programs and as text for people.

kinds         one dispatch: which kind of thing a path is, and one sentence when it is none
packed_data   datasets, shards and files of any storage, token stores, plans: by their manifests and headers
training      checkpoints and runs: by their JSON files
histograms    what --deep adds: lengths, fullness, trained share, sequences per bin
view          the facts as tables
"""
