"""`edgellm-bench`: prefill, decode and speculation speed of an engine on this machine."""
