"""models.md: the families of models that are served, from the table that the engine reads."""

from __future__ import annotations

from engine.description.families import FAMILIES
from scripts.documents.reference.markdown import code, page, table

TEXT = """\
A checkpoint directory holds `config.json`, `tokenizer.json` and safetensors files, as transformers writes them. The
first name under `architectures` in config.json decides which family it is. A key of config.json that is not served ends
the start with an error that names it. `...ForSequenceClassification` in the place of
`...ForCausalLM` is the same decoder with a head that gives scores to texts
([beams-and-embeddings.md](../beams-and-embeddings.md)).

All families run on the native CPU kernels, on torch and on Triton. How to add one:
[adding-a-model.md](../adding-a-model.md). All are served from [quantised checkpoints](../quantised.md) too."""
HEAD = ("family", "architecture in config.json")


def render() -> str:
    rows = ((family.title, code(architecture)) for architecture, family in FAMILIES.items())
    return page("Models", "engine/description/families", TEXT, table(HEAD, rows))
