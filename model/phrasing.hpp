// Forms a model's prompts and extracts the text that is graded. Workers, evaluation, warm start and the checks before a
// run all use it.
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

// The run's settings for prompts.
struct PromptStyle {
  std::string text{kPromptPlace};        // the problem's prompt replaces {prompt}
  bool chat = false;                     // use the model's chat template, with the prompt as a user's message
  std::string system;                    // system message before the prompt; requires `chat`
  std::string chat_options_json = "{}";  // further names for the template, such as enable_thinking
  std::vector<std::string> stop = {};    // a response ends when its text contains one of these
  // Without `chat`: the text between two responses, around the observation.
  std::string turn = "\n{observation}\n";
};

// A prompt as a conversation. In `user_format`, the user's last message replaces {prompt}. `system` comes first if the
// prompt has no such message.
std::vector<ChatMessage> conversation(const PolicyInput& prompt, std::string_view user_format, std::string_view system);

inline constexpr std::size_t kStopsMax = 16, kStopBytesMax = 64;

// Immutable and cheap to copy. Thread-safe.
class Phrasing {
 public:
  // kInvalid: a text without {prompt}, `chat` for a model without a chat template, a system message without `chat`, or
  // a template that is malformed or fails on a first try.
  static Result<Phrasing> make(const ModelFiles& files, const PromptStyle& style);
  // From another process's description: its tokenizer.json, its ending tokens and its prompt_json().
  static Result<Phrasing> from_parts(Tokenizer tokenizer, std::vector<Token> eos, std::string_view prompt_json);
  std::string prompt_json() const;

  // The text and the tokens that the model continues. kInvalid if the template or the tokenizer refuses the prompt.
  Result<std::string> prompt_text(const PolicyInput& problem) const;
  Result<std::vector<Token>> prompt(const PolicyInput& problem) const;
  // The tokens between a response and the next one. They contain the observation; in a chat, its messages or a user's
  // message with its text. The earlier tokens do not change. `response`: the previous one, with its ending token.
  // kInvalid as above.
  Result<std::vector<Token>> follow_up(std::span<const Token> response, const PolicyInput& observation) const;
  // The number of tokens of a response up to its end: an ending token, or the token that completes a stop string.
  // Absent if there is neither. The caller knows that the first `tokens_checked` tokens do not end the response.
  std::optional<std::size_t> response_end(std::span<const Token> response, std::size_t tokens_checked = 0) const;
  // The part of a response that is graded, as text: up to its end, without the ending token, with the stop string.
  std::string answer(std::span<const Token> response) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::vector<Token>& eos() const { return eos_; }
  const std::vector<std::string>& stop() const { return stop_; }

 private:
  Phrasing(Tokenizer tokenizer, std::vector<Token> eos) : tokenizer_(std::move(tokenizer)), eos_(std::move(eos)) {}
  Tokenizer tokenizer_;
  std::vector<Token> eos_;
  std::vector<std::string> stop_;
  std::string prompt_format_, observation_format_ = PromptStyle().turn, system_, variables_json_;
  std::string template_text_;
  std::optional<ChatTemplate> template_;  // absent: the text is used as it is
};

}  // namespace echoline::model
