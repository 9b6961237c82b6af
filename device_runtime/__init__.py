"""Engine to tokens: backends, sampling, the decoding loop, `llm_inference`."""
