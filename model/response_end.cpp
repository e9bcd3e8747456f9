// Looks for ending tokens and stop strings, for prompts of a task (model/phrasing) and of a client.
#include "model/response_end.hpp"

#include <algorithm>

namespace echoline::model {

std::optional<std::size_t> response_end(const Tokenizer& tokenizer, std::span<const Token> response,
                                        std::span<const Token> ends, std::span<const std::string> stops,
                                        std::size_t tokens_checked) {
  std::size_t longest_stop_bytes = 0;
  for (const std::string& stop : stops) longest_stop_bytes = std::max(longest_stop_bytes, stop.size());
  std::string text;  // end of the response so far, long enough to hold all but the last byte of a stop string
  for (std::size_t i = std::min(tokens_checked, response.size()); i > 0 && text.size() + 1 < longest_stop_bytes; --i)
    text = tokenizer.decode(response.subspan(i - 1, 1)) + text;
  for (std::size_t i = tokens_checked; i < response.size(); ++i) {
    if (std::find(ends.begin(), ends.end(), response[i]) != ends.end()) return i + 1;
    if (longest_stop_bytes == 0) continue;
    if (text.size() >= longest_stop_bytes) text.erase(0, text.size() - (longest_stop_bytes - 1));
    text += tokenizer.decode(response.subspan(i, 1));
    for (const std::string& stop : stops)
      if (text.find(stop) != std::string::npos) return i + 1;
  }
  return std::nullopt;
}

}  // namespace echoline::model
