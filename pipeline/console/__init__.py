"""The pipeline's pages of the console."""
