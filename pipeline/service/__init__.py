"""What the service runs of the pipeline."""
