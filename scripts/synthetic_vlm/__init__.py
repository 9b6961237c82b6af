"""A small vision-language model of drawn scenes with verifiable captions."""
