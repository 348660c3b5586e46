"""The history of the data pipeline's runs: what ran when, with what outcome."""
