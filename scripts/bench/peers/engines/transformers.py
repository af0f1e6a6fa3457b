"""transformers' generate(): batches of at most 32 in order of arrival, padded on the left to the longest."""

from __future__ import annotations

import importlib
from typing import Any

BATCH = 32


class Generate:
    def __init__(self, options: dict[str, Any]) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(options["num_threads"])
        dtype = getattr(self._torch, options["dtype"])
        factory = transformers.AutoModelForCausalLM
        self._model = factory.from_pretrained(options["model"], dtype=dtype, attn_implementation="sdpa").eval()
        self.version = f"transformers {transformers.__version__}"

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        counts: list[int] = []
        for start in range(0, len(requests), BATCH):
            counts += self._batch(requests[start : start + BATCH])
        return {"num_tokens": counts}

    def _batch(self, requests: list[tuple[list[int], int]]) -> list[int]:
        """A batch runs until its longest is done; the others' surplus is thrown away."""
        width, most = max(len(prompt) for prompt, _ in requests), max(count for _, count in requests)
        ids = self._torch.zeros(len(requests), width, dtype=self._torch.long)
        mask = self._torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, width - len(prompt) :] = self._torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        limits = {"max_new_tokens": most, "min_new_tokens": most, "eos_token_id": None, "pad_token_id": 0}
        with self._torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, do_sample=False, **limits)
        return [min(count, output.shape[1] - width) for _, count in requests]


load = Generate
