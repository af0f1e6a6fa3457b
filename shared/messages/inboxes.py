"""What each service may receive.  An actor must have a handler for every member of its inbox's union."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, get_args

from shared.messages.control import (
    Drain,
    GetLoad,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    PeerGone,
    Refused,
    Roster,
    Tick,
    Wake,
)
from shared.messages.drafts import DraftProposals, DraftUpdate
from shared.messages.requests import (
    AbortRequest,
    AddRequest,
    AttachRequest,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    PiecesRequest,
    PiecesResult,
    RequestRejected,
    TokenizeRequest,
)
from shared.messages.steps import Holdings, ReportHoldings, StepPlan, StepResult
from shared.messages.streams import StopMatched, StreamLost, TextBatch, TokenBatch

GatewayInbox = (
    TextBatch | RequestRejected | EncodeResult | DecodeResult | PiecesResult | Load | Roster | Refused | Drain | Tick
)
TokenizerInbox = (
    TokenizeRequest | EncodeRequest | DecodeRequest | PiecesRequest | AbortRequest | Roster | Refused | Drain | Tick
)
SchedulerInbox = (
    AddRequest
    | AbortRequest
    | AttachRequest
    | StepResult
    | Holdings
    | StopMatched
    | StreamLost
    | DraftProposals
    | Hello
    | Heartbeat
    | Goodbye
    | GetLoad
    | Drain
    | Tick
    | Wake
    | PeerGone
)
DetokenizerInbox = TokenBatch | Roster | Refused | Drain | Tick
WorkerInbox = StepPlan | ReportHoldings | Roster | Refused | Drain | Tick
DraftInbox = DraftUpdate | Roster | Refused | Drain | Tick
INBOXES = (GatewayInbox, TokenizerInbox, SchedulerInbox, DetokenizerInbox, WorkerInbox, DraftInbox)

TO_ONESELF = frozenset({Drain, Tick, Wake, PeerGone})  # timers, signals, what the transport saw: never from others


def from_others(union: Any) -> Any:
    """What of an inbox's union may come over the wire.  A union of messages to oneself alone stays as it is."""
    kinds = [kind for kind in get_args(union) if kind not in TO_ONESELF]
    return reduce(or_, kinds) if kinds else union
