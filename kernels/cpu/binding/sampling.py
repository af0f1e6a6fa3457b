"""What the native kernels do with logits: the most likely tokens, drawn ones, and where truncation cuts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.binding.contents import check
from kernels.cpu.binding.library import Library


class Sampling(Library):
    """Ops over rows of values."""

    def argmax(
        self,
        logits: Tensor,  # [num_rows, vocab_size] float32
    ) -> Tensor:  # [num_rows] int64
        check(logits, torch.float32, tuple(logits.shape))
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        self._call(self._functions.pg_argmax, logits.data_ptr(), *logits.shape, token_ids.data_ptr())
        return token_ids

    def gumbel_argmax(
        self,
        values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
        cut: Tensor,  # [num_rows] float32
        last_tied: Tensor,  # [num_rows] int64
        keys: tuple[Tensor, Tensor],  # each [num_rows] int64, from `kernels.ops.sampling.noise.row_keys`
    ) -> Tensor:  # [num_rows] int64
        num_rows = len(values)
        check(values, torch.float32, tuple(values.shape))
        check(cut, torch.float32, (num_rows,))
        for column in (last_tied, *keys):
            check(column, torch.int64, (num_rows,))
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        addresses = [column.data_ptr() for column in (cut, last_tied, *keys, token_ids)]
        self._call(self._functions.pg_gumbel_argmax, values.data_ptr(), *values.shape, *addresses)
        return token_ids

    def truncation(
        self,
        values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
        depth: Tensor,  # [num_rows] float64: log(min_p); -inf: off
        top_k: Tensor,  # [num_rows] int64; 0: off
        top_p: Tensor,  # [num_rows] float64; 1: off
    ) -> tuple[Tensor, Tensor]:  # cut [num_rows] float32, last_tied [num_rows] int64
        num_rows = len(values)
        check(values, torch.float32, tuple(values.shape))
        for column, dtype in ((depth, torch.float64), (top_k, torch.int64), (top_p, torch.float64)):
            check(column, dtype, (num_rows,))
        cut, last_tied = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        addresses = [column.data_ptr() for column in (depth, top_k, top_p, cut, last_tied)]
        self._call(self._functions.pg_truncation, values.data_ptr(), *values.shape, *addresses)
        return cut, last_tied
