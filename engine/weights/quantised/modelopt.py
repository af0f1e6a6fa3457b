"""ModelOpt's FP8 and NVFP4: names of their own, and a second scale that multiplies."""

from __future__ import annotations

from engine.weights.quantised.form import Form, Quantisation, Same, SchemeKeys
from engine.weights.quantised.fp8 import Float8
from engine.weights.quantised.grid import ANY, Grid
from engine.weights.quantised.mxfp4 import NV_GROUP, Float4

FORMS: dict[str, Form] = {
    "FP8": Float8(Grid(ANY)),
    "NVFP4": Float4(NV_GROUP, ".weight", ".weight_scale_2", divides=False),
}


def read_modelopt(keys: SchemeKeys) -> Quantisation:
    """Modules that are left as they are have a plain weight."""
    algorithm = keys.one_of("quant_algo", list(FORMS))
    return Quantisation(f"ModelOpt {algorithm}", Same(FORMS[algorithm]), rounds_activations=True)
