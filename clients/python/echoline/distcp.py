"""Turns a distributed checkpoint of PyTorch (.distcp files) into a folder that `echoline publish` takes.

    python3 -m echoline.distcp CHECKPOINT FOLDER [--key model]

Needs torch. Floating point numbers become BF16.
"""
from __future__ import annotations

import argparse
import os
from typing import Any, Dict

from .safetensors import of_torch, pack


def tensors_in(values: Any, prefix: str = "") -> Dict[str, Any]:
    """The tensors of nested dictionaries, by their joined names."""
    found: Dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(tensors_in(value, f"{prefix}{name}."))
        elif hasattr(value, "detach"):
            found[prefix + name] = value
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description="Turns a distributed checkpoint of PyTorch into safetensors.")
    arguments.add_argument("checkpoint", help="the folder with .metadata and .distcp files")
    arguments.add_argument("folder", help="where model.safetensors is written")
    arguments.add_argument("--key", default="model", help="the part of the checkpoint that is the model")
    a = arguments.parse_args()
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: Dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(a.checkpoint), planner=_EmptyStateDictLoadPlanner(),
                     no_dist=True)
    model = state.get(a.key, state)
    tensors = {name: of_torch(value) for name, value in tensors_in(model).items() if value.is_floating_point()}
    if not tensors:
        arguments.exit(1, f"{a.checkpoint}: no floating point tensors below '{a.key}'; it has {sorted(state)[:20]}\n")
    os.makedirs(a.folder, exist_ok=True)
    temporary = os.path.join(a.folder, "model.safetensors.writing")
    with open(temporary, "wb") as file:
        file.write(pack(tensors))
    os.replace(temporary, os.path.join(a.folder, "model.safetensors"))
    print(f"{len(tensors)} tensors in {a.folder}")


if __name__ == "__main__":
    main()
