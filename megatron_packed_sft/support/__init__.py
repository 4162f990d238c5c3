"""Helpers that every room may use: atomic publishing, checksums, array files, compiled kernels, progress, wording."""
