"""What runs when, and at which worker."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class SchedulingSettings(Section, frozen=True, kw_only=True):
    TITLE = "Scheduling"
    max_model_len: Annotated[int, common("Longest prompt with its output. 0: what the model and the memory allow.")] = 0
    max_input_length: Annotated[int, advanced("Longest prompt. 0: max_model_len - 1.")] = 0
    max_num_seqs: Annotated[
        int,
        common("Sequences that run at once on each worker; fewer where memory is short for states (linear attention)."),
    ] = 128
    max_num_batched_tokens: Annotated[int, common("Tokens in one step of a worker.")] = 2048
    enable_chunked_prefill: Annotated[
        bool, advanced("Compute long prompts in pieces, in the same steps as decodes.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        advanced(
            "Largest piece of a prompt in one step. 0: the whole budget of the step. Needs enable_chunked_prefill."
        ),
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], advanced("Order of waiting requests. priority: a smaller priority runs earlier.")
    ] = "fcfs"
    priority_ageing: Annotated[float, advanced("Seconds of waiting that are worth one step of priority.")] = 30.0
    tenant_weights: Annotated[
        str, advanced('Shares of tenants that wait, such as "acme=2,beta=0.5". Other tenants have 1.')
    ] = ""
    fair_prefill_tokens: Annotated[
        int,
        advanced(
            "Prompt tokens in one step of tenants that ask for more than their share, while others ask for less. "
            "0: no limit."
        ),
    ] = 512
    routing_policy: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"],
        advanced("How one of several workers is chosen for a request. See docs/benchmarking.md."),
    ] = "prefix_aware"
    max_num_queued_reqs: Annotated[int, advanced("Requests that may wait; further ones end RESOURCE_EXHAUSTED.")] = 4096
    max_num_queued_tokens: Annotated[
        int, advanced("Prompt tokens that may wait; further requests end RESOURCE_EXHAUSTED.")
    ] = 16 << 20
    max_num_queued_background_reqs: Annotated[
        int, advanced("Requests of batches that may wait; they do not count as max_num_queued_reqs.")
    ] = 4096
    background_step_tokens: Annotated[
        int,
        advanced(
            "Tokens in one step of batches alone: the next other request waits for that step. "
            "More where a GPU computes them as soon. Needs enable_chunked_prefill."
        ),
    ] = 32
    max_logprobs: Annotated[int, advanced("Most log-probabilities per token that a request may ask.")] = 20
    max_n: Annotated[int, advanced("Most completions that one request may ask for.")] = 64
