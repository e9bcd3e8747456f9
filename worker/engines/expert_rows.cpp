// Parses numpy's arrays, whose format NEP 1 describes, and selects the experts of mixture layers.
#include "worker/engines/expert_rows.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "base/text.hpp"

namespace echoline::worker {
namespace {

constexpr std::size_t kValueBytesMax = 4, kHeaderBytesMax = 4096;  // of one number; of a file's header
constexpr std::size_t kFileBytesMax = kValueBytesMax * data_plane::kExpertChoicesMax + kHeaderBytesMax;
constexpr std::size_t kBase64BytesMax = kFileBytesMax / 3 * 4;  // base64 writes 3 bytes as 4 characters
constexpr std::size_t kShownBytesMax = 120;                     // of a text in an error

template <class... Args>
Error corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "experts in the engine's answer", format, std::forward<Args>(args)...);
}

// The bytes of a base64 text with padding; absent for any other text.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  std::uint32_t bits = 0;  // the low 24 are those of the last four characters
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    int value = -1;
    if (c >= 'A' && c <= 'Z') value = c - 'A';
    if (c >= 'a' && c <= 'z') value = c - 'a' + 26;
    if (c >= '0' && c <= '9') value = c - '0' + 52;
    if (c == '+') value = 62;
    if (c == '/') value = 63;
    if (i >= text.size() - padding) value = 0;  // '=': its zero bytes are removed below
    if (value < 0) return std::nullopt;
    bits = bits << 6 | static_cast<std::uint32_t>(value);
    if (i % 4 != 3) continue;
    for (const int shift : {16, 8, 0}) bytes.push_back(static_cast<char>(bits >> shift & 0xff));
  }
  for (std::size_t i = 0; i < padding; ++i) bytes.pop_back();  // for resize(), GCC 12 would give a false warning
  return bytes;
}

// The text that follows "'name':" in a header, without the space before it.
std::string_view field(std::string_view header, std::string_view name) {
  const std::string key = fmt::format("'{}':", name);
  const std::size_t at = header.find(key);
  if (at == std::string_view::npos) return {};
  std::string_view rest = header.substr(at + key.size());
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  return rest;
}

// The three sizes of "(2, 3, 4)"; absent for another text or sizes of more than nine digits.
std::optional<std::array<std::size_t, 3>> three_sizes(std::string_view text) {
  std::array<std::size_t, 3> sizes{};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::string_view before = i == 0 ? "(" : ", ";
    if (!text.starts_with(before)) return std::nullopt;
    text.remove_prefix(before.size());
    constexpr std::size_t kDigitsMax = 9;
    std::size_t digits = 0;
    for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9' && digits < kDigitsMax; ++digits)
      sizes[i] = 10 * sizes[i] + static_cast<std::size_t>(text[digits] - '0');
    if (digits == 0) return std::nullopt;
    text.remove_prefix(digits);
  }
  return text.starts_with(")") ? std::optional(sizes) : std::nullopt;
}

struct NumberType {
  std::string_view name;  // in the header, with its quotes: byte order, kind (i: signed, u: unsigned), bytes
  std::size_t bytes;
  bool is_signed;
};
constexpr NumberType kTypes[] = {{"'|u1'", 1, false}, {"'<u2'", 2, false}, {"'<i2'", 2, true}, {"'<i4'", 4, true}};

// One number of an array, or -1 if it cannot be the index of an expert.
std::int16_t expert_at(const char* data, const NumberType& type) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, data, type.bytes);  // both numpy's number and this machine are little-endian
  std::int64_t value = bits;
  if (type.is_signed) value = type.bytes == 2 ? static_cast<std::int16_t>(bits) : static_cast<std::int32_t>(bits);
  const bool is_expert = value >= 0 && value <= std::numeric_limits<std::int16_t>::max();
  return is_expert ? static_cast<std::int16_t>(value) : std::int16_t{-1};
}

// Removes from a .npy file everything before its numbers. Returns the file's header, a Python dictionary as text.
Result<std::string_view> take_header(std::string_view& file) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  constexpr std::size_t kVersionBytes = 2;  // major and minor
  if (!file.starts_with(kMagic) || file.size() < kMagic.size() + kVersionBytes)
    return corrupt("expected a file of numpy, found '{}'", printable(file, kShownBytesMax));
  const char major = file[kMagic.size()];
  if (major < 1 || major > 3) return corrupt("version {} of numpy's file format, expected 1 to 3", int{major});
  file.remove_prefix(kMagic.size() + kVersionBytes);
  const std::size_t length_bytes = major == 1 ? 2 : 4;  // of the number that gives the header's length
  if (file.size() < length_bytes)
    return corrupt("expected a header after numpy's version, found {} bytes", file.size());
  std::uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), length_bytes);  // both the number and this machine are little-endian
  file.remove_prefix(length_bytes);
  if (header_bytes > file.size()) return corrupt("a header of {} bytes in {}", header_bytes, file.size());
  const std::string_view header = file.substr(0, header_bytes);
  file.remove_prefix(header_bytes);
  return header;
}

}  // namespace

