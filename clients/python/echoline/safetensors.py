"""Reads and writes the safetensors format with only the standard library."""
from __future__ import annotations

import json
import math
import struct
from typing import Any, Mapping, NamedTuple, Tuple

# Bits per element. F4 and F6 are packed.
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
        "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
        "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
# Codes of the struct module.
_FORMATS = {"U8": "B", "BOOL": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "F32": "f",
            "I64": "q", "U64": "Q", "F64": "d"}


class Tensor(NamedTuple):
    dtype: str  # a name of BITS
    shape: Tuple[int, ...]
    data: memoryview  # row-major, little endian

    def values(self) -> memoryview:
        """A flat view of the elements as Python numbers, in row-major order. BF16, F16 and F8 are not supported."""
        return self.data.cast("B").cast(_FORMATS[self.dtype])

    def numpy(self) -> Any:
        """As a numpy array that shares the memory. KeyError for BF16 and F8."""
        import numpy

        names = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4",
                 "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8"}
        return numpy.frombuffer(self.data, dtype=names[self.dtype]).reshape(self.shape)

    def torch(self) -> Any:
        """As a torch tensor with its own memory. KeyError for F8."""
        import torch

        if self.dtype == "BF16":
            bits = torch.frombuffer(bytearray(self.data), dtype=torch.int16)
            return bits.view(torch.bfloat16).reshape(self.shape)
        return torch.from_numpy(self.numpy().copy())


def of_torch(value: Any) -> Tensor:
    """Converts a torch tensor of floating point numbers to BF16."""
    import torch

    value = value.detach().to("cpu")
    if value.is_floating_point():
        value = value.to(torch.bfloat16).contiguous().view(torch.int16)
        return Tensor("BF16", tuple(value.shape), memoryview(value.numpy()).cast("B"))
    raise TypeError(f"a policy has floating point tensors, found {value.dtype}")


def of_floats(values: Any) -> Tensor:
    """Converts a sequence, numpy array or torch tensor of numbers to a one-dimensional F32 tensor."""
    if hasattr(values, "detach"):
        values = values.detach().to("cpu").numpy()
    if hasattr(values, "astype"):
        data = values.astype("<f4").tobytes()
    else:
        data = struct.pack(f"<{len(values)}f", *values)
    return Tensor("F32", (len(data) // 4,), memoryview(data))


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file. ValueError if a tensor's data does not have the size of its shape."""
    header, offset, parts = {}, 0, []
    # The largest elements come first, so that every tensor is aligned.
    for name in sorted(tensors, key=lambda n: (-BITS[tensors[n].dtype], n)):
        tensor = tensors[name]
        size = BITS[tensor.dtype] * math.prod(tensor.shape) // 8
        if tensor.data.nbytes != size:
            raise ValueError(f"{name}: {tensor.data.nbytes} bytes, expected {size}")
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
        parts.append(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def unpack(data: bytes) -> Tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """The tensors, which share the memory of `data`, and the metadata. ValueError if the data is not valid."""
    view = memoryview(data)
    if len(view) < 8:
        raise ValueError(f"a safetensors file has at least 8 bytes, found {len(view)}")
    (length,) = struct.unpack_from("<Q", view)
    if length > len(view) - 8:
        raise ValueError(f"expected a header of {length} bytes, found only {len(view) - 8} bytes")
    header = json.loads(bytes(view[8:8 + length]))
    metadata = header.pop("__metadata__", {})
    body, tensors = view[8 + length:], {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(body) or 8 * (end - begin) != BITS[entry["dtype"]] * math.prod(entry["shape"]):
            raise ValueError(f"tensor {name}: bytes {begin} to {end} of {len(body)} do not fit its shape "
                             f"{entry['shape']}")
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), body[begin:end])
    return tensors, metadata
