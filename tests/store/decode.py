#!/usr/bin/env python3
"""Reads a policy store by docs/store.md and delta/FORMAT.md alone, without echoline: checks every signature, hash and
link of the versions in a folder, and rebuilds each snapshot. Prints one line per version."""
import ctypes
import hashlib
import pathlib
import struct
import sys

xxh, zstd = ctypes.CDLL("libxxhash.so.0"), ctypes.CDLL("libzstd.so.1")
class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]
xxh.XXH3_128bits.restype, xxh.XXH3_128bits.argtypes = Hash128, [ctypes.c_char_p, ctypes.c_size_t]
zstd.ZSTD_decompress.restype = ctypes.c_size_t
zstd.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
def xxh3(data):
    found = xxh.XXH3_128bits(data, len(data))
    return struct.pack(">QQ", found.high, found.low)

# Ed25519 (RFC 8032), verification only.
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
def point(data):
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    square = (y * y - 1) * pow(D * y * y + 1, -1, P)
    x = pow(square, (P + 3) // 8, P)
    x = x * pow(2, (P - 1) // 4, P) % P if (x * x - square) % P else x
    assert (x * x - square) % P == 0, "not a point"
    return (x if x & 1 == sign else P - x, y)
def add(a, b):
    product = D * a[0] * b[0] * a[1] * b[1]
    return ((a[0] * b[1] + b[0] * a[1]) * pow(1 + product, -1, P) % P,
            (a[1] * b[1] + a[0] * b[0]) * pow(1 - product, -1, P) % P)
def times(k, a):
    result = (0, 1)
    while k:
        result, a, k = add(result, a) if k & 1 else result, add(a, a), k >> 1
    return result
BASE = point(bytes([88] + [102] * 31))
def signed(text, context, key):
    """The fields of a signed text, by the first word of each line."""
    body, signature = text.rsplit(b"signature ", 1)
    signature = bytes.fromhex(signature.decode().strip())
    message = b"echoline/" + context + b"\0" + body
    h = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    s = int.from_bytes(signature[32:], "little")
    assert s < L and times(s, BASE) == add(point(signature[:32]), times(h, point(key))), "wrong signature"
    return dict(line.split(" ", 1) for line in body.decode().splitlines())

def varint(data, at):
    number = shift = 0
    while True:
        number, shift, at = number | (data[at] & 127) << shift, shift + 7, at + 1
        if data[at - 1] < 128: return number, at
def stream(data, at):
    kind, (size, at) = data[at], varint(data, at + 1)
    if kind == 0: return data[at:at + size], at + size
    packed, at = varint(data, at)
    out = ctypes.create_string_buffer(size)
    assert zstd.ZSTD_decompress(out, size, data[at:at + packed], packed) == size, "zstd"
    return out.raw, at + packed
def frames(patch):
    assert patch[:8] == b"ECHOPTCH" and struct.unpack_from("<H", patch, 8)[0] in (3, 4), "not a patch"
    at, found = 10, []
    while at < len(patch):
        end = at + 5 + struct.unpack_from("<I", patch, at + 1)[0]
        assert patch[end:end + 8] == xxh3(patch[at:end])[:8], "checksum of a frame"
        found.append((patch[at:at + 1], patch[at + 5:end]))
        at = end + 8
    return found

SIZES = {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 8, 13: 8, 14: 8}
FLOATS = (3, 4, 7, 8, 11, 14)
def digest_of_snapshot(found):
    (count,), (table, _) = struct.unpack_from("<I", found[0][1], 1), stream(found[0][1], 5)
    tensors, at = [], 0
    for _ in range(count):
        size, at = varint(table, at)
        name, dtype, rank, at, shape = table[at:at + size], table[at + size], table[at + size + 1], at + size + 2, []
        for _ in range(rank):
            dimension, at = varint(table, at)
            shape.append(dimension)
        tensors.append((name, dtype, shape, bytearray()))
    for _, body in found[1:-1]:
        tensor, at = varint(body, 0)
        for _ in range(2): _, at = varint(body, at)  # the segment and the number of layers, 1
        elements, at = varint(body, at + 1)
        for _ in range(2): _, at = varint(body, at)  # entropy and length
        dtype = tensors[tensor][1]
        planes = []
        for _ in range(SIZES[dtype]):
            plane, at = stream(body, at)
            planes.append(plane)
        bits = 8 * SIZES[dtype]
        for element in zip(*planes):
            value = int.from_bytes(bytes(element), "big")
            if dtype in FLOATS: value = value >> 1 | (value & 1) << (bits - 1)
            tensors[tensor][3].extend(value.to_bytes(bits // 8, "little"))
    whole = b"echoline.state.2" + struct.pack("<Q", count)
    for name, dtype, shape, data in tensors:
        leaves = b"".join(xxh3(bytes(data[i:i + 65536])) for i in range(0, len(data), 65536))
        head = struct.pack("<BBH", dtype, len(shape), len(name)) + name
        whole += xxh3(head + struct.pack(f"<{len(shape)}Q", *shape) + leaves)
    return xxh3(whole).hex()

root = pathlib.Path(sys.argv[1])
run = (root / "run").read_bytes()
key = bytes.fromhex(run.split(b"key ")[1][:64].decode())
assert signed(run, b"store run", key)["echoline-store"] == "1"
digests, versions = {}, []
for ready in sorted([*root.glob("snapshots/*/ready"), *root.glob("deltas/*/ready")]):
    text = (ready.parent / "manifest").read_bytes()
    assert ready.read_text() == hashlib.sha256(text).hexdigest() + "\n", f"{ready}: not of its manifest"
    manifest = signed(text, b"store manifest", key)
    patch = (ready.parent / f"{int(manifest['term']):012}.patch").read_bytes()
    assert len(patch) == int(manifest["patch-bytes"]) and manifest["version"] == ready.parent.name
    assert hashlib.sha256(patch).hexdigest() == manifest["patch-sha256"], f"{ready}: another patch"
    found = frames(patch)
    base, result = found[-1][1][:16].hex(), found[-1][1][16:32].hex()
    assert result == manifest["digest"] and base == manifest["base-digest"].replace("none", "0" * 32)
    if manifest["kind"] == "snapshot": assert digest_of_snapshot(found) == result, f"{ready}: weights"
    assert digests.setdefault(manifest["version"], result) == result, "two policies of one version"
    versions.append(manifest)
for manifest in versions:
    if manifest["base"] in digests: assert digests[manifest["base"]] == manifest["base-digest"], "a broken chain"
newest, _ = (root / "latest").read_bytes().split(b"echoline-manifest")[1:]
newest = signed(b"echoline-manifest" + newest, b"store manifest", key)
assert digests[newest["version"]] == newest["digest"], "latest is not ready"
for manifest in sorted(versions, key=lambda manifest: manifest["version"]):
    print(manifest["version"], manifest["kind"], manifest["digest"])
