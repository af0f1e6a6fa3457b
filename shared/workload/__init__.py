"""What is asked of a server, and when: the same workloads for the load generator and for the simulator."""

from __future__ import annotations

from shared.workload.requests import (
    BYTE_VOCABULARY,
    BlockPrompt,
    ChatPrompt,
    LoadRequest,
    Prompt,
    Ramp,
    RandomLengths,
    TextPrompt,
    TokenPrompt,
    arrival_times,
    at_times,
    ramp_times,
    random_requests,
    read_prompts,
)
from shared.workload.traces import Trace, read_trace
