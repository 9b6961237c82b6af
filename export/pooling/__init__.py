"""What follows the hidden states of embedding models and rerankers: pooling, dense layers."""
