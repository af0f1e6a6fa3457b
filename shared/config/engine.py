"""What the model is, and what computes it."""

from pathlib import Path
from typing import Annotated, Literal

from shared.config.section import Section, advanced, common


class EngineSettings(Section, frozen=True, kw_only=True):
    TITLE = "Model"
    model: Annotated[str, common("A checkpoint directory, or the name of a repository on the Hugging Face hub.")] = (
        "models/pageant-stories"
    )
    served_model_name: Annotated[
        str, common("What clients call the model. Empty: the name of the model's directory.")
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
        common(
            "Type of the arithmetic; half is float16, float is float32. auto: on a GPU the checkpoint's; on a CPU "
            "float32, or bfloat16 where the processor multiplies that faster and the checkpoint is in it."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4"],
        common(
            "Weights are quantised at load. int8: per output channel, and activations per row as they come; int4: in "
            "groups of input features, and activations to 8 bits in the same groups. See docs/performance.md."
        ),
    ] = "none"
    quantization_group: Annotated[
        Literal[32, 64, 128],
        advanced("Input features that share a scale of int4 weights: 4.5, 4.25 or 4.125 bits per weight."),
    ] = 64
    quantization_head: Annotated[
        Literal["int8", "none"],
        advanced("The head of quantised weights, which is the embedding too where both are one. none: as without."),
    ] = "int8"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], advanced("dummy: random weights are made from config.json alone.")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], common("Where the model runs. auto: on a GPU if there is one.")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        advanced(
            "Kernels on a CPU: native ones (C++, compiled at first use), or torch's. auto: native ones, or torch's "
            "with a warning if native ones are not available."
        ),
    ] = "auto"
    cpu_target: Annotated[
        Literal["native", "x86-64-v3", "x86-64-v4", "cascadelake", "cooperlake", "sapphirerapids"],
        advanced("Kind of processor that the native kernels are compiled for. native: this one."),
    ] = "native"
    batch_invariant: Annotated[
        bool,
        advanced(
            "Torch kernels on a CPU: the arithmetic of a token never depends on its batch. The native kernels always "
            "have that."
        ),
    ] = True
    num_threads: Annotated[int, common("Threads of a worker's CPU kernels. 0: one for each core.")] = 0
    attention_backend: Annotated[
        Literal["auto", "triton", "flashinfer", "flashattention"],
        advanced("Attention kernels on a GPU; the last two must be installed. auto: triton. See docs/gpu.md."),
    ] = "auto"
    enforce_eager: Annotated[bool, advanced("On a GPU: no CUDA graphs.")] = False
    mixed_workers: Annotated[
        bool,
        advanced(
            "Admit workers that compute other bits (formats, kernels, processors). A stream stays with workers of the "
            "kind that began it."
        ),
    ] = False

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name
