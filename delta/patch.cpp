#include "delta/patch.hpp"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>

#include "delta/digest.hpp"
#include "delta/segment.hpp"

namespace echoline::delta {

// Access to the memory of a state that keeps its remembered digests true.
class StateWriter {
 public:
  static std::span<std::byte> memory(OwnedState& state, std::size_t index) {
    OwnedState::Tensor& t = state.tensors_[index];
    return {t.memory.get(), t.byte_count};
  }
  static const std::optional<Digest>& remembered(const OwnedState& state, std::size_t index) {
    return state.tensors_[index].digest;
  }
  static void remember(OwnedState& state, std::size_t index, const Digest& digest) {
    if (state.tensors_[index].sealed) state.tensors_[index].digest = digest;
  }
};

namespace {

constexpr std::string_view kMagic = "ECHOPTCH";
constexpr std::uint16_t kFormatVersion = 1;
constexpr std::size_t kHeaderBytes = 80;
constexpr std::size_t kChecksumBytes = 16;

// Fixed part of a patch, in the order of its fields.
struct Header {
  PatchKind kind = PatchKind::kSnapshot;
  std::uint32_t tensors = 0;
  Digest base;
  Digest result;
  std::uint64_t state_bytes = 0;
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
};

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "read patch", "{}", why); }

// Runs `f`; an allocation that fails becomes kExhausted.
template <class F>
auto guarded(std::string_view operation, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(Code::kExhausted, operation, "out of memory");
  }
}

Digest checksum(ByteSpan bytes) {
  XXH128_canonical_t form;
  XXH128_canonicalFromHash(&form, XXH3_128bits(bytes.data(), bytes.size()));
  Digest digest;
  std::memcpy(digest.bytes.data(), form.digest, digest.bytes.size());
  return digest;
}

std::uint64_t segment_count(std::uint64_t elements) { return (elements + kSegmentElements - 1) / kSegmentElements; }

// ---- encoding ----

// A run of elements of one tensor.
struct Run {
  std::size_t tensor;
  std::size_t first_byte;
  std::size_t byte_count;
};

std::vector<Run> split_into_runs(const StateView& state) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < state.size(); ++i) {
    const std::size_t step = kSegmentElements * dtype_bytes(state[i].dtype);
    for (std::size_t at = 0; at < state[i].bytes.size(); at += step)
      runs.push_back({i, at, std::min(step, state[i].bytes.size() - at)});
  }
  return runs;
}

