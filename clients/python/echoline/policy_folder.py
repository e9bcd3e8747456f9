"""The folder in which a worker keeps its policy for an inference server: safetensors files in memory (/dev/shm)."""
from __future__ import annotations

import mmap
import os
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from . import safetensors

Layout = Mapping[str, Tuple[str, Tuple[int, ...]]]  # dtype and shape of each tensor


class PolicyFolder:
    """Maps the files of the folder. The worker overwrites tensors in place, so the mapping shows the newest policy. The
    caller must read only while the worker does not write."""

    def __init__(self, path: str):
        self.path = os.path.realpath(path)
        # File name -> its identity (device, inode, size) and its tensors.
        self._files: Dict[str, Tuple[Tuple[int, ...], Mapping[str, safetensors.Tensor]]] = {}
        self._tensors: Dict[str, safetensors.Tensor] = {}
        self.refresh()

    def refresh(self) -> Layout:
        """Maps files that are new or have been replaced. Returns the layout of all files. Raises ValueError if they are
        not a policy."""
        names = sorted(name for name in os.listdir(self.path) if name.endswith(".safetensors"))
        if not names:
            raise ValueError(f"{self.path}: expected safetensors files, found none")
        files, tensors = {}, {}
        for name in names:
            with open(os.path.join(self.path, name), "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino, status.st_size)
                mapped_before = self._files.get(name)
                if mapped_before is not None and mapped_before[0] == identity:
                    files[name] = mapped_before
                else:
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    mapped_tensors, _metadata = safetensors.unpack(mapping)
                    files[name] = identity, mapped_tensors
            for tensor, value in files[name][1].items():
                if tensor in tensors:
                    raise ValueError(f"{self.path}: {tensor} is in two files")
                tensors[tensor] = value
        self._files, self._tensors = files, tensors
        return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}

    def torch_tensors(self, names: Iterable[str]) -> Iterable[Tuple[str, Any]]:
        """Yields names and tensors, which share the files' memory and must not be written to."""
        for name in names:
            yield name, self._tensors[name].torch(copy=False)


def whole_layers(changed: Set[str], all_names: Iterable[str]) -> Dict[str, List[str]]:
    """Returns the groups of tensors that contain a changed one, by the prefix of their names. A group is a decoder
    layer ("model.layers.3") or a module outside of the layers ("lm_head"). A server that fuses tensors of a layer, such
    as queries, keys and values, must get all of them together."""
    groups: Dict[str, List[str]] = {}
    for name in all_names:
        groups.setdefault(layer_of(name), []).append(name)
    return {prefix: names for prefix, names in groups.items() if not changed.isdisjoint(names)}


def layer_of(name: str) -> str:
    """Returns the prefix of a tensor's name that whole_layers() groups by."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i + 1])
    return ".".join(parts[:-1])