Result<data_plane::RoutedExperts> parse_expert_rows(std::string_view base64) {
  if (base64.size() > kBase64BytesMax)
    return corrupt("{} bytes, at most {} are allowed", base64.size(), kBase64BytesMax);
  const std::optional<std::string> decoded = decode_base64(base64);
  if (!decoded) return corrupt("expected base64, found '{}'", printable(base64, kShownBytesMax));
  std::string_view file = *decoded;  // its numbers, once take_header() has removed what precedes them
  ECHO_ASSIGN(const std::string_view header, take_header(file));
  const auto type = std::ranges::find_if(
      kTypes, [&](const NumberType& candidate) { return field(header, "descr").starts_with(candidate.name); });
  const auto sizes = three_sizes(field(header, "shape"));
  if (type == std::end(kTypes) || !sizes || !field(header, "fortran_order").starts_with("False"))
    return corrupt("expected integers in the shape (tokens, layers, experts), found the header {}",
                   printable(header, kShownBytesMax));
  const auto [tokens, layers, per_token] = *sizes;
  const bool layers_fit = layers >= 1 && layers <= data_plane::kExpertLayersMax;
  const bool experts_fit = per_token >= 1 && per_token <= data_plane::kExpertsPerTokenMax;
  // A division, because the product of all three could overflow; its divisor is at least 1.
  const bool all_fit = layers_fit && experts_fit && tokens <= data_plane::kExpertChoicesMax / (layers * per_token);
  if (!all_fit)
    return corrupt("{} tokens, {} layers and {} experts, expected at most {} numbers", tokens, layers, per_token,
                   data_plane::kExpertChoicesMax);
  const std::size_t count = tokens * layers * per_token;
  if (file.size() != count * type->bytes)
    return corrupt("{} bytes of numbers, expected {} of {} bytes", file.size(), count, type->bytes);
  data_plane::RoutedExperts experts{static_cast<std::uint32_t>(layers), static_cast<std::uint32_t>(per_token), {}};
  experts.values.resize(count);
  for (std::size_t i = 0; i < count; ++i) experts.values[i] = expert_at(file.data() + i * type->bytes, *type);
  // The canonical form of RoutedExperts: a token's experts in a layer ascend. If one of them is invalid or occurs
  // twice, none can be relied on, so all become -1.
  for (auto first = experts.values.begin(); first != experts.values.end();
       first += static_cast<std::ptrdiff_t>(per_token)) {
    const std::span<std::int16_t> choices(first, per_token);
    if (!data_plane::sort_experts(choices)) std::ranges::fill(choices, std::int16_t{-1});
  }
  return experts;
}

void keep_mixture_layers(const model::ModelConfig& model, data_plane::RoutedExperts& experts) {
  if (experts.choices() == 0) return;  // the server reports no experts
  // kCarried: this program cannot compute the model, and does not know which of its layers are mixtures.
  if (model.family == model::Family::kCarried) return;
  const std::int64_t mixtures = model.mixture_layers();
  const bool has_known_layers = experts.layers == mixtures || experts.layers == model.layers;
  if (!model.experts || experts.per_token != model.experts->per_token || !has_known_layers) {
    experts = {};  // experts of another model are of no use
    return;
  }
  if (experts.layers == mixtures) return;  // the server has left out the other layers itself
  data_plane::RoutedExperts kept{static_cast<std::uint32_t>(mixtures), experts.per_token, {}};
  for (std::size_t token = 0; token < experts.tokens(); ++token)
    for (std::int64_t layer = 0; layer < model.layers; ++layer) {
      if (!model.is_mixture(layer)) continue;
      const auto first = experts.values.begin() + (static_cast<std::ptrdiff_t>(token) * model.layers + layer) *
                                                      std::ptrdiff_t{experts.per_token};
      kept.values.insert(kept.values.end(), first, first + experts.per_token);
    }
  experts = std::move(kept);
}

}  // namespace echoline::worker
