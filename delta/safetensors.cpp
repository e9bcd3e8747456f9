// Parses and writes safetensors files, for checkpoints and for tensors that trainers exchange.
#include "delta/safetensors.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "delta/bytes.hpp"
#include "delta/pending_file.hpp"

namespace echoline::delta {
namespace {

using nlohmann::json;

constexpr std::uint64_t kHeaderBytesMax = 100'000'000;  // as in the safetensors library
constexpr std::string_view kMetadataKey = "__metadata__";

// A tensor as described in the header.
struct Entry {
  std::string name;
  std::optional<DType> dtype;
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::vector<std::int64_t>> offsets;  // begin and end of its bytes within the data
};

// Reads the header's JSON as events: { name: {dtype, shape, data_offsets}, "__metadata__": {text: text} }. For anything
// else the handlers return false and set error().
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  const std::string& error() const { return error_; }
  std::vector<Entry> entries;
  Metadata metadata;

  bool key(string_t& text) override {
    key_ = text;
    if (depth_ == 2) return in_metadata_ ? true : accept_tensor_key();
    // At depth 1 the key is a tensor's name, or that of the metadata.
    in_metadata_ = text == kMetadataKey;
    if (!names_.insert(text).second) return refuse(fmt::format("'{}' occurs twice", text));
    if (!in_metadata_) entries.emplace_back().name = text;
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ == 2 || open_list_) return refuse_value("an object");
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1 && !in_metadata_) {
      const Entry& entry = entries.back();
      if (!entry.dtype || !entry.shape || !entry.offsets)
        return refuse(fmt::format("tensor '{}' lacks its dtype, shape or data_offsets", entry.name));
    }
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || open_list_) return refuse_value("a list");
    if (key_ == "shape") open_list_ = &entries.back().shape.emplace();
    if (key_ == "data_offsets") open_list_ = &entries.back().offsets.emplace();
    return open_list_ ? true : refuse_value("a list");
  }
  bool end_array() override {
    open_list_ = nullptr;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (!open_list_ || value > INT64_MAX) return refuse_value(fmt::format("the number {}", value));
    if (open_list_->size() == kRankMax) return refuse(fmt::format("a list in '{}' is too long", entries.back().name));
    open_list_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool string(string_t& text) override {
    if (open_list_ || depth_ != 2) return refuse_value("a text");
    if (in_metadata_) {
      if (!metadata.emplace(key_, text).second) return refuse(fmt::format("metadata '{}' occurs twice", key_));
      return true;
    }
    if (key_ != "dtype") return refuse_value("a text");
    const auto dtype = parse_dtype(text);
    if (!dtype) return refuse(fmt::format("tensor '{}': {}", entries.back().name, dtype.error().detail));
    entries.back().dtype = *dtype;
    return true;
  }
  bool null() override { return refuse_value("null"); }
  bool boolean(bool) override { return refuse_value("a truth value"); }
  bool number_integer(number_integer_t value) override { return refuse_value(fmt::format("the number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override { return refuse_value("the number " + text); }
  bool binary(binary_t&) override { return refuse_value("bytes"); }
  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    return refuse(fmt::format("it is not valid JSON at byte {}", position));
  }

 private:
  bool accept_tensor_key() {
    const Entry& entry = entries.back();
    const bool is_repeated = (key_ == "dtype" && entry.dtype) || (key_ == "shape" && entry.shape) ||
                             (key_ == "data_offsets" && entry.offsets);
    if (is_repeated) return refuse(fmt::format("tensor '{}' has '{}' twice", entry.name, key_));
    if (key_ != "dtype" && key_ != "shape" && key_ != "data_offsets")
      return refuse(fmt::format("tensor '{}' has the unknown key '{}'", entry.name, key_));
    return true;
  }
  bool refuse(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool refuse_value(std::string_view found) {
    return refuse(depth_ == 0 ? fmt::format("expected an object, found {}", found)
                              : fmt::format("'{}' cannot be {}", key_, found));
  }
  std::string error_;
  std::string key_;  // the latest key at any depth
  std::set<std::string> names_;
  int depth_ = 0;  // of nested objects: 1 in the header, 2 in a tensor's entry or the metadata
  bool in_metadata_ = false;
  std::vector<std::int64_t>* open_list_ = nullptr;  // the list of numbers being read
};

// Creates tensors over `data`, which they must fill exactly. HeaderReader has checked that the optional fields of all
// entries are set.
Result<StateView> place_tensors(std::vector<Entry> entries, ByteSpan data, std::string_view what) {
  // First checks each entry alone, then all in the order of their data.
  const auto error_of = [&](const Entry& entry, std::string_view defect) {
    return fail(Code::kInvalid, "read safetensors", "{}: tensor '{}' {}", what, entry.name, defect);
  };
  for (const Entry& entry : entries) {
    if (entry.offsets->size() != 2 || (*entry.offsets)[0] > (*entry.offsets)[1])
      return error_of(entry, "has data_offsets that are not a begin and an end");
    const auto bytes = tensor_bytes(*entry.dtype, *entry.shape);
    if (!bytes) return error_of(entry, bytes.error().detail);
    const auto span_bytes = static_cast<std::uint64_t>((*entry.offsets)[1] - (*entry.offsets)[0]);
    if (span_bytes != *bytes)
      return error_of(entry,
                      fmt::format("takes {} bytes by type and shape, its data_offsets span {}", *bytes, span_bytes));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return *a.offsets < *b.offsets; });
  StateView tensors;
  std::uint64_t end = 0;  // of the tensors so far, within the data
  for (Entry& entry : entries) {
    const auto begin = static_cast<std::uint64_t>((*entry.offsets)[0]);
    if (begin != end)
      return error_of(entry, fmt::format("begins at data byte {}, expected {} ({})", begin, end,
                                         begin < end ? "tensors overlap" : "there is a gap before it"));
    end = static_cast<std::uint64_t>((*entry.offsets)[1]);
    const ByteSpan bytes = end <= data.size() ? data.subspan(begin, end - begin) : ByteSpan{};
    tensors.push_back(
        {.name = std::move(entry.name), .dtype = *entry.dtype, .shape = std::move(*entry.shape), .bytes = bytes});
  }
  if (end != data.size())
    return fail(Code::kInvalid, "read safetensors",
                "{}: the header describes {} bytes of tensor data, the file has {}: "
                "it is {}",
                what, end, data.size(), end > data.size() ? "cut short; fetch it again" : "too long");
  auto sorted = canonical(std::move(tensors));
  if (!sorted) return fail(Code::kInvalid, "read safetensors", "{}: {}", what, sorted.error().detail);
  return sorted;
}

// The header's JSON for consecutive tensors. Throws json::exception if a text is not UTF-8.
std::string header_text(const StateView& tensors, const Metadata& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += fmt::format("\"{}\":{},", kMetadataKey, json(metadata).dump());
  std::uint64_t offset = 0;
  for (const TensorView& tensor : tensors) {
    text += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)", json(tensor.name).dump(),
                        dtype_name(tensor.dtype), fmt::join(tensor.shape, ","), offset, offset + tensor.bytes.size());
    offset += tensor.bytes.size();
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data begins at a multiple of 8
  return text;
}

}  // namespace

