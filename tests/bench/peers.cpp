#include "tests/bench/peers.hpp"

#include <zstd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace echoline::bench {
namespace {

using Bytes = std::span<const std::byte>;
using delta::OwnedState;
using delta::StateView;
using delta::TensorView;

Error broken(std::string_view peer) {
  return fail(Code::kCorrupt, peer, "the blob does not fit the state it is applied to");
}

template <class T>
void put(Blob& out, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

// Reads from the front; after a read past the end, failed() is true and reads give zero or nothing.
class Reader {
 public:
  explicit Reader(Bytes bytes) : rest_(bytes) {}
  bool failed() const { return failed_; }
  Bytes take(std::size_t count) {
    if (count > rest_.size()) return failed_ = true, Bytes{};
    const Bytes taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }
  template <class T>
  T number() {
    T value{};
    if (const Bytes taken = take(sizeof value); !taken.empty()) std::memcpy(&value, taken.data(), sizeof value);
    return value;
  }

 private:
  Bytes rest_;
  bool failed_ = false;
};

// Calls f(position) for every unit of `size` bytes that differs, in order.
template <std::size_t size, class F>
void each_change(Bytes prev, Bytes cur, F&& f) {
  constexpr std::size_t kBlock = 32;
  std::size_t at = 0;
  const auto scan = [&](std::size_t end) {
    for (; at < end; at += size)
      if (std::memcmp(prev.data() + at, cur.data() + at, size) != 0) f(at / size);
  };
  while (at + kBlock <= cur.size()) {
    if (std::memcmp(prev.data() + at, cur.data() + at, kBlock) == 0)
      at += kBlock;
    else
      scan(at + kBlock);
  }
  scan(cur.size());
}

template <class F>
auto with_size(std::size_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(std::integral_constant<std::size_t, 1>{});
    case 2:
      return f(std::integral_constant<std::size_t, 2>{});
    case 4:
      return f(std::integral_constant<std::size_t, 4>{});
    default:
      return f(std::integral_constant<std::size_t, 8>{});
  }
}

// zstd ---------------------------------------------------------------------------------------------------------------

struct FreeContext {
  void operator()(ZSTD_CCtx* c) const { ZSTD_freeCCtx(c); }
  void operator()(ZSTD_DCtx* d) const { ZSTD_freeDCtx(d); }
};

// Memory that costs nothing until it is written.
class Scratch {
 public:
  explicit Scratch(std::size_t size) : size_(size), memory_(new std::byte[size]) {}
  std::byte* data() const { return memory_.get(); }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::unique_ptr<std::byte[]> memory_;
};

Result<Blob> compress(Bytes raw, int level) {
  const Scratch out(ZSTD_compressBound(raw.size()));
  const std::size_t n = ZSTD_compress(out.data(), out.size(), raw.data(), raw.size(), level);
  if (ZSTD_isError(n)) return fail(Code::kInternal, "zstd", "{}", ZSTD_getErrorName(n));
  return Blob(out.data(), out.data() + n);
}

Result<Blob> decompress(Bytes frame, std::size_t raw_max) {
  const unsigned long long size = ZSTD_getFrameContentSize(frame.data(), frame.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size > raw_max) return fail(Code::kCorrupt, "zstd", "not a frame we wrote");
  Blob out(static_cast<std::size_t>(size));
  const std::size_t n = ZSTD_decompress(out.data(), out.size(), frame.data(), frame.size());
  if (ZSTD_isError(n) || n != out.size()) return fail(Code::kCorrupt, "zstd", "{}", ZSTD_getErrorName(n));
  return out;
}

// LEB128 gaps and raw values -----------------------------------------------------------------------------------------

Result<Blob> leb128_encode(const StateView& prev, const StateView& cur) {
  Blob out;
  for (std::size_t t = 0; t < cur.size(); ++t) {
    const std::size_t count_at = out.size();
    put(out, std::uint64_t{0});
    std::uint64_t count = 0;
    with_size(dtype_bytes(cur[t].dtype), [&](auto size) {
      std::size_t next = 0;  // first position the gap may point to
      each_change<size>(prev[t].bytes, cur[t].bytes, [&](std::size_t position) {
        std::byte entry[10 + size];
        std::size_t n = 0;
        std::uint64_t gap = position - next;
        for (; gap >= 0x80; gap >>= 7) entry[n++] = static_cast<std::byte>(gap | 0x80);
        entry[n++] = static_cast<std::byte>(gap);
        std::memcpy(entry + n, cur[t].bytes.data() + position * size, size);
        out.insert(out.end(), entry, entry + n + size);
        next = position + 1;
        ++count;
      });
    });
    std::memcpy(out.data() + count_at, &count, sizeof count);
  }
  return out;
}

Status leb128_apply(Bytes blob, OwnedState& state) {
  Reader in(blob);
  const StateView view = state.view();
  for (std::size_t t = 0; t < view.size(); ++t) {
    const auto count = in.number<std::uint64_t>();
    if (count == 0) continue;
    const std::span<std::byte> to = state.mutable_bytes(t);
    const std::size_t size = dtype_bytes(view[t].dtype);
    std::uint64_t position = 0;
    for (std::uint64_t i = 0; i < count; ++i, ++position) {
      std::uint64_t gap = 0;
      for (unsigned shift = 0; shift < 63; shift += 7) {
        const auto byte = in.number<std::uint8_t>();
        gap |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
        if (byte < 0x80) break;
      }
      const Bytes value = in.take(size);
      position += gap;
      if (in.failed() || position >= to.size() / size) return broken("LEB128 gaps");
      std::memcpy(to.data() + position * size, value.data(), size);
    }
  }
  state.seal();
  return ok();
}

// PULSE v3.1 ---------------------------------------------------------------------------------------------------------

// Appends `values` in the narrowest of the given widths (1, 2, 4) that fits all; returns the width.
std::size_t put_narrow(Blob& out, const std::vector<std::uint32_t>& values, std::size_t narrowest) {
  std::uint32_t highest = 0;
  for (const std::uint32_t value : values) highest = std::max(highest, value);
  const std::size_t width = std::max<std::size_t>(narrowest, highest < 1u << 8 ? 1 : highest < 1u << 16 ? 2 : 4);
  const std::size_t at = out.size();
  out.resize(at + width * values.size());
  std::byte* to = out.data() + at;
  for (const std::uint32_t value : values) {
    std::memcpy(to, &value, width);  // little endian
    to += width;
  }
  return width;
}

std::uint64_t columns_of(const TensorView& tensor) {
  if (tensor.shape.size() < 2 || tensor.shape[0] == 0)
    return std::max<std::uint64_t>(1, tensor.bytes.size() / dtype_bytes(tensor.dtype));
  return tensor.bytes.size() / dtype_bytes(tensor.dtype) / static_cast<std::uint64_t>(tensor.shape[0]);
}

Result<Blob> pulse_encode(const StateView& prev, const StateView& cur) {
  Blob body;
  std::string header = R"({"version":"3.1","tensors":[)";
  std::vector<std::uint32_t> rows, columns;
  Blob values;
  for (std::size_t t = 0; t < cur.size(); ++t) {
    rows.clear();
    columns.clear();
    values.clear();
    const std::uint64_t width = columns_of(cur[t]);
    const std::uint64_t elements = cur[t].bytes.size() / dtype_bytes(cur[t].dtype);
    if (elements > 0x7fffffff)
      return fail(Code::kInvalid, "PULSE", "tensor '{}' has more than 2^31 elements", cur[t].name);
    with_size(dtype_bytes(cur[t].dtype), [&](auto size) {
      std::uint64_t row = 0, row_begin = 0, last_row = 0, last_column = 0;
      each_change<size>(prev[t].bytes, cur[t].bytes, [&](std::size_t position) {
        for (; position - row_begin >= width; row_begin += width) ++row;
        const std::uint64_t column = position - row_begin;
        rows.push_back(static_cast<std::uint32_t>(row - last_row));
        columns.push_back(static_cast<std::uint32_t>(row == last_row ? column - last_column : column));
        const std::byte* value = cur[t].bytes.data() + position * size;
        values.insert(values.end(), value, value + size);
        last_row = row;
        last_column = column;
      });
    });
    if (rows.empty()) continue;
    const std::size_t row_width = put_narrow(body, rows, 1);
    const std::size_t column_width = put_narrow(body, columns, 2);
    body.insert(body.end(), values.begin(), values.end());
    header += fmt::format(R"({}{{"name":"{}","index":{},"count":{},"row_bytes":{},"column_bytes":{}}})",
                          header.back() == '[' ? "" : ",", cur[t].name, t, rows.size(), row_width, column_width);
  }
  header += "]}";
  Blob raw;
  raw.reserve(4 + header.size() + body.size());
  put(raw, static_cast<std::uint32_t>(header.size()));
  const Bytes header_bytes = std::as_bytes(std::span(header));
  raw.insert(raw.end(), header_bytes.begin(), header_bytes.end());
  raw.insert(raw.end(), body.begin(), body.end());
  return compress(raw, 1);
}

// The number behind "key": in our own header, from `at` on.
std::uint64_t header_number(std::string_view header, std::string_view key, std::size_t at) {
  const std::size_t found = header.find(key, at);
  return found == std::string_view::npos ? 0 : std::strtoull(header.data() + found + key.size(), nullptr, 10);
}

Status pulse_apply(Bytes blob, OwnedState& state) {
  ECHO_ASSIGN(const Blob raw, decompress(blob, std::size_t{1} << 36));
  Reader in(raw);
  const Bytes header_bytes = in.take(in.number<std::uint32_t>());
  const std::string header(reinterpret_cast<const char*>(header_bytes.data()), header_bytes.size());
  const StateView view = state.view();
  for (std::size_t at = header.find("{\"name\""); at != std::string::npos; at = header.find("{\"name\"", at + 1)) {
    const std::uint64_t t = header_number(header, "\"index\":", at);
    const std::uint64_t count = header_number(header, "\"count\":", at);
    const std::uint64_t row_width = header_number(header, "\"row_bytes\":", at);
    const std::uint64_t column_width = header_number(header, "\"column_bytes\":", at);
    if (t >= view.size() || row_width - 1 > 3 || column_width - 1 > 3) return broken("PULSE");
    const std::size_t size = dtype_bytes(view[t].dtype);
    const Bytes rows = in.take(count * row_width), columns = in.take(count * column_width);
    const Bytes values = in.take(count * size);
    if (in.failed()) return broken("PULSE");
    const std::span<std::byte> to = state.mutable_bytes(t);
    const std::uint64_t width = columns_of(view[t]);
    std::uint64_t row_begin = 0, column = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
      std::uint32_t row_delta = 0, column_delta = 0;
      std::memcpy(&row_delta, rows.data() + i * row_width, row_width);
      std::memcpy(&column_delta, columns.data() + i * column_width, column_width);
      column = row_delta == 0 ? column + column_delta : column_delta;
      row_begin += row_delta * width;
      const std::uint64_t position = row_begin + column;
      if (position >= to.size() / size) return broken("PULSE");
      std::memcpy(to.data() + position * size, values.data() + i * size, size);
    }
  }
  state.seal();
  return ok();
}

