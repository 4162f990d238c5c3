"""Hydra applications: where the configuration lies, how it is checked, and one-sentence errors for wrong keys."""
