// Suggestions for mistyped words, for run files and the command line.
#include "base/suggest.hpp"

#include <algorithm>
#include <cctype>
#include <vector>

namespace echoline {
namespace {

constexpr std::size_t kWordCharsMax = 128;

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// The number of edits from `a` to `b` (optimal string alignment). row[j] is the number from the first i characters of
// `a` to the first j of `b`.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row_two_before(b.size() + 1), row_before(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::swap(row_two_before, row_before);
    std::swap(row_before, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({row_before[j] + 1, row[j - 1] + 1, row_before[j - 1] + (a[i - 1] != b[j - 1])});
      const bool are_swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (are_swapped) row[j] = std::min(row[j], row_two_before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::optional<std::string> suggest(std::string_view word, std::span<const std::string> candidates) {
  if (word.empty() || word.size() > kWordCharsMax) return std::nullopt;
  const std::string typed = lower(word);
  // More than one edit per three characters is taken for another word.
  std::size_t nearest_distance = std::max<std::size_t>(1, word.size() / 3) + 1;
  std::optional<std::string> nearest;
  for (const std::string& candidate : candidates) {
    if (candidate.empty() || candidate.size() > kWordCharsMax) continue;
    const std::size_t distance = edit_distance(typed, lower(candidate));
    if (distance < nearest_distance && distance < candidate.size()) {
      nearest_distance = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> candidates) {
  const auto nearest = suggest(word, candidates);
  return nearest ? "; did you mean '" + *nearest + "'?" : "";
}

}  // namespace echoline
