"""The wire: every message, one union per inbox, one codec."""

from __future__ import annotations

from shared.messages.adapters import (
    Adapter,
    AdapterFailure,
    AdapterLoaded,
    AdaptersHeld,
    HoldAdapters,
    LoadAdapter,
    UnloadAdapter,
)
from shared.messages.base import Message
from shared.messages.codec import MessageDecoder, encode, schema_hash
from shared.messages.control import (
    Drain,
    GetLoad,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Member,
    PeerGone,
    Refused,
    Roster,
    ServiceName,
    SlidingPool,
    Tick,
    Wake,
    WorkerCapacity,
    WorkerLoad,
    WorkerRole,
)
from shared.messages.drafts import DraftCapacity, DraftProposals, DraftUpdate
from shared.messages.fingerprint import Fingerprint
from shared.messages.inboxes import (
    DetokenizerInbox,
    DraftInbox,
    GatewayInbox,
    SchedulerInbox,
    StoreInbox,
    TokenizerInbox,
    WorkerInbox,
)
from shared.messages.latency import LatencyBreakdown
from shared.messages.moves import (
    BlocksMoved,
    DropBlocks,
    FetchBlocks,
    Leaving,
    LookUpBlocks,
    MayLeave,
    MoveCounts,
    OfferBlocks,
    ServeBlocks,
    StoreCapacity,
    StoreContents,
)
from shared.messages.requests import (
    HAS_EVERYTHING,
    AbortRequest,
    AddRequest,
    AttachRequest,
    ChatMessage,
    ChatOptions,
    DecodeRequest,
    DecodeResult,
    DescribeRequest,
    DescribeResult,
    EncodeRequest,
    EncodeResult,
    PiecesRequest,
    PiecesResult,
    RequestHeader,
    RequestRejected,
    TokenizeRequest,
    ToolCall,
)
from shared.messages.steps import (
    AdmittedSequence,
    DraftDistribution,
    Holdings,
    Refusal,
    RefusedRow,
    ReportHoldings,
    SlidingPlan,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from shared.messages.streams import (
    FinishReason,
    OpenStream,
    SequenceText,
    SequenceTokens,
    StopMatched,
    StreamLost,
    TextBatch,
    TokenBatch,
)
