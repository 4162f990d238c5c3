"""Lengths in, a plan out: which sequences share a bin. Pure NumPy, with numba where there is a hot loop.

lengths ─ items ─▶ strategies ─▶ plan ─▶ bin_order ─▶ aligned
          filter   which sizes    CSR,    shuffle,     a multiple
          cut      share a bin    canon.  steps        of the ranks
          count    (search/)
"""
