"""Mixtures whose experts are codes: the Triton kernel against its reference, on a GPU where there is one, else
interpreted."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels.interface import AttentionShape
from kernels.ops.experts.experts import ExpertWeights
from kernels.ops.experts.experts_decoded import experts_decoded, pack_experts_decoded
from kernels.ops.linears import decoded_weight
from kernels.ops.linears.codes import Codes, quantise_to_codes
from kernels.ops.linears.decoded_weight import DecodedWeight, stack_decoded
from kernels.provider import has_triton, triton_kernels
from tests.kernels.expert_cases import SHAPES, Mixture

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton.experts import experts_decoded as kernel
from kernels.triton.experts.expert_slots import sort_slots
from tests.kernels.triton.test_triton_decoded import DEVICE, KINDS, any_codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
TRITON = triton_kernels(AttentionShape())


def mixture_of(num_tokens: int, count: int, top_k: int, *, gated: bool = True, bias: bool = False) -> Mixture:
    """With features that fill neither a tile nor a word's block."""
    return Mixture(num_tokens, count=count, top_k=top_k, hidden=272, inner=80, gated=gated, bias=bias)


MIXTURES = {
    "one row": mixture_of(1, 3, 1),
    "few rows of many experts": mixture_of(3, 12, 4, bias=True),
    "all experts": mixture_of(7, 2, 2, gated=False),
    "many rows": mixture_of(60, 3, 2, bias=True),
}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 5e-2}  # of two products, one after the other
GROUPS = {"int4": (16, 32, 128), "e2m1": (16,), "mxfp4": (32,), "e4m3": (32, 128)}


def codes_of(mixture: Mixture, kind: str, group: int) -> tuple[list[Codes], list[Codes]]:
    sizes = (stack.shape for stack in (mixture.gate_up, mixture.down))
    first, second = ([any_codes(kind, n, k, group, seed=one) for one in range(count)] for count, n, k in sizes)
    return first, [replace(codes, scales=codes.scales / 16) for codes in second]


