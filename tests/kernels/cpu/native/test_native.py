"""Every native op against its reference, and each row against itself in other company, in every build."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.native import KVShape, Native, StepColumns
from kernels.cpu.binding.packing import FORMATS, KV_FORMATS, PackedLinear
from kernels.interface import reference_kernels
from kernels.ops.attention import attention
from kernels.ops.attention.kv_cache import FP8S, KVCache
from kernels.ops.attention.kv_store import store_kv
from kernels.ops.layers.rms_norm import rms_norm
from kernels.ops.linears import linear, linear_int8
from kernels.ops.linears.quantise import quantise, saturate_fp8
from kernels.ops.sampling import truncation
from kernels.ops.sampling.noise import row_keys
from tests.kernels.cpu.natives import BUILDS, load_build

DTYPES, KV_DTYPES = list(FORMATS), list(KV_FORMATS)
SHAPES = [(16, 16), (64, 361), (80, 48), (144, 40), (576, 96), (704, 33), (1536, 64)]  # (in, out)
SAMPLING = reference_kernels().sampling


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(native: Native, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> PackedLinear:
    memory = torch.empty(native.packed_bytes(len(weight), weight.shape[1], dtype), dtype=torch.uint8)
    return native.pack_linear(weight, dtype, memory, bias)


def expected_linear(x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor) -> Tensor:
    if dtype == torch.int8:
        return linear_int8.linear(x, linear_int8.pack_linear(weight), bias)
    return linear.linear(x.double(), linear.pack_linear(weight.to(dtype).double()), bias.double()).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_linear(native: Native, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    x, weight, bias = normal(300, in_features), normal(out_features, in_features, seed=1), normal(out_features, seed=2)
    packed = pack(native, weight, dtype, bias)
    for rows in (*range(1, 41), 100, 300):
        found, wanted = native.linear(x[:rows], packed), expected_linear(x[:rows], weight, dtype, bias)
        torch.testing.assert_close(found, wanted, atol=2e-6 * in_features, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_of_a_linear_are_alone(native: Native, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """Bit for bit, for every number of rows up to 40, at every place, and for every number of threads."""
    x, packed = normal(300, in_features), pack(native, normal(out_features, in_features, seed=1), dtype)
    for rounds in (False, True):
        whole = native.linear(x, packed, rounds=rounds)
        for rows in (*range(1, 41), 100):
            for start in (0, 7, 300 - rows):
                part = native.linear(x[start : start + rows].contiguous(), packed, rounds=rounds)
                assert torch.equal(part, whole[start : start + rows])
        for threads in (1, 3, 2):
            native.set_threads(threads, pin=False)
            assert torch.equal(native.linear(x, packed, rounds=rounds), whole)


def test_rows_whose_sums_wait_are_alone(native: Native) -> None:
    """So many rows and features that tiles take both in parts."""
    x, packed = normal(620, 704), pack(native, normal(96, 704, seed=1), torch.bfloat16)
    whole = native.linear(x, packed, rounds=True)
    for start, rows in ((0, 32), (500, 40), (590, 30)):
        part = native.linear(x[start : start + rows].contiguous(), packed, rounds=True)
        assert torch.equal(part, whole[start : start + rows])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_takes_whatever_a_checkpoint_holds(native: Native, stored: torch.dtype, dtype: torch.dtype) -> None:
    weight, x = normal(96, 64).to(stored), normal(5, 64, seed=1)
    odd = torch.cat((torch.zeros(1, dtype=stored), weight.flatten()))[1:].view(96, 64)
    assert odd.data_ptr() % 64
    wanted = native.linear(x, pack(native, weight.float(), dtype))
    assert torch.equal(native.linear(x, pack(native, odd, dtype)), wanted)


def test_float32_and_bfloat16_panels_of_the_same_values_give_the_same_bits(native: Native) -> None:
    x, weight = normal(33, 576), normal(96, 576, seed=1).bfloat16()
    wide, narrow = (native.linear(x, pack(native, weight, dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("in_features", [16, 48, 64, 576])
def test_products_of_bfloat16_are_near_the_exact_ones(native: Native, in_features: int) -> None:
    """By vectors, or by tiles where the features are a multiple of 32."""
    x, weight = normal(70, in_features), normal(361, in_features, seed=1).bfloat16()
    packed, wanted = pack(native, weight, torch.bfloat16), x.bfloat16().double() @ weight.double().t()
    for rows in (1, 15, 16, 17, 31, 32, 33, 70):
        found = native.linear(x[:rows].contiguous(), packed, rounds=True)
        torch.testing.assert_close(found, wanted[:rows].float(), atol=2e-6 * in_features, rtol=1e-5)


def test_rounding_is_of_what_goes_in(native: Native) -> None:
    x, weight = normal(9, 144), normal(64, 144, seed=1).bfloat16()
    found = native.linear(x, pack(native, weight, torch.bfloat16), rounds=True)
    wanted = (x.bfloat16().double() @ weight.double().t()).float()
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert not torch.equal(found, native.linear(x, pack(native, weight, torch.bfloat16)))


def test_int8_is_the_reference_bit_for_bit(native: Native) -> None:
    x, weight, bias = normal(200, 704), normal(1361, 704, seed=1), normal(1361, seed=2)
    x[3], weight[5] = 0.0, 0.0
    wanted = linear_int8.linear(x, linear_int8.pack_linear(weight), bias)
    assert torch.equal(native.linear(x, pack(native, weight, torch.int8, bias)), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [16, 80, 352])
def test_gate_and_up_by_turns(native: Native, inner: int, dtype: torch.dtype) -> None:
    """The same columns as of the two apart, each once, with its own bias."""
    gate, up, x = normal(inner, 64), normal(inner, 64, seed=1), normal(7, 64, seed=2)
    bias = torch.arange(2.0 * inner).view(2, inner)
    memory = torch.empty(native.packed_bytes(2 * inner, 64, dtype), dtype=torch.uint8)
    packed = native.pack_gate_up(gate, up, dtype, memory, bias)
    order = native.linear(torch.zeros(1, 64), packed)[0].long()
    assert sorted(order.tolist()) == list(range(2 * inner))
    apart = torch.cat((native.linear(x, pack(native, gate, dtype)), native.linear(x, pack(native, up, dtype))), dim=1)
    assert torch.equal(native.linear(x, packed), apart[:, order] + order.float())


@pytest.mark.parametrize("width", [16, 48, 64, 576, 1536])
def test_rms_norm(native: Native, width: int) -> None:
    x, weight = normal(19, width) * 3, normal(width, seed=1)
    found = native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
    assert torch.equal(native.rms_norm(x[4:6].contiguous(), weight, 1e-5), found[4:6])


class Paged:
    """Sequences in a random pool, in the reference's layout and in the native one; strangers' blocks are huge."""

    def __init__(
        self, native: Native, lengths: list[int], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
    ) -> None:
        self.native, self.lengths, self.block_size = native, lengths, block_size
        self.num_heads, num_kv_heads, self.head_dim = heads
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(3))
        self.tables = np.full((len(lengths), max(counts)), int(order[-1]))
        for index, count in enumerate(counts):
            self.tables[index, :count] = order[sum(counts[:index]) : sum(counts[: index + 1])]
        self.query = normal(sum(lengths), self.num_heads, self.head_dim)
        key, value = (normal(sum(lengths), num_kv_heads, self.head_dim, seed=seed) for seed in (1, 2))
        self.starts = np.cumsum(lengths) - lengths
        self._fill(KVShape(dtype, block_size, num_kv_heads, self.head_dim), key, value, len(order), order[-3:])

    def _fill(self, shape: KVShape, key: Tensor, value: Tensor, num_blocks: int, strange: Tensor) -> None:
        slots = torch.from_numpy(np.concatenate([self._slots(index) for index in range(len(self.lengths))]))
        scales = [torch.zeros(num_blocks, self.block_size, shape.num_kv_heads) for _ in range(2)]
        pools = [torch.zeros((*scales[0].shape, self.head_dim), dtype=shape.dtype) for _ in range(2)]
        by_head = [torch.ones(shape.num_kv_heads) if shape.dtype in FP8S else None for _ in range(2)]
        self.cache = KVCache(*pools, *(scales if shape.dtype == torch.int8 else (None, None)), *by_head)
        sizes = self.native.key_bytes(shape), self.native.value_bytes(shape)
        self.blocks = [torch.zeros(num_blocks, size, dtype=torch.uint8) for size in sizes]
        wild = (strange[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
        huge = torch.full((len(wild), shape.num_kv_heads, self.head_dim), 1e6)
        for keys, values, where in ((huge, huge, wild), (key, value, slots)):
            store_kv(keys, values, self.cache, where)
            self.native.store_kv(shape, keys, values, where, *self.blocks)
        self.shape = shape

    def leave_behind(self, number: float) -> None:
        """As of a sequence that had these blocks before: every slot behind a sequence's last token holds the number."""
        ends = -(-np.array(self.lengths) // self.block_size) * self.block_size
        behind = [self._slots(index, int(end))[self.lengths[index] :] for index, end in enumerate(ends)]
        slots = torch.from_numpy(np.concatenate(behind))
        left = torch.full((len(slots), self.shape.num_kv_heads, self.head_dim), number)
        self.native.store_kv(self.shape, left, left, slots, *self.blocks)

    def _slots(self, index: int, end: int = 0) -> np.ndarray:
        places = np.arange(end or self.lengths[index])
        blocks: np.ndarray = self.tables[index, places // self.block_size]
        return blocks * self.block_size + places % self.block_size

    def attend(
        self, scheduled: list[int], window: int, order: list[int] | None = None, *, rounds: bool = False
    ) -> list[Tensor]:
        """Of each sequence in `order`, the outputs of its last `scheduled` tokens."""
        chosen = np.array(order if order is not None else range(len(self.lengths)))
        counts, ends = np.array(scheduled)[chosen], np.array(self.lengths)[chosen]
        query = torch.cat([self._query(int(index), int(count)) for index, count in zip(chosen, counts, strict=True)])
        longest = max(self.lengths)
        tokens = torch.zeros(len(self.lengths), longest, dtype=torch.int64)
        step = StepColumns(tokens, self.tables).fill(chosen, ends - counts, counts, np.zeros_like(counts))
        model = abi.PgModel(block_size=self.block_size, kv_format=KV_FORMATS[self.shape.dtype])
        model.round_activations = model.round_attention = rounds
        keys, values = (block.data_ptr() for block in self.blocks)
        layer = abi.PgLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.head_dim,
            keys=keys,
            values=values,
            window=window,
        )
        return list(torch.split(self.native.attention(model, layer, step, query), counts.tolist()))

    def expected(self, scheduled: list[int], window: int) -> list[Tensor]:
        query = torch.cat([self._query(index, count) for index, count in enumerate(scheduled)])
        plan = attention.plan_attention(
            scheduled, self.lengths, torch.from_numpy(self.tables), self.block_size, [window]
        )
        scale = self.head_dim**-0.5
        return list(torch.split(attention.paged_attention(query, self.cache, plan, scale, window), scheduled))

    def _query(self, index: int, count: int) -> Tensor:
        end = int(self.starts[index]) + self.lengths[index]
        return self.query[end - count : end]


LENGTHS, SCHEDULED = [1, 65, 4, 150, 64, 33, 21, 600], [1, 1, 4, 70, 1, 4, 20, 300]
HEADS = [(4, 4, 16), (6, 2, 32), (9, 3, 64), (8, 1, 128), (2, 1, 512)]


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_attention(
    native: Native, heads: tuple[int, int, int], block_size: int, window: int, dtype: torch.dtype
) -> None:
    """Whole prompts, chunks and single tokens in one call."""
    paged = Paged(native, LENGTHS, heads, block_size, dtype)
    for found, wanted in zip(paged.attend(SCHEDULED, window), paged.expected(SCHEDULED, window), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_of_rounded_queries_is_near(native: Native, heads: tuple[int, int, int], window: int) -> None:
    """Where there are products of bfloat16, by tiles or vectors, queries and probabilities are rounded to it too."""
    paged = Paged(native, LENGTHS, heads, 16, torch.bfloat16)
    both = zip(paged.attend(SCHEDULED, window, rounds=True), paged.expected(SCHEDULED, window), strict=True)
    for found, wanted in both:
        torch.testing.assert_close(found, wanted, atol=3e-2, rtol=2e-2)
        assert float((found - wanted).abs().mean()) < 2e-3


@pytest.mark.parametrize(("dtype", "rounds"), [*((dtype, False) for dtype in KV_DTYPES), (torch.bfloat16, True)])
def test_attention_sees_nothing_that_an_earlier_sequence_left(native: Native, dtype: torch.dtype, rounds: bool) -> None:
    """A block comes as it was freed: where a model computed no numbers for one request, others do not see them."""
    paged = Paged(native, [1, 65, 16, 33, 2, 301], (6, 2, 32), 16, dtype)
    scheduled = [1, 1, 16, 20, 1, 40]
    before = paged.attend(scheduled, 0, rounds=rounds)
    for number in (float("nan"), float("inf")):
        paged.leave_behind(number)
        for found, wanted in zip(paged.attend(scheduled, 0, rounds=rounds), before, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 32)])
