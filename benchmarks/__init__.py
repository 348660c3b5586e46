"""Benchmarks: one module for each claim about speed or size, measured next to a peer in the same run."""
