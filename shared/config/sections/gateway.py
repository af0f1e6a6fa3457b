"""What the gateway listens at, what it reads, and how long it waits for clients."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class GatewaySettings(Section, frozen=True, kw_only=True):
    TITLE = "Gateway"
    host: Annotated[str, common("Address at which the gateway listens.")] = "127.0.0.1"
    port: Annotated[int, common("Port for gRPC. 0: any free one.")] = 50051
    http_port: Annotated[int, common("Port for HTTP and the page to try it. 0: any free one; -1: no HTTP.")] = 8000
    tool_call_parser: Annotated[
        Literal[
            "", "auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "kimi_k2", "deepseek_v3",
            "deepseek_v31", "deepseek_v32", "openai", "gemma4", "functiongemma", "llama4_pythonic", "phi4_mini_json",
        ],
        common("How the model writes calls of tools. auto: as its chat template has them; empty: it makes none."),
    ] = ""  # fmt: skip
    chat_template: Annotated[
        str,
        common("A file with the chat template (Jinja) that is used in place of the checkpoint's own, or its text."),
    ] = ""
    closed_objects: Annotated[
        Literal["tools", "all", "none"],
        advanced(
            "Objects of a JSON schema that does not say additionalProperties have only the properties that it names. "
            "tools: in the arguments of tools; all: in response_format and guided_json too; none: nowhere. See "
            "docs/structured.md."
        ),
    ] = "tools"
    reasoning_parser: Annotated[
        Literal[
            "", "auto", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "gemma4", "openai_gptoss",
        ],
        common("How the model writes its reasoning. auto: as its chat template has it; empty: it has none."),
    ] = ""  # fmt: skip
    enable_force_include_usage: Annotated[
        bool, advanced("Every event of a stream has `usage`, although its request does not ask for it.")
    ] = False
    enable_per_request_metrics: Annotated[
        bool, advanced("Answers and the last `usage` of streams come with `metrics`, vLLM's times of a request.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, advanced("Log-probabilities name tokens `token_id:7`, where a request does not say otherwise.")
    ] = False
    root_path: Annotated[
        str, advanced("Path under which a reverse proxy shows the HTTP server, if the proxy passes it on: `/llm`.")
    ] = ""
    files_dir: Annotated[
        str,
        common(
            "Folder of the files and batches of clients, which all gateways of a deployment share. Empty: /v1/files "
            "and /v1/batches are not served."
        ),
    ] = ""
    max_file_bytes: Annotated[int, advanced("Largest file that a client may store.")] = 200 << 20
    max_tenant_file_bytes: Annotated[int, advanced("Bytes of files that one tenant may store.")] = 10 << 30
    max_batch_lines: Annotated[int, advanced("Most requests of one batch.")] = 50_000
    batch_concurrency: Annotated[int, advanced("Requests of batches that run at a time, of all tenants.")] = 16
    share_port: Annotated[
        bool,
        advanced(
            "Several gateways of this host listen at one port, and one that leaves lets go of it at once. "
            "`pageant serve` sets it."
        ),
    ] = False
    max_connections: Annotated[
        int, advanced("Open connections at each front of a gateway; never more than its descriptors allow.")
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        advanced(
            "Open connections of one client address, never more than half of all. Behind a proxy all clients have one "
            "address."
        ),
    ] = 2048
    header_timeout: Annotated[
        float, advanced("Seconds that a client has for its TLS handshake, and for the head of each request.")
    ] = 10.0
    idle_timeout: Annotated[float, advanced("Seconds that a connection stays open without a request.")] = 75.0
    max_request_bytes: Annotated[int, advanced("Largest request.")] = 32 << 20
    max_prompt_bytes: Annotated[int, advanced("Largest prompt as text.")] = 4 << 20
    max_receiving_bytes: Annotated[
        int, advanced("Bytes of requests that are half there, at each gateway; one sender has half of it at most.")
    ] = 256 << 20
    body_timeout: Annotated[float, advanced("Seconds that the body of a request may pause.")] = 10.0
    response_dir: Annotated[
        str,
        advanced(
            "Directory (mode 0700) of the responses that /v1/responses keeps, one file each; several gateways may "
            "share it. Empty: responses in runtime_dir."
        ),
    ] = ""
    response_ttl: Annotated[
        float, advanced("Seconds for which a response is kept for previous_response_id. 0: none is.")
    ] = 3600.0
    max_response_bytes: Annotated[
        int, advanced("Bytes of responses that are kept; the oldest go where there are more. 0: none is kept.")
    ] = 1 << 30
    template_timeout: Annotated[float, advanced("Seconds that a chat template may take.")] = 1.0
    num_tokenizer_threads: Annotated[int, advanced("Threads of a tokenizer.")] = 1
