"""`broadcast_data` of core/tensor_parallel/data.py (0.16.1) for mock batches: the fields are views of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

DIMENSIONS: Final = 5
"""`_MAX_DATA_DIM`: sizes that are sent for each field."""


def broadcast_fields(shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """Return fields of these shapes. The first tensor-parallel rank has copied them to the GPU and joins them."""
    from megatron.core import parallel_state as mpu

    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    _broadcast(torch.zeros(DIMENSIONS * len(shapes), dtype=torch.int64, device="cuda"))
    if mpu.get_tensor_model_parallel_rank() == 0:
        flat = torch.cat([torch.zeros(size, dtype=dtype, device="cuda") for size in sizes.values()])
    else:
        flat = torch.empty(sum(sizes.values()), dtype=dtype, device="cuda")
    _broadcast(flat)
    fields, offset = {}, 0
    for name, size in sizes.items():
        fields[name] = flat.narrow(0, offset, size).view(shapes[name])
        offset += size
    return fields


def _broadcast(tensor: torch.Tensor) -> None:
    from megatron.core import parallel_state as mpu

    if mpu.get_tensor_model_parallel_world_size() > 1:
        group = mpu.get_tensor_model_parallel_group()
        torch.distributed.broadcast(tensor, mpu.get_tensor_model_parallel_src_rank(), group=group)
