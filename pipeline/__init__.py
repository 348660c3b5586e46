"""The data pipeline: what passes through the mediator, read, kept and reported by Spark."""
