"""A quantised checkpoint through the runner, against transformers with its dequantised weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.description.reading import read_config
from engine.weights.source import Checkpoint
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, oracle_logprobs, random_prompt
from tests.engine.driver import Driver

ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
MODELS = {"LlamaForCausalLM": transformers.LlamaForCausalLM, "GptOssForCausalLM": transformers.GptOssForCausalLM}


def dequantised_model(directory: Path) -> Any:
    """Transformers' model of the checkpoint's configuration with the weights that its source gives out."""
    spec = read_config(directory)
    source = Checkpoint(directory, spec)
    config = transformers.AutoConfig.from_pretrained(directory)
    del config.quantization_config
    config.dtype = torch.float32
    model = MODELS[spec.architecture](config).eval()
    weights: dict[str, Tensor] = {}
    for part in source.tensors.parts():
        if part.rows is None and part.expert is None and part.head_order is None:
            weights[part.name] = source.take(part).float()
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert not surplus and not [name for name in missing if "experts" not in name and "qkv" not in name], missing
    return model


def assert_served(directory: Path, kernels: str, model: Any = None) -> None:
    """Log-probabilities of a prompt in chunks and of an output within 1e-4, and equal greedy tokens."""
    oracle = dequantised_model(directory) if model is None else model
    vocab_size = oracle.config.vocab_size
    driver = Driver(make_runner(directory, kernels, dtype="float32", kv_cache_dtype="float32"))
    sequence = driver.add(3, random_prompt(33, seed=1, vocab_size=vocab_size), ALL_LOGPROBS)
    driver.generate(6, chunk=7)
    rows = []
    for position in [*sequence.prompt_logprobs, *sequence.logprobs]:
        assert position is not None
        indices = torch.tensor(position.token_ids)
        rows.append(torch.empty(vocab_size).index_put_((indices,), torch.tensor(position.logprobs)))
    wanted = oracle_logprobs(oracle, sequence.token_ids[:-1])
    torch.testing.assert_close(torch.stack(rows), wanted, atol=1e-4, rtol=0)
    assert sequence.output == wanted[sequence.num_prompt - 1 :].argmax(-1).tolist()
