"""The checkpoints that the tests are answered by, behind Qwen3's own tokenizer and chat template, which most of vLLM's
tests are written for.  What they say means nothing (`states.py`), so tests of a model's sense cannot pass on them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from scripts.bench.common.adapters import write_adapter
from scripts.bench.common.models import write_config, write_weights
from scripts.vllm_http.server import ADAPTER, CLASSIFIER, EMBEDDER, MODEL, REASONER
from scripts.vllm_http.states import make_stateful

TOKENIZER = "tokenizers/qwen3"  # in the folder of test data
END_OF_TURN, END_OF_TEXT = 151_645, 151_643
LABELS = {"0": "Default", "1": "Spoiled"}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16", "bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TURN,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip


CHECKPOINTS: dict[str, tuple[dict[str, Any], bool | None]] = {  # what differs; whether it thinks, if it says anything
    MODEL: ({}, False),
    REASONER: ({}, True),
    CLASSIFIER: ({"architectures": ["Qwen3ForSequenceClassification"], "id2label": LABELS}, None),
    EMBEDDER: ({"hidden_size": 384, "tie_word_embeddings": True}, None),  # as many components as multilingual-e5-small
}


def make_all(directory: Path) -> dict[str, str]:
    """Their directories, and that of an adapter, by the variables that name them.

    Raises FileNotFoundError where the tokenizer is not among the test data.
    """
    data = Path(os.environ.get("PAGEANT_TEST_DATA", Path(__file__).parents[3] / "shared/data"))
    for variable, (changes, thinks) in CHECKPOINTS.items():
        made = directory / variable
        made.mkdir(parents=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(data / TOKENIZER / file, made)
        write_weights(made, CONFIG | changes)
        if thinks is not None:
            make_stateful(made / "model.safetensors", made / "tokenizer.json", thinks=thinks)
        write_config(made, CONFIG | changes)
    model = directory / MODEL  # the adapter changes little, so that it ends its turns as the model does
    write_adapter(model, directory / ADAPTER, scale=0.001, base_model_name_or_path=str(model))
    return {variable: str(directory / variable) for variable in (*CHECKPOINTS, ADAPTER)}
