"""Shards of a policy, for trainers whose ranks hold parts of it (FSDP2, tensor parallelism)."""
from __future__ import annotations

import json
from typing import Any, Dict, Mapping, NamedTuple, Sequence

from . import safetensors


class Shard(NamedTuple):
    """A box of a tensor: the part that one rank holds."""

    content: Any  # a `Tensor`, or a torch tensor of floating point numbers, which is sent as BF16
    shape: Sequence[int]  # of the whole tensor
    offset: Sequence[int]  # index of the box's first element in the whole tensor


def shards_of_rank(state: Mapping[str, Any], rank: int) -> Dict[str, Shard]:
    """The shards that this rank uploads. `state` maps Hugging Face's names to torch tensors, as model.state_dict() of
    FSDP2 does. A rank holds a part of each DTensor. All ranks hold the plain tensors, and only rank 0 uploads them.
    Floating point numbers become BF16."""
    shards = {}
    for name, value in state.items():
        if hasattr(value, "to_local"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            local_part = value.to_local()
            if local_part.numel() > 0 and not _is_copy(value):
                shards[name] = Shard(local_part, tuple(value.shape), tuple(offset))
        elif rank == 0:
            shards[name] = Shard(value, tuple(value.shape), (0,) * value.dim())
    return shards


def _is_copy(value: Any) -> bool:
    """Whether another rank holds the same part and uploads it. Along a replicated dimension of the mesh (the grid of
    ranks), only the rank with index 0 uploads."""
    mesh_indices = value.device_mesh.get_coordinate()
    for placement, index in zip(value.placements, mesh_indices):
        if placement.is_partial():
            raise ValueError("a partial DTensor has no values of the policy: redistribute it first")
        if placement.is_replicate() and index != 0:
            return True
    return False


def file_of_part(shards: Mapping[str, Shard], rank: int, ranks: int, attempt: str) -> safetensors.File:
    """Returns the body of POST /v1/policy/VERSION/shards: one rank's part. `attempt` is the same text on all ranks. A
    restarted trainer chooses another one, so that the learner does not join parts of two attempts. Torch tensors are
    converted one at a time, while they are sent."""
    boxes = {name: {"name": name, "shape": list(shard.shape), "offset": list(shard.offset)}
             for name, shard in shards.items()}
    metadata = {"rank": rank, "ranks": ranks, "attempt": attempt, "tensors": boxes}
    return safetensors.File({name: shard.content for name, shard in shards.items()},
                            metadata={"echoline_shards": json.dumps(metadata)})
