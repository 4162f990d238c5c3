"""Lengths in, a plan out: which sequences share a bin. NumPy, with numba where there is a hot loop.

lengths ─▶ items ─▶ strategies ─▶ packer ─▶ plan ─▶ aligned
           filter   which sizes   reading   CSR,    a multiple of
           cut      share a bin   order,    file    the ranks
           count    (search/)     steps
"""
