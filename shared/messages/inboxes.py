"""What each service may receive.  An actor must have a handler for every member of its inbox's union."""

from __future__ import annotations

from shared.messages.control import Drain, GetLoad, Goodbye, Heartbeat, Hello, Load, Refused, Roster, Tick
from shared.messages.drafts import DraftProposals, DraftUpdate
from shared.messages.requests import (
    AbortRequest,
    AddRequest,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    RequestRejected,
    TokenizeRequest,
)
from shared.messages.steps import StepPlan, StepResult
from shared.messages.streams import StopMatched, StreamLost, TextBatch, TokenBatch

GatewayInbox = TextBatch | RequestRejected | EncodeResult | DecodeResult | Load | Roster | Refused | Drain | Tick
TokenizerInbox = TokenizeRequest | EncodeRequest | DecodeRequest | AbortRequest | Roster | Refused | Drain | Tick
SchedulerInbox = (
    AddRequest
    | AbortRequest
    | StepResult
    | StopMatched
    | StreamLost
    | DraftProposals
    | Hello
    | Heartbeat
    | Goodbye
    | GetLoad
    | Drain
    | Tick
)
DetokenizerInbox = TokenBatch | Roster | Refused | Drain | Tick
WorkerInbox = StepPlan | Roster | Refused | Drain | Tick
DraftInbox = DraftUpdate | Roster | Refused | Drain | Tick
INBOXES = (GatewayInbox, TokenizerInbox, SchedulerInbox, DetokenizerInbox, WorkerInbox, DraftInbox)
