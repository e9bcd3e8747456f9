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
constexpr std::size_t kFileNameBytesMax = 255;  // as on Linux file systems
// A journal is a header, records and an end. A record replaces a whole part of a file, or single elements.
enum Kind : std::uint8_t { kWhole = 1, kSparse = 2, kEnd = 3 };

Error corrupt(std::string_view defect) { return fail(Code::kCorrupt, "read journal", "{}", defect); }

// Every piece ends with the digest of its bytes (its seal). The chain is the digest of all seals, folded one by one.
Digest next_in_chain(const Digest& chain, const Digest& seal) {
  std::array<std::byte, 2 * sizeof chain.bytes> chain_and_seal;
  std::ranges::copy(chain.bytes, chain_and_seal.begin());
  std::ranges::copy(seal.bytes, chain_and_seal.begin() + sizeof chain.bytes);
  return digest_bytes(chain_and_seal);
}

Digest read_digest(ByteReader& reader) {
  Digest digest;
  std::ranges::copy(reader.read_bytes(digest.bytes.size()), digest.bytes.begin());
  return digest;
}

// Reads the seal of a piece, compares it with the bytes read, and adds it to `chain`. `from_piece`: the reader's bytes
// before it read the piece. False if the seal differs.
bool read_seal(ByteSpan from_piece, ByteReader& reader, Digest& chain) {
  const Digest actual = digest_bytes(from_piece.first(from_piece.size() - reader.remaining().size()));
  if (read_digest(reader) != actual || reader.failed()) return false;
  chain = next_in_chain(chain, actual);
  return true;
}

// Whether the name is that of a file in the journal's folder, not a path.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

Status read_header(ByteReader& reader, Journal& journal, Digest& chain) {
  const ByteSpan from_header = reader.remaining();
  if (!std::ranges::equal(reader.read_bytes(kMagic.size()), as_byte_span(kMagic)))
    return corrupt("it does not begin like a journal");
  const auto version = reader.read_number<std::uint16_t>();
  const auto zero = reader.read_number<std::uint16_t>();  // reserved
  if (reader.failed() || version != kFormatVersion)
    return corrupt(fmt::format("it has format version {}, this program reads version {}", version, kFormatVersion));
  if (zero != 0) return corrupt(fmt::format("its reserved field is {}, expected 0", zero));
  const auto file_count = reader.read_number<std::uint32_t>();
  journal.base = read_digest(reader);
  journal.result = read_digest(reader);
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < file_count && !reader.failed(); ++i) {
    JournalFile file;
    file.bytes = reader.read_number<std::uint64_t>();
    const auto name_bytes = reader.read_number<std::uint16_t>();
    const ByteSpan name = reader.read_bytes(name_bytes);
    file.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    if (!reader.failed() &&
        (name_bytes > kFileNameBytesMax || !is_plain_name(file.name) || !names.insert(file.name).second))
      return corrupt("a file name in it is not that of a single file in its folder");
    journal.files.push_back(std::move(file));
  }
  if (reader.failed() || !read_seal(from_header, reader, chain)) return corrupt("its header is damaged");
  return ok();
}

// The fixed part of a record, or of the journal's end. Members are stored in this order.
struct RecordHead {
  std::uint8_t kind = 0, element_bytes = 0;
  std::uint16_t zero = 0;  // reserved
  std::uint32_t file = 0;
  std::uint64_t first_byte = 0, byte_count = 0;
  std::uint64_t count = 0;  // of changed elements; at the end, of records
};

RecordHead read_head(ByteReader& reader) {
  RecordHead head;
  head.kind = reader.read_number<std::uint8_t>();
  head.element_bytes = reader.read_number<std::uint8_t>();
  head.zero = reader.read_number<std::uint16_t>();
  head.file = reader.read_number<std::uint32_t>();
  head.first_byte = reader.read_number<std::uint64_t>();
  head.byte_count = reader.read_number<std::uint64_t>();
  head.count = reader.read_number<std::uint64_t>();
  return head;
}

void put_head(ByteVector& out, const RecordHead& head) {
  put(out, head.kind);
  put(out, head.element_bytes);
  put(out, head.zero);
  put(out, head.file);
  put(out, head.first_byte);
  put(out, head.byte_count);
  put(out, head.count);
}

