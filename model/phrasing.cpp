// Renders problems as prompts, by the prompt style or the chat template, and finds where a response ends.
#include "model/phrasing.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/response_end.hpp"

namespace echoline::model {
namespace {

using nlohmann::ordered_json;

// Stands for a response in a rendered chat, so that the text after it can be found.
constexpr std::string_view kAnyResponse = "(any response)";
constexpr std::size_t kSettingBytesShown = 200;

std::string replace_all(std::string_view text, std::string_view placeholder, std::string_view replacement) {
  std::string out;
  std::size_t begin = 0;
  for (std::size_t match; (match = text.find(placeholder, begin)) != std::string::npos;
       begin = match + placeholder.size())
    out.append(text.substr(begin, match - begin)).append(replacement);
  return out.append(text.substr(begin));
}

template <class... Args>
Error prompt_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "prompt", format, std::forward<Args>(args)...);
}

}  // namespace

Result<Phrasing> Phrasing::make(const ModelFiles& files, const PromptStyle& style) {
  if (style.chat && !files.chat_template)
    return prompt_error(
        "task.chat is set, but the model has no chat template: neither chat_template.jinja nor 'chat_template' in "
        "tokenizer_config.json");
  if (!style.system.empty() && !style.chat)
    return prompt_error("task.system needs task.chat: only a chat has a system message");
  ordered_json variables = ordered_json::parse(files.special_tokens_json, nullptr, /*allow_exceptions=*/false);
  const ordered_json options = ordered_json::parse(style.chat_options_json, nullptr, /*allow_exceptions=*/false);
  if (!options.is_object()) return prompt_error("task.chat_options is {}, expected names and values", options.dump());
  if (!options.empty() && !style.chat) return prompt_error("task.chat_options needs task.chat");
  variables.update(options);
  // Workers receive these parts (prompt_json()). from_parts() uses them here too, so that both make equal objects.
  ordered_json parts = {{"text", style.text}, {"turn", style.turn}};
  if (!style.stop.empty()) parts["stop"] = style.stop;
  if (style.chat) {
    parts["chat_template"] = *files.chat_template;
    parts["system"] = style.system;
    parts["variables"] = variables;
  }
  ECHO_ASSIGN(Phrasing phrasing,
              from_parts(files.tokenizer, files.eos,
                         parts.dump(-1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace)));
  // Renders one prompt, so that a broken template is reported before the run begins.
  ECHO_TRY(phrasing.prompt_text("1+1="));
  return phrasing;
}

