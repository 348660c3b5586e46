"""The clean-up: its passes, what they removed, and the watch on the clock that they need."""
