"""vLLM's tests of its HTTP interface, run against Pageant: scripts/prove_vllm_http."""
