"""What every room may use and none owns: compiled kernels, worker processes, optional packages, wording."""
