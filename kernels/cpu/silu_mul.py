"""silu(gate) * up with the exponential in float64.

A vectorised float32 exponential and the scalar one at the end of a loop differ by a bit, and which elements are at an
end depends on the number of rows and threads.  In float64 the difference does not survive the rounding back.
"""

from __future__ import annotations

from torch import Tensor


def silu_mul(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate_size], the gates first
) -> Tensor:  # [num_tokens, intermediate_size]
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    return wide.div_(wide.neg().exp_().add_(1)).to(gate.dtype) * up
