"""adapter_config.json as PEFT means it: the rank and the scale of each module, and what is refused.

A setting that would change the adapter's outputs and is not served is refused by its key: without it the outputs would
be silently wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ModelError

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

# Keys that say nothing else than this, or are refused.
_ABSENT = (
    "use_dora",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "use_qalora",
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # ways to begin that leave another base model behind


@dataclass(frozen=True, slots=True)
class LoraConfig:
    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]  # an expression that names match, or ends of names
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_stabilised: bool = False  # alpha / sqrt(rank), not alpha / rank
    targets_part: bool = False  # layers or modules that are targeted by name are left out
    ties_weights: bool = False  # what is added to the embedding is added to the head that is tied to it

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def targets(self, module: str) -> bool:
        if isinstance(self.target_modules, str):
            return self.target_modules == ALL_LINEAR or re.fullmatch(self.target_modules, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)

    def targets_by_name(self, module: str) -> bool:
        """The same, but of what no word for many modules stands for."""
        return self.target_modules != ALL_LINEAR and not self.targets_part and self.targets(module)


def read_lora_config(text: bytes) -> LoraConfig:
    """Raises ModelError naming the key."""
    try:
        values: dict[str, Any] = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG_NAME} cannot be read: {error}") from error
    if values.get("peft_type") != "LORA":
        raise _refused("peft_type", values.get("peft_type"), 'only "LORA" is served')
    for key in _ABSENT:
        if values.get(key):
            raise _refused(key, values[key], "is not served")
    if values.get("bias", "none") != "none":
        raise _refused("bias", values["bias"], 'only "none" is served')
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise _refused("init_lora_weights", start, "the adapter belongs to a base model that it changed")
    return LoraConfig(
        rank=_rank("r", values.get("r")),
        alpha=_number("lora_alpha", values.get("lora_alpha")),
        target_modules=_targets(values.get("target_modules")),
        rank_pattern={key: _rank("rank_pattern", value) for key, value in _patterns(values, "rank_pattern")},
        alpha_pattern={key: _number("alpha_pattern", value) for key, value in _patterns(values, "alpha_pattern")},
        rank_stabilised=bool(values.get("use_rslora")),
        ties_weights=bool(values.get("ensure_weight_tying")),
        targets_part=any(values.get(key) is not None for key in ("layers_to_transform", "exclude_modules")),
    )


def _refused(key: str, value: object, why: str) -> ModelError:
    return ModelError(f"{CONFIG_NAME}: {key} {json.dumps(value)[:100]}: {why}")


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(key, value, "a rank is an integer of at least 1")
    return value


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _refused(key, value, "a finite number is wanted")
    return float(value)


def _patterns(values: Mapping[str, Any], key: str) -> list[tuple[str, object]]:
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise _refused(key, patterns, "an object is wanted")
    for pattern in patterns:
        _compiled(key, pattern)
    return list(patterns.items())


def _targets(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        if value != ALL_LINEAR:
            _compiled("target_modules", value)
        return value
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise _refused("target_modules", value, "names, or an expression, are wanted")


def _compiled(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refused(key, pattern, f"no regular expression: {error}") from error


def _matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that a module's name, or the end of it behind a dot, matches; empty where none does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), "")
