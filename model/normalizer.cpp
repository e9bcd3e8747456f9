// Reads and applies the normalizer of tokenizer.json.
#include "model/normalizer.hpp"

#include <algorithm>

#include "model/tokenizer_json.hpp"

namespace echoline::model {
namespace {

using tokenizer_json::Json;
constexpr std::size_t kNormalizersMax = 16;
constexpr std::size_t kPrefixBytesMax = 64;
constexpr std::size_t kGrowthMax = 64;  // the most bytes of a normalized text per byte of the original
constexpr int kSequenceDepthMax = 4;    // levels of Sequences inside Sequences

}  // namespace

Status Normalizer::read_step(const Json& step, int depth) {
  using tokenizer_json::is_type, tokenizer_json::member, tokenizer_json::text_member, tokenizer_json::invalid;
  constexpr std::pair<std::string_view, NormalForm> kForms[] = {
      {"NFC", NormalForm::kNfc}, {"NFD", NormalForm::kNfd}, {"NFKC", NormalForm::kNfkc}, {"NFKD", NormalForm::kNfkd}};
  if (is_type(step, "Sequence")) {
    const Json* list = member(step, "normalizers");
    if (!list || !list->is_array() || depth == kSequenceDepthMax)
      return invalid("'normalizer' has {}, expected a Sequence with a list 'normalizers'",
                     tokenizer_json::short_dump(step));
    for (const Json& part : *list) ECHO_TRY(read_step(part, depth + 1));
    return ok();
  }
  if (steps_.size() == kNormalizersMax) return invalid("'normalizer' has more than {} steps", kNormalizersMax);
  for (const auto& [name, form] : kForms)
    if (is_type(step, name)) {
      steps_.emplace_back(std::in_place_type<NormalForm>, form);
      return ok();
    }
  has_only_forms_ = false;
  if (const std::string* prefix = is_type(step, "Prepend") ? text_member(step, "prepend") : nullptr) {
    if (prefix->size() > kPrefixBytesMax)
      return invalid("'normalizer' Prepend has {} bytes, expected at most {}", prefix->size(), kPrefixBytesMax);
    steps_.emplace_back(std::in_place_type<Prefix>, Prefix{*prefix});
    return ok();
  }
  if (is_type(step, "Replace")) {
    const Json* pattern = member(step, "pattern");
    const std::string* literal = pattern ? text_member(*pattern, "String") : nullptr;
    const std::string* regex = pattern ? text_member(*pattern, "Regex") : nullptr;
    const std::string* replacement = text_member(step, "content");
    if ((!literal && !regex) || !replacement)
      return invalid("'normalizer' Replace is {}, expected 'pattern' with String or Regex, and 'content'",
                     tokenizer_json::short_dump(step));
    if (literal) {
      steps_.emplace_back(std::in_place_type<Replacement>, Replacement{TextPattern::literal(*literal), *replacement});
    } else {
      ECHO_ASSIGN(TextPattern expression, TextPattern::regex(*regex));
      steps_.emplace_back(std::in_place_type<Replacement>, Replacement{std::move(expression), *replacement});
    }
    return ok();
  }
  return invalid("'normalizer' has {}, expected NFC, NFD, NFKC, NFKD, Prepend, Replace or a Sequence of these",
                 tokenizer_json::short_dump(step));
}

Result<Normalizer> Normalizer::read(const Json& root) {
  Normalizer normalizer;
  if (const Json* step = tokenizer_json::member(root, "normalizer")) ECHO_TRY(normalizer.read_step(*step, /*depth=*/0));
  return normalizer;
}

bool Normalizer::keeps(std::string_view text) const {
  return steps_.empty() || (has_only_forms_ && std::all_of(text.begin(), text.end(), [](char c) {
                              return static_cast<unsigned char>(c) < 0x80;
                            }));
}

Result<std::string> Normalizer::apply(std::string_view text, bool prepends) const {
  const std::size_t bytes_max = kGrowthMax * text.size() + kPrefixBytesMax;
  std::string out(text);
  for (const Step& step : steps_) {
    if (const auto* form = std::get_if<NormalForm>(&step)) {
      out = to_normal_form(out, *form);
    } else if (const auto* prefix = std::get_if<Prefix>(&step)) {
      if (prepends && !out.empty()) out.insert(0, prefix->text);
    } else {
      const auto& [pattern, replacement] = std::get<Replacement>(step);
      ECHO_ASSIGN(out, pattern.replace_all(out, replacement, bytes_max));
    }
  }
  return out;
}

}  // namespace echoline::model
