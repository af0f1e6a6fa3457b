"""Checkpoints of a decoder that ends in a classifier of whole texts: its labels, and what makes their logits scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.description.spec import LabelActivation
from shared.errors import ModelError

CLASSIFIES, GENERATES = "ForSequenceClassification", "ForCausalLM"  # ends of an architecture's name
DEFAULT_COUNT = 2  # transformers leaves it out
MOST_LABELS = 4096
ACTIVATIONS: Mapping[str, LabelActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def read_labels(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `labels` and `label_activation` of a description.  Raises ModelError naming the key."""
    names = raw.get("id2label")
    count = raw.get("num_labels", DEFAULT_COUNT if names is None else len(names))
    if not isinstance(count, int) or not 1 <= count <= MOST_LABELS:
        raise ModelError(f"num_labels must be 1 to {MOST_LABELS}, got {count!r}")
    if names is None:
        names = {str(place): f"LABEL_{place}" for place in range(count)}
    if not isinstance(names, Mapping) or sorted(names) != sorted(map(str, range(count))):
        raise ModelError(f"id2label must name the labels 0 to {count - 1}")
    problem = raw.get("problem_type")
    if problem is not None and problem not in ACTIVATIONS:
        raise ModelError(f"problem_type must be one of {', '.join(ACTIVATIONS)}, got {problem!r}")
    activation = ACTIVATIONS[problem] if problem else "sigmoid" if count == 1 else "softmax"
    return {"labels": tuple(str(names[str(place)]) for place in range(count)), "label_activation": activation}
