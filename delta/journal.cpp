// Reads and writes journals; in_place.cpp calls it.
#include "delta/journal.hpp"

#include <bit>
#include <set>
#include <tuple>

#include "delta/digest.hpp"

namespace echoline::delta {
namespace {

constexpr std::string_view kMagic = "ECHOJRNL";
constexpr std::uint16_t kFormatVersion = 1;
constexpr std::size_t kFileNameBytesMax = 255;
enum Kind : std::uint8_t { kWhole = 1, kSparse = 2, kEnd = 3 };

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "read journal", "{}", why); }

// Every piece ends with the digest of its bytes (its seal). The chain is the digest of all seals, folded one by one.
Digest next_in_chain(const Digest& chain, const Digest& seal) {
  std::array<std::byte, 2 * sizeof chain.bytes> both;
  std::ranges::copy(chain.bytes, both.begin());
  std::ranges::copy(seal.bytes, both.begin() + sizeof chain.bytes);
  return digest_bytes(both);
}

Digest read_digest(Reader& reader) {
  Digest digest;
  std::ranges::copy(reader.bytes(digest.bytes.size()), digest.bytes.begin());
  return digest;
}

// Reads the seal of a piece, compares it with the bytes read since `whole`, and adds it to `chain`. False if it
// differs.
bool read_seal(ByteSpan whole, Reader& reader, Digest& chain) {
  const Digest found = digest_bytes(whole.first(whole.size() - reader.rest().size()));
  if (read_digest(reader) != found || reader.failed()) return false;
  chain = next_in_chain(chain, found);
  return true;
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

Status read_header(Reader& reader, Journal& journal, Digest& chain) {
  const ByteSpan whole = reader.rest();
  if (!std::ranges::equal(reader.bytes(kMagic.size()), as_byte_span(kMagic)))
    return corrupt("it does not begin like a journal");
  const auto version = reader.number<std::uint16_t>();
  const auto zero = reader.number<std::uint16_t>();
  if (reader.failed() || version != kFormatVersion || zero != 0)
    return corrupt(fmt::format("it has format version {}, this program reads version {}", version, kFormatVersion));
  const auto files = reader.number<std::uint32_t>();
  journal.base = read_digest(reader);
  journal.result = read_digest(reader);
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < files && !reader.failed(); ++i) {
    JournalFile file;
    file.bytes = reader.number<std::uint64_t>();
    const auto length = reader.number<std::uint16_t>();
    const ByteSpan name = reader.bytes(length);
    file.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    if (!reader.failed() &&
        (length > kFileNameBytesMax || !is_plain_name(file.name) || !names.insert(file.name).second))
      return corrupt("a file name in it is not that of a single file in its folder");
    journal.files.push_back(std::move(file));
  }
  if (reader.failed() || !read_seal(whole, reader, chain)) return corrupt("its header is damaged");
  return ok();
}

struct RecordHead {
  std::uint8_t kind, element_bytes;
  std::uint16_t zero;
  std::uint32_t file;
  std::uint64_t first_byte, byte_count, count;
};

RecordHead read_head(Reader& reader) {
  RecordHead f{};
  f.kind = reader.number<std::uint8_t>();
  f.element_bytes = reader.number<std::uint8_t>();
  f.zero = reader.number<std::uint16_t>();
  f.file = reader.number<std::uint32_t>();
  f.first_byte = reader.number<std::uint64_t>();
  f.byte_count = reader.number<std::uint64_t>();
  f.count = reader.number<std::uint64_t>();
  return f;
}

void put_head(ByteVector& out, const RecordHead& f) {
  put(out, f.kind);
  put(out, f.element_bytes);
  put(out, f.zero);
  put(out, f.file);
  put(out, f.first_byte);
  put(out, f.byte_count);
  put(out, f.count);
}

