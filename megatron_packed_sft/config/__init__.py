"""Hydra's edge: configuration files and overrides in, a checked dataclass out, one sentence per wrong key."""
