"""Fetches the console's browser libraries when the package is built; not installed."""