def held(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(DEVICE, dtype)


def compute(mixture: Mixture, packed: tuple[ExpertWeights, ExpertWeights], dtype: torch.dtype) -> Tensor:
    x, ids, weights = mixture.x.to(DEVICE, dtype), mixture.ids.to(DEVICE), mixture.weights.to(DEVICE)
    return TRITON.experts(x / 16, ids, weights, *packed, "silu", mixture.gated)


def packed_of(mixture: Mixture, kind: str, group: int, dtype: torch.dtype) -> tuple[ExpertWeights, ExpertWeights]:
    first, second = codes_of(mixture, kind, group)
    return (
        pack_experts_decoded(first, held(mixture.gate_up_bias, dtype)),
        pack_experts_decoded(second, held(mixture.down_bias, dtype)),
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", MIXTURES)
@pytest.mark.parametrize(("kind", "group"), [(kind, group) for kind, groups in GROUPS.items() for group in groups])
def test_experts_are_those_of_the_reference(kind: str, group: int, shape: str, dtype: torch.dtype) -> None:
    """With experts that have no rows, and groups that end with the features, or not."""
    mixture = MIXTURES[shape]
    found = compute(mixture, packed_of(mixture, kind, group, dtype), dtype).float()
    first, second = codes_of(mixture, kind, group)
    wanted = experts_decoded(
        mixture.x.to(DEVICE, dtype) / 16, mixture.ids.to(DEVICE), mixture.weights.to(DEVICE),
        (first, held(mixture.gate_up_bias, dtype)), (second, held(mixture.down_bias, dtype)), "silu", mixture.gated,
    ).float()  # fmt: skip
    assert float((found - wanted).abs().max()) <= TOLERANCES[dtype] * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_alone(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, in tiles of any height and whatever other rows there are."""
    mixture = MIXTURES["many rows"]
    packed = packed_of(mixture, kind, KINDS[kind], dtype)
    whole = compute(mixture, packed, dtype)
    for rows in (slice(41, 42), slice(17, 40), slice(59, 29, -1)):
        some = mixture_of(1, 3, 2, bias=True)
        places = range(*rows.indices(60)) if rows.step else range(60)[rows]
        some.x, some.ids, some.weights = (each[list(places)] for each in (mixture.x, mixture.ids, mixture.weights))
        assert torch.equal(compute(some, packed, dtype), whole[list(places)])


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_any_height(kind: str) -> None:
    mixture, bits = MIXTURES["many rows"], []
    packed = packed_of(mixture, kind, KINDS[kind], torch.float32)
    for most in (16, 32, 64):
        with patch.object(kernel, "MOST_ROWS", {4: most}):
            bits.append(compute(mixture, packed, torch.float32))
    assert all(torch.equal(bits[0], other) for other in bits[1:])


def test_a_product_is_that_of_the_expert_s_own_weight() -> None:
    """Bit for bit, as a linear of codes has it in one part."""
    from kernels.triton.linears import linear_decoded

    codes = [any_codes("mxfp4", 72, 256, 32, seed=one) for one in range(3)]
    packed = pack_experts_decoded(codes, None)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    slots = sort_slots(torch.tensor([[2], [0], [2], [2], [0]], device=DEVICE), 3)
    assert packed.decoded is not None
    found = kernel.multiply_decoded_experts(x, slots, packed.decoded, None, 1)
    for row, expert in enumerate((2, 0, 2, 2, 0)):
        linear = TRITON.pack_decoded
        assert linear is not None
        weight = linear(codes[expert])
        assert weight.decoded is not None and linear_decoded.num_parts(weight.decoded) == 1
        assert torch.equal(found[row], TRITON.linear(x[row : row + 1], weight, None)[0])


def test_scales_take_no_more_than_they_need() -> None:
    """Powers of two and numbers of 16 bits are held so; others in float32."""
    codes = [any_codes("mxfp4", 24, 96, 32, seed=one) for one in range(2)]
    powers = [replace(one, scales=torch.exp2((one.scales * 100).round() - 127)) for one in codes]
    halves = [replace(one, scales=one.scales.half().float()) for one in codes]
    for given, dtype in ((powers, torch.bfloat16), (halves, torch.float16), (codes, torch.float32)):
        packed = pack_experts_decoded(given, None).decoded
        assert packed is not None and packed.scales.dtype == dtype
        assert torch.equal(packed.scales.float(), torch.stack([one.scales.t() for one in given]))
        assert packed.zeros.numel() == 2, "E2M1 has no zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_scales_change_no_bit(dtype: torch.dtype) -> None:
    mixture = SHAPES["one row"]
    first, second = codes_of(mixture, "mxfp4", 32)
    given = [[replace(one, scales=one.scales.to(dtype).float()) for one in codes] for codes in (first, second)]
    narrow = tuple(pack_experts_decoded(codes, None) for codes in given)
    with patch.object(decoded_weight, "NARROW", ()):
        wide = tuple(pack_experts_decoded(codes, None) for codes in given)
    assert [one.decoded.scales.dtype for one in (*narrow, *wide) if one.decoded] == [dtype] * 2 + [torch.float32] * 2
    found, wanted = (compute(mixture, (both[0], both[1]), torch.float32) for both in (narrow, wide))
    assert torch.equal(found, wanted)


def test_what_is_not_one_weight() -> None:
    def packed(kind: str, n: int, k: int, group: int) -> DecodedWeight:
        return decoded_weight.pack_decoded(any_codes(kind, n, k, group))

    for other in (packed("mxfp4", 16, 64, 32), packed("int4", 16, 64, 64), packed("int4", 24, 64, 32)):
        with pytest.raises(ValueError, match="same kind, group and shape"):
            stack_decoded([packed("int4", 16, 64, 32), other])


@pytest.mark.parametrize("group", [32, 128])
def test_4_bits_made_of_numbers(group: int) -> None:
    """Mixtures whose features fill no group, of experts that are quantised as they are packed."""
    from kernels.ops.linears.codes import INT4
    from kernels.provider import quantising

    kernels, mixture = quantising(TRITON, INT4, group, quantised_head=True), SHAPES["many rows"]
    numbers = [[one.to(DEVICE) for one in stack] for stack in (mixture.gate_up, mixture.down)]
    biases = held(mixture.gate_up_bias, torch.float32), held(mixture.down_bias, torch.float32)
    packed = [kernels.pack_experts(*both) for both in zip(numbers, biases, strict=True)]
    rounded = [[quantise_to_codes(one, group).dequantised() for one in stack] for stack in numbers]
    wanted = [TRITON.pack_experts(*both) for both in zip(rounded, biases, strict=True)]
    assert all(one.decoded is not None and one.decoded.scales.element_size() == 2 for one in packed)
    found, exact = (compute(mixture, (both[0], both[1]), torch.float32) for both in (packed, wanted))
    torch.testing.assert_close(found, exact, atol=2e-5 * float(exact.abs().max()), rtol=2e-5)
