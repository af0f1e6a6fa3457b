"""Limits of open requests at each gateway; a request counts with its prompt and all tokens that it may ask for."""

from typing import Annotated

from shared.config.section import Section, advanced


class AdmissionSettings(Section, frozen=True, kw_only=True):
    TITLE = "Admission"
    max_open_reqs: Annotated[
        int,
        advanced(
            "Open requests at a gateway; further ones end RESOURCE_EXHAUSTED at once. 0: twice what the scheduler "
            "queues and runs."
        ),
    ] = 0
    max_open_tokens: Annotated[
        int,
        advanced(
            "Tokens of the open requests at a gateway, prompts and all that they may ask for. "
            "0: twice max_num_queued_tokens."
        ),
    ] = 0
    max_tenant_reqs: Annotated[int, advanced("Open requests of each tenant. 0: no limit of its own.")] = 0
    max_tenant_tokens: Annotated[
        int, advanced("Tokens of the open requests of each tenant. 0: no limit of its own.")
    ] = 0
    max_unread_bytes: Annotated[
        int, advanced("Output of one request that its client has not read; above it the request ends.")
    ] = 64 << 20
