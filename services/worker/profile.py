"""Measures what the largest step takes beside weights and KV cache."""

from __future__ import annotations

import torch

from shared.config import Settings
from shared.modeling.kv_pool import KVPool
from shared.modeling.llama import Decoder, StepInputs


def peak_activation(model: Decoder, settings: Settings, dtype: torch.dtype) -> int:
    """Bytes above the present that a step of max_num_batched_tokens tokens and max_num_seqs samples needs (GPU)."""
    device, config = model.device, model.config
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    pool = KVPool(
        num_layers=config.num_layers,
        num_blocks=1,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    with torch.inference_mode():
        hidden = model.forward(_largest_inputs(model, settings), pool.layers)
        logits = model.logits(hidden[: settings.max_num_seqs])
        torch.softmax(logits, dim=-1)
    return torch.cuda.max_memory_allocated(device) - before


def _largest_inputs(model: Decoder, settings: Settings) -> StepInputs:
    """Prompts of one length that fill the step, all in block 0: their values do not matter, only their sizes."""
    total = settings.max_num_batched_tokens
    longest = min(total, settings.max_model_len or model.config.max_position_embeddings)
    lengths = [longest] * (total // longest) + ([total % longest] if total % longest else [])
    positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
    tables = torch.zeros(len(lengths), -(-longest // settings.block_size), dtype=torch.int64, device=model.device)
    attention = model.kernels.plan_attention(lengths, lengths, tables, settings.block_size, model.windows)
    slots = positions % settings.block_size
    return StepInputs(torch.zeros_like(positions), positions, slots, attention)
