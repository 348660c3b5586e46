"""The claims about speed and size: one module a claim, each measured beside its peer in the same run."""
