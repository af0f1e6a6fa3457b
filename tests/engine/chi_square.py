"""Pearson's test of counts against a distribution."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_EXPECTED = 8.0  # cells that expect fewer are taken together: the approximation wants some in each


def p_value(
    counts: NDArray[np.int64],  # [num_cells]
    probs: NDArray[np.float64],  # [num_cells] their distribution, if all is well
) -> float:
    """How often chance alone is this far off.  Zero where a cell was met that cannot be."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    rare = expected < LEAST_EXPECTED
    if expected[rare].sum() < LEAST_EXPECTED:  # too few even together: they go to the rarest of the others
        rare[np.flatnonzero(~rare)[expected[~rare].argmin()]] = True
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return float(torch.special.gammaincc(*(torch.tensor(x / 2, dtype=torch.float64) for x in (freedom, statistic))))
