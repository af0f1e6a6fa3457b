"""Triton kernels, one file per op of `kernels.ops` under the same name; import it only where triton is installed.

Nothing here is NVIDIA's alone: no inline assembly, no library calls, only what Triton's language has since 3.2.
Arithmetic is float32 whatever the tensors hold, and rounds where the reference rounds.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # said outright, because versions of triton differ
