"""Shards of a policy, for trainers whose ranks hold parts of it (FSDP2, tensor parallelism)."""
from __future__ import annotations

import json
from typing import Any, Dict, Mapping, NamedTuple, Sequence

from .safetensors import Tensor, of_torch, pack


class Shard(NamedTuple):
    """A box of a tensor: `content` begins at index `offset` of a tensor with this shape."""

    content: Tensor
    shape: Sequence[int]
    offset: Sequence[int]


def of_state(state: Mapping[str, Any], rank: int) -> Dict[str, Shard]:
    """The shards of this rank. `state` maps Hugging Face's names to torch tensors, as model.state_dict() of FSDP2 does:
    DTensors, of which the rank holds a part, and plain tensors, which all ranks hold and rank 0 hands in. Floating
    point numbers become BF16."""
    shards = {}
    for name, value in state.items():
        if hasattr(value, "to_local"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            local = value.to_local()
            if local.numel() > 0 and not _is_copy(value):
                shards[name] = Shard(of_torch(local), tuple(value.shape), tuple(offset))
        elif rank == 0:
            shards[name] = Shard(of_torch(value), tuple(value.shape), (0,) * value.dim())
    return shards


def _is_copy(value: Any) -> bool:
    """Whether another rank holds the same part and hands it in: along a replicated dimension of the mesh, only index 0
    does."""
    coordinate = value.device_mesh.get_coordinate()
    for placement, index in zip(value.placements, coordinate):
        if placement.is_partial():
            raise ValueError("a partial DTensor has no values of the policy: redistribute it first")
        if placement.is_replicate() and index != 0:
            return True
    return False


def pack_part(shards: Mapping[str, Shard], rank: int, ranks: int, attempt: str) -> bytes:
    """The body of POST /v1/policy/VERSION/shards: one rank's part."""
    tensors = {name: {"name": name, "shape": list(shard.shape), "offset": list(shard.offset)}
               for name, shard in shards.items()}
    metadata = {"rank": rank, "ranks": ranks, "attempt": attempt, "tensors": tensors}
    return pack({name: shard.content for name, shard in shards.items()}, {"echoline_shards": json.dumps(metadata)})
