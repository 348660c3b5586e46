"""Turning texts into vectors, in a process of its own."""
