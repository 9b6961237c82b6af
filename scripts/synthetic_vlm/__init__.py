"""A small vision-language model of drawn scenes, whose answers can be checked."""
