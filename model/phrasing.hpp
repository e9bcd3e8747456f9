// How problems are put to a model and its answers are read: the one place where prompts and the text that is graded are
// formed, for workers, evaluation, warm start and the checks before a run.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/chat_template.hpp"
#include "model/model_files.hpp"

namespace echoline::model {

inline constexpr std::string_view kPromptPlace = "{prompt}";
inline constexpr std::string_view kObservationPlace = "{observation}";

// What a run wants of its prompts.
struct PromptStyle {
  std::string text{kPromptPlace};        // the problem's prompt goes in the place of {prompt}
  bool chat = false;                     // as the message of a user, in the model's chat template
  std::string system;                    // a message before it; needs `chat`
  std::string chat_options_json = "{}";  // more names for the template, such as enable_thinking
  std::vector<std::string> stop = {};    // a response ends when its text contains one of these
  std::string turn =
      "\n{observation}\n";  // without `chat`: between a response and the next goes what the policy is told
};

// A prompt as a conversation: `text` is around what the user said last, and `system` first where the prompt has no such
// message.
std::vector<ChatMessage> conversation(const Told& prompt, std::string_view text, std::string_view system);

inline constexpr std::size_t kStopsMax = 16, kStopBytesMax = 64;

// Immutable and cheap to copy; may be used from several threads at once.
class Phrasing {
 public:
  // kInvalid: a text without {prompt}, `chat` for a model without chat template, a system message without `chat`, a
  // template that is malformed, or that fails on a first try.
  static Result<Phrasing> make(const ModelFiles& files, const PromptStyle& style);
  // As described by another process: its tokenizer.json, its ending tokens and its prompt_json().
  static Result<Phrasing> from_parts(Tokenizer tokenizer, std::vector<Token> eos, std::string_view prompt_json);
  std::string prompt_json() const;

  // The text and the tokens that the model continues. kInvalid for a prompt the template or the tokenizer refuses.
  Result<std::string> prompt_text(const Told& problem) const;
  Result<std::vector<Token>> prompt(const Told& problem) const;
  // What goes between a response and the next one: the tokens of an observation, where this is a chat as its messages
  // or that of a user. The tokens before stay as they are. `response`: the one before, with the token that ended it.
  // kInvalid as above.
  Result<std::vector<Token>> follow_up(std::span<const Token> response, const Told& observation) const;
  // How many tokens of a response there are until it ends: with an ending token, or with the one that completes a stop
  // string in its text. Absent: neither is there. The first `known` tokens are known not to end it.
  std::optional<std::size_t> end(std::span<const Token> response, std::size_t known = 0) const;
  // What is graded of a response: its text up to its end, without the token that ends it, with the stop string that
  // does.
  std::string answer(std::span<const Token> response) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::vector<Token>& eos() const { return eos_; }
  const std::vector<std::string>& stop() const { return stop_; }

 private:
  Phrasing(Tokenizer tokenizer, std::vector<Token> eos) : tokenizer_(std::move(tokenizer)), eos_(std::move(eos)) {}
  Tokenizer tokenizer_;
  std::vector<Token> eos_;
  std::vector<std::string> stop_;
  std::string text_, turn_ = PromptStyle().turn, system_, variables_json_;
  std::string template_text_;
  std::optional<ChatTemplate> template_;  // absent: the text as it is
};

}  // namespace echoline::model