// Reads a record without its seal. Returns false if it is malformed.
bool read_record(const RecordHead& head, ByteReader& reader, const Journal& journal, JournalRecord& record) {
  if ((head.kind != kWhole && head.kind != kSparse) || head.zero != 0 || head.file >= journal.files.size())
    return false;
  if (head.element_bytes > 8 || !std::has_single_bit(head.element_bytes) || head.byte_count % head.element_bytes != 0)
    return false;
  const std::uint64_t file_bytes = journal.files[head.file].bytes;
  if (head.byte_count == 0 || head.first_byte > file_bytes || head.byte_count > file_bytes - head.first_byte)
    return false;
  const std::uint64_t elements = head.byte_count / head.element_bytes;
  // The limit keeps the products below from overflowing.
  if (head.count > elements || head.count > std::uint64_t{1} << 32) return false;
  record = {.file = head.file,
            .first_byte = head.first_byte,
            .byte_count = head.byte_count,
            .element_bytes = head.element_bytes,
            .whole = head.kind == kWhole,
            .positions = {},
            .values = {}};
  if (record.whole && head.count != elements) return false;
  if (!record.whole) record.positions = reader.read_bytes(head.count * sizeof(std::uint32_t));
  record.values = reader.read_bytes(head.count * head.element_bytes);
  if (reader.failed()) return false;
  for (std::size_t i = 0; i < record.positions.size(); i += sizeof(std::uint32_t))
    if (load<std::uint32_t>(record.positions.data() + i) >= elements) return false;
  return true;
}

bool precedes(const JournalRecord& a, const JournalRecord& b) {
  return std::tie(a.file, a.first_byte) < std::tie(b.file, b.first_byte);
}

}  // namespace

Result<Journal> parse_journal(std::span<const std::byte> bytes) {
  Journal journal;
  Digest chain;
  ByteReader reader(bytes);
  ECHO_TRY(read_header(reader, journal, chain));
  for (;;) {
    const ByteSpan from_record = reader.remaining();
    const RecordHead head = read_head(reader);
    if (reader.failed()) return corrupt("it is cut short");
    if (head.kind == kEnd) {
      const bool is_zero_otherwise =
          !head.element_bytes && !head.zero && !head.file && !head.first_byte && !head.byte_count;
      if (!is_zero_otherwise || head.count != journal.records.size() || read_digest(reader) != chain ||
          reader.failed() || !reader.remaining().empty())
        return corrupt("its end does not fit its records");
      break;
    }
    JournalRecord record;
    if (!read_record(head, reader, journal, record) || !read_seal(from_record, reader, chain))
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

Status JournalWriter::write_sealed_buffer() {
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
  put(buffer_, std::uint16_t{0});  // reserved
  put(buffer_, static_cast<std::uint32_t>(files.size()));
  put_bytes(buffer_, base.bytes);
  put_bytes(buffer_, result.bytes);
  for (const JournalFile& file : files) {
    put(buffer_, file.bytes);
    put(buffer_, static_cast<std::uint16_t>(file.name.size()));  // the file exists: at most kFileNameBytesMax
    put_bytes(buffer_, as_byte_span(file.name));
  }
  return write_sealed_buffer();
}

Status JournalWriter::add(std::size_t file, std::uint64_t first_byte, const TensorWrite& write) {
  buffer_.clear();
  const std::uint64_t count = write.values.size() / write.element_bytes;
  put_head(buffer_, {.kind = write.whole ? kWhole : kSparse,
                     .element_bytes = static_cast<std::uint8_t>(write.element_bytes),
                     .file = static_cast<std::uint32_t>(file),
                     .first_byte = first_byte,
                     .byte_count = write.byte_count,
                     .count = count});
  if (!write.whole) put_bytes(buffer_, std::as_bytes(std::span(write.positions)));
  put_bytes(buffer_, write.values);
  ++record_count_;
  return write_sealed_buffer();
}

Status JournalWriter::finish() {
  buffer_.clear();
  put_head(buffer_, {.kind = kEnd, .count = record_count_});
  put_bytes(buffer_, chain_.bytes);
  bytes_ += buffer_.size();
  return sink_(buffer_);
}

}  // namespace echoline::delta
