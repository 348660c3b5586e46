"""DISCOVER: splits requests, searches the index, and pages through the results."""
