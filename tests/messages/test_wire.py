"""The wire format is pinned: every message's bytes are compared with golden ones; old bytes must go on decoding.

PAGEANT_WRITE_GOLDEN=1 pytest tests/messages     writes them anew, after a deliberate change
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from shared import messages as m
from shared.errors import ProtocolError
from shared.messages.inboxes import INBOXES
from shared.packing import pack_tokens, unpack_tokens
from tests.messages.samples import SAMPLES

GOLDEN = Path(__file__).with_name("golden.json")
ALL = sorted({kind for union in INBOXES for kind in get_args(union)}, key=lambda kind: kind.__name__)


def test_every_message_has_a_sample() -> None:
    assert {type(sample) for sample in SAMPLES} == set(ALL) | {m.EncodeResult, m.DecodeResult}


def test_bytes_are_golden() -> None:
    actual = {type(sample).__name__: m.encode(sample).hex() for sample in SAMPLES}
    if os.environ.get("PAGEANT_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(actual, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert actual == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_messages_survive_the_wire(sample: m.Message) -> None:
    inbox = next(union for union in INBOXES if type(sample) in get_args(union))
    assert m.MessageDecoder[m.Message](inbox).decode(m.encode(sample)) == sample


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_conventions(kind: type[m.Message]) -> None:
    config = kind.__struct_config__
    assert config.array_like
    assert config.frozen
    assert not config.gc
    assert config.tag == kind.__name__
    defaults = [field.required for field in msgspec.structs.fields(kind)]
    assert defaults == sorted(defaults, reverse=True), "fields with defaults come last, so that more can follow"


def test_bytes_of_an_older_version_decode() -> None:
    short = msgspec.msgpack.encode(["RequestRejected", "r1", "internal", "why"])
    assert m.MessageDecoder[m.Message](m.GatewayInbox).decode(short) == m.RequestRejected("r1", "internal", "why")  # type: ignore[arg-type]


def test_only_the_inbox_s_own_messages_decode() -> None:
    with pytest.raises(ProtocolError):
        m.MessageDecoder[m.Message](m.WorkerInbox).decode(m.encode(m.AbortRequest("r1")))


def test_garbage_is_a_protocol_error_and_nothing_else() -> None:
    decoder = m.MessageDecoder[m.Message](m.SchedulerInbox)
    rng = random.Random(0)
    valid = [m.encode(sample) for sample in SAMPLES]
    num_refused = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decoder.decode(bytes(data[: rng.randrange(1, len(data) + 1)]))
        except ProtocolError:
            num_refused += 1
    assert num_refused > 10_000


def test_the_schema_hash_is_stable_within_a_version() -> None:
    assert m.schema_hash() == m.schema_hash()
    assert len(m.schema_hash()) == 16


def test_packed_tokens() -> None:
    ids = [0, 1, -1, 2**31 - 1]
    assert unpack_tokens(pack_tokens(ids)) == ids
    assert pack_tokens([1]) == b"\x01\x00\x00\x00"
    with pytest.raises(ProtocolError):
        unpack_tokens(b"\x01\x00\x00")
    with pytest.raises(OverflowError):
        pack_tokens([2**31])
