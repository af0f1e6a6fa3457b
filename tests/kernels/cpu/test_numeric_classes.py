"""Which native builds agree bit for bit: the `numeric_class` of a fingerprint says so, and is held to it here.

With AVX-512 all agree in float32, and in int8, whose integers are exact.  AVX2 adds up a row's squares and a softmax in
vectors of half the length, and so in another order: another class.  What a processor makes of products of bfloat16 is
its own affair: one with an instruction for them and one without are of two classes where inputs are rounded to it.
Attention is computed in such products beside int8 weights too, unless float32 is asked for.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest

from engine.loading.load import load_runner
from kernels.cpu.binding.build import NATIVE
from kernels.cpu.binding.loading import load
from kernels.cpu.binding.native import NativeUnavailable
from shared.config import Settings
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import random_prompt
from tests.engine.driver import Driver

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "pageant-stories-draft")
TARGETS = (NATIVE, "x86-64-v3", "x86-64-v4")
FORMATS = {
    "float32": {"dtype": "float32", "kv_cache_dtype": "float32"},
    "bfloat16 cache": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8 weights": {"dtype": "float32", "quantization": "int8"},
    "int4 weights": {"dtype": "float32", "quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights in bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
EVERYTHING = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=20)
Bits = tuple[tuple[int | float, ...], ...]


@cache
def computed(target: str, formats: str, block_size: int = 16) -> tuple[str, Bits]:
    """The class that a build is said to be of; and tokens and log-probabilities, whose every bit counts."""
    try:
        load(target)
    except NativeUnavailable as error:
        pytest.skip(f"no native kernels ({target}): {error}")
    settings = {"cpu_target": target, "block_size": block_size, **FORMATS[formats]}
    runner = load_runner(Settings.of(model=MODEL, kernels="native", num_blocks=64, **settings))
    driver = Driver(runner)
    for row in range(3):
        driver.add(row, random_prompt(40 + 30 * row, seed=row, vocab_size=runner.capacity.vocab_size), EVERYTHING)
    driver.generate(12, chunk=24)
    assert runner.fingerprint is not None
    positions = [one for live in driver.live.values() for one in (*live.prompt_logprobs, *live.logprobs) if one]
    assert len(positions) > 200
    return runner.fingerprint.numeric_class, tuple((*one.token_ids, *one.logprobs) for one in positions)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(TARGETS, 2)))
def test_builds_of_one_class_agree_bit_for_bit(one: str, other: str, formats: str) -> None:
    (first, bits), (second, others) = computed(one, formats), computed(other, formats)
    assert bits == others if first == second else first != second


@pytest.mark.parametrize("formats", [name for name, one in FORMATS.items() if one["dtype"] == "float32"])
def test_all_with_avx512_are_of_one_class(formats: str) -> None:
    assert computed("x86-64-v4", formats)[0] == computed(NATIVE, formats)[0] == "avx512"


def test_avx2_and_avx512_differ_in_bits_and_so_in_class() -> None:
    """The difference seldom changes a token, but it may."""
    (first, bits), (second, others) = computed("x86-64-v3", "float32"), computed("x86-64-v4", "float32")
    assert (first, second) == ("avx2", "avx512")
    assert bits != others
    assert max(abs(a - b) for one, two in zip(bits, others, strict=True) for a, b in zip(one, two, strict=True)) < 1e-3


@pytest.mark.parametrize("formats", FORMATS)
def test_no_bit_hangs_on_the_block_size(formats: str) -> None:
    """So it is no part of the fingerprint of native kernels."""
    assert computed(NATIVE, formats, 16) == computed(NATIVE, formats, 32)
