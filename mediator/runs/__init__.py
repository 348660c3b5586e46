"""The history of the data pipeline's runs: what ran when, with what outcome; pure rules over a port."""