// slime, overwrite ---------------------------------------------------------------------------------------------------

Result<Blob> slime_encode(const StateView& prev, const StateView& cur) {
  Blob out, raw, values;
  for (std::size_t t = 0; t < cur.size(); ++t) {
    if (cur[t].bytes.size() > std::numeric_limits<std::uint32_t>::max())
      return fail(Code::kInvalid, "slime", "tensor '{}' has positions above 2^32", cur[t].name);
    raw.clear();
    values.clear();
    put(raw, std::uint32_t{0});
    each_change<1>(prev[t].bytes, cur[t].bytes, [&](std::size_t position) {
      put(raw, static_cast<std::uint32_t>(position));
      values.push_back(cur[t].bytes[position]);
    });
    const auto count = static_cast<std::uint32_t>(values.size());
    std::memcpy(raw.data(), &count, sizeof count);
    raw.insert(raw.end(), values.begin(), values.end());
    ECHO_ASSIGN(const Blob frame, compress(raw, 1));
    put(out, static_cast<std::uint64_t>(frame.size()));
    out.insert(out.end(), frame.begin(), frame.end());
  }
  return out;
}

Status slime_apply(Bytes blob, OwnedState& state) {
  Reader in(blob);
  for (std::size_t t = 0; t < state.size(); ++t) {
    const Bytes frame = in.take(in.number<std::uint64_t>());
    if (in.failed()) return broken("slime");
    ECHO_ASSIGN(const Blob raw, decompress(frame, std::size_t{1} << 36));
    Reader body(raw);
    const auto count = body.number<std::uint32_t>();
    const Bytes positions = body.take(std::size_t{4} * count), values = body.take(count);
    if (body.failed()) return broken("slime");
    if (count == 0) continue;
    const std::span<std::byte> to = state.mutable_bytes(t);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t position = 0;
      std::memcpy(&position, positions.data() + 4 * i, 4);
      if (position >= to.size()) return broken("slime");
      to[position] = values[i];
    }
  }
  state.seal();
  return ok();
}

