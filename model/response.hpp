// What of a response is text, the same for workers, the learner's second look and evaluation.
#pragma once
#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "model/tokenizer.hpp"

namespace echoline::model {

// Whether the response ended by itself, with one of the tokens `eos`.
inline bool ended_by_itself(std::span<const Token> response, std::span<const Token> eos) {
  return !response.empty() && std::find(eos.begin(), eos.end(), response.back()) != eos.end();
}

// The text that is graded: all tokens but the one that ended the response.
inline std::string response_text(const Tokenizer& tokenizer, std::span<const Token> response,
                                 std::span<const Token> eos) {
  return tokenizer.decode(response.first(response.size() - (ended_by_itself(response, eos) ? 1 : 0)));
}

}  // namespace echoline::model
