// Implements RowFile for the data sets of this folder.
#include "data_plane/adapters/maths/rows.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/random.hpp"
#include "data_plane/limits.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane::maths {
namespace {

constexpr std::size_t kReadBlockBytes = 1u << 20;
constexpr std::size_t kDepthMax = 64;  // nested brackets of a row

std::uint64_t hash_of(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

// Identifies a row by its prompt and reference. 128 bits, so that no two of kRowsMax rows collide by chance.
struct Digest {
  std::uint64_t low, high;
  bool operator==(const Digest&) const = default;
};
struct DigestHash {
  std::size_t operator()(const Digest& digest) const { return digest.low; }
};

Digest digest_of(const Row& row) {
  const XXH128_hash_t prompt = XXH3_128bits(row.prompt.text.data(), row.prompt.text.size());
  const XXH128_hash_t reference = XXH3_128bits(row.reference.data(), row.reference.size());
  // Mixing only the prompt makes the order matter: (a, b) differs from (b, a).
  return {.low = mix64(prompt.low64) + reference.low64, .high = mix64(prompt.high64) + reference.high64};
}

// Whether more brackets are open at once than a row needs. To parse them would take much memory and time.
bool is_nested_too_deep(std::string_view line) {
  std::size_t depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < line.size() && depth <= kDepthMax; ++i) {
    const char c = line[i];
    if (in_string && c == '\\') ++i;  // an escaped quote does not end the string
    if (c == '"') in_string = !in_string;
    if (!in_string && (c == '{' || c == '[')) ++depth;
    if (!in_string && (c == '}' || c == ']') && depth > 0) --depth;
  }
  return depth > kDepthMax;
}

// The value of `key`: the field of that name, or else the nested field to which its dots lead. nullptr if there is
// neither.
const nlohmann::json* value_at(const nlohmann::json& row, std::string_view key) {
  const nlohmann::json* value = &row;
  if (const auto field = row.find(std::string(key)); field != row.end()) return &*field;
  for (;;) {
    const std::size_t dot = key.find('.');
    if (!value->is_object()) return nullptr;
    const auto next = value->find(std::string(key.substr(0, dot)));
    if (next == value->end()) return nullptr;
    value = &*next;
    if (dot == std::string_view::npos) return value;
    key.remove_prefix(dot + 1);
  }
}

// Calls `on_line` with every line, its offset and its number. Returns the first error of `on_line`.
template <class OnLine>
Status for_each_line(const std::filesystem::path& path, int fd, OnLine on_line) {
  std::string pending;  // bytes read that do not yet form a line
  std::uint64_t offset = 0, number = 0;
  std::vector<char> block(kReadBlockBytes);
  for (bool has_more = true; has_more;) {
    const ssize_t bytes_read = ::read(fd, block.data(), block.size());
    if (bytes_read < 0 && errno == EINTR) continue;
    if (bytes_read < 0) return os_error("read rows", path);
    has_more = bytes_read > 0;
    pending.append(block.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes_read, 0)));
    std::size_t begin = 0;
    while (begin < pending.size()) {
      const std::size_t end = std::min(pending.find('\n', begin), pending.size());
      if (end - begin > kRowBytesMax)
        return fail(Code::kInvalid, "read rows", "{}:{}: longer than {} MiB, the limit of a row", path.string(),
                    number + 1, kRowBytesMax >> 20);
      if (end == pending.size() && has_more) break;  // the line continues in the next block
      if (++number > UINT32_MAX)
        return fail(Code::kExhausted, "read rows", "{}: more than {} lines; split it", path.string(), UINT32_MAX);
      ECHO_TRY(on_line(std::string_view(pending).substr(begin, end - begin), offset + begin,
                       static_cast<std::uint32_t>(number)));
      begin = std::min(end + 1, pending.size());
    }
    offset += begin;
    pending.erase(0, begin);
  }
  return ok();
}

}  // namespace

Result<std::string> text_at(const nlohmann::json& row, std::string_view key) {
  const nlohmann::json* value = value_at(row, key);
  if (value != nullptr && value->is_string()) return value->get<std::string>();
  return fail(Code::kInvalid, "", "expected a string '{}'{}", key,
              value == nullptr ? "" : fmt::format(", found {}", value->type_name()));
}

Result<std::string> text_or_number_at(const nlohmann::json& row, std::string_view key) {
  const nlohmann::json* value = value_at(row, key);
  if (value != nullptr && value->is_number_integer()) return value->dump();
  return text_at(row, key);
}

