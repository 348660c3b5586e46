"""Measures search quality on an operator's own cards and requests."""
