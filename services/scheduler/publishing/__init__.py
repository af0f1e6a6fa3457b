"""KV events in vLLM's format: what workers' pools hold, published for processes that route requests."""
