"""What pools hidden states: the inputs of embeddings; /classify, /score and /rerank."""