// zstd --patch-from --------------------------------------------------------------------------------------------------

Blob in_one_piece(const StateView& state) {
  std::size_t size = 0;
  for (const TensorView& tensor : state) size += tensor.bytes.size();
  Blob all;
  all.reserve(size);
  for (const TensorView& tensor : state) all.insert(all.end(), tensor.bytes.begin(), tensor.bytes.end());
  return all;
}

int window_log(std::size_t bytes) {
  int log = 10;
  while ((std::size_t{1} << log) <= bytes) ++log;
  return std::min(log, 31);  // the library's limit
}

Result<Blob> patch_from_encode(const StateView& prev, const StateView& cur) {
  const Blob from = in_one_piece(prev), to = in_one_piece(cur);
  const std::unique_ptr<ZSTD_CCtx, FreeContext> context(ZSTD_createCCtx());
  const auto set = [&](ZSTD_cParameter parameter, int value) {
    return !ZSTD_isError(ZSTD_CCtx_setParameter(context.get(), parameter, value));
  };
  if (!set(ZSTD_c_compressionLevel, 3) || !set(ZSTD_c_windowLog, window_log(std::max(from.size(), to.size()))) ||
      !set(ZSTD_c_enableLongDistanceMatching, 1) ||
      ZSTD_isError(ZSTD_CCtx_refPrefix(context.get(), from.data(), from.size())))
    return fail(Code::kInternal, "zstd --patch-from", "the library refused a parameter");
  const Scratch out(ZSTD_compressBound(to.size()));
  const std::size_t n = ZSTD_compress2(context.get(), out.data(), out.size(), to.data(), to.size());
  if (ZSTD_isError(n)) return fail(Code::kInternal, "zstd --patch-from", "{}", ZSTD_getErrorName(n));
  return Blob(out.data(), out.data() + n);
}

