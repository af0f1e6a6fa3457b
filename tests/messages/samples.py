"""One filled-in sample of every message."""

from __future__ import annotations

from shared import messages as m
from shared.errors import RejectCode
from shared.packing import pack_tokens
from shared.requests.beam import Beam, EarlyStopping
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.sampling import SamplingParams

HEADER = m.RequestHeader("r1", "ipc://g", "t1", "mine", "acme", 2, 1.5, 9.5, "salt", True)
PARAMS = SamplingParams(
    temperature=0.5,
    top_k=5,
    logit_bias={3: 1.5},
    stop=["\n"],
    seed=7,
    n=2,
    max_tokens=9,
    grammar=Grammar(GrammarKind.REGEX, "[ab]+", "guided_regex"),
    beam=Beam(4, 0.5, EarlyStopping.FIRST),
    pooling=Pooling(PoolingKind.MEAN, normalize=False),
)
CAPACITY = m.WorkerCapacity(
    100, 16, 8, 512, 4096, "stories", "float32", "cpu", "fp_0123456789ab", [m.SlidingPool(512, 80)], True, 12
)
FINGERPRINT = m.Fingerprint(
    tokenizer="aa", chat_template="bb", generation_config="cc", load_format="safetensors", weights="dd", config="ee",
    executor="native 12", numeric_class="avx512", dtype="float32", quantization="none", kv_cache_dtype="bfloat16",
    batch_invariant="true", block_size="16",
)  # fmt: skip
LOGPROBS = m.TokenLogprobs([5, 6], [-0.5, -1.5], 1)
TOKENS = pack_tokens([1, 2, 3])
REFUSED = m.RefusedRow(0, m.Refusal.STALE_BLOCK, 17, 5, 6, [(18, 2)], 1, [[(19, 3)]])
VECTOR = b"\0\0\x80?"
CALLING = m.ChatMessage("assistant", "", "Tom", "c0", [m.ToolCall("c1", "weather", '{"city":"Rome"}')], "hm")
DISTRIBUTION = m.DraftDistribution(TOKENS, b"\0" * 12)
LEDGER = m.LatencyBreakdown([3, 0, -1], 1.5, 4, 2, 1, [5, 6], 700)

