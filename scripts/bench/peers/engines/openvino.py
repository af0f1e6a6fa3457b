"""OpenVINO GenAI: its pipeline with continuous batching, prefix caching and chunked prefill."""

from __future__ import annotations

import importlib
from typing import Any


class OpenVino:
    def __init__(self, options: dict[str, Any]) -> None:
        self._tensors: Any = importlib.import_module("openvino")
        self._genai: Any = importlib.import_module("openvino_genai")
        self._numpy: Any = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.num_kv_blocks = 0
        scheduler.cache_size = options["kv_cache_gib"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": options["num_threads"], "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = self._genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)
        self.version = f"openvino-genai {self._genai.__version__}"

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        prompts = [self._tensors.Tensor(self._numpy.array([ids], dtype=self._numpy.int64)) for ids, _ in requests]
        outputs = self._pipeline.generate(prompts, [self._generation(count) for _, count in requests])
        return {"num_tokens": [len(output.m_generation_ids[0]) for output in outputs]}

    def _generation(self, count: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        return config


load = OpenVino
