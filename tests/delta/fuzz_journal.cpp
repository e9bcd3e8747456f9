// Fuzz target: bytes as the journal of an application in place, unchanged and with corrected checksums. A journal that
// parses must stay inside the files it names. It must also have the same effect in one piece and window by window.
#include <cstdlib>
#include <cstring>

#include "delta/digest.hpp"
#include "delta/journal.hpp"

using namespace echoline::delta;

namespace {

constexpr std::uint64_t kFileBytesMax = 1 << 16;  // no memory is allocated for larger files
constexpr std::size_t kDigestBytes = 16;
// The parts of a journal with a fixed size (FORMAT.md, "Journals").
constexpr std::size_t kHeaderBytes = 48, kFileEntryBytes = 10, kRecordHeadBytes = 32;
constexpr std::uint64_t kSparseRecord = 2, kEndRecord = 3;

void require(bool condition) {
  if (!condition) std::abort();
}

// Applies the records of a file to all of it, and to one window after the other. Both must give the same content.
void check_effect(const Journal& journal, std::size_t file) {
  std::vector<std::byte> at_once(static_cast<std::size_t>(journal.files[file].bytes), std::byte{7});
  std::vector<std::byte> by_windows = at_once;
  constexpr std::size_t kWindowBytes = 61;  // odd, so that elements lie across the ends of windows
  std::size_t bytes_set = 0;                // at once, less those set by windows
  for (const JournalRecord& r : journal.records) {
    if (r.file != file) continue;
    apply_record(r, 0, at_once, [&](std::uint64_t begin, std::uint64_t end) {
      require(begin >= r.first_byte && end <= r.end() && begin < end);
      bytes_set += end - begin;
    });
    for (std::size_t window = 0; window < by_windows.size(); window += kWindowBytes)
      apply_record(r, window, std::span(by_windows).subspan(window, std::min(kWindowBytes, by_windows.size() - window)),
                   [&](std::uint64_t begin, std::uint64_t end) { bytes_set -= end - begin; });
  }
  require(at_once == by_windows && bytes_set == 0);
}

void try_journal(std::span<const std::byte> bytes) {
  const auto journal = parse_journal(bytes);
  if (!journal) return;
  const JournalRecord* previous = nullptr;
  for (const JournalRecord& r : journal->records) {
    require(r.file < journal->files.size() && r.first_byte < r.end() && r.end() <= journal->files[r.file].bytes);
    require(!previous || previous->file < r.file || (previous->file == r.file && previous->end() <= r.first_byte));
    for (const auto part : {r.positions, r.values})
      require(part.empty() ||
              (part.data() >= bytes.data() && part.data() + part.size() <= bytes.data() + bytes.size()));
    previous = &r;
  }
  for (std::size_t i = 0; i < journal->files.size(); ++i)
    if (journal->files[i].bytes <= kFileBytesMax) check_effect(*journal, i);
}

std::uint64_t number_at(const std::vector<std::byte>& journal, std::size_t offset, std::size_t bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, journal.data() + offset, bytes);
  return value;
}

// Corrects every checksum that can be found, so that damage reaches the checks behind them.
void fix_checksums(std::vector<std::byte>& journal) {
  Digest chain;
  const auto seal = [&](std::size_t begin, std::size_t end) {
    if (end < begin || journal.size() < kDigestBytes || end > journal.size() - kDigestBytes) return false;
    const Digest sum = digest_bytes(std::span(journal).subspan(begin, end - begin));
    std::memcpy(journal.data() + end, sum.bytes.data(), kDigestBytes);
    std::byte chain_and_sum[2 * kDigestBytes];
    std::memcpy(chain_and_sum, chain.bytes.data(), kDigestBytes);
    std::memcpy(chain_and_sum + kDigestBytes, sum.bytes.data(), kDigestBytes);
    chain = digest_bytes(chain_and_sum);
    return true;
  };
  if (journal.size() < kHeaderBytes) return;
  std::size_t offset = kHeaderBytes;
  for (std::uint64_t files = number_at(journal, 12, 4); files > 0; --files) {
    if (offset + kFileEntryBytes > journal.size()) return;
    offset += kFileEntryBytes + number_at(journal, offset + 8, 2);
  }
  if (!seal(0, offset)) return;
  for (offset += kDigestBytes; offset + kRecordHeadBytes <= journal.size();) {
    const std::uint64_t kind = number_at(journal, offset, 1), element_bytes = number_at(journal, offset + 1, 1);
    const std::uint64_t count = number_at(journal, offset + 24, 8);
    const std::size_t head_end = offset + kRecordHeadBytes;
    if (kind == kEndRecord && head_end + kDigestBytes <= journal.size())
      std::memcpy(journal.data() + head_end, chain.bytes.data(), kDigestBytes);
    if (kind == kEndRecord || count > journal.size()) return;
    const std::size_t end = head_end + count * element_bytes + (kind == kSparseRecord ? 4 * count : 0);
    if (!seal(offset, end)) return;
    offset = end + kDigestBytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try_journal(bytes);
  std::vector<std::byte> repaired(bytes.begin(), bytes.end());
  fix_checksums(repaired);
  try_journal(repaired);
  return 0;
}
