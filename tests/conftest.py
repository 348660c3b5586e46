"""What every layer of tests shares."""
