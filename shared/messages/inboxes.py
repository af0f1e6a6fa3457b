"""What each service may receive.  An actor must have a handler for every member of its inbox's union."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, get_args

from shared.messages.adapters import AdapterLoaded, AdaptersHeld, HoldAdapters, LoadAdapter, UnloadAdapter
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
from shared.messages.moves import (
    BlocksMoved,
    DropBlocks,
    FetchBlocks,
    Leaving,
    LookUpBlocks,
    MayLeave,
    OfferBlocks,
    ServeBlocks,
    StoreContents,
)
from shared.messages.requests import (
    AbortRequest,
    AddRequest,
    AttachRequest,
    DecodeRequest,
    DecodeResult,
    DescribeRequest,
    DescribeResult,
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
    TextBatch
    | RequestRejected
    | EncodeResult
    | DecodeResult
    | PiecesResult
    | DescribeResult
    | Load
    | AdapterLoaded
    | Roster
    | Refused
    | Drain
    | Tick
)
TokenizerInbox = (
    TokenizeRequest
    | EncodeRequest
    | DecodeRequest
    | PiecesRequest
    | DescribeRequest
    | AbortRequest
    | Roster
    | Refused
    | Drain
    | Tick
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
    | LoadAdapter
    | UnloadAdapter
    | AdaptersHeld
    | BlocksMoved
    | StoreContents
    | Leaving
    | Drain
    | Tick
    | Wake
    | PeerGone
)
DetokenizerInbox = TokenBatch | Roster | Refused | Drain | Tick
WorkerInbox = (
    StepPlan
    | ReportHoldings
    | HoldAdapters
    | OfferBlocks
    | FetchBlocks
    | ServeBlocks
    | MayLeave
    | Roster
    | Refused
    | Drain
    | Tick
    | PeerGone
)
DraftInbox = DraftUpdate | Roster | Refused | Drain | Tick
StoreInbox = Roster | Refused | Drain | Tick | DropBlocks | LookUpBlocks
INBOXES = (GatewayInbox, TokenizerInbox, SchedulerInbox, DetokenizerInbox, WorkerInbox, DraftInbox, StoreInbox)

TO_ONESELF = frozenset({Drain, Tick, Wake, PeerGone})  # timers, signals, what the transport saw: never from others


def from_others(union: Any) -> Any:
    """What of an inbox's union may come over the wire.  A union of messages to oneself alone stays as it is."""
    kinds = [kind for kind in get_args(union) if kind not in TO_ONESELF]
    return reduce(or_, kinds) if kinds else union
