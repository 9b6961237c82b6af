"""The commands around the pipeline."""
