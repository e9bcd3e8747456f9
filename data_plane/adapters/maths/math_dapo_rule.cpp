// math_dapo of verl, with the normalisation of the Minerva paper (Lewkowycz et al. 2022, appendix D.1;
// arXiv:2206.14858).
//
// The answer is searched in the last 300 characters. The last "Answer:" outside an earlier answer counts, in upper or
// lower case, with optional white space before the colon. The answer is the rest of that line, or the next line that is
// not empty. The answer and the reference are compared after the steps of normalised().
#include <algorithm>

#include "data_plane/adapters/maths/rules.hpp"
#include "data_plane/adapters/maths/text.hpp"

namespace echoline::data_plane::maths {
namespace {

constexpr std::size_t kGradedCharactersMax = 300;
constexpr std::size_t kBoxCharactersMax = 100;  // math_dapo_boxed() searches the last 100 characters
constexpr std::string_view kBoxCommand = "\\boxed{";
constexpr CharacterView kNoAnswer = U"[INVALID]";  // verl compares this text if there is no answer

struct Replacement {
  CharacterView from, to;
};
// In this order: each replacement works on the result of those before it.
constexpr Replacement kReplacements[] = {
    {U"an ", U""},
    {U"a ", U""},
    {U".$", U"$"},
    {U"\\$", U""},
    {U"\\ ", U""},
    {U" ", U""},
    {U"mbox", U"text"},
    {U",\\text{and}", U","},
    {U"\\text{and}", U","},
    {U"\\text{m}", U"\\text{}"},
    {U"square", U""},
    {U"ways", U""},
    {U"integers", U""},
    {U"dollars", U""},
    {U"mph", U""},
    {U"inches", U""},
    {U"hours", U""},
    {U"km", U""},
    {U"units", U""},
    {U"\\ldots", U""},
    {U"sue", U""},
    {U"points", U""},
    {U"feet", U""},
    {U"minutes", U""},
    {U"digits", U""},
    {U"cents", U""},
    {U"degrees", U""},
    {U"cm", U""},
    {U"gm", U""},
    {U"pounds", U""},
    {U"meters", U""},
    {U"meals", U""},
    {U"edges", U""},
    {U"students", U""},
    {U"childrentickets", U""},
    {U"multiples", U""},
    {U"\\text{s}", U""},
    {U"\\text{.}", U""},
    {U"\\text{\ns}", U""},
    {U"\\text{}^2", U""},
    {U"\\text{}^3", U""},
    {U"\\text{\n}", U""},
    {U"\\text{}", U""},
    {U"\\mathrm{th}", U""},
    {U"^\\circ", U""},
    {U"^{\\circ}", U""},
    {U"\\;", U""},
    {U",\\!", U""},
    {U"{,}", U""},
    {U"\"", U""},
    {U"\\dots", U""},
};

// Replaces every line by what change(line, result) appends to the result.
template <class Change>
Characters line_by_line(CharacterView text, Change change) {
  Characters result;
  for (;;) {
    const std::size_t end = text.find(U'\n');
    change(text.substr(0, end), result);
    if (end == CharacterView::npos) return result;
    result += U'\n';
    text.remove_prefix(end + 1);
  }
}

// A line with at least two '$' becomes the text between the first two.
void keep_formula(CharacterView line, Characters& result) {
  const std::size_t open = line.find(U'$');
  const std::size_t close = open == CharacterView::npos ? open : line.find(U'$', open + 1);
  result += close == CharacterView::npos ? line : line.substr(open, close + 1 - open);
}

// "\text{...}" becomes its content up to the first '}' of the line; `command` ends in '{'.
void unwrap(CharacterView line, CharacterView command, Characters& result) {
  for (;;) {
    const std::size_t open = line.find(command);
    const std::size_t close = open == CharacterView::npos ? open : line.find(U'}', open + command.size());
    if (close == CharacterView::npos) break;
    result += line.substr(0, open);
    result += line.substr(open + command.size(), close - open - command.size());
    line.remove_prefix(close + 1);
  }
  result += line;
}

// Removes a line's first "\boxed{" and last '}'. A later "\boxed{" stays.
void unbox(CharacterView line, Characters& result) {
  constexpr CharacterView kCommand = U"\\boxed{";
  const std::size_t open = line.find(kCommand);
  const std::size_t close = line.rfind(U'}');
  if (open == CharacterView::npos || close == CharacterView::npos || close < open + kCommand.size()) {
    result += line;
    return;
  }
  result += line.substr(0, open);
  result += line.substr(open + kCommand.size(), close - open - kCommand.size());
  result += line.substr(close + 1);
}

// "fracab" becomes "frac{a}{b}": a is anything but '{', b anything but a line's end.
Characters braced_fractions(CharacterView text) {
  constexpr CharacterView kCommand = U"frac";
  Characters result;
  for (std::size_t fraction = text.find(kCommand); fraction != CharacterView::npos; fraction = text.find(kCommand)) {
    const std::size_t a = fraction + kCommand.size(), b = a + 1;
    if (b >= text.size() || text[a] == U'{' || text[b] == U'\n') {
      result += text.substr(0, a);
      text.remove_prefix(a);
      continue;
    }
    result += text.substr(0, a);
    result += U'{';
    result += text[a];
    result += U"}{";
    result += text[b];
    result += U'}';
    text.remove_prefix(b + 1);
  }
  result += text;
  return result;
}

// "sqrta" becomes "sqrt{a}".
Characters braced_roots(CharacterView text) {
  constexpr CharacterView kCommand = U"sqrt";
  Characters result;
  for (std::size_t root = text.find(kCommand); root != CharacterView::npos; root = text.find(kCommand)) {
    const std::size_t a = root + kCommand.size();
    result += text.substr(0, a);
    text.remove_prefix(a);
    if (text.empty() || text[0] == U'{') continue;
    result += U'{';
    result += text[0];
    result += U'}';
    text.remove_prefix(1);
  }
  result += text;
  return result;
}

Characters normalised(CharacterView answer) {
  if (const std::size_t sign = answer.rfind(U'='); sign != CharacterView::npos) answer.remove_prefix(sign + 1);
  Characters text(answer);
  for (const auto& [from, to] : kReplacements)
    if (text.find(from) != Characters::npos) text = replaced(text, from, to);
  text = line_by_line(text, keep_formula);
  for (const CharacterView command : {U"\\text{", U"\\textbf{", U"\\overline{"})
    text = line_by_line(text, [&](CharacterView line, Characters& result) { unwrap(line, command, result); });
  text = line_by_line(text, unbox);
  text = braced_roots(braced_fractions(text));
  std::erase(text, U'$');
  Characters number = text;
  std::erase(number, U',');
  if (!number.empty() && std::all_of(number.begin(), number.end(), is_digit)) text = std::move(number);
  return Characters(trimmed(text));
}

// Whether `c` is the lower-case letter, or its upper case.
bool is_letter_ignoring_case(char32_t c, char lower) {
  const auto small = static_cast<char32_t>(lower);
  return c == small || c == small - (U'a' - U'A') || (lower == 's' && c == 0x17f);  // the long s folds to s
}

// Offsets of the answer's characters.
struct AnswerRange {
  std::size_t begin = 0, end = 0;
};

// The answer that follows an "Answer:" at `position`.
std::optional<AnswerRange> answer_at(CharacterView text, std::size_t position) {
  for (const char letter : std::string_view("answer")) {
    if (position == text.size() || !is_letter_ignoring_case(text[position], letter)) return std::nullopt;
    ++position;
  }
  while (position < text.size() && is_space(text[position])) ++position;
  if (position == text.size() || text[position] != U':') return std::nullopt;
  const std::size_t after_colon = ++position;
  while (position < text.size() && is_space(text[position])) ++position;
  if (position == text.size()) {  // only white space: the last space that does not end a line, and the text after it
    while (position > after_colon && text[position - 1] == U'\n') --position;
    if (position == after_colon) return std::nullopt;
    --position;
  }
  const std::size_t end = std::min(text.find(U'\n', position), text.size());
  return AnswerRange{.begin = position, .end = end};
}

std::optional<AnswerRange> last_answer(CharacterView text) {
  std::optional<AnswerRange> last_range;
  for (std::size_t i = 0; i < text.size();) {
    const auto range = answer_at(text, i);
    if (range) last_range = range;
    i = range ? range->end : i + 1;
  }
  return last_range;
}

}  // namespace

Verdict math_dapo(std::string_view response, std::string_view reference) {
  const Characters text = decode(last_characters(response, kGradedCharactersMax));
  const auto range = last_answer(text);
  const Characters answer =
      normalised(range ? CharacterView(text).substr(range->begin, range->end - range->begin) : kNoAnswer);
  Verdict verdict{.correct = answer == normalised(decode(reference))};
  if (range) {
    verdict.answer = encode(answer);
    verdict.trailing = text.size() - range->end;
  }
  return verdict;
}

Verdict math_dapo_boxed(std::string_view response, std::string_view reference) {
  // Cut twice, as in verl's code.
  const std::string_view text = last_characters(last_characters(response, kGradedCharactersMax), kBoxCharactersMax);
  const std::size_t begin = text.rfind(kBoxCommand);
  std::uint64_t open_braces = 0;
  for (std::size_t i = begin; begin != std::string_view::npos && i < text.size(); ++i) {
    if (text[i] == '{') ++open_braces;
    if (text[i] != '}' || --open_braces > 0) continue;
    // decode() replaces invalid UTF-8.
    std::string answer = encode(decode(text.substr(begin + kBoxCommand.size(), i - begin - kBoxCommand.size())));
    const bool correct = answer == encode(decode(reference));
    return {.correct = correct, .answer = std::move(answer), .trailing = count_characters(text.substr(i + 1))};
  }
  return {};
}

}  // namespace echoline::data_plane::maths