def test_attention_of_rounded_queries_does_not_hang_on_the_block_size(
    native: Native, heads: tuple[int, int, int]
) -> None:
    first, *others = (
        Paged(native, LENGTHS, heads, size, torch.bfloat16).attend(SCHEDULED, 0, rounds=True) for size in (16, 32, 64)
    )
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 1, 37, 256, 300])
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 16)])
def test_attention_of_a_token_is_alone(
    native: Native, heads: tuple[int, int, int], window: int, dtype: torch.dtype, rounds: bool
) -> None:
    """Bit for bit: by itself or beside others, in whole prompts or in chunks of any size, in any order."""
    paged = Paged(native, LENGTHS, heads, 16, dtype)
    whole = paged.attend(LENGTHS, window, rounds=rounds)
    for scheduled in ([1] * 8, SCHEDULED, [min(length, 13) for length in LENGTHS]):
        for found, wanted in zip(paged.attend(scheduled, window, rounds=rounds), whole, strict=True):
            assert torch.equal(found, wanted[-len(found) :])
    order = [5, 3, 0, 7]
    for index, found in zip(order, paged.attend(LENGTHS, window, order, rounds=rounds), strict=True):
        assert torch.equal(found, whole[index])
    for index in range(len(LENGTHS)):
        assert torch.equal(paged.attend(LENGTHS, window, [index], rounds=rounds)[0], whole[index])


