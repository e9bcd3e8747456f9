// Searches Markdown for the program, for the task "code".
#include "data_plane/adapters/code/extract.hpp"

#include <algorithm>

namespace echoline::data_plane {
namespace {

constexpr std::size_t kFenceTicksMin = 3;  // backticks of a line that opens a block
constexpr std::string_view kThinkBegin = "<think>", kThinkEnd = "</think>";

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n\f\v") == std::string_view::npos; }

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::size_t leading_backticks(std::string_view line) { return std::min(line.find_first_not_of('`'), line.size()); }

// Removes and returns the first line.
std::string_view next_line(std::string_view& text) {
  const auto end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

bool defines_something(std::string_view code) {
  while (!code.empty()) {
    const std::string_view line = next_line(code);
    if (line.starts_with("def ") || line.starts_with("class ") || line.starts_with("async def ")) return true;
  }
  return false;
}

bool is_word_character(char c) {
  // Python allows letters outside ASCII; their bytes have the high bit.
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || (c & 0x80) != 0;
}

}  // namespace

ExtractedProgram extract_code(std::string_view response) {
  ExtractedProgram extracted;
  if (const auto end = response.rfind(kThinkEnd); end != std::string_view::npos) {
    const auto begin = response.find(kThinkBegin);
    extracted.thinking =
        begin < end && !is_blank(response.substr(begin + kThinkBegin.size(), end - begin - kThinkBegin.size()));
    response.remove_prefix(end + kThinkEnd.size());
  }
  bool found_block = false, best_defines_something = false;
  std::string_view best_block, remaining = response;
  while (!remaining.empty()) {
    const std::string_view opening = next_line(remaining);
    const std::size_t opening_ticks = leading_backticks(opening);
    if (opening_ticks < kFenceTicksMin) continue;
    const std::string_view language = trimmed(opening.substr(opening_ticks));
    const char* const begin = remaining.data();
    std::size_t block_bytes = 0;
    bool closed = false;
    while (!closed && !remaining.empty()) {
      const std::string_view line = next_line(remaining);
      const std::size_t closing_ticks = leading_backticks(line);
      closed = closing_ticks >= opening_ticks && is_blank(line.substr(closing_ticks));
      // The block ends before its closing line. Without one, it is all lines so far.
      block_bytes = static_cast<std::size_t>((closed ? line.data() : remaining.data()) - begin);
    }
    if (!language.empty() && language != "python" && language != "py" && language != "python3") continue;
    const std::string_view block(begin, block_bytes);
    const bool block_defines_something = defines_something(block);
    // The last block counts, but one that only calls functions does not replace one that defines some.
    if (best_defines_something && !block_defines_something) continue;
    best_block = block;
    found_block = true;
    best_defines_something = block_defines_something;
    extracted.fenced = closed;
  }
  extracted.code = found_block ? best_block : response;
  if (is_blank(extracted.code)) extracted.code.clear();
  return extracted;
}

bool defines(std::string_view code, std::string_view name) {
  while (!code.empty()) {
    std::string_view line = next_line(code);
    for (const std::string_view word : {"async ", "def ", "class "})
      if (line.starts_with(word)) line.remove_prefix(std::min(line.find_first_not_of(' ', word.size()), line.size()));
    if (!line.starts_with(name)) continue;
    line.remove_prefix(name.size());
    if (line.empty() || is_word_character(line.front())) continue;
    line = trimmed(line);
    if (line.starts_with('(') || line.starts_with(':') || (line.starts_with('=') && !line.starts_with("==")))
      return true;
  }
  return false;
}

}  // namespace echoline::data_plane
