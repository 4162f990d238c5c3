"""The offline pipeline: scan, encode, plan, write shards, publish; each stage leaves a receipt."""
