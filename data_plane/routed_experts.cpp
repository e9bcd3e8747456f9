// The packed form: one byte with the format's number, then a zstd frame. The frame has the numbers of tokens, layers
// and experts per token, and then the experts layer by layer, because the tokens of a layer prefer the same experts.
// Experts that are not known take one 0. Others take the first expert plus 1, then the distance of each expert from the
// one before it, because distances take fewer bits than experts. All are numbers of 7 bits a byte, the lowest first,
// each byte but the last with the highest bit.
#include "data_plane/routed_experts.hpp"

#include <zstd.h>

#include <algorithm>
#include <optional>

namespace echoline::data_plane {
namespace {

constexpr std::string_view kOperation = "routed experts";
constexpr char kFormat = 1;
constexpr int kCompressionLevel = 3;        // zstd's default
constexpr std::size_t kNumberBytesMax = 3;  // numbers up to 2^21
constexpr std::uint32_t kExpertMax = 32767;
constexpr std::size_t kHeaderBytesMax = 3 * 5;

void append_number(std::string& out, std::uint32_t number) {
  for (; number >= 0x80; number >>= 7) out.push_back(static_cast<char>(number | 0x80));
  out.push_back(static_cast<char>(number));
}

// Takes a number of at most `bytes_max` bytes from the front of `in`; absent if there is none, or if it has a shorter
// form.
std::optional<std::uint32_t> take_number(std::string_view& in, std::size_t bytes_max = kNumberBytesMax) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < std::min(bytes_max, in.size()); ++i) {
    const auto byte = static_cast<unsigned char>(in[i]);
    number |= std::uint64_t{byte & 0x7fu} << (7 * i);
    if (byte >= 0x80) continue;
    if ((i > 0 && byte == 0) || number > UINT32_MAX) return std::nullopt;
    in.remove_prefix(i + 1);
    return static_cast<std::uint32_t>(number);
  }
  return std::nullopt;
}

}  // namespace

bool sort_experts(std::span<std::int16_t> experts) {
  std::sort(experts.begin(), experts.end());
  return experts.front() >= 0 && std::adjacent_find(experts.begin(), experts.end()) == experts.end();
}

Status make_canonical(RoutedExperts& experts) {
  if (experts.choices() == 0 || experts.layers > kExpertLayersMax || experts.per_token > kExpertsPerTokenMax ||
      experts.values.size() % experts.choices() != 0)
    return fail(Code::kInvalid, kOperation, "{} values for {} layers and {} experts per token, expected whole tokens",
                experts.values.size(), experts.layers, experts.per_token);
  for (auto first = experts.values.begin(); first != experts.values.end(); first += experts.per_token) {
    const auto last = first + experts.per_token;
    const bool are_known = sort_experts({first, last});
    if (!are_known && !(*first == -1 && *(last - 1) == -1))
      return fail(Code::kInvalid, kOperation,
                  "a token has the experts {} to {} in a layer, expected {} different ones from 0, or only -1", *first,
                  *(last - 1), experts.per_token);
  }
  return ok();
}

void extend(RoutedExperts& known, const RoutedExperts& longer) {
  if (known.choices() == 0) known = {longer.layers, longer.per_token, {}};
  if (longer.layers != known.layers || longer.per_token != known.per_token) return;
  const auto begin = static_cast<std::ptrdiff_t>(std::min(known.values.size(), longer.values.size()));
  known.values.insert(known.values.end(), longer.values.begin() + begin, longer.values.end());
}

std::string pack_experts(const RoutedExperts& experts) {
  const std::size_t tokens = experts.tokens();
  if (tokens == 0 || experts.values.size() > kExpertChoicesMax) return {};
  std::string plain;
  plain.reserve(kHeaderBytesMax + experts.values.size());
  append_number(plain, static_cast<std::uint32_t>(tokens));
  append_number(plain, experts.layers);
  append_number(plain, experts.per_token);
  for (std::size_t layer = 0; layer < experts.layers; ++layer)
    for (std::size_t token = 0; token < tokens; ++token) {
      const std::int16_t* const first = experts.values.data() + (token * experts.layers + layer) * experts.per_token;
      std::int32_t before = -1;
      if (*first < 0) append_number(plain, 0);
      for (std::size_t i = 0; i < experts.per_token && *first >= 0; ++i) {
        append_number(plain, static_cast<std::uint32_t>(first[i] - before));
        before = first[i];
      }
    }
  std::string packed(1 + ZSTD_compressBound(plain.size()), kFormat);
  const std::size_t size =
      ZSTD_compress(packed.data() + 1, packed.size() - 1, plain.data(), plain.size(), kCompressionLevel);
  if (ZSTD_isError(size) != 0 || size + 1 > kRoutedExpertsBytesMax) return {};
  packed.resize(size + 1);
  return packed;
}