// Calls work(thread's own index, item) for every item below `count`, on up to `threads` threads.
// An exception in any of them is thrown again here.
template <class F>
void for_each_parallel(std::size_t count, unsigned threads, F&& work) {
  threads = static_cast<unsigned>(std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(count, 1)));
  std::atomic<std::size_t> next{0};
  std::vector<std::exception_ptr> failures(threads);
  const auto loop = [&](unsigned self) {
    try {
      for (std::size_t i; (i = next.fetch_add(1)) < count;) work(self, i);
    } catch (...) {
      failures[self] = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (unsigned t = 1; t < threads; ++t) helpers.emplace_back(loop, t);
    loop(0);
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

Status check_same_tensors(const StateView& prev, const StateView& cur) {
  const auto complain = [](const TensorView& t, std::string_view why) {
    return fail(Code::kInvalid, "encode delta",
                "tensor '{}' {}; a delta needs the same tensors on both sides, publish a "
                "snapshot instead",
                t.name, why);
  };
  for (std::size_t i = 0; i < prev.size() || i < cur.size(); ++i) {
    if (i == cur.size() || (i < prev.size() && prev[i].name < cur[i].name))
      return complain(prev[i], "is only in the previous state");
    if (i == prev.size() || cur[i].name < prev[i].name) return complain(cur[i], "is only in the new state");
    if (prev[i].dtype != cur[i].dtype)
      return complain(
          cur[i], fmt::format("changes its type from {} to {}", dtype_name(prev[i].dtype), dtype_name(cur[i].dtype)));
    if (prev[i].shape != cur[i].shape)
      return complain(cur[i], fmt::format("changes its shape from [{}] to [{}]", fmt::join(prev[i].shape, ", "),
                                          fmt::join(cur[i].shape, ", ")));
  }
  return ok();
}

ByteVector encode_table(const StateView& state) {
  ByteVector table;
  for (const TensorView& t : state) {
    put_varint(table, t.name.size());
    put_bytes(table, as_byte_span(t.name));
    put(table, static_cast<std::uint8_t>(t.dtype));
    put(table, static_cast<std::uint8_t>(t.shape.size()));
    for (const std::int64_t dim : t.shape) put_varint(table, static_cast<std::uint64_t>(dim));
  }
  return table;
}

void put_header(ByteVector& out, const Header& h) {
  put_bytes(out, as_byte_span(kMagic));
  put(out, kFormatVersion);
  put(out, static_cast<std::uint8_t>(h.kind));
  put(out, std::uint8_t{0});
  put(out, h.tensors);
  put_bytes(out, h.base.bytes);
  put_bytes(out, h.result.bytes);
  put(out, h.state_bytes);
  put(out, h.elements);
  put(out, h.changed);
  put(out, std::uint64_t{0});
}

Digest digest_of_canonical(const StateView& state, unsigned threads) {
  std::vector<Digest> digests(state.size());
  for_each_parallel(state.size(), threads, [&](unsigned, std::size_t i) { digests[i] = digest_tensor(state[i]); });
  return combine_digests(digests);
}

// Both kinds; `prev` and `cur` are canonical.
Result<ByteVector> encode(const StateView* prev, const StateView& cur, const EncodeOptions& options,
                          PatchStats* stats) {
  if (cur.size() > UINT32_MAX) return fail(Code::kInvalid, "encode patch", "more than 2^32 - 1 tensors");
  Header header;
  header.kind = prev ? PatchKind::kDelta : PatchKind::kSnapshot;
  header.tensors = static_cast<std::uint32_t>(cur.size());
  if (prev) header.base = digest_of_canonical(*prev, options.threads);
  header.result = digest_of_canonical(cur, options.threads);

  const std::vector<Run> runs = split_into_runs(cur);
  std::vector<ByteVector> segments(runs.size());
  std::atomic<std::uint64_t> changed{0};
  const unsigned threads = std::clamp(options.threads, 1u, 256u);
  std::vector<std::unique_ptr<SegmentEncoder>> encoders(threads);
  for_each_parallel(runs.size(), threads, [&](unsigned self, std::size_t i) {
    if (!encoders[self]) encoders[self] = std::make_unique<SegmentEncoder>(options.zstd_level);
    const auto part = [&](const StateView& s) {
      return s[runs[i].tensor].bytes.subspan(runs[i].first_byte, runs[i].byte_count);
    };
    std::optional<ByteSpan> old;
    if (prev) old = part(*prev);
    changed += encoders[self]->encode(old, part(cur), cur[runs[i].tensor].dtype, segments[i]);
  });
  for (const TensorView& t : cur) {
    header.state_bytes += t.bytes.size();
    header.elements += t.bytes.size() / dtype_bytes(t.dtype);
  }
  header.changed = changed;

  ByteVector out;
  std::size_t total = kHeaderBytes + kChecksumBytes + 4096;
  for (const ByteVector& s : segments) total += s.size();
  out.reserve(total);
  put_header(out, header);
  SegmentEncoder(options.zstd_level).encode_stream(encode_table(cur), SIZE_MAX, out);
  for (ByteVector& s : segments) {
    put_bytes(out, s);
    ByteVector().swap(s);
  }
  put_bytes(out, checksum(out).bytes);
  if (stats) {
    *stats = {header.state_bytes, header.elements, header.changed, out.size(), std::nullopt, header.result};
    if (prev) stats->base = header.base;
  }
  return out;
}

// ---- decoding ----

struct LocatedSegment {
  std::size_t tensor = 0;
  std::size_t first_byte = 0;
  std::size_t byte_count = 0;
  Segment segment;
};

struct ParsedPatch {
  PatchInfo info;
  std::vector<LocatedSegment> segments;
};

Result<Header> parse_header(Reader& reader) {
  Header h;
  const ByteSpan magic = reader.bytes(kMagic.size());
  if (!std::ranges::equal(magic, as_byte_span(kMagic))) return corrupt("these bytes are not a patch (wrong magic)");
  const auto version = reader.number<std::uint16_t>();
  if (version != kFormatVersion)
    return corrupt(fmt::format("patch format version {}, this program reads version {}", version, kFormatVersion));
  const auto kind = reader.number<std::uint8_t>();
  const auto zero = reader.number<std::uint8_t>();
  h.tensors = reader.number<std::uint32_t>();
  for (Digest* d : {&h.base, &h.result}) std::ranges::copy(reader.bytes(d->bytes.size()), d->bytes.begin());
  h.state_bytes = reader.number<std::uint64_t>();
  h.elements = reader.number<std::uint64_t>();
  h.changed = reader.number<std::uint64_t>();
  const auto reserved = reader.number<std::uint64_t>();
  if (reader.failed()) return corrupt("the header is cut short");
  if (kind != 1 && kind != 2) return corrupt(fmt::format("unknown patch kind {}", kind));
  h.kind = static_cast<PatchKind>(kind);
  if (zero != 0 || reserved != 0 || (h.kind == PatchKind::kSnapshot && h.base != Digest{}))
    return corrupt("a reserved field of the header is not zero");
  return h;
}

Result<PatchTensor> parse_table_entry(Reader& reader) {
  PatchTensor t;
  const std::uint64_t name_bytes = reader.varint();
  if (name_bytes > kNameBytesMax) return corrupt("a tensor name is too long");
  const ByteSpan name = reader.bytes(name_bytes);
  t.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  const auto dtype = reader.number<std::uint8_t>();
  const auto rank = reader.number<std::uint8_t>();
  if (reader.failed() || dtype >= kAllDTypes.size() || rank > kRankMax)
    return corrupt("the tensor table is cut short or has an unknown element type or rank");
  t.dtype = static_cast<DType>(dtype);
  for (unsigned i = 0; i < rank; ++i) t.shape.push_back(static_cast<std::int64_t>(reader.varint()));
  if (reader.failed()) return corrupt("the tensor table is cut short");
  const auto bytes = tensor_bytes(t.dtype, t.shape);
  if (!bytes) return corrupt(fmt::format("tensor '{}': {}", t.name, bytes.error().detail));
  t.elements = *bytes / dtype_bytes(t.dtype);
  return t;
}

Result<std::vector<PatchTensor>> parse_table(Reader& reader, const Header& header, const DecodeLimits& limits) {
  const auto beyond = [](std::string_view what, std::uint64_t found, std::uint64_t max) {
    return fail(Code::kExhausted, "read patch", "{} {}, the limit is {}", found, what, max);
  };
  if (header.tensors > limits.tensors_max) return beyond("tensors", header.tensors, limits.tensors_max);
  ECHO_ASSIGN(const Stream stream, read_stream(reader, 0, UINT64_MAX));
  if (stream.raw_bytes > limits.table_bytes_max)
    return beyond("bytes of tensor table", stream.raw_bytes, limits.table_bytes_max);
  ByteVector table(stream.raw_bytes);
  ECHO_TRY(expand_stream(stream, table));
  Reader entries(table);
  std::vector<PatchTensor> tensors;
  std::uint64_t state_bytes = 0;
  for (std::uint32_t i = 0; i < header.tensors; ++i) {
    ECHO_ASSIGN(PatchTensor t, parse_table_entry(entries));
    if (!tensors.empty() && t.name <= tensors.back().name) return corrupt("the tensor table is not in canonical order");
    const std::uint64_t bytes = t.elements * dtype_bytes(t.dtype);
    if (bytes > limits.state_bytes_max - state_bytes)
      return beyond("bytes of state at least", state_bytes + bytes, limits.state_bytes_max);
    state_bytes += bytes;
    tensors.push_back(std::move(t));
  }
  if (!entries.rest().empty()) return corrupt("the tensor table has bytes after its last entry");
  if (state_bytes != header.state_bytes) return corrupt("the tensor table and the header disagree on the state's size");
  return tensors;
}

// Walks every length in the patch; after it the only surprises left are inside compressed streams.
Result<ParsedPatch> parse(ByteSpan patch, const DecodeLimits& limits) {
  if (patch.size() < kHeaderBytes + kChecksumBytes)
    return corrupt(fmt::format("{} bytes are too few for a patch", patch.size()));
  const ByteSpan body = patch.first(patch.size() - kChecksumBytes);
  Reader reader(body);
  ECHO_ASSIGN(const Header header, parse_header(reader));
  if (!std::ranges::equal(checksum(body).bytes, patch.subspan(body.size())))
    return corrupt(
        fmt::format("the checksum does not match: the {} bytes were cut short or changed on the way", patch.size()));
  ParsedPatch parsed;
  PatchInfo& info = parsed.info;
  ECHO_ASSIGN(info.tensors, parse_table(reader, header, limits));
  info.kind = header.kind;
  if (info.kind == PatchKind::kDelta) info.base = header.base;
  info.result = header.result;
  info.state_bytes = header.state_bytes;
  info.patch_bytes = patch.size();
  info.payload_bytes = reader.rest().size();
  for (std::size_t i = 0; i < info.tensors.size(); ++i) {
    PatchTensor& t = info.tensors[i];
    const std::size_t size = dtype_bytes(t.dtype);
    const std::size_t before = reader.rest().size();
    for (std::uint64_t s = 0; s < segment_count(t.elements); ++s) {
      const std::uint64_t first = s * kSegmentElements;
      ECHO_ASSIGN(Segment segment, read_segment(reader, t.dtype, std::min(kSegmentElements, t.elements - first)));
      t.changed += segment.changed;
      if (info.kind == PatchKind::kSnapshot &&
          (segment.coding != SegmentCoding::kDense || segment.changed != segment.elements))
        return corrupt(fmt::format("tensor '{}' of a snapshot is not whole", t.name));
      parsed.segments.push_back(
          {i, static_cast<std::size_t>(first) * size, static_cast<std::size_t>(segment.elements) * size, segment});
    }
    t.payload_bytes = before - reader.rest().size();
    info.elements += t.elements;
    info.changed += t.changed;
  }
  if (!reader.rest().empty()) return corrupt("there are bytes after the last tensor");
  if (info.elements != header.elements || info.changed != header.changed)
    return corrupt("header and payload disagree on the number of elements");
  return parsed;
}

Status check_tensors_match(const PatchInfo& info, const StateView& state) {
  const auto complain = [](const std::string& name, std::string_view why) {
    return fail(Code::kInvalid, "apply delta", "tensor '{}' {}: the patch is of another model", name, why);
  };
  for (std::size_t i = 0; i < info.tensors.size() || i < state.size(); ++i) {
    if (i == info.tensors.size()) return complain(state[i].name, "is not in the patch");
    const PatchTensor& t = info.tensors[i];
    if (i == state.size()) return complain(t.name, "is not in the state");
    if (t.name != state[i].name) return complain(t.name, fmt::format("stands where the state has '{}'", state[i].name));
    if (t.dtype != state[i].dtype || t.shape != state[i].shape)
      return complain(
          t.name, fmt::format("is {} [{}] in the patch and {} [{}] in the state", dtype_name(t.dtype),
                              fmt::join(t.shape, ", "), dtype_name(state[i].dtype), fmt::join(state[i].shape, ", ")));
  }
  return ok();
}

// Replacement values of a whole patch. Written at most once; taken back on destruction unless committed.
class Installation {
 public:
  Installation(OwnedState& state, const std::vector<LocatedSegment>& segments) : state_(state), segments_(segments) {}
  Installation(const Installation&) = delete;
  Installation& operator=(const Installation&) = delete;
  ~Installation() {
    if (written_) swap_all();
  }
  Status resolve(const PatchInfo& info) {
    replacements_.reserve(segments_.size());
    for (const LocatedSegment& s : segments_) {
      ECHO_ASSIGN(Replacement r, decode_replacement(s.segment, info.tensors[s.tensor].dtype, part(s)));
      replacements_.push_back({dtype_bytes(info.tensors[s.tensor].dtype), std::move(r)});
    }
    return ok();
  }
  void write() {
    swap_all();
    written_ = true;
  }
  void commit() { written_ = false; }

 private:
  struct Sized {
    std::size_t element_bytes;
    Replacement replacement;
  };
  std::span<std::byte> part(const LocatedSegment& s) {
    return StateWriter::memory(state_, s.tensor).subspan(s.first_byte, s.byte_count);
  }
  void swap_all() {
    for (std::size_t i = 0; i < segments_.size(); ++i)
      replacements_[i].replacement.swap_with(part(segments_[i]), replacements_[i].element_bytes);
  }
  OwnedState& state_;
  const std::vector<LocatedSegment>& segments_;
  std::vector<Sized> replacements_;
  bool written_ = false;
};

Status apply(ByteSpan patch, OwnedState& state, const DecodeLimits& limits) {
  ECHO_ASSIGN(const ParsedPatch parsed, parse(patch, limits));
  const PatchInfo& info = parsed.info;
  if (info.kind != PatchKind::kDelta)
    return fail(Code::kInvalid, "apply delta", "this patch is a snapshot, expected a delta; decode it instead");
  const StateView view = state.view();
  ECHO_TRY(check_tensors_match(info, view));
  const Digest before = state.digest();
  if (before != *info.base)
    return fail(Code::kStale, "apply delta",
                "the delta applies to the state with digest {}, this state has {}; nothing "
                "was changed",
                info.base->hex(), before.hex());

  Installation installation(state, parsed.segments);
  ECHO_TRY(installation.resolve(info));
  installation.write();
  std::vector<Digest> digests(view.size());
  for (std::size_t i = 0; i < view.size(); ++i) {
    const auto& remembered = StateWriter::remembered(state, i);
    digests[i] = remembered && info.tensors[i].changed == 0 ? *remembered : digest_tensor(view[i]);
  }
  const Digest after = combine_digests(digests);
  if (after != info.result)
    return fail(Code::kCorrupt, "apply delta",
                "the result has digest {}, the patch promised {}; the state was restored", after.hex(),
                info.result.hex());
  installation.commit();
  for (std::size_t i = 0; i < view.size(); ++i) StateWriter::remember(state, i, digests[i]);
  return ok();
}

Result<OwnedState> decode(ByteSpan patch, const DecodeLimits& limits) {
  ECHO_ASSIGN(const ParsedPatch parsed, parse(patch, limits));
  const PatchInfo& info = parsed.info;
  if (info.kind != PatchKind::kSnapshot)
    return fail(Code::kInvalid, "decode snapshot",
                "this patch is a delta to the state with digest {}; it needs that "
                "state to apply to",
                info.base->hex());
  StateView like;
  for (const PatchTensor& t : info.tensors) like.push_back({t.name, t.dtype, t.shape, {}});
  ECHO_ASSIGN(OwnedState state, OwnedState::zeros_like(like));
  for (const LocatedSegment& s : parsed.segments)
    ECHO_TRY(decode_dense(s.segment, info.tensors[s.tensor].dtype,
                          StateWriter::memory(state, s.tensor).subspan(s.first_byte, s.byte_count)));
  if (const Digest found = state.digest(); found != info.result)
    return fail(Code::kCorrupt, "decode snapshot", "the state has digest {}, the patch promised {}", found.hex(),
                info.result.hex());
  return state;
}

}  // namespace

Result<std::vector<std::byte>> encode_delta(const StateView& prev, const StateView& cur, const EncodeOptions& options,
                                            PatchStats* stats) {
  return guarded("encode delta", [&]() -> Result<ByteVector> {
    ECHO_ASSIGN(const StateView before, canonical(prev));
    ECHO_ASSIGN(const StateView after, canonical(cur));
    ECHO_TRY(check_same_tensors(before, after));
    return encode(&before, after, options, stats);
  });
}

Result<std::vector<std::byte>> encode_snapshot(const StateView& cur, const EncodeOptions& options, PatchStats* stats) {
  return guarded("encode snapshot", [&]() -> Result<ByteVector> {
    ECHO_ASSIGN(const StateView sorted, canonical(cur));
    return encode(nullptr, sorted, options, stats);
  });
}

Result<PatchInfo> inspect(std::span<const std::byte> patch, const DecodeLimits& limits) {
  return guarded("read patch", [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(ParsedPatch parsed, parse(patch, limits));
    return std::move(parsed.info);
  });
}

Status apply_delta(std::span<const std::byte> patch, OwnedState& state, const DecodeLimits& limits) {
  return guarded("apply delta", [&] { return apply(patch, state, limits); });
}

Result<OwnedState> decode_snapshot(std::span<const std::byte> patch, const DecodeLimits& limits) {
  return guarded("decode snapshot", [&] { return decode(patch, limits); });
}

}  // namespace echoline::delta