// Reads a record without its seal.
bool read_record(const RecordHead& f, Reader& reader, const Journal& journal, JournalRecord& r) {
  if ((f.kind != kWhole && f.kind != kSparse) || f.zero != 0 || f.file >= journal.files.size()) return false;
  if (f.element_bytes > 8 || !std::has_single_bit(f.element_bytes) || f.byte_count % f.element_bytes != 0) return false;
  const std::uint64_t file_bytes = journal.files[f.file].bytes;
  if (f.byte_count == 0 || f.first_byte > file_bytes || f.byte_count > file_bytes - f.first_byte) return false;
  const std::uint64_t elements = f.byte_count / f.element_bytes;
  // The limit keeps the products below from overflowing.
  if (f.count > elements || f.count > std::uint64_t{1} << 32) return false;
  r = {f.file, f.first_byte, f.byte_count, f.element_bytes, f.kind == kWhole, {}, {}};
  if (r.whole && f.count != elements) return false;
  if (!r.whole) r.positions = reader.bytes(f.count * sizeof(std::uint32_t));
  r.values = reader.bytes(f.count * f.element_bytes);
  if (reader.failed()) return false;
  for (std::size_t i = 0; i < r.positions.size(); i += sizeof(std::uint32_t))
    if (load<std::uint32_t>(r.positions.data() + i) >= elements) return false;
  return true;
}

bool precedes(const JournalRecord& a, const JournalRecord& b) {
  return std::tie(a.file, a.first_byte) < std::tie(b.file, b.first_byte);
}

}  // namespace

Result<Journal> parse_journal(std::span<const std::byte> bytes) {
  Journal journal;
  Digest chain;
  Reader reader(bytes);
  ECHO_TRY(read_header(reader, journal, chain));
  for (;;) {
    const ByteSpan whole = reader.rest();
    const RecordHead f = read_head(reader);
    if (reader.failed()) return corrupt("it is cut short");
    if (f.kind == kEnd) {
      const bool zeros = !f.element_bytes && !f.zero && !f.file && !f.first_byte && !f.byte_count;
      if (!zeros || f.count != journal.records.size() || read_digest(reader) != chain || reader.failed() ||
          !reader.rest().empty())
        return corrupt("its end does not fit its records");
      break;
    }
    JournalRecord record;
    if (!read_record(f, reader, journal, record) || !read_seal(whole, reader, chain))
      return corrupt(fmt::format("record {} in it is damaged", journal.records.size()));
    journal.records.push_back(record);
  }
  std::ranges::sort(journal.records, precedes);
  for (std::size_t i = 1; i < journal.records.size(); ++i)
    if (journal.records[i - 1].file == journal.records[i].file &&
        journal.records[i - 1].end() > journal.records[i].first_byte)
      return corrupt("two of its records cover the same bytes");
  return journal;
}

Status JournalWriter::put_sealed() {
  const Digest seal = digest_bytes(buffer_);
  put_bytes(buffer_, seal.bytes);
  chain_ = next_in_chain(chain_, seal);
  bytes_ += buffer_.size();
  return sink_(buffer_);
}

Status JournalWriter::begin(const Digest& base, const Digest& result, const std::vector<JournalFile>& files) {
  buffer_.clear();
  put_bytes(buffer_, as_byte_span(kMagic));
  put(buffer_, kFormatVersion);
  put(buffer_, std::uint16_t{0});
  put(buffer_, static_cast<std::uint32_t>(files.size()));
  put_bytes(buffer_, base.bytes);
  put_bytes(buffer_, result.bytes);
  for (const JournalFile& file : files) {
    put(buffer_, file.bytes);
    put(buffer_, static_cast<std::uint16_t>(file.name.size()));
    put_bytes(buffer_, as_byte_span(file.name));
  }
  return put_sealed();
}

Status JournalWriter::add(std::size_t file, std::uint64_t first_byte, const TensorWrite& write) {
  buffer_.clear();
  const std::uint64_t count = write.values.size() / write.element_bytes;
  put_head(buffer_, {write.whole ? kWhole : kSparse, static_cast<std::uint8_t>(write.element_bytes), 0,
                     static_cast<std::uint32_t>(file), first_byte, write.byte_count, count});
  if (!write.whole) put_bytes(buffer_, std::as_bytes(std::span(write.positions)));
  put_bytes(buffer_, write.values);
  ++records_;
  return put_sealed();
}

Status JournalWriter::finish() {
  buffer_.clear();
  put_head(buffer_, {kEnd, 0, 0, 0, 0, 0, records_});
  put_bytes(buffer_, chain_.bytes);
  bytes_ += buffer_.size();
  return sink_(buffer_);
}

}  // namespace echoline::delta