Status patch_from_apply(Bytes blob, OwnedState& state) {
  const Blob from = in_one_piece(state.view());
  const Scratch to(from.size());
  const std::unique_ptr<ZSTD_DCtx, FreeContext> context(ZSTD_createDCtx());
  if (ZSTD_isError(ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, 31)) ||
      ZSTD_isError(ZSTD_DCtx_refPrefix(context.get(), from.data(), from.size())))
    return fail(Code::kInternal, "zstd --patch-from", "the library refused a parameter");
  const std::size_t n = ZSTD_decompressDCtx(context.get(), to.data(), to.size(), blob.data(), blob.size());
  if (ZSTD_isError(n) || n != to.size()) return broken("zstd --patch-from");
  std::size_t at = 0;
  for (std::size_t t = 0; t < state.size(); ++t) {
    const std::span<std::byte> tensor = state.mutable_bytes(t);
    if (!tensor.empty()) std::memcpy(tensor.data(), to.data() + at, tensor.size());
    at += tensor.size();
  }
  state.seal();
  return ok();
}

}  // namespace

const std::vector<Peer>& peers() {
  static const std::vector<Peer> all = {
      {"LEB128 + raw", "LEB128 gaps and new values", leb128_encode, leb128_apply},
      {"PULSE v3.1", "row and column deltas, new values, zstd-1", pulse_encode, pulse_apply},
      {"slime overwrite", "u32 byte positions, new bytes, zstd-1", slime_encode, slime_apply},
      {"zstd patch-from", "zstd-3 with the old weights as prefix", patch_from_encode, patch_from_apply},
  };
  return all;
}

}  // namespace echoline::bench
