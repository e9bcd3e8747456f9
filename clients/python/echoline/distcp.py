"""Turns a distributed checkpoint of PyTorch (.distcp files) into a folder that `echoline publish` takes.

    python3 -m echoline.distcp CHECKPOINT FOLDER [--key model]

Needs torch. Floating point numbers become BF16.
"""
from __future__ import annotations

import argparse
import os
from typing import Any, Dict

from . import safetensors


def flatten_tensors(values: Any, prefix: str = "") -> Dict[str, Any]:
    """Returns the tensors of nested dictionaries. The names of the levels are joined with dots."""
    tensors: Dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            tensors.update(flatten_tensors(value, f"{prefix}{name}."))
        elif hasattr(value, "detach"):
            tensors[prefix + name] = value
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description="Turns a distributed checkpoint of PyTorch into safetensors.")
    parser.add_argument("checkpoint", help="the folder with .metadata and .distcp files")
    parser.add_argument("folder", help="where model.safetensors is written")
    parser.add_argument("--key", default="model", help="the part of the checkpoint that is the model")
    arguments = parser.parse_args()
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: Dict[str, Any] = {}
    # These private functions load in one process all that the checkpoint has, whatever its names.
    _load_state_dict(state, storage_reader=FileSystemReader(arguments.checkpoint),
                     planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    model = state.get(arguments.key, state)
    tensors = {name: safetensors.of_torch(value) for name, value in flatten_tensors(model).items()
               if value.is_floating_point()}
    if not tensors:
        parser.exit(1, f"{arguments.checkpoint}: no floating point tensors below '{arguments.key}'; it has "
                       f"{sorted(state)[:20]}\n")
    os.makedirs(arguments.folder, exist_ok=True)
    # Renamed when complete, so that a publication never reads half a file.
    unfinished_path = os.path.join(arguments.folder, "model.safetensors.writing")
    with open(unfinished_path, "wb") as file:
        file.write(safetensors.pack(tensors))
    os.replace(unfinished_path, os.path.join(arguments.folder, "model.safetensors"))
    print(f"{len(tensors)} tensors in {arguments.folder}")


if __name__ == "__main__":
    main()
