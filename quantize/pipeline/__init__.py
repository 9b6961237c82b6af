"""One run of `edgellm-quantize`: plan, layers, resume, summary."""
