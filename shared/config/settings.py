"""Every setting, declared and described: this is the one place that says what a setting means.

Help pages and docs/reference/settings.md are made from the sentences (`scripts/reference`).
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shared.config.topics import Topic
from shared.exposure import is_loopback

MAX_DRAFT_TOKENS = 64

MODEL = Topic("Model")
MEMORY = Topic("Memory")
SCHEDULING = Topic("Scheduling")
SPECULATION = Topic("Speculation")
GATEWAY = Topic("Gateway")
ACCESS = Topic("Access")
ADMISSION = Topic("Admission")
DEPLOYMENT = Topic("Deployment")
OBSERVATION = Topic("Logs and metrics")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment's settings; names of limits are vLLM's.  Sizes in bytes, times in seconds, lengths in tokens."""

    model: Annotated[
        str, MODEL.common("A checkpoint directory, or the name of a repository on the Hugging Face hub.")
    ] = "models/pageant-stories"
    served_model_name: Annotated[
        str, MODEL.common("What clients call the model. Empty: the name of the model's directory.")
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
        MODEL.common(
            "Type of the arithmetic; half is float16, float is float32. auto: on a GPU the checkpoint's; on a CPU "
            "float32, or bfloat16 where the processor multiplies that faster and the checkpoint is in it."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        MODEL.common("int8: weights are quantised at load, per output channel, and activations per row as they come."),
    ] = "none"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        MODEL.advanced("dummy: random weights are made from config.json alone."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], MODEL.common("Where the model runs. auto: on a GPU if there is one.")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        MODEL.advanced(
            "Kernels on a CPU: native ones (C++, compiled at first use), or torch's. auto: native ones, or torch's "
            "with a warning if native ones cannot be had."
        ),
    ] = "auto"
    cpu_target: Annotated[
        Literal["native", "x86-64-v3", "x86-64-v4", "cascadelake", "cooperlake"],
        MODEL.advanced("Kind of processor that the native kernels are compiled for. native: this one."),
    ] = "native"
    batch_invariant: Annotated[
        bool,
        MODEL.advanced(
            "Torch kernels on a CPU: the arithmetic of a token never depends on its batch. The native kernels always "
            "have that."
        ),
    ] = True
    num_threads: Annotated[int, MODEL.common("Threads of a worker's CPU kernels. 0: one for each core.")] = 0
    attention_backend: Annotated[
        Literal["auto", "triton", "flashinfer", "flashattention"],
        MODEL.advanced("Attention kernels on a GPU; the last two must be installed. auto: triton. See docs/gpu.md."),
    ] = "auto"
    enforce_eager: Annotated[bool, MODEL.advanced("On a GPU: no CUDA graphs.")] = False
    mixed_workers: Annotated[
        bool,
        MODEL.advanced(
            "Admit workers that compute other bits (formats, kernels, processors). A stream stays with workers of the "
            "kind that began it."
        ),
    ] = False

    block_size: Annotated[
        Literal[8, 16, 32, 64],
        MEMORY.advanced("Tokens in a KV block. The native kernels on AVX-512 need 16 or more."),
    ] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8", "fp8"],
        MEMORY.advanced(
            "Type of the KV cache; int8 is scaled per token and head, fp8 is for a GPU. auto: the type of the weights, "
            "bfloat16 beside int8."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, MEMORY.common("Share of the GPU's memory for weights, activations and KV cache.")
    ] = 0.9
    kv_cache_memory: Annotated[
        int,
        MEMORY.common(
            "Bytes of KV cache. 0: on a GPU what gpu_memory_utilization leaves; on a CPU 1 GiB, or 40 % of the free "
            "memory if that is less."
        ),
    ] = 0
    num_blocks: Annotated[int, MEMORY.advanced("Number of KV blocks, in place of the memory plan. 0: the plan's.")] = 0
    enable_prefix_caching: Annotated[
        bool, MEMORY.advanced("Reuse the KV cache of equal prefixes, within one tenant.")
    ] = True

    max_model_len: Annotated[
        int, SCHEDULING.common("Longest prompt with its output. 0: what the model and the memory allow.")
    ] = 0
    max_input_length: Annotated[int, SCHEDULING.advanced("Longest prompt. 0: max_model_len - 1.")] = 0
    max_num_seqs: Annotated[int, SCHEDULING.common("Sequences that run at once on each worker.")] = 128
    max_num_batched_tokens: Annotated[int, SCHEDULING.common("Tokens in one step of a worker.")] = 2048
    enable_chunked_prefill: Annotated[
        bool, SCHEDULING.advanced("Compute long prompts in pieces, in the same steps as decodes.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, SCHEDULING.advanced("Largest piece of a prompt in one step. 0: the whole budget of the step.")
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        SCHEDULING.advanced("Order of waiting requests. priority: a smaller priority runs earlier."),
    ] = "fcfs"
    priority_ageing: Annotated[
        float, SCHEDULING.advanced("Seconds of waiting that are worth one step of priority.")
    ] = 30.0
    tenant_weights: Annotated[
        str, SCHEDULING.advanced('Shares of tenants that wait, such as "acme=2,beta=0.5". Other tenants have 1.')
    ] = ""
    fair_prefill_tokens: Annotated[
        int,
        SCHEDULING.advanced(
            "Prompt tokens in one step of tenants that ask for more than their share, while others ask for less. "
            "0: no limit."
        ),
    ] = 512
    routing_policy: Annotated[
        Literal["round_robin", "least_loaded", "prefix_aware"],
        SCHEDULING.advanced("How one of several workers is chosen for a request. See docs/benchmarking.md."),
    ] = "prefix_aware"
    max_num_queued_reqs: Annotated[
        int, SCHEDULING.advanced("Requests that may wait; further ones end RESOURCE_EXHAUSTED.")
    ] = 4096
    max_num_queued_tokens: Annotated[
        int, SCHEDULING.advanced("Prompt tokens that may wait; further requests end RESOURCE_EXHAUSTED.")
    ] = 16 << 20
    max_logprobs: Annotated[int, SCHEDULING.advanced("Most log-probabilities per token that a request may ask.")] = 20
    max_n: Annotated[int, SCHEDULING.advanced("Most completions that one request may ask for.")] = 64

    draft: Annotated[
        str,
        SPECULATION.common(
            "Speculative decoding: ngram looks drafts up in the text itself; a directory is a smaller model with the "
            "same tokenizer, run by a process of its own. Drafts change no output."
        ),
    ] = "off"
    num_draft_tokens: Annotated[
        int,
        SPECULATION.advanced(
            "Draft tokens per sequence and step. 0: as many as pay by measurement, up to max_num_draft_tokens."
        ),
    ] = 0
    max_num_draft_tokens: Annotated[int, SPECULATION.advanced("Most draft tokens per sequence and step.")] = 8
    acceptance: Annotated[
        Literal["coupled", "rejection"],
        SPECULATION.advanced(
            "coupled: the same tokens as without drafts. rejection: the same distribution, and more drafts accepted."
        ),
    ] = "coupled"
    prompt_lookup_min: Annotated[int, SPECULATION.advanced("Fewest tokens of the text's end that ngram looks for.")] = 2
    prompt_lookup_max: Annotated[int, SPECULATION.advanced("Most tokens of the text's end that ngram looks for.")] = 5
    draft_kv_cache_memory: Annotated[int, SPECULATION.advanced("Bytes of KV cache of a draft's model.")] = 256 << 20
    draft_num_threads: Annotated[int, SPECULATION.advanced("Threads of a draft's CPU kernels.")] = 1

    host: Annotated[str, GATEWAY.common("Address at which the gateway listens.")] = "127.0.0.1"
    port: Annotated[int, GATEWAY.common("Port for gRPC. 0: any free one.")] = 50051
    http_port: Annotated[int, GATEWAY.common("Port for HTTP and the page to try it. 0: any free one; -1: no HTTP.")] = (
        8000
    )
    tool_call_parser: Annotated[
        Literal["", "hermes", "llama3_json", "mistral"],
        GATEWAY.common("How the model writes calls of tools. Empty: it makes none."),
    ] = ""
    closed_objects: Annotated[
        Literal["tools", "all", "none"],
        GATEWAY.advanced(
            "Objects of a JSON schema that does not say additionalProperties have only the properties that it names. "
            "tools: in the arguments of tools; all: in response_format and guided_json too; none: nowhere. See "
            "docs/structured.md."
        ),
    ] = "tools"
    reasoning_parser: Annotated[
        Literal["", "qwen3", "deepseek_r1"], GATEWAY.common("How the model writes its reasoning. Empty: it has none.")
    ] = ""
    share_port: Annotated[
        bool,
        GATEWAY.advanced(
            "Several gateways of this host listen at one port, and one that leaves lets go of it at once. "
            "`pageant serve` sets it."
        ),
    ] = False
    max_connections: Annotated[
        int,
        GATEWAY.advanced("Open connections at each front of a gateway; never more than its descriptors allow."),
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        GATEWAY.advanced(
            "Open connections of one client address, never more than half of all. Behind a proxy all clients have one "
            "address."
        ),
    ] = 2048
    header_timeout: Annotated[
        float, GATEWAY.advanced("Seconds that a client has for its TLS handshake, and for the head of each request.")
    ] = 10.0
    idle_timeout: Annotated[float, GATEWAY.advanced("Seconds that a connection stays open without a request.")] = 75.0
    max_request_bytes: Annotated[int, GATEWAY.advanced("Largest request.")] = 32 << 20
    max_prompt_bytes: Annotated[int, GATEWAY.advanced("Largest prompt as text.")] = 4 << 20
    max_receiving_bytes: Annotated[
        int,
        GATEWAY.advanced("Bytes of requests that are half there, at each gateway; one sender has half of it at most."),
    ] = 256 << 20
    body_timeout: Annotated[float, GATEWAY.advanced("Seconds that the body of a request may pause.")] = 10.0
    template_timeout: Annotated[float, GATEWAY.advanced("Seconds that a chat template may take.")] = 1.0
    num_tokenizer_threads: Annotated[int, GATEWAY.advanced("Threads of a tokenizer.")] = 1

    api_keys: Annotated[
        str,
        ACCESS.common(
            "Keys that open the gateway: `tenant:key, ...`, or keys alone. Empty, here and in api_keys_file: no "
            "authentication, and the header x-tenant names the tenant."
        ),
    ] = ""
    api_keys_file: Annotated[str, ACCESS.common("A file with the same, one key to a line.")] = ""
    tls_cert_file: Annotated[
        str, ACCESS.common("Certificate as PEM; with it and tls_key_file gRPC and HTTP speak TLS only.")
    ] = ""
    tls_key_file: Annotated[str, ACCESS.common("Private key of tls_cert_file, as PEM.")] = ""
    tls_client_ca_file: Annotated[
        str, ACCESS.advanced("Authority as PEM; clients must show a certificate that it has signed.")
    ] = ""

    allowed_hosts: Annotated[
        str,
        ACCESS.common(
            "Names in the Host header of HTTP that are answered, beside those of loopback: `name, *.domain`, or `*`. "
            "Empty: any; but only those of loopback where host is loopback, so that no web page gets in by a name of "
            "its own."
        ),
    ] = ""
    cors_allow_origins: Annotated[
        str,
        ACCESS.common("Web pages of other origins that may ask over HTTP: `https://chat.example, ...`, or `*`."),
    ] = ""

    # At each gateway.  A request counts with its prompt and all tokens that it may ask for.
    max_open_reqs: Annotated[
        int,
        ADMISSION.advanced(
            "Open requests at a gateway; further ones end RESOURCE_EXHAUSTED at once. 0: twice what the scheduler "
            "queues and runs."
        ),
    ] = 0
    max_open_tokens: Annotated[
        int,
        ADMISSION.advanced(
            "Tokens of the open requests at a gateway, prompts and all that they may ask for. "
            "0: twice max_num_queued_tokens."
        ),
    ] = 0
    max_tenant_reqs: Annotated[int, ADMISSION.advanced("Open requests of each tenant. 0: no limit of its own.")] = 0
    max_tenant_tokens: Annotated[
        int, ADMISSION.advanced("Tokens of the open requests of each tenant. 0: no limit of its own.")
    ] = 0
    max_unread_bytes: Annotated[
        int, ADMISSION.advanced("Output of one request that its client has not read; above it the request ends.")
    ] = 64 << 20

    transport: Annotated[
        Literal["ipc", "tcp"],
        DEPLOYMENT.advanced("ZeroMQ's sockets between the services: ipc on one host, tcp (encrypted) across hosts."),
    ] = "ipc"
    runtime_dir: Annotated[
        str,
        DEPLOYMENT.common("Directory (mode 0700) of the deployment's sockets and keys. Empty: a directory per user."),
    ] = ""
    scheduler_host: Annotated[str, DEPLOYMENT.advanced("With tcp: the scheduler's host.")] = "127.0.0.1"
    scheduler_port: Annotated[int, DEPLOYMENT.advanced("With tcp: the scheduler's port.")] = 5550
    advertise_host: Annotated[
        str,
        DEPLOYMENT.advanced(
            "With tcp: the host at which others reach this service. Empty: its address on the scheduler's network."
        ),
    ] = ""
    heartbeat_interval: Annotated[float, DEPLOYMENT.advanced("Seconds between two heartbeats of a service.")] = 0.5
    heartbeat_timeout: Annotated[
        float, DEPLOYMENT.advanced("Seconds of silence after which a service is given up, an interval later at most.")
    ] = 2.5
    resume_timeout: Annotated[
        float, DEPLOYMENT.advanced("Seconds that a stream waits for the return of a service before it ends.")
    ] = 30.0
    drain_timeout: Annotated[
        float, DEPLOYMENT.advanced("Seconds that open streams have to end when all services stop (SIGTERM).")
    ] = 5.0
    handover_timeout: Annotated[
        float, DEPLOYMENT.advanced("Seconds that they have when one service leaves and another replaces it (SIGUSR1).")
    ] = 60.0
    status_file: Annotated[
        str, DEPLOYMENT.advanced("File that says READY while the service is well, for container health checks.")
    ] = ""
    stall_timeout: Annotated[
        float,
        DEPLOYMENT.advanced(
            "Seconds without progress while work waits, until health checks say STALLED. Where steps are long, a long "
            "step is no stall."
        ),
    ] = 5.0
    reconcile_interval: Annotated[
        float,
        DEPLOYMENT.advanced(
            "Seconds between two comparisons of the scheduler's and the workers' rows and blocks; leaks are reclaimed."
        ),
    ] = 5.0
    incident_dir: Annotated[
        str,
        DEPLOYMENT.advanced(
            "Directory of a file for each stall and fatal error: stacks, state and last log lines, no prompts or "
            "outputs. Empty: incidents in runtime_dir."
        ),
    ] = ""
    max_incidents: Annotated[int, DEPLOYMENT.advanced("Incident files that are kept of each service.")] = 8
    record: Annotated[
        str,
        OBSERVATION.advanced(
            "File in which the scheduler notes what it is asked, token ids too, for `pageant replay`. Empty: none."
        ),
    ] = ""
    record_bytes: Annotated[int, OBSERVATION.advanced("Size of that recording; the newest part is kept.")] = 256 << 20
    record_steps: Annotated[
        str,
        OBSERVATION.advanced(
            "File in which the worker notes every step, for `pageant simulate --recorded`. Empty: none."
        ),
    ] = ""

    metrics_port: Annotated[
        int,
        OBSERVATION.common(
            "Port of /metrics at each service, for Prometheus; `pageant serve` counts up from it. 0: any free one; "
            "-1: none."
        ),
    ] = -1
    log_steps: Annotated[bool, OBSERVATION.advanced("A log line for each step, which `pageant trace` draws.")] = False
    tracing: Annotated[
        bool,
        OBSERVATION.advanced("Account for the time of each request, and say what is done for it at each service."),
    ] = True
    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        OBSERVATION.common("Least severe log lines that are written. auto: warning on a terminal, else info."),
    ] = "auto"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        OBSERVATION.common("Form of log lines. auto: console on a terminal, else json."),
    ] = "auto"

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines reach the gateway, and need neither a key nor a certificate."""
        return not (is_loopback(self.host) or self.api_keys or self.api_keys_file or self.tls_client_ca_file)

    @property
    def incident_path(self) -> Path:
        """Where incidents are written; not created here."""
        return Path(self.incident_dir) if self.incident_dir else self.runtime_path / "incidents"

    @property
    def runtime_path(self) -> Path:
        """The private directory of this deployment's sockets and keys; not created here."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/pageant-{os.getuid()}") / "pageant"