Result<RoutedExperts> unpack_experts(std::string_view packed, std::size_t tokens) {
  if (packed.empty()) return RoutedExperts{};
  const auto corrupt = []<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    return fail(Code::kCorrupt, kOperation, format, std::forward<Args>(args)...);
  };
  if (packed.size() > kRoutedExpertsBytesMax)
    return corrupt("{} bytes, at most {} are allowed", packed.size(), kRoutedExpertsBytesMax);
  if (packed[0] != kFormat)
    return corrupt("format {}, expected {}: both ends must run the same release", int{packed[0]}, int{kFormat});
  packed.remove_prefix(1);
  // Checked before anything is unpacked, because a small frame can unpack to any size.
  const unsigned long long size = ZSTD_getFrameContentSize(packed.data(), packed.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN ||
      size > kHeaderBytesMax + kNumberBytesMax * kExpertChoicesMax)
    return corrupt("expected a zstd frame that declares at most {} values", kExpertChoicesMax);
  // The header comes first, so that no more is unpacked than the tokens need.
  std::string plain(std::min<std::size_t>(size, kHeaderBytesMax), '\0');
  ZSTD_DCtx* const context = ZSTD_createDCtx();
  ECHO_CHECK(context != nullptr, "zstd has no memory for a context");
  ZSTD_inBuffer input{packed.data(), packed.size(), 0};
  const auto unpack_rest = [&](std::size_t begin) {
    ZSTD_outBuffer output{plain.data(), plain.size(), begin};
    while (output.pos < output.size) {
      const std::size_t before = output.pos + input.pos;
      const std::size_t result = ZSTD_decompressStream(context, &output, &input);
      if (ZSTD_isError(result) != 0 || output.pos + input.pos == before) return false;
    }
    return true;
  };
  bool is_unpacked = unpack_rest(0);
  std::string_view rest = plain;
  const auto token_count = take_number(rest, 5), layers = take_number(rest, 5), per_token = take_number(rest, 5);
  const bool has_shape = is_unpacked && token_count && layers && per_token && *token_count == tokens && *layers >= 1 &&
                         *layers <= kExpertLayersMax && *per_token >= 1 && *per_token <= kExpertsPerTokenMax;
  const std::size_t header_bytes = plain.size() - rest.size();
  RoutedExperts experts;
  std::size_t values = 0;
  if (has_shape) {
    experts.layers = *layers, experts.per_token = *per_token;
    values = tokens <= kExpertChoicesMax / experts.choices() ? tokens * experts.choices() : kExpertChoicesMax + 1;
    if (values <= kExpertChoicesMax && size <= header_bytes + kNumberBytesMax * values) {
      const std::size_t unpacked = plain.size();
      plain.resize(size);
      is_unpacked = unpack_rest(unpacked);
    }
  }
  ZSTD_freeDCtx(context);
  if (!has_shape)
    return corrupt("expected a zstd frame with the experts of {} tokens, found {}", tokens,
                   is_unpacked && token_count ? fmt::format("a frame for {} tokens", *token_count) : "other bytes");
  if (values > kExpertChoicesMax || plain.size() != size || !is_unpacked)
    return corrupt("{} tokens, {} layers and {} experts per token in {} bytes, expected at most {} values", tokens,
                   *layers, *per_token, size, kExpertChoicesMax);
  rest = std::string_view(plain).substr(header_bytes);
  experts.values.assign(values, -1);
  for (std::size_t layer = 0; layer < experts.layers; ++layer)
    for (std::size_t token = 0; token < tokens; ++token) {
      std::int16_t* const first = experts.values.data() + (token * experts.layers + layer) * experts.per_token;
      std::uint32_t next = 0;  // the expert, plus 1
      for (std::size_t i = 0; i < experts.per_token; ++i) {
        const auto distance = take_number(rest);
        if (distance && *distance == 0 && i == 0) break;  // not known
        if (!distance || *distance == 0 || *distance > kExpertMax + 1 || next + *distance > kExpertMax + 1)
          return corrupt("token {} has no {} different experts from 0 to {} in layer {}", token, experts.per_token,
                         kExpertMax, layer);
        next += *distance;
        first[i] = static_cast<std::int16_t>(next - 1);
      }
    }
  if (!rest.empty()) return corrupt("{} bytes after the experts of the last token", rest.size());
  return experts;
}

}  // namespace echoline::data_plane
