// The redo journal of an application in place: the bytes to write to each file of a checkpoint. Once it is durable, the
// writes can be repeated after a crash. A truncated journal does not parse. FORMAT.md, "Journals", defines the bytes;
// in_place.hpp the protocol. Internal to this folder.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "delta/bytes.hpp"
#include "delta/patch.hpp"

namespace echoline::delta {

struct JournalFile {
  std::string name;  // in the journal's folder
  std::uint64_t bytes = 0;
};

// New content for a part of a file; the spans point into the journal.
struct JournalRecord {
  std::size_t file = 0;
  std::uint64_t first_byte = 0;  // of the part within the file
  std::uint64_t byte_count = 0;  // of the part
  std::size_t element_bytes = 0;
  bool whole = false;                    // `values` replaces the whole part
  std::span<const std::byte> positions;  // otherwise: a u32 per changed element, counted from the part's first
  std::span<const std::byte> values;
  std::uint64_t end() const { return first_byte + byte_count; }
};

struct Journal {
  Digest base;    // of the checkpoint before
  Digest result;  // of the checkpoint afterwards
  std::vector<JournalFile> files;
  std::vector<JournalRecord> records;  // ascending by file and first byte, without overlap
};

// Checks every length, checksum and position. kCorrupt names the defect.
Result<Journal> parse_journal(std::span<const std::byte> bytes);

// Writes a journal piece by piece. One thread at a time.
class JournalWriter {
 public:
  using Sink = std::function<Status(std::span<const std::byte>)>;
  explicit JournalWriter(Sink sink) : sink_(std::move(sink)) {}
  // Call begin() first, then add() for each write, and finish() last.
  Status begin(const Digest& base, const Digest& result, const std::vector<JournalFile>& files);
  // Records a write to a tensor; the part begins at `first_byte` of the file.
  Status add(std::size_t file, std::uint64_t first_byte, const TensorWrite& write);
  Status finish();
  std::uint64_t bytes() const { return bytes_; }

 private:
  // Writes `buffer_` with its digest, the seal, and adds the seal to `chain_`.
  Status write_sealed_buffer();
  Sink sink_;
  ByteVector buffer_;
  Digest chain_;  // digest of the seals of all pieces; finish() writes it, so that a missing piece is noticed
  std::uint64_t record_count_ = 0;
  std::uint64_t bytes_ = 0;
};

// Applies a record to `window`, which holds the file's bytes from `window_begin` on. Calls touched(begin, end) with
// each byte range of the file that was set.
template <class Touched>
void apply_record(const JournalRecord& record, std::uint64_t window_begin, std::span<std::byte> window,
                  Touched&& touched) {
  const std::uint64_t window_end = window_begin + window.size();
  // Sets the part of these bytes that is in the window.
  const auto put = [&](std::uint64_t first_byte, const std::byte* values, std::size_t count) {
    const std::uint64_t begin = std::max(first_byte, window_begin), end = std::min(first_byte + count, window_end);
    if (begin >= end) return;
    std::memcpy(window.data() + (begin - window_begin), values + (begin - first_byte),
                static_cast<std::size_t>(end - begin));
    touched(begin, end);
  };
  if (record.whole) return put(record.first_byte, record.values.data(), record.values.size());
  const std::size_t count = record.positions.size() / sizeof(std::uint32_t);
  for (std::size_t i = 0; i < count; ++i) {
    const auto position = load<std::uint32_t>(record.positions.data() + i * sizeof(std::uint32_t));
    put(record.first_byte + position * record.element_bytes, record.values.data() + i * record.element_bytes,
        record.element_bytes);
  }
}

}  // namespace echoline::delta
