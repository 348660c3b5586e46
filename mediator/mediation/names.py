"""Canonical names: the one form in which keys and DIDs are compared, whatever a peer writes (D3)."""
