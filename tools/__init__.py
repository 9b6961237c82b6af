"""Programs around the pipeline: the demo, and the model that it runs."""