SAMPLES: list[m.Message] = [
    m.TokenizeRequest(
        HEADER,
        PARAMS,
        chat=[m.ChatMessage("user", "Hi"), CALLING],
        sent_token_ids=[TOKENS],
        chat_options=m.ChatOptions('[{"type":"function"}]', '{"enable_thinking":false}', False, True, "<tool_call>"),
        is_resumed=True,
        sent_finished=[False, True],
        latency=LEDGER,
        fingerprint="fp_0123456789ab",
    ),
    m.EncodeRequest("r1", "ipc://g", text="Hi"),
    m.DescribeRequest("r1", "ipc://g", ["<think>"]),
    m.DescribeResult("r1", '{"chat_template": "x"}', [[9]]),
    m.PiecesRequest("r1", "ipc://g", TOKENS),
    m.PiecesResult("r1", [b"Hi", b"\xe2\x82"]),
    m.DecodeRequest("r1", "ipc://g", TOKENS),
    m.EncodeResult("r1", TOKENS),
    m.DecodeResult("r1", "Hi"),
    m.AddRequest(
        HEADER,
        PARAMS,
        TOKENS,
        [2],
        tokenized_time=1.0,
        is_resumed=True,
        sent_finished=[False, True],
        latency=LEDGER,
        fingerprint="fp_0123456789ab",
    ),
    m.AbortRequest("r1", "finished", "ipc://g"),
    m.AttachRequest("r1", "ipc://g", 9.5, LEDGER),
    m.RequestRejected("r1", RejectCode.RESOURCE_EXHAUSTED, "full", "n", 1000, "context_length_exceeded"),
    m.StepPlan(
        epoch=3,
        step_id=4,
        admitted=[m.AdmittedSequence(0, TOKENS, 3, PARAMS, -7, [2], "r1", "t1", 1)],
        rows=[0, 1],
        num_computed_tokens=[0, 9],
        num_scheduled_tokens=[3, 1],
        num_new_blocks=[1, 0],
        new_block_ids=[17],
        block_copies=[(1, 2)],
        released_rows=[5],
        num_draft_tokens=[0, 1],
        draft_token_ids=[9],
        draft_distributions=[DISTRIBUTION],
        rejection=True,
        new_block_generations=[6],
        copy_generations=[5],
        sliding=[m.SlidingPlan([0, 1], [1, 0], [18], [7], [(2, 3)], [4])],
        state_forks=[(1, 0)],
        state_loads=[(0, 2, 7)],
        state_saves=[(1, 3, 8)],
    ),
    m.DraftUpdate(
        3,
        4,
        closed_rows=[2],
        opened=[m.AdmittedSequence(0, TOKENS, 3, PARAMS, -7, [2], "r1", "t1", 1)],
        rows=[0, 1],
        num_tokens=[3, 9],
        num_new=[0, 1],
        new_token_ids=[11],
        num_wanted=[4, 4],
        num_ahead=5,
        rejection=True,
    ),
    m.DraftProposals(3, 4, [0, 1], [3, 10], [1, 1], [5, 6], [DISTRIBUTION, DISTRIBUTION], [2], 0.25),
    m.ReportHoldings(3, 7, 5),
    m.Holdings(3, 7, 5, 5, [0, 2], [1 << 31, 0]),
    m.StepResult(3, 4, [0, 1], [11], [LOGPROBS], {0: [LOGPROBS]}, 0.25, {0: "too complex"}, {1: VECTOR}, [REFUSED]),
    m.TokenBatch(
        [m.OpenStream(HEADER, 0, 3, [1, 2, 3], ["\n"], False, True, True, 0, 2, [None, LOGPROBS], VECTOR, "fp_1")],
        [m.SequenceTokens("r1", 0, 4, [11], [LOGPROBS], m.FinishReason.STOP, 11, 8, 5, LEDGER)],
        [("r2", 0)],
        1.5,
    ),
    m.TextBatch(
        [
            m.SequenceText(
                "r1",
                0,
                4,
                20,
                " a",
                [11],
                [LOGPROBS],
                m.FinishReason.LENGTH,
                "",
                3,
                2,
                5,
                None,
                8,
                5,
                LEDGER,
                VECTOR,
                "fp_1",
            )
        ]
    ),
    m.StopMatched("r1", 0, 5),
    m.StreamLost("r1", 0),
    m.Hello(
        m.ServiceName.WORKER,
        "worker-1",
        "ipc://w",
        5,
        "abc",
        CAPACITY,
        m.DraftCapacity(8, 512, 4096, "tiny"),
        FINGERPRINT,
        [FINGERPRINT],
    ),
    m.Heartbeat(m.ServiceName.WORKER, "worker-1", 5, 77, "ipc://w", alive=["fp_1"]),
    m.Goodbye(m.ServiceName.WORKER, "worker-1", 5),
    m.Roster(9, 2, [m.Member(m.ServiceName.WORKER, "worker-1", "ipc://w", 5)], CAPACITY, 512, 511, "", [FINGERPRINT]),
    m.Refused("worker-1", "mixed versions"),
    m.Drain(12.5),
    m.Tick(),
    m.Wake(),
    m.PeerGone("ipc://w"),
    m.GetLoad("r1", "ipc://g"),
    m.LoadAdapter("r1", "ipc://g", "stories", "/adapters/stories"),
    m.UnloadAdapter("r1", "ipc://g", "stories"),
    m.AdapterLoaded("r1", m.Adapter("stories", "00" * 16, "/adapters/stories")),
    m.HoldAdapters(7, 1, [m.Adapter("stories", "", "/adapters/stories")]),
    m.AdaptersHeld(
        7,
        1,
        [m.Adapter("stories", "00" * 16, "/adapters/stories")],
        [m.AdapterFailure(m.Adapter("other", "", "/adapters/other"), "r: 0")],
    ),
    m.Load(
        "r1",
        1,
        2,
        [m.WorkerLoad("worker-1", 1, 100, 50, 20, 9, "fp_1")],
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        0.5,
        1,
        4,
        3,
        2,
        1,
        [2, 1],
    ),
    m.OfferBlocks(7, 3, 12, "store-1", [b"n" * 16], [17], [5], "unix:/run/s.blocks", b"secret"),
    m.FetchBlocks(
        7, 4, 12, "store-1", [b"n" * 16, b"o" * 16], [18, 19], [6, 2], "tcp:10.0.0.2:5000", b"secret", 0.5, True
    ),
    m.BlocksMoved(7, 4, 1, 4096, 0.5, "missing"),
    m.DropBlocks("store-1"),
    m.LookUpBlocks("store-1", [b"s" * 16 + b"n" * 16]),
    m.StoreContents("store-1", [b"k" * 32], [b"d" * 32], True),
    m.ServeBlocks(7, 5, 13, [b"n" * 16], [17], [5]),
    m.Leaving("worker-1", 5),
    m.MayLeave("worker-1", 5),
]
