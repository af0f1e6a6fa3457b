"""Checkpoints that the makers' own packages wrote: weights bit for bit as they dequantise them, and what is served.

`scripts/make_quantised_fixtures` makes them again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.description.reading import read_config
from engine.weights.source import Checkpoint
from tests.engine.checkpoints import KERNELS
from tests.engine.weights.quantised.served import assert_served

FIXTURES = sorted(path.parent for path in (Path(__file__).parent / "fixtures").glob("*/expected.json"))
DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def digest_of(weight: Tensor) -> str:
    """As the makers' script has it: zeros have no sign."""
    return hashlib.sha256((weight + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def expected_of(fixture: Path) -> dict[str, dict[str, str]]:
    content: dict[str, Any] = json.loads((fixture / "expected.json").read_text(encoding="utf-8"))
    return dict(content["weights"])


def test_there_are_fixtures_of_every_maker() -> None:
    made_by = {json.loads((one / "expected.json").read_text(encoding="utf-8"))["made_by"][0] for one in FIXTURES}
    assert made_by == {"auto-round 0.16.1", "llmcompressor 0.14.0.1"} and len(FIXTURES) >= 20


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_weights_are_those_of_the_package(fixture: Path) -> None:
    source = Checkpoint(fixture, read_config(fixture))
    expected = expected_of(fixture)
    quantised = {part.name: part for part in source.tensors.parts() if source.quantised_as(part) is not None}
    assert quantised.keys() == expected.keys()
    for name, one in expected.items():
        weight = source.take(quantised[name])
        assert weight.dtype == torch.float32
        assert digest_of(weight.to(DTYPES[one["dtype"]])) == one["sha256"], name
    source.release()


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_codes_are_what_is_taken(fixture: Path) -> None:
    source = Checkpoint(fixture, read_config(fixture))
    for part in source.tensors.parts():
        codes = source.take_codes(part)
        assert (codes is None) == (source.quantised_as(part) is None)
        if codes is not None:
            assert codes.shape == part.wanted
            assert torch.equal(codes.dequantised(), source.take(part))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_log_probabilities_are_those_of_the_dequantised_model(fixture: Path, kernels: str) -> None:
    assert_served(fixture, kernels)
