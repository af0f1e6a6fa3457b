"""How the sequences of a step draw their tokens, where all of them are drawn in one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SampledColumns:
    """Of each sequence, as the columns of a sampler: what takes its token beside its logits."""

    temperature: NDArray[np.float32]  # [num_seqs]; 0: the likeliest
    seeds: NDArray[np.int64]  # [num_seqs]
    top_k: NDArray[np.int64]  # [num_seqs]; 0: off
    depth: NDArray[np.float64]  # [num_seqs] log(min_p); -inf: off
    top_p: NDArray[np.float64]  # [num_seqs]; 1: off