def test_what_lies_behind_a_sequence_has_no_part_in_it(native: Native) -> None:
    """Values of tokens to come may be anything, even no numbers, where a block was another sequence's before."""
    for length in (1, 2, 13, 16, 35):
        paged = Paged(native, [length], (4, 2, 32), 16, torch.bfloat16)
        before = paged.attend([length], 0, rounds=True)[0]
        block, first = int(paged.tables[0, (length - 1) // 16]), length + length % 2
        later = torch.arange(first, -(-length // 16) * 16) % 16 + block * 16
        wild = torch.full((len(later), 2, 32), float("nan"))
        if len(later):
            paged.native.store_kv(paged.shape, wild, wild, later, *paged.blocks)
        assert torch.equal(paged.attend([length], 0, rounds=True)[0], before)


@pytest.mark.parametrize("dtype", FP8S)
def test_floats_of_8_bits_are_rounded_as_torch_does(native: Native, dtype: torch.dtype) -> None:
    """Every value, what lies half way between two and next to that, what is nearly nothing, and what is too large."""
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    beside = torch.cat([torch.nextafter(middle, torch.tensor(way)) for way in (-torch.inf, torch.inf)])
    others = torch.tensor([1e-30, -1e-40, 1e6, -1e6, 1e38, 464.0, 61440.0])
    values = torch.cat((exact, middle, beside, others, normal(16 * 1024)))[: 16 * 1024].view(1024, 1, 16)
    shape = KVShape(dtype, 16, 1, 16)
    sizes = native.key_bytes(shape), native.value_bytes(shape)
    keys, found = (torch.zeros(64, size, dtype=torch.uint8) for size in sizes)
    native.store_kv(shape, values, values, torch.arange(1024), keys, found)
    wanted = saturate_fp8(values, torch.ones(1), dtype).view(torch.uint8)
    assert torch.equal(found.flatten(), wanted.flatten())
    assert torch.equal(keys.view(64, 16, 16).transpose(1, 2).flatten(), wanted.flatten())


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_store_touches_its_slots_only(native: Native, dtype: torch.dtype) -> None:
    """Storing one token more leaves what attention reads of the others as it was."""
    paged = Paged(native, [40, 24], (4, 2, 32), 16, dtype)
    before = [paged.attend([1, 24], 0, rounds=rounds) for rounds in (False, True)]
    free = int(paged.tables[1, 1]) * 16 + 8
    token = normal(1, 2, 32, seed=9) * 100
    native.store_kv(paged.shape, token, token, torch.tensor([free]), *paged.blocks)
    for rounds in (False, True):
        for found, wanted in zip(paged.attend([1, 24], 0, rounds=rounds), before[rounds], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 100, 361, 5000])
def test_argmax(native: Native, vocab_size: int) -> None:
    """Rounded, so that there are equals: the lowest id wins."""
    logits = (normal(64, vocab_size) * 2).round()
    logits[5] = float("-inf")
    assert torch.equal(native.argmax(logits), SAMPLING.argmax(logits))


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0, 5.0, 30.0, 1e6])
@pytest.mark.parametrize("vocab_size", [1, 2, 100, 361, 600, 5000])
def test_gumbel_argmax(native: Native, vocab_size: int, scale: float) -> None:
    values = normal(200, vocab_size) * scale
    keys = row_keys(torch.arange(200) - 100, torch.arange(200) * 7)
    bounds = torch.full((200,), float("-inf")), torch.full((200,), vocab_size)
    assert torch.equal(native.gumbel_argmax(values, *bounds, keys), SAMPLING.gumbel_argmax(values, *bounds, keys))


@pytest.mark.parametrize("vocab_size", [20, 3000])
def test_gumbel_argmax_truncated_in_the_middle_of_ties(native: Native, vocab_size: int) -> None:
    values = normal(100, vocab_size).round()
    keys = row_keys(torch.arange(100), torch.arange(100))
    cut, last_tied = values.quantile(0.5, dim=1).round(), torch.full((100,), vocab_size // 3)
    last_tied[::2] = vocab_size
    found = native.gumbel_argmax(values, cut, last_tied, keys)
    assert torch.equal(found, SAMPLING.gumbel_argmax(values, cut, last_tied, keys))


def test_gumbel_argmax_with_nothing_left(native: Native) -> None:
    values = torch.full((2, 9), float("-inf"))
    values[1, 4] = 0.0
    bounds = torch.full((2,), float("-inf")), torch.full((2,), 9)
    assert native.gumbel_argmax(values, *bounds, row_keys(torch.arange(2), torch.arange(2))).tolist() == [0, 4]


# (min_p, top_k, top_p)
LIMITS = [
    (0.0, 0, 1.0), (0.1, 0, 1.0), (1.0, 0, 1.0), (0.0, 1, 1.0), (0.0, 7, 1.0), (0.0, 10**6, 1.0), (0.0, 0, 0.9),
    (0.0, 0, 1e-9), (0.0, 0, 0.9999999), (0.02, 8, 0.9), (0.0, 40, 0.5), (0.3, 0, 0.7),
]  # fmt: skip


def limit_columns(count: int) -> tuple[Tensor, Tensor, Tensor]:
    min_p, top_k, top_p = zip(*(LIMITS[place % len(LIMITS)] for place in range(count)), strict=True)
    return torch.tensor(min_p).double().log(), torch.tensor(top_k), torch.tensor(top_p).double()


@pytest.mark.parametrize("scale", [0.01, 0.2, 3.0, 12.0, 80.0])
@pytest.mark.parametrize("vocab_size", [1, 12, 361, 4096, 30_000])
def test_truncation(native: Native, vocab_size: int, scale: float) -> None:
    values = normal(60, vocab_size) * scale
    values[7:9, ::2] = float("-inf")  # what a mask forbids
    found, wanted = (op(values, *limit_columns(60)) for op in (native.truncation, truncation.truncation))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_truncation_in_the_middle_of_ties(native: Native) -> None:
    values = (normal(60, 5000) / 2).round()
    found, wanted = (op(values, *limit_columns(60)) for op in (native.truncation, truncation.truncation))
    assert torch.equal(found[0], wanted[0])
    # Sums of thousands of equals differ in their last bits, so that one more or less may be needed.
    places = (values == wanted[0][:, None]).cumsum(1)
    ranks = [places.gather(1, last.clamp(max=4999)[:, None]) for last in (found[1], wanted[1])]
    assert int((ranks[0] - ranks[1]).abs().max()) <= 1
    assert torch.equal(found[1] == 5000, wanted[1] == 5000)


def test_truncation_of_a_row_is_its_own(native: Native) -> None:
    values, limits = normal(60, 700) * 3, limit_columns(60)
    together = native.truncation(values, *limits)
    for row in range(60):
        alone = native.truncation(values[row : row + 1], *(column[row : row + 1] for column in limits))
        assert [one[0].item() for one in alone] == [one[row].item() for one in together]


def test_truncation_of_nothing(native: Native) -> None:
    values = torch.full((len(LIMITS), 30), float("-inf"))
    cut, _ = native.truncation(values, *limit_columns(len(LIMITS)))
    assert bool((cut == float("-inf")).all())


def test_wrong_tensors_are_refused_before_anything_is_read(native: Native) -> None:
    packed = pack(native, normal(32, 64), torch.float32)
    wrong = (normal(3, 48), normal(3, 64).double(), normal(64, 3).t(), normal(3, 128)[:, :64])
    for x in wrong:
        with pytest.raises(ValueError, match="expected contiguous"):
            native.linear(x, packed)
    with pytest.raises(ValueError, match="expected contiguous"):
        native.pack_linear(normal(32, 64), torch.int8, torch.empty(5, dtype=torch.uint8))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous int64"):
        StepColumns(tokens, np.zeros((2, 4), np.int32))
    with pytest.raises(ValueError, match="expected contiguous"):
        StepColumns(tokens[:, :2], np.zeros((2, 4), np.int64))


def test_quantised_keys_are_the_reference_s(native: Native) -> None:
    """The same integers and scales, wherever the layout puts them."""
    shape, key = KVShape(torch.int8, 64, 8, 256), normal(64, 8, 256)
    sizes = native.key_bytes(shape), native.value_bytes(shape)
    keys, values = (torch.zeros(1, size, dtype=torch.uint8) for size in sizes)
    native.store_kv(shape, key, key, torch.arange(64), keys, values)
    quantised, scales = quantise(key)
    for block in (keys[0], values[0]):
        found = block[: key.numel()].view(torch.int8)
        assert torch.equal(found.sort().values, quantised.flatten().sort().values)
        assert torch.equal(block[key.numel() :].view(torch.float32).sort().values, scales.flatten().sort().values)


def test_builds_agree_on_what_is_supported() -> None:
    """A dimension that is not served is named, and nothing that the tests above went through is refused."""
    library = load_build("native")

    def reason(heads: tuple[int, int, int] = (4, 2, 16), hidden: int = 64, block_size: int = 16) -> str:
        """Of a model whose second layer has these heads."""
        names = ("num_heads", "num_kv_heads", "head_dim")
        layers = (abi.PgLayer(**dict(zip(names, one, strict=True))) for one in ((4, 2, 16), heads))
        pointer = (abi.PgLayer * 2)(*layers)
        return library.why_unsupported(abi.PgModel(num_layers=2, hidden=hidden, block_size=block_size, layers=pointer))

    assert reason() == ""
    reasons = [reason(hidden=40), reason((4, 2, 24)), reason(block_size=4), reason((194, 2, 16))]
    assert all(reasons)
    assert len(set(reasons)) == len(reasons)
    assert reason((4, 2, 592)) == reason((4, 2, 24))
    for heads, block_size in itertools.product(HEADS, (16, 32, 64)):
        assert reason(heads, block_size=block_size) == ""
