"""What the gateway listens at, what it reads, and how long it waits for clients."""

from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class GatewaySettings(Section, frozen=True, kw_only=True):
    TITLE = "Gateway"
    host: Annotated[str, common("Address at which the gateway listens.")] = "127.0.0.1"
    port: Annotated[int, common("Port for gRPC. 0: any free one.")] = 50051
    http_port: Annotated[int, common("Port for HTTP and the page to try it. 0: any free one; -1: no HTTP.")] = 8000
    tool_call_parser: Annotated[
        Literal["", "hermes", "llama3_json", "mistral"],
        common("How the model writes calls of tools. Empty: it makes none."),
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
        Literal["", "qwen3", "deepseek_r1"], common("How the model writes its reasoning. Empty: it has none.")
    ] = ""
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
    template_timeout: Annotated[float, advanced("Seconds that a chat template may take.")] = 1.0
    num_tokenizer_threads: Annotated[int, advanced("Threads of a tokenizer.")] = 1