Result<Phrasing> Phrasing::from_parts(Tokenizer tokenizer, std::vector<Token> eos, std::string_view prompt_json) {
  if (eos.empty())
    return prompt_error(
        "no token ends a text: neither config.json, generation_config.json nor the tokenizer names one");
  Phrasing phrasing(std::move(tokenizer), std::move(eos));
  const ordered_json parts = ordered_json::parse(prompt_json, nullptr, /*allow_exceptions=*/false);
  const auto read_text = [&](const char* key, std::string& value) {
    const bool is_present = parts.is_object() && parts.contains(key) && parts[key].is_string();
    if (is_present) value = parts[key].get<std::string>();
    return is_present;
  };
  if (!read_text("text", phrasing.prompt_format_))
    return prompt_error("expected an object with 'text', found {}", prompt_json.substr(0, 80));
  if (phrasing.prompt_format_.find(kPromptPlace) == std::string::npos)
    return prompt_error("task.prompt is '{}', expected a text with {} where the problem goes",
                        phrasing.prompt_format_.substr(0, kSettingBytesShown), kPromptPlace);
  read_text("turn", phrasing.observation_format_);
  if (phrasing.observation_format_.find(kObservationPlace) == std::string::npos)
    return prompt_error("task.turn is '{}', expected a text with {} where the observation goes",
                        phrasing.observation_format_.substr(0, kSettingBytesShown), kObservationPlace);
  const ordered_json stops = parts.contains("stop") ? parts["stop"] : ordered_json::array();
  if (!stops.is_array() || stops.size() > kStopsMax)
    return prompt_error("expected at most {} stop strings, found {}", kStopsMax,
                        stops.dump().substr(0, kSettingBytesShown));
  for (const ordered_json& stop : stops) {
    if (!stop.is_string() || stop.get_ref<const std::string&>().empty() ||
        stop.get_ref<const std::string&>().size() > kStopBytesMax)
      return prompt_error("rollout.stop: expected texts of 1 to {} bytes, found {}", kStopBytesMax,
                          stop.dump().substr(0, kSettingBytesShown));
    phrasing.stop_.push_back(stop.get<std::string>());
  }
  if (!read_text("chat_template", phrasing.template_text_)) return phrasing;
  read_text("system", phrasing.system_);
  if (parts.contains("variables") && parts["variables"].is_object())
    phrasing.variables_json_ =
        parts["variables"].dump(-1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
  ECHO_ASSIGN(phrasing.template_, ChatTemplate::parse(phrasing.template_text_));
  return phrasing;
}

std::string Phrasing::prompt_json() const {
  ordered_json parts = {{"text", prompt_format_}, {"turn", observation_format_}};
  if (!stop_.empty()) parts["stop"] = stop_;
  if (template_) {
    parts["chat_template"] = template_text_;
    parts["system"] = system_;
    parts["variables"] = ordered_json::parse(variables_json_, nullptr, /*allow_exceptions=*/false);
  }
  return parts.dump(-1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
}

std::vector<ChatMessage> conversation(const PolicyInput& prompt, std::string_view user_format,
                                      std::string_view system) {
  std::vector<ChatMessage> messages = prompt.messages;
  if (messages.empty()) messages.push_back({.role = "user", .content = prompt.text});
  if (ChatMessage& last_message = messages.back(); last_message.role == "user")
    last_message.content = replace_all(user_format, kPromptPlace, last_message.content);
  if (!system.empty() && messages.front().role != "system")
    messages.insert(messages.begin(), ChatMessage{.role = "system", .content = std::string(system)});
  return messages;
}

Result<std::string> Phrasing::prompt_text(const PolicyInput& problem) const {
  if (!template_) return replace_all(prompt_format_, kPromptPlace, problem.text);
  return template_->render(conversation(problem, prompt_format_, system_), /*add_generation_prompt=*/true,
                           variables_json_);
}

Result<std::vector<Token>> Phrasing::prompt(const PolicyInput& problem) const {
  ECHO_ASSIGN(const std::string text, prompt_text(problem));
  ECHO_ASSIGN(std::vector<Token> tokens, tokenizer_.encode(text));
  // A chat template writes the first tokens, such as a beginning-of-text token, itself.
  if (!template_) tokens.insert(tokens.begin(), tokenizer_.prompt_prefix().begin(), tokenizer_.prompt_prefix().end());
  return tokens;
}

Result<std::vector<Token>> Phrasing::follow_up(std::span<const Token> response, const PolicyInput& observation) const {
  const std::optional<Token> previous = response.empty() ? std::nullopt : std::optional(response.back());
  if (!template_)
    return tokenizer_.encode(replace_all(observation_format_, kObservationPlace, observation.text), previous);
  // With the placeholder alone as its format, conversation() does not add the text of prompts to an observation.
  std::vector<ChatMessage> messages = conversation(observation, kPromptPlace, {});
  // "?" stands for the prompt, because templates expect a user's message before a response.
  messages.insert(messages.begin(), {{"user", "?"}, {"assistant", std::string(kAnyResponse)}});
  ECHO_ASSIGN(const std::string chat_text,
              template_->render(messages, /*add_generation_prompt=*/true, variables_json_));
  const std::size_t response_begin = chat_text.find(kAnyResponse);
  if (response_begin == std::string::npos)
    return prompt_error("the chat template leaves out the assistant's earlier answers");
  std::string_view text_after = std::string_view(chat_text).substr(response_begin + kAnyResponse.size());
  if (!response.empty() && std::find(eos_.begin(), eos_.end(), response.back()) != eos_.end()) {
    const std::string ending = tokenizer_.decode(response.last(1));  // already the end of the response
    if (!ending.empty() && text_after.starts_with(ending)) text_after.remove_prefix(ending.size());
  }
  return tokenizer_.encode(text_after, previous);
}

std::optional<std::size_t> Phrasing::response_end(std::span<const Token> response, std::size_t tokens_checked) const {
  return model::response_end(tokenizer_, response, eos_, stop_, tokens_checked);
}

std::string Phrasing::answer(std::span<const Token> response) const {
  const auto end = response_end(response);
  if (end) response = response.first(*end);
  const bool ends_by_token = end && std::find(eos_.begin(), eos_.end(), response.back()) != eos_.end();
  std::string text = tokenizer_.decode(ends_by_token ? response.first(response.size() - 1) : response);
  std::size_t length = text.size();  // in bytes; the last token may extend beyond its stop string
  for (const std::string& stop : stop_)
    if (const std::size_t stop_begin = text.find(stop); stop_begin != std::string::npos)
      length = std::min(length, stop_begin + stop.size());
  text.resize(length);
  return text;
}

}  // namespace echoline::model
