"""What a part of a layer takes of a tensor or of codes as they are stored."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.description.names import Part
from kernels.ops.linears.codes import Codes


def view_of(part: Part, stored: Tensor) -> Tensor:
    """What a slot wants of a stored tensor; a view of it wherever it can be one."""
    found = stored if part.expert is None else stored[part.expert]
    found = rows_of_part(part, found.T if part.transposed else found)
    if part.columns is not None:
        found = found[:, part.columns]
    if part.absorbed:
        found = found.T
    return found.float() + 1.0 if part.plus_one else found


def rows_of_part(part: Part, found: Tensor) -> Tensor:
    """Those that a part takes of a matrix [out_features, ...], in its order."""
    if part.rows is not None:
        found = found[part.rows]
    if part.head_order is not None:
        heads = found.view(-1, part.head_rows or len(part.head_order), *found.shape[1:])
        found = heads[:, list(part.head_order)].flatten(0, 1)
    return found if part.cut is None else found[part.cut]


def as_linear(part: Part) -> Part:
    """A part of one quantised matrix: these are always [out_features, in_features], and of one expert."""
    return replace(part, transposed=False, expert=None)


def rows_of_codes(part: Part, codes: Codes) -> Codes:
    octets = rows_of_part(part, codes.codes.view(torch.uint8)).view(codes.codes.dtype)
    zeros = None if codes.zeros is None else rows_of_part(part, codes.zeros)
    return replace(codes, codes=octets, scales=rows_of_part(part, codes.scales), zeros=zeros)


def is_exact(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a format holds every value of the stored one."""
    return dtype in (stored, torch.float32)


def copied(tensor: Tensor, out: Tensor, rounded: torch.dtype) -> Tensor:
    """Without a copy between where the format holds every value."""
    return out.copy_(tensor if is_exact(tensor.dtype, rounded) else tensor.to(rounded))
