"""Packs the default model, all-MiniLM-L6-v2, when the package is built: without torch, from pinned weights."""
