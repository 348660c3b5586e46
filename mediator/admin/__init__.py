"""Operators over HTTP: who they are, how they sign in, what they did, and the admin API."""
