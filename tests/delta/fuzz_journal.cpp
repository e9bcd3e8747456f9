// Fuzz target: bytes as the journal of an application in place, unchanged and with corrected checksums. A journal that
// parses must stay inside the files it names. It must also have the same effect in one piece and window by window.
#include <cstdlib>
#include <cstring>

#include "delta/digest.hpp"
#include "delta/journal.hpp"

using namespace echoline::delta;

namespace {

constexpr std::uint64_t kFileBytesMax = 1 << 16;  // larger files are not made here
constexpr std::size_t kDigestBytes = 16;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_meaning(const Journal& journal, std::size_t file) {
  std::vector<std::byte> whole(static_cast<std::size_t>(journal.files[file].bytes), std::byte{7});
  std::vector<std::byte> pieces = whole;
  constexpr std::size_t kWindowBytes = 61;  // elements lie across its ends
  std::size_t set = 0;
  for (const JournalRecord& r : journal.records) {
    if (r.file != file) continue;
    overlay(r, 0, whole, [&](std::uint64_t begin, std::uint64_t end) {
      require(begin >= r.first_byte && end <= r.end() && begin < end);
      set += end - begin;
    });
    for (std::size_t at = 0; at < pieces.size(); at += kWindowBytes)
      overlay(r, at, std::span(pieces).subspan(at, std::min(kWindowBytes, pieces.size() - at)),
              [&](std::uint64_t begin, std::uint64_t end) { set -= end - begin; });
  }
  require(whole == pieces && set == 0);
}

void try_journal(std::span<const std::byte> bytes) {
  const auto journal = parse_journal(bytes);
  if (!journal) return;
  const JournalRecord* last = nullptr;
  for (const JournalRecord& r : journal->records) {
    require(r.file < journal->files.size() && r.first_byte < r.end() && r.end() <= journal->files[r.file].bytes);
    require(!last || last->file < r.file || (last->file == r.file && last->end() <= r.first_byte));
    for (const auto part : {r.positions, r.values})
      require(part.empty() ||
              (part.data() >= bytes.data() && part.data() + part.size() <= bytes.data() + bytes.size()));
    last = &r;
  }
  for (std::size_t i = 0; i < journal->files.size(); ++i)
    if (journal->files[i].bytes <= kFileBytesMax) check_meaning(*journal, i);
}

std::uint64_t number(const std::vector<std::byte>& from, std::size_t at, std::size_t bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, from.data() + at, bytes);
  return value;
}

// Corrects every checksum that can be found, so that damage reaches the checks behind them.
void fix_checksums(std::vector<std::byte>& journal) {
  Digest chain;
  const auto seal = [&](std::size_t begin, std::size_t end) {
    if (end < begin || journal.size() < kDigestBytes || end > journal.size() - kDigestBytes) return false;
    const Digest sum = digest_bytes(std::span(journal).subspan(begin, end - begin));
    std::memcpy(journal.data() + end, sum.bytes.data(), kDigestBytes);
    std::byte both[2 * kDigestBytes];
    std::memcpy(both, chain.bytes.data(), kDigestBytes);
    std::memcpy(both + kDigestBytes, sum.bytes.data(), kDigestBytes);
    chain = digest_bytes(both);
    return true;
  };
  if (journal.size() < 48) return;
  std::size_t at = 48;
  for (std::uint64_t files = number(journal, 12, 4); files > 0; --files) {
    if (at + 10 > journal.size()) return;
    at += 10 + number(journal, at + 8, 2);
  }
  if (!seal(0, at)) return;
  for (at += kDigestBytes; at + 32 <= journal.size();) {
    const std::uint64_t kind = number(journal, at, 1), element_bytes = number(journal, at + 1, 1);
    const std::uint64_t count = number(journal, at + 24, 8);
    if (kind == 3 && at + 32 + kDigestBytes <= journal.size())
      std::memcpy(journal.data() + at + 32, chain.bytes.data(), kDigestBytes);
    if (kind == 3 || count > journal.size()) return;
    const std::size_t end = at + 32 + count * element_bytes + (kind == 2 ? 4 * count : 0);
    if (!seal(at, end)) return;
    at = end + kDigestBytes;
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
