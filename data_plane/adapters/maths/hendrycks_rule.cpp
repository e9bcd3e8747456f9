// The rule of MATH (Hendrycks et al. 2021, arXiv:2103.03874), in its authors' variant and in verl's training variant.
// The answer is in the last box, found by matching braces. The answer and the reference are normalised() and compared.
// If normalisation is undefined ("\sqrt" at the end, two units), the texts are compared unchanged.
#include <algorithm>

#include "data_plane/adapters/maths/rules.hpp"
#include "data_plane/adapters/maths/text.hpp"

namespace echoline::data_plane::maths {
namespace {

enum class Variant { kHendrycks, kVerl };
constexpr std::size_t kVariableCharactersMax = 2;  // of "x " in "x = 5": characters before an '=' that is removed
constexpr std::size_t kIntegerDigitsMax = 4300;    // Python 3.11 and later refuse longer integers by default

struct Box {
  std::string_view content;
  std::string_view text_after;
};

// Matches braces from the last "\boxed", or if there is none the last "\fbox". Text may come before the first brace,
// but only "\boxed{" gives an answer: an \fbox never does.
std::optional<Box> last_box(std::string_view text) {
  constexpr std::string_view kCommand = "\\boxed{";
  std::size_t begin = text.rfind("\\boxed");
  if (begin == std::string_view::npos) begin = text.rfind("\\fbox");
  std::int64_t open_braces = 0;
  for (std::size_t i = begin; begin != std::string_view::npos && i < text.size(); ++i) {
    if (text[i] == '{') ++open_braces;
    if (text[i] != '}' || --open_braces != 0) continue;
    const std::string_view box = text.substr(begin, i + 1 - begin);
    if (!box.starts_with(kCommand)) return std::nullopt;
    return Box{.content = box.substr(kCommand.size(), box.size() - 1 - kCommand.size()),
               .text_after = text.substr(i + 1)};
  }
  return std::nullopt;
}

// verl's variant: "\boxed " without braces, up to the next '$', has priority over boxes with braces.
std::optional<Box> last_box_or_bare(std::string_view text) {
  constexpr std::string_view kBare = "\\boxed ";
  const std::size_t begin = text.rfind(kBare);
  if (begin == std::string_view::npos) return last_box(text);
  const std::string_view text_after = text.substr(begin + kBare.size());
  const std::size_t end = std::min(text_after.find('$'), text_after.size());
  return Box{.content = text_after.substr(0, end), .text_after = text_after.substr(end)};
}

struct Replacement {
  CharacterView from, to;
};
// In this order: each replacement works on the result of those before it.
constexpr Replacement kReplacementsBeforeUnit[] = {
    {U"\n", U""},     {U"\\!", U""},     {U"\\\\", U"\\"},    {U"tfrac", U"frac"}, {U"dfrac", U"frac"},
    {U"\\left", U""}, {U"\\right", U""}, {U"^{\\circ}", U""}, {U"^\\circ", U""},   {U"\\$", U""},
};
constexpr Replacement kReplacementsAfterUnit[] = {{U"\\%", U""}, {U" .", U" 0."}, {U"{.", U"{0."}};

void replace(Characters& text, const Replacement& replacement) {
  if (text.find(replacement.from) != Characters::npos) text = replaced(text, replacement.from, replacement.to);
}

// "\sqrta" becomes "\sqrt{a}". Absent if nothing, or another root, follows a root.
std::optional<Characters> braced_roots(CharacterView text) {
  constexpr CharacterView kCommand = U"\\sqrt";
  Characters result;
  for (std::size_t root = text.find(kCommand); root != CharacterView::npos; root = text.find(kCommand)) {
    result += text.substr(0, root + kCommand.size());
    text.remove_prefix(root + kCommand.size());
    if (text.empty() || text.starts_with(kCommand)) return std::nullopt;
    if (text[0] == U'{') continue;
    result += U'{';
    result += text[0];
    result += U'}';
    text.remove_prefix(1);
  }
  result += text;
  return result;
}

// "\fracab" becomes "\frac{a}{b}", and "\fraca{b}" becomes "\frac{a}{b}". Unchanged if only one character follows a
// fraction; absent if none does.
std::optional<Characters> braced_fractions(CharacterView text) {
  constexpr CharacterView kCommand = U"\\frac";
  Characters result;
  CharacterView remaining = text;
  for (std::size_t begin = remaining.find(kCommand); begin != CharacterView::npos; begin = remaining.find(kCommand)) {
    result += remaining.substr(0, begin + kCommand.size());
    remaining.remove_prefix(begin + kCommand.size());
    const CharacterView part = remaining.substr(0, remaining.find(kCommand));
    if (part.empty()) return std::nullopt;
    if (part[0] == U'{') continue;
    if (part.size() < 2) {
      result.assign(text);
      return result;
    }
    result += U'{';
    result += part[0];
    result += U'}';
    remaining.remove_prefix(1);
    if (part[1] == U'{') continue;
    result += U'{';
    result += part[1];
    result += U'}';
    remaining.remove_prefix(1);
  }
  result += remaining;
  return result;
}

// A whole number in a program's notation: no '+', no leading zeros.
bool is_plain_integer(CharacterView text) {
  const bool negative = text.starts_with(U'-');
  if (negative) text.remove_prefix(1);
  if (text.empty() || text.size() > kIntegerDigitsMax || (text[0] == U'0' && (text.size() > 1 || negative)))
    return false;
  return std::all_of(text.begin(), text.end(), [](char32_t c) { return c >= U'0' && c <= U'9'; });
}

// "a/b" of two integers becomes "\frac{a}{b}".
Characters quotient_as_fraction(Characters text) {
  const std::size_t slash = text.find(U'/');
  if (slash == Characters::npos) return text;
  const CharacterView numerator = CharacterView(text).substr(0, slash),
                      denominator = CharacterView(text).substr(slash + 1);
  if (!is_plain_integer(numerator) || !is_plain_integer(denominator)) return text;
  Characters fraction = U"\\frac{";
  fraction += numerator;
  fraction += U"}{";
  fraction += denominator;
  fraction += U'}';
  return fraction;
}

// Absent if the normalisation is undefined.
std::optional<Characters> normalised(Characters text, Variant variant) {
  for (const Replacement& replacement : kReplacementsBeforeUnit) replace(text, replacement);
  constexpr CharacterView kUnit = U"\\text{ ";
  if (occurrences(text, kUnit) > 1) return std::nullopt;
  text.resize(std::min(text.find(kUnit), text.size()));  // cuts the unit off
  // The authors' code removes "\\%" twice, here and below; the first removal can create another "\\%". verl's code
  // removes "\\\\%" first.
  replace(text, variant == Variant::kVerl ? Replacement{U"\\\\%", U""} : Replacement{U"\\%", U""});
  for (const Replacement& replacement : kReplacementsAfterUnit) replace(text, replacement);
  if (text.empty()) return text;
  if (text[0] == U'.') text.insert(text.begin(), U'0');
  // "x =" and "k=" in front of the value are left out. Without an '=', `sign` is npos, which is above the limit.
  if (const std::size_t sign = text.find(U'=');
      sign <= kVariableCharactersMax && text.find(U'=', sign + 1) == Characters::npos)
    text.erase(0, sign + 1);
  auto with_roots = braced_roots(text);
  if (!with_roots) return std::nullopt;
  std::erase(*with_roots, U' ');
  auto with_fractions = braced_fractions(*with_roots);
  if (!with_fractions) return std::nullopt;
  if (*with_fractions == U"0.5") *with_fractions = U"\\frac{1}{2}";
  return quotient_as_fraction(std::move(*with_fractions));
}

Verdict compare_box(const std::optional<Box>& box, std::string_view reference, Variant variant) {
  if (!box) return {};
  const Characters answer = decode(box->content), expected = decode(reference);
  const auto normalised_answer = normalised(answer, variant);
  const auto normalised_expected = normalised_answer ? normalised(expected, variant) : std::nullopt;
  const bool both_normalised = normalised_answer && normalised_expected;
  return {.correct = both_normalised ? *normalised_answer == *normalised_expected : answer == expected,
          .answer = encode(both_normalised ? *normalised_answer : answer),
          .trailing = count_characters(box->text_after)};
}

}  // namespace

Verdict math_reward(std::string_view response, std::string_view reference) {
  return compare_box(last_box_or_bare(response), reference, Variant::kVerl);
}

Verdict hendrycks_math(std::string_view response, std::string_view reference) {
  return compare_box(last_box(response), reference, Variant::kHendrycks);
}

std::optional<std::string> boxed_answer(std::string_view solution) {
  const auto box = last_box_or_bare(solution);
  if (!box) return std::nullopt;
  return std::string(box->content);
}

}  // namespace echoline::data_plane::maths
