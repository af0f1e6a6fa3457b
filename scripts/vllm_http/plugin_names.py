"""Variables of the environment that the command and its pytest share."""

SOURCE = "PAGEANT_VLLM_SOURCE"  # an unpacked source distribution of vLLM
OUTCOMES = "PAGEANT_VLLM_OUTCOMES"  # the file in which outcomes are kept, as JSON by test
