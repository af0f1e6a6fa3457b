"""What workers' pools hold, published for those who route requests: vLLM's KV events."""