Result<PolicyInput> prompt_at(const nlohmann::json& row, std::string_view key) {
  const nlohmann::json* value = value_at(row, key);
  if (value == nullptr || !value->is_array()) {
    ECHO_ASSIGN(std::string text, text_at(row, key));
    return PolicyInput(std::move(text));
  }
  auto input = read_policy_input(*value, kPromptBytesMax);
  if (!input) return fail(Code::kInvalid, "", "'{}': {}", key, input.error().detail);
  if (input->messages.size() == 1 && input->messages.front().role == "user")
    return PolicyInput(input->text);  // the short form of the same prompt
  return input;
}

Result<Row> read_row(std::string_view line, const RowReader& reader) {
  if (is_nested_too_deep(line)) return fail(Code::kInvalid, "", "expected brackets nested at most {} deep", kDepthMax);
  const auto json = nlohmann::json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return fail(Code::kInvalid, "", "expected a JSON object");
  ECHO_ASSIGN(Row row, reader(json));
  for (const auto& [what, text, bytes_max] : {std::tuple{"prompt", &row.prompt.text, kPromptBytesMax},
                                              std::tuple{"answer", &row.reference, kReferenceBytesMax}}) {
    if (text->empty()) return fail(Code::kInvalid, "", "the {} is empty", what);
    if (text->size() > bytes_max)
      return fail(Code::kInvalid, "", "a {} of {} bytes, expected {} KiB at most", what, text->size(), bytes_max >> 10);
  }
  return row;
}

Result<RowFile> RowFile::open(const std::filesystem::path& path, RowReader reader) {
  const auto file = std::make_shared<const Descriptor>(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file->get() < 0) return os_error("read rows", path);
  struct stat info {};
  if (::fstat(file->get(), &info) != 0) return os_error("read rows", path);
  if (!S_ISREG(info.st_mode)) return fail(Code::kIo, "read rows", "{}: expected a JSON Lines file", path.string());
  RowFile rows(path, file, std::move(reader));
  std::unordered_set<Digest, DigestHash> seen;
  ECHO_TRY(for_each_line(
      path, file->get(), [&](std::string_view line, std::uint64_t offset, std::uint32_t number) -> Status {
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) return ok();
        const auto row = read_row(line, rows.reader_);
        if (!row) return fail(Code::kInvalid, "read rows", "{}:{}: {}", path.string(), number, row.error().detail);
        if (!seen.insert(digest_of(*row)).second) {
          ++rows.repeated_;
          return ok();
        }
        if (rows.places_.size() == kRowsMax)
          return fail(Code::kExhausted, "read rows", "{}:{}: more than {} different rows; split the file",
                      path.string(), number, kRowsMax);
        rows.places_.push_back({.offset = offset,
                                .prompt_hash = hash_of(row->prompt.text),
                                .bytes = static_cast<std::uint32_t>(line.size()),
                                .line = number});
        return ok();
      }));
  if (rows.places_.empty()) return fail(Code::kInvalid, "read rows", "{}: the file has no rows", path.string());
  rows.places_.shrink_to_fit();
  return rows;
}

Result<Row> RowFile::row(std::size_t index) const {
  const RowPlace& place = places_[index];
  std::string line(place.bytes, '\0');
  for (std::size_t bytes_read = 0; bytes_read < line.size();) {
    const ssize_t just_read = ::pread(file_->get(), line.data() + bytes_read, line.size() - bytes_read,
                                      static_cast<off_t>(place.offset + bytes_read));
    if (just_read < 0 && errno == EINTR) continue;
    if (just_read < 0) return os_error("read rows", path_);
    if (just_read == 0) break;  // the file has become shorter, which the check of the hash below notices
    bytes_read += static_cast<std::size_t>(just_read);
  }
  auto row = read_row(line, reader_);
  if (!row || hash_of(row->prompt.text) != place.prompt_hash)
    return fail(Code::kCorrupt, "read rows",
                "{}:{}: the file has changed since it was opened; do not change it during a run, and start again",
                path_.string(), place.line);
  return row;
}

std::optional<std::size_t> RowFile::index_of_line(std::uint32_t line) const {
  const auto place =
      std::lower_bound(places_.begin(), places_.end(), line,
                       [](const RowPlace& row_place, std::uint32_t wanted) { return row_place.line < wanted; });
  if (place == places_.end() || place->line != line) return std::nullopt;
  return static_cast<std::size_t>(place - places_.begin());
}

RowFile RowFile::move_out(const std::function<bool(std::uint64_t prompt_hash)>& is_chosen) {
  RowFile moved_rows(path_, file_, reader_);
  for (const RowPlace& place : places_)
    if (is_chosen(place.prompt_hash)) moved_rows.places_.push_back(place);
  std::erase_if(places_, [&](const RowPlace& place) { return is_chosen(place.prompt_hash); });
  return moved_rows;
}

}  // namespace echoline::data_plane::maths
