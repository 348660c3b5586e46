"""The settings: what an operator can set, where each value comes from, and what is wrong with it."""
