// Reads and applies the pre-tokenizer of tokenizer.json.
#include "model/pre_tokenizer.hpp"

#include <optional>

#include "model/tokenizer_json.hpp"
#include "model/unicode.hpp"

namespace echoline::model {
namespace {

using tokenizer_json::invalid;
using tokenizer_json::Json;
using tokenizer_json::short_dump;
constexpr std::size_t kPreTokenizersMax = 16;
constexpr int kNestingMax = 4;  // Sequences inside Sequences
// The default split of ByteLevel: GPT-2's rule.
constexpr const char* kByteLevelRegex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr std::size_t kReplacementBytesMax = 4;  // Metaspace replaces a space by one character, of 4 bytes at most

// A match of a Split, or the text between two matches.
struct Part {
  std::size_t begin = 0, end = 0;
  bool is_match = false;  // the opposite if the Split has 'invert'
};

}  // namespace

Status PreTokenizer::add_regex(const std::string& expression) {
  ECHO_ASSIGN(TextPattern pattern, TextPattern::regex(expression));
  steps_.emplace_back(std::in_place_type<Split>, Split{.pattern = std::move(pattern)});
  return ok();
}

Status PreTokenizer::read_split(const Json& step) {
  constexpr std::pair<std::string_view, Behavior> kBehaviors[] = {{"Isolated", Behavior::kIsolated},
                                                                  {"Removed", Behavior::kRemoved},
                                                                  {"MergedWithPrevious", Behavior::kMergedWithPrevious},
                                                                  {"MergedWithNext", Behavior::kMergedWithNext},
                                                                  {"Contiguous", Behavior::kContiguous}};
  const Json* found = tokenizer_json::member(step, "pattern");
  const std::string* literal = found ? tokenizer_json::text_member(*found, "String") : nullptr;
  const std::string* regex = found ? tokenizer_json::text_member(*found, "Regex") : nullptr;
  if (!literal && !regex)
    return invalid("'pre_tokenizer' Split is {}, expected 'pattern' with Regex or String", short_dump(step));
  const std::string* name = tokenizer_json::text_member(step, "behavior");
  std::optional<Behavior> behavior;
  for (const auto& [behavior_name, value] : kBehaviors)
    if (name && *name == behavior_name) behavior = value;
  if (!behavior)
    return invalid(
        "'pre_tokenizer' Split is {}, expected 'behavior' Isolated, Removed, MergedWithPrevious, MergedWithNext or "
        "Contiguous",
        short_dump(step));
  const bool inverts = tokenizer_json::is_true(step, "invert");
  if (literal) {
    steps_.emplace_back(std::in_place_type<Split>, Split{TextPattern::literal(*literal), *behavior, inverts});
    return ok();
  }
  auto pattern = TextPattern::regex(*regex);
  if (!pattern) return invalid("'pre_tokenizer' Split: {}", pattern.error().detail);
  steps_.emplace_back(std::in_place_type<Split>, Split{*std::move(pattern), *behavior, inverts});
  return ok();
}

Status PreTokenizer::read_metaspace(const Json& step) {
  const std::string* replacement = tokenizer_json::text_member(step, "replacement");
  const std::string* scheme = tokenizer_json::text_member(step, "prepend_scheme");
  const bool adds_prefix = tokenizer_json::is_true(step, "add_prefix_space", /*if_absent=*/true);
  const std::string_view prepends = scheme ? std::string_view(*scheme) : adds_prefix ? "always" : "never";
  if (!replacement || !is_one_character(*replacement) ||
      (prepends != "always" && prepends != "first" && prepends != "never"))
    return invalid(
        "'pre_tokenizer' Metaspace is {}, expected a character 'replacement' and 'prepend_scheme' always, first or "
        "never",
        short_dump(step));
  steps_.emplace_back(std::in_place_type<Metaspace>, Metaspace{.replacement = *replacement,
                                                               .prepends = prepends == "always"  ? Prepends::kAlways
                                                                           : prepends == "first" ? Prepends::kFirst
                                                                                                 : Prepends::kNever});
  if (tokenizer_json::is_true(step, "split", /*if_absent=*/true))
    steps_.emplace_back(std::in_place_type<Split>,
                        Split{.pattern = TextPattern::literal(*replacement), .behavior = Behavior::kMergedWithNext});
  return ok();
}

Status PreTokenizer::read_step(const Json& step, int depth) {
  using tokenizer_json::is_true, tokenizer_json::is_type, tokenizer_json::member;
  if (is_byte_level_) return invalid("'pre_tokenizer' continues after ByteLevel with {}", short_dump(step));
  if (is_type(step, "Sequence")) {
    const Json* list = member(step, "pretokenizers");
    if (!list || !list->is_array() || depth == kNestingMax)
      return invalid("'pre_tokenizer' has {}, expected a Sequence with a list 'pretokenizers'", short_dump(step));
    for (const Json& part : *list) ECHO_TRY(read_step(part, depth + 1));
  } else if (is_type(step, "Split")) {
    ECHO_TRY(read_split(step));
  } else if (is_type(step, "Digits")) {
    ECHO_TRY(add_regex(is_true(step, "individual_digits") ? R"(\p{N})" : R"(\p{N}+)"));
  } else if (is_type(step, "WhitespaceSplit")) {
    ECHO_TRY(add_regex(R"(\s)"));
    std::get<Split>(steps_.back()).behavior = Behavior::kRemoved;
  } else if (is_type(step, "Metaspace")) {
    ECHO_TRY(read_metaspace(step));
  } else if (is_type(step, "ByteLevel")) {
    is_byte_level_ = true;
    if (is_true(step, "add_prefix_space", /*if_absent=*/true)) steps_.emplace_back(std::in_place_type<SpacePrefix>);
    if (is_true(step, "use_regex", /*if_absent=*/true)) ECHO_TRY(add_regex(kByteLevelRegex));
  } else {
    return invalid(
        "'pre_tokenizer' has {}, expected Split, Digits, Metaspace, WhitespaceSplit, ByteLevel or a Sequence of these",
        short_dump(step));
  }
  if (steps_.size() > kPreTokenizersMax) return invalid("'pre_tokenizer' has more than {} steps", kPreTokenizersMax);
  return ok();
}

Result<PreTokenizer> PreTokenizer::read(const Json& root) {
  PreTokenizer pre_tokenizer;
  if (const Json* step = tokenizer_json::member(root, "pre_tokenizer"))
    ECHO_TRY(pre_tokenizer.read_step(*step, /*depth=*/0));
  return pre_tokenizer;
}

Status PreTokenizer::split_from(std::size_t step_index, std::string_view text, bool begins_text, bool continues,
                                const OnPiece& on_piece) const {
  if (text.empty()) return ok();
  if (step_index == steps_.size()) return on_piece(text);
  const Step& step = steps_[step_index];
  if (std::holds_alternative<SpacePrefix>(step)) {
    if (continues || text.front() == ' ') return split_from(step_index + 1, text, begins_text, continues, on_piece);
    return split_from(step_index + 1, " " + std::string(text), begins_text, continues, on_piece);
  }
  if (const auto* metaspace = std::get_if<Metaspace>(&step)) {
    ECHO_ASSIGN(std::string replaced, TextPattern::literal(" ").replace_all(text, metaspace->replacement,
                                                                            kReplacementBytesMax * text.size()));
    const bool prepends = !continues && (metaspace->prepends == Prepends::kAlways ||
                                         (metaspace->prepends == Prepends::kFirst && begins_text));
    if (prepends && !replaced.starts_with(metaspace->replacement)) replaced.insert(0, metaspace->replacement);
    return split_from(step_index + 1, replaced, begins_text, continues, on_piece);
  }
  const auto& [pattern, behavior, inverts] = std::get<Split>(step);
  if (behavior == Behavior::kIsolated) return split_isolated(step_index, text, begins_text, continues, on_piece);

  std::vector<Part> parts;
  TextPattern::Match match;
  for (std::size_t begin = 0; begin < text.size(); begin = match.end) {
    ECHO_TRY(pattern.find(text, begin, match));
    if (match.begin > begin) parts.push_back({begin, match.begin, inverts});
    if (match.begin < text.size()) parts.push_back({match.begin, match.end, !inverts});
  }
  // Whether part i becomes one piece with the part before it.
  const auto joins_previous = [&, &merge = behavior](std::size_t i) {
    switch (merge) {
      case Behavior::kContiguous:
        return parts[i].is_match == parts[i - 1].is_match;
      case Behavior::kMergedWithPrevious:
        return parts[i].is_match && !parts[i - 1].is_match;
      case Behavior::kMergedWithNext:
        return parts[i - 1].is_match && !parts[i].is_match;
      default:
        return false;
    }
  };
  for (std::size_t i = 0, next = 0; i < parts.size(); i = next) {
    for (next = i + 1; next < parts.size() && joins_previous(next);) ++next;
    if (behavior == Behavior::kRemoved && parts[i].is_match) continue;
    const std::size_t begin = parts[i].begin, end = parts[next - 1].end;
    ECHO_TRY(split_from(step_index + 1, text.substr(begin, end - begin), begins_text && begin == 0,
                        continues && begin == 0, on_piece));
  }
  return ok();
}

// Applies a Split with the behavior kIsolated: every match and every text between two matches is a piece. As it is the
// common case, it avoids the list of parts.
Status PreTokenizer::split_isolated(std::size_t step_index, std::string_view text, bool begins_text, bool continues,
                                    const OnPiece& on_piece) const {
  const TextPattern& pattern = std::get<Split>(steps_[step_index]).pattern;
  TextPattern::Match match;
  const auto split_part = [&](std::size_t begin, std::size_t end) {
    return split_from(step_index + 1, text.substr(begin, end - begin), begins_text && begin == 0,
                      continues && begin == 0, on_piece);
  };
  for (std::size_t begin = 0; begin < text.size(); begin = match.end) {
    ECHO_TRY(pattern.find(text, begin, match));
    if (match.begin > begin) ECHO_TRY(split_part(begin, match.begin));
    if (match.begin < text.size()) ECHO_TRY(split_part(match.begin, match.end));
  }
  return ok();
}

}  // namespace echoline::model
