#include "data_plane/adapters/code/extract.hpp"

#include <algorithm>

namespace echoline::data_plane {
namespace {

constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>";

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n\f\v") == std::string_view::npos; }

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::size_t backticks(std::string_view line) { return std::min(line.find_first_not_of('`'), line.size()); }

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
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || (c & 0x80) != 0;
}

}  // namespace

Extracted extract_code(std::string_view response) {
  Extracted found;
  if (const auto end = response.rfind(kThinkEnd); end != std::string_view::npos) {
    const auto begin = response.find(kThink);
    found.thinking = begin < end && !is_blank(response.substr(begin + kThink.size(), end - begin - kThink.size()));
    response.remove_prefix(end + kThinkEnd.size());
  }
  bool any = false, best_defines = false;
  std::string_view best, rest = response;
  while (!rest.empty()) {
    const std::string_view opening = next_line(rest);
    const std::size_t ticks = backticks(opening);
    if (ticks < 3) continue;
    const std::string_view language = trimmed(opening.substr(ticks));
    const char* const begin = rest.data();
    std::size_t length = 0;
    bool closed = false;
    while (!closed && !rest.empty()) {
      const std::string_view line = next_line(rest);
      const std::size_t closing = backticks(line);
      closed = closing >= ticks && is_blank(line.substr(closing));
      length = static_cast<std::size_t>((closed ? line.data() : rest.data()) - begin);
    }
    if (!language.empty() && language != "python" && language != "py" && language != "python3") continue;
    const std::string_view block(begin, length);
    const bool defines = defines_something(block);
    if (best_defines && !defines) continue;
    best = block;
    any = true;
    best_defines = defines;
    found.fenced = closed;
  }
  found.code = any ? best : response;
  if (is_blank(found.code)) found.code.clear();
  return found;
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
