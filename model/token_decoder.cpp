// Reads and applies the decoder of tokenizer.json.
#include "model/token_decoder.hpp"

#include <algorithm>

#include "model/byte_level.hpp"
#include "model/text_pattern.hpp"
#include "model/tokenizer_json.hpp"
#include "model/unicode.hpp"

namespace echoline::model {
namespace {

using tokenizer_json::invalid;
using tokenizer_json::Json;
using tokenizer_json::short_dump;
constexpr std::size_t kDecodersMax = 16, kReplacementsMax = 2, kContentBytesMax = 16;
constexpr int kStripMax = 1000;  // characters that a Strip removes at an end of a text
constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

Status TokenDecoder::read_step(const Json& step, bool is_last) {
  using tokenizer_json::is_type, tokenizer_json::member, tokenizer_json::text_member;
  if (is_type(step, "ByteLevel") && is_last && replacements_.empty() && !has_byte_fallback_ && !has_fuse_) {
    is_byte_level_ = true;
  } else if (is_type(step, "Metaspace") && is_last && !has_fuse_) {
    const std::string* replacement = text_member(step, "replacement");
    if (!replacement || !is_one_character(*replacement))
      return invalid("'decoder' Metaspace is {}, expected a character 'replacement'", short_dump(step));
    replacements_.emplace_back(*replacement, " ");
    const std::string* scheme = text_member(step, "prepend_scheme");
    strips_first_token_ =
        scheme ? *scheme != "never" : tokenizer_json::is_true(step, "add_prefix_space", /*if_absent=*/true);
  } else if (is_type(step, "Replace") && !has_byte_fallback_ && !has_fuse_) {
    const Json* pattern = member(step, "pattern");
    const std::string* literal = pattern ? text_member(*pattern, "String") : nullptr;
    const std::string* content = text_member(step, "content");
    if (!literal || literal->empty() || !content || content->size() > kContentBytesMax)
      return invalid("'decoder' Replace is {}, expected 'pattern' with String, and 'content' of at most {} bytes",
                     short_dump(step), kContentBytesMax);
    if (replacements_.size() == kReplacementsMax)
      return invalid("'decoder' has more than {} of Replace", kReplacementsMax);
    replacements_.emplace_back(*literal, *content);
  } else if (is_type(step, "ByteFallback") && !has_byte_fallback_ && !has_fuse_) {
    has_byte_fallback_ = true;
  } else if (is_type(step, "Fuse")) {
    has_fuse_ = true;
  } else if (is_type(step, "Strip") && is_last && has_fuse_) {
    const std::string* content = text_member(step, "content");
    const Json* start = member(step, "start");
    const Json* stop = member(step, "stop");
    const auto is_count = [](const Json* count) { return count && count->is_number_unsigned() && *count <= kStripMax; };
    if (!content || !is_one_character(*content) || !is_count(start) || !is_count(stop))
      return invalid("'decoder' Strip is {}, expected a character 'content', 'start' and 'stop'", short_dump(step));
    strip_content_ = *content;
    strip_begin_ = start->get<std::size_t>();
    strip_end_ = stop->get<std::size_t>();
  } else {
    return invalid(
        "'decoder' has {}, expected ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip in "
        "this order",
        short_dump(step));
  }
  return ok();
}

Result<TokenDecoder> TokenDecoder::read(const Json& root, bool is_byte_level) {
  TokenDecoder decoder;
  const Json* found = tokenizer_json::member(root, "decoder");
  if (!found) {
    if (!is_byte_level)
      return invalid(
          "'decoder' is missing, expected ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse "
          "and Strip");
    decoder.is_byte_level_ = true;
    return decoder;
  }
  const Json* list = tokenizer_json::is_type(*found, "Sequence") ? tokenizer_json::member(*found, "decoders") : nullptr;
  if (!list) {
    ECHO_TRY(decoder.read_step(*found, /*is_last=*/true));
    return decoder;
  }
  if (!list->is_array() || list->empty() || list->size() > kDecodersMax)
    return invalid("'decoder' is {}, expected a Sequence with a list 'decoders' of at most {}", short_dump(*found),
                   kDecodersMax);
  for (std::size_t i = 0; i < list->size(); ++i) ECHO_TRY(decoder.read_step((*list)[i], i + 1 == list->size()));
  return decoder;
}

std::optional<unsigned char> TokenDecoder::fallback_byte(std::string_view written) const {
  if (!has_byte_fallback_ || written.size() != 6 || !written.starts_with("<0x") || written.back() != '>')
    return std::nullopt;
  unsigned byte = 0;
  for (const char c : written.substr(3, 2)) {
    const bool is_digit = c >= '0' && c <= '9', is_upper = c >= 'A' && c <= 'F', is_lower = c >= 'a' && c <= 'f';
    if (!is_digit && !is_upper && !is_lower) return std::nullopt;
    byte = byte * 16 + static_cast<unsigned>(is_digit ? c - '0' : is_upper ? c - 'A' + 10 : c - 'a' + 10);
  }
  return static_cast<unsigned char>(byte);
}

std::string TokenDecoder::bytes(std::string_view written) const {
  if (is_byte_level_) {
    // As in Hugging Face's tokenizers, a token with any other character stands for its own text.
    if (auto bytes = from_byte_level(written)) return *std::move(bytes);
    return std::string(written);
  }
  std::string out(written);
  for (const auto& [pattern, replacement] : replacements_) {
    std::string replaced;
    std::size_t begin = 0;
    for (std::size_t match; (match = out.find(pattern, begin)) != std::string::npos; begin = match + pattern.size())
      replaced.append(out, begin, match - begin).append(replacement);
    out = replaced.append(out, begin);
  }
  if (const auto byte = fallback_byte(out)) out.assign(1, static_cast<char>(*byte));
  return out;
}

std::string TokenDecoder::text(const std::vector<Piece>& pieces) const {
  std::string out;
  for (std::size_t i = 0, next = 0; i < pieces.size(); i = next) {
    next = i + 1;
    if (pieces[i].is_fallback_byte) {
      // Consecutive fallback bytes are decoded together. If they are not UTF-8, each becomes U+FFFD.
      std::string bytes(pieces[i].bytes);
      for (; next < pieces.size() && pieces[next].is_fallback_byte; ++next) bytes += pieces[next].bytes;
      if (!utf8_error(bytes)) {
        out += bytes;
      } else {
        for (std::size_t byte = 0; byte < bytes.size(); ++byte) out += kReplacementCharacter;
      }
    } else if (i == 0 && strips_first_token_) {
      for (const char c : pieces[i].bytes)
        if (c != ' ') out += c;
    } else {
      out += pieces[i].bytes;
    }
  }
  if (is_byte_level_) return to_valid_utf8(out);
  std::string_view stripped = out;
  for (std::size_t count = 0; count < strip_begin_ && stripped.starts_with(strip_content_); ++count)
    stripped.remove_prefix(strip_content_.size());
  for (std::size_t count = 0; count < strip_end_ && stripped.ends_with(strip_content_); ++count)
    stripped.remove_suffix(strip_content_.size());
  return std::string(stripped);
}

}  // namespace echoline::model
