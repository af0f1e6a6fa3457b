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
        str,
        common(
            "What clients call the model, with commas between several names, of which answers have the first. "
            "Empty: the name of the model's directory."
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
        common(
            "Type of the arithmetic; half is float16, float is float32. auto: on a GPU the checkpoint's; on a CPU "
            "float32, or bfloat16 where the processor multiplies that faster and the checkpoint is in it."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        common(
            "How weights are held and multiplied. auto: as the checkpoint has them; the native kernels multiply its "
            "4-bit and int8 codes with activations in 8 bits, unless dtype is float32. none: in 16 or 32 bits. int8, "
            "int4: quantised at load, per output channel or in groups of input features, and activations to 8 bits as "
            "they come (of int4 on a CPU alone). fp8, for GPUs: E4M3, as the checkpoint has it or per output channel, "
            "and activations to E4M3 as they come. See docs/quantised.md and docs/performance.md."
        ),
    ] = "auto"
    quantization_group: Annotated[
        Literal[32, 64, 128],
        advanced("Input features that share a scale of int4 weights: 4.5, 4.25 or 4.125 bits per weight."),
    ] = 64
    quantization_head: Annotated[
        Literal["int8", "none"],
        advanced(
            "Type of the output head where weights are quantised, and of the embedding if it is tied to the head. "
            "none: the type that the head has without quantization."
        ),
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
    num_threads: Annotated[
        int,
        common(
            "Threads of a worker's CPU kernels, of each rank's. 0: one for each core. With executor=ray each rank asks "
            "Ray for as many CPUs, and 0 is 1."
        ),
    ] = 0
    tensor_parallel_size: Annotated[
        int,
        common(
            "Processes that compute a model together as one worker, each with a part of every weight and of the KV "
            "cache: on a CPU with native kernels, to the same bits as one; with kernels=torch, or with device=cuda and "
            "a GPU for each, by torch.distributed. See docs/ranks.md."
        ),
    ] = 1
    tensor_parallel_reduce: Annotated[
        bool,
        advanced(
            "Ranks that compute with torch add partial sums (all-reduce, twice in a layer) in the place of gathering "
            "features (four times): the bits are not those of one process. See docs/ranks.md."
        ),
    ] = False
    enable_dbo: Annotated[
        bool,
        advanced(
            "Dual batch overlap, of ranks that compute with torch: a step's sequences go through the layers as two "
            "halves in turns, so that one computes while what the other exchanges is under way. See docs/ranks.md."
        ),
    ] = False
    dbo_token_threshold: Annotated[
        int, advanced("Tokens of a step from which on it is computed as two halves, with enable_dbo.")
    ] = 32
    pipeline_parallel_size: Annotated[
        int,
        advanced(
            "Processes that compute a model one behind the other as one worker, each some of its layers and their KV "
            "cache: on a CPU, with native kernels, to the same bits as one. With tensor_parallel_size above 1 each of "
            "these stages is a group of so many ranks. See docs/ranks.md."
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        advanced(
            "Ranks of tensor_parallel_size have some of a mixture's experts whole, in the place of a part of each. "
            "See docs/ranks.md."
        ),
    ] = False
    enable_sequence_parallel: Annotated[
        bool,
        advanced(
            "Each rank of tensor_parallel_size computes the norms of some rows, and the results are gathered; "
            "otherwise each rank computes the norms of all rows. See docs/ranks.md."
        ),
    ] = False
    enable_eplb: Annotated[
        bool,
        advanced(
            "Move whole experts between ranks while they serve, so that all compute about as many rows. "
            "Needs enable_expert_parallel. See docs/ranks.md."
        ),
    ] = False
    num_redundant_experts: Annotated[
        int,
        advanced("Whole experts of each layer that the ranks together have twice: those that most rows take."),
    ] = 0
    eplb_step_interval: Annotated[
        int, advanced("Steps between two looks at which experts are to be moved, with enable_eplb.")
    ] = 3000
    executor: Annotated[
        Literal["local", "hosts", "ray"],
        advanced(
            "Where the ranks of a worker run. local: processes of this host, which share memory. hosts: each where "
            "`pageant rank --join` starts it, of this host or others, linked by TCP. ray: each worker, of one rank or "
            "of several, where a Ray cluster has a place. See docs/ranks.md and docs/ray.md."
        ),
    ] = "local"
    attention_backend: Annotated[
        Literal["auto", "triton", "flashinfer", "flashattention"],
        advanced("Attention kernels on a GPU; the last two must be installed. auto: triton. See docs/gpu.md."),
    ] = "auto"
    enforce_eager: Annotated[bool, advanced("On a GPU: no CUDA graphs.")] = False
    programmatic_launch: Annotated[
        bool,
        advanced(
            "On a GPU, for steps of one token: kernels are put in place before the ones before them have ended (CUDA's "
            "programmatic dependent launch; Hopper and later). Faster, but not proved yet. See docs/gpu.md."
        ),
    ] = False
    mixed_workers: Annotated[
        bool,
        advanced(
            "Admit workers that compute other bits (formats, kernels, processors). A stream stays with workers of the "
            "kind that began it."
        ),
    ] = False

    @property
    def ranks(self) -> int:
        """Processes of one worker: cut across its layers, along them, or both."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_torch_ranks(self) -> bool:
        """Ranks compute with torch, and exchange what they have by torch.distributed."""
        return self.tensor_parallel_size > 1 and (self.kernels == "torch" or self.device == "cuda")

    @property
    def has_stages(self) -> bool:
        return self.pipeline_parallel_size > 1

    @property
    def has_ranked_stages(self) -> bool:
        """Each stage is a group of ranks."""
        return self.has_stages and self.tensor_parallel_size > 1

    @property
    def members(self) -> int:
        """What a worker's leader is linked to, and itself: stages where there are any, else ranks.  With executor=hosts
        each may be on a host of its own."""
        return self.pipeline_parallel_size if self.has_stages else self.tensor_parallel_size

    @property
    def ranks_by(self) -> str:
        """The setting that says how many there are."""
        return "pipeline_parallel_size" if self.has_stages else "tensor_parallel_size"

    @property
    def ranks_here(self) -> int:
        """Ranks of one worker that share this host's cores."""
        if self.executor == "local":
            return self.ranks
        return self.tensor_parallel_size if self.has_stages else 1

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that clients may call it."""
        names = [name.strip() for name in self.served_model_name.split(",")]
        return tuple(name for name in names if name) or (Path(self.model).name,)
