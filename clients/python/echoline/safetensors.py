"""Reads and writes the safetensors format with only the standard library."""
from __future__ import annotations

import functools
import json
import math
import mmap
import struct
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Tuple, Union

# Bits per element, by type. Elements of F4 and F6 are packed without gaps.
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
        "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
        "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
# Format codes of the struct module.
_FORMATS: Mapping[str, Any] = {"U8": "B", "BOOL": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I",
                               "F32": "f", "I64": "q", "U64": "Q", "F64": "d"}
# Attributes of the module torch. Older versions lack some of them.
_TORCH_NAMES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
                "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
                "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
                "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
                "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2"}
_PIECE_BYTES = 16 << 20  # tensors are sent in pieces of this size, because a socket's timeout applies to one piece


class Tensor(NamedTuple):
    dtype: str  # a name of BITS
    shape: Tuple[int, ...]
    data: memoryview  # row-major, little endian

    def values(self) -> memoryview[Any]:
        """A flat view of the elements as Python numbers, in row-major order. KeyError for types without a format code:
        BF16, F16, F8, F6, F4 and C64."""
        flat: memoryview[Any] = self.data.cast("B").cast(_FORMATS[self.dtype])
        return flat

    def numpy(self) -> Any:
        """Returns a numpy array that shares the memory. KeyError for BF16, F8, F6 and F4."""
        import numpy

        names = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4",
                 "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8"}
        return numpy.frombuffer(self.data, dtype=names[self.dtype]).reshape(self.shape)

    def torch(self, copy: bool = True) -> Any:
        """Returns a torch tensor. It has its own memory. Without `copy` it shares this tensor's memory, which may be
        read-only. The last dimension of F4 has half its size, because torch stores two elements in one. TypeError for
        F6, and for other types that the installed torch lacks."""
        import torch

        torch_dtype = getattr(torch, _TORCH_NAMES.get(self.dtype, ""), None)
        if torch_dtype is None:
            raise TypeError(f"torch {torch.__version__} has no type for {self.dtype}")
        shape = (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape
        if self.data.nbytes == 0:
            return torch.empty(shape, dtype=torch_dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that is read-only
            flat = torch.frombuffer(bytearray(self.data) if copy else self.data, dtype=torch.uint8)
        return flat.view(torch_dtype).reshape(shape)


def of_torch(value: Any, keep_type: bool = False) -> Tensor:
    """Converts a torch tensor of floating point numbers to BF16. With `keep_type`, it may have any type and keeps it.
    The result then shares the tensor's memory if that is contiguous and on the CPU."""
    dtype, shape = _layout_of_torch(value, keep_type)
    return Tensor(dtype, shape, _data_of_torch(value, keep_type))


def _layout_of_torch(value: Any, keep_type: bool) -> Tuple[str, Tuple[int, ...]]:
    import torch

    shape = tuple(value.shape)
    if not keep_type:
        if value.is_floating_point():
            return "BF16", shape
        raise TypeError(f"expected a tensor of floating point numbers, found {value.dtype}: pass keep_types=True if "
                        "the run's model is one that echoline only carries")
    for name, attribute in _TORCH_NAMES.items():
        if value.dtype == getattr(torch, attribute, None):
            return name, (*shape[:-1], 2 * shape[-1]) if name == "F4" else shape
    raise TypeError(f"a safetensors file has no type for {value.dtype}")


def _data_of_torch(value: Any, keep_type: bool) -> memoryview:
    import torch

    value = value.detach()
    if not keep_type:
        value = value.to(torch.bfloat16)
    value = value.to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    if value.is_complex():
        value = torch.view_as_real(value).reshape(-1)
    return memoryview(value.view(torch.uint8).numpy())


def of_floats(values: Any) -> Tensor:
    """Converts a sequence, numpy array or torch tensor of numbers to a one-dimensional F32 tensor."""
    if hasattr(values, "detach"):
        values = values.detach().to("cpu").numpy()
    if hasattr(values, "astype"):
        data = values.astype("<f4").tobytes()
    else:
        data = struct.pack(f"<{len(values)}f", *values)
    return Tensor("F32", (len(data) // 4,), memoryview(data))


class File:
    """A safetensors file to send. Iterating yields its bytes, as views of the tensors' memory. Torch tensors are
    converted, or copied from their device, one at a time during the iteration. May be iterated several times."""

    def __init__(self, tensors: Mapping[str, Any], keep_types: bool = False, metadata: Mapping[str, str] = {}):
        """The values of `tensors` are `Tensor`s or torch tensors. ValueError if the data of a `Tensor` does not have
        the size of its shape. TypeError as in of_torch()."""
        layouts: Dict[str, Tuple[str, Tuple[int, ...]]] = {}
        sources: Dict[str, Callable[[], memoryview]] = {}
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                layouts[name] = value.dtype, value.shape
                sources[name] = functools.partial(getattr, value, "data")
                if value.data.nbytes != _byte_count(value.dtype, value.shape):
                    raise ValueError(f"{name}: {value.data.nbytes} bytes, expected "
                                     f"{_byte_count(value.dtype, value.shape)}")
            else:
                try:
                    layouts[name] = _layout_of_torch(value, keep_types)
                except TypeError as error:
                    raise TypeError(f"{name}: {error}") from None
                sources[name] = functools.partial(_data_of_torch, value, keep_types)
        # The largest elements come first, so that every tensor is aligned.
        order = sorted(layouts, key=lambda name: (-BITS[layouts[name][0]], name))
        header: Dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name in order:
            dtype, shape = layouts[name]
            nbytes = _byte_count(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        header_json = json.dumps(header).encode()
        header_json += b" " * (-len(header_json) % 8)  # the data begins at a multiple of 8
        self._head = struct.pack("<Q", len(header_json)) + header_json
        self._sources: List[Callable[[], memoryview]] = [sources[name] for name in order]
        self.nbytes = len(self._head) + offset

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        for source in self._sources:
            data = source().cast("B")
            for begin in range(0, data.nbytes, _PIECE_BYTES):
                yield data[begin:begin + _PIECE_BYTES]


def _byte_count(dtype: str, shape: Tuple[int, ...]) -> int:
    return BITS[dtype] * math.prod(shape) // 8


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = {}) -> bytes:
    """Returns the bytes of a safetensors file. ValueError if a tensor's data does not have the size of its shape."""
    return b"".join(File(tensors, metadata=metadata))


def unpack(data: Union[bytes, bytearray, memoryview, mmap.mmap]) -> Tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Returns the tensors of a file, which share the memory of `data`, and its metadata. ValueError if the data is not
    valid."""
    view = memoryview(data)
    if len(view) < 8:
        raise ValueError(f"a safetensors file has at least 8 bytes, found {len(view)}")
    (header_bytes,) = struct.unpack_from("<Q", view)
    if header_bytes > len(view) - 8:
        raise ValueError(f"expected a header of {header_bytes} bytes, found only {len(view) - 8} bytes")
    header = json.loads(bytes(view[8:8 + header_bytes]))
    metadata = header.pop("__metadata__", {})
    body, tensors = view[8 + header_bytes:], {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        is_inside = 0 <= begin <= end <= len(body)
        if not is_inside or 8 * (end - begin) != BITS[entry["dtype"]] * math.prod(entry["shape"]):
            raise ValueError(f"tensor {name}: bytes {begin} to {end} of {len(body)} do not fit its shape "
                             f"{entry['shape']}")
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), body[begin:end])
    return tensors, metadata