Result<SafetensorsContent> parse_safetensors(std::span<const std::byte> file, std::string_view what) {
  const auto error_of = [&](std::string_view defect) {
    return fail(Code::kInvalid, "read safetensors", "{}: {}", what, defect);
  };
  constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);
  if (file.size() < kLengthBytes)
    return error_of(fmt::format("a safetensors file has at least 8 bytes, this one has {}", file.size()));
  const auto header_bytes = load<std::uint64_t>(file.data());
  if (header_bytes > kHeaderBytesMax)
    return error_of(
        fmt::format("it declares a header of {} bytes, at most {} are allowed; this is not a safetensors file",
                    header_bytes, kHeaderBytesMax));
  if (header_bytes > file.size() - kLengthBytes)
    return error_of(
        fmt::format("it declares a header of {} bytes, so the file should have at least {}, it has {}: it is "
                    "cut short; fetch it again",
                    header_bytes, header_bytes + kLengthBytes, file.size()));
  const ByteSpan header = file.subspan(kLengthBytes, header_bytes);
  const auto* text = reinterpret_cast<const char*>(header.data());
  if (header.empty() || *text != '{')
    return error_of("the header does not start with '{'; this is not a safetensors file");
  HeaderReader reader;
  try {
    if (!json::sax_parse(text, text + header.size(), &reader)) return error_of("bad header: " + reader.error());
  } catch (const std::exception& e) {
    return error_of(fmt::format("bad header: {}", e.what()));
  }
  SafetensorsContent content;
  const ByteSpan data = file.subspan(kLengthBytes + header_bytes);
  ECHO_ASSIGN(content.tensors, place_tensors(std::move(reader.entries), data, what));
  content.metadata = std::move(reader.metadata);
  return content;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile file;
  ECHO_ASSIGN(file.mapping_, MappedFile::open(path, "open safetensors"));
  ECHO_ASSIGN(file.content_, parse_safetensors(file.mapping_.bytes(), path.string()));
  file.path_ = path;
  return file;
}

namespace {

// The start of a file: 8 bytes of length, and the header. Sorts `tensors` into file order.
Result<std::string> file_head(StateView& tensors, const Metadata& metadata, const std::string& where) {
  ECHO_ASSIGN(tensors, canonical(std::move(tensors)));
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorView& a, const TensorView& b) {
    return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
  });
  std::string header;
  try {
    header = header_text(tensors, metadata);
  } catch (const json::exception&) {
    return fail(Code::kInvalid, "write safetensors", "{}: a tensor name or metadata text is not UTF-8", where);
  }
  if (header.size() > kHeaderBytesMax)
    return fail(Code::kInvalid, "write safetensors", "{}: the header takes {} bytes, at most {} are allowed", where,
                header.size(), kHeaderBytesMax);
  if (std::any_of(tensors.begin(), tensors.end(), [](const TensorView& tensor) { return tensor.name == kMetadataKey; }))
    return fail(Code::kInvalid, "write safetensors", "{}: a tensor cannot be named '{}'", where, kMetadataKey);
  const std::uint64_t length = header.size();
  header.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  return header;
}

}  // namespace

Result<std::string> safetensors_bytes(const StateView& state, const Metadata& metadata) try {
  StateView tensors = state;
  ECHO_ASSIGN(std::string file, file_head(tensors, metadata, "in memory"));
  std::size_t file_bytes = file.size();
  for (const TensorView& tensor : tensors) file_bytes += tensor.bytes.size();
  file.reserve(file_bytes);
  for (const TensorView& tensor : tensors)
    file.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  return file;
} catch (const std::bad_alloc&) {
  return fail(Code::kExhausted, "write safetensors", "the file does not fit into memory");
}

Status write_safetensors(const std::filesystem::path& path, const StateView& state, const Metadata& metadata) {
  StateView tensors = state;
  ECHO_ASSIGN(const std::string head, file_head(tensors, metadata, path.string()));
  PendingFile file(path, "write safetensors");
  ECHO_TRY(file.write(as_byte_span(head)));
  for (const TensorView& tensor : tensors) ECHO_TRY(file.write(tensor.bytes));
  return file.commit();
}

}  // namespace echoline::delta
