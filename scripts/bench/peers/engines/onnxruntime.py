"""ONNX Runtime GenAI: requests of one shape as one batch, others one after the other, since it joins none that run."""

from __future__ import annotations

import importlib
from typing import Any


class OnnxRuntime:
    def __init__(self, options: dict[str, Any]) -> None:
        self._genai: Any = importlib.import_module("onnxruntime_genai")
        self._model = self._genai.Model(options["model"])
        self.version = f"onnxruntime-genai {self._genai.__version__}"

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        shapes = {(len(ids), count) for ids, count in requests}
        batches = [requests] if len(shapes) == 1 else [[request] for request in requests]
        return {"num_tokens": [count for batch in batches for count in self._batch(batch)]}

    def _batch(self, requests: list[tuple[list[int], int]]) -> list[int]:
        (prompt, count), size = requests[0], len(requests)
        params, length = self._genai.GeneratorParams(self._model), len(prompt) + count
        params.set_search_options(batch_size=size, max_length=length, min_length=length, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens([ids for ids, _ in requests] if size > 1 else prompt)
        while not generator.is_done():
            generator.generate_next_token()
        return [len(generator.get_sequence(index)) - len(prompt) for index in range(size)]


load = OnnxRuntime
