// Reads the keys of the run file for the model and its prompts; the learner calls it with the other sections.
#include "model/settings.hpp"

#include "base/config.hpp"

namespace echoline::model {

void read(ConfigSection s, ModelSettings& settings) {
  s.read("preset", settings.preset,
         "a new model, initialised from the seed; `echoline model init --help` lists the presets");
  s.read("path", settings.path, "a Hugging Face directory: config.json, safetensors and tokenizer.json");
  if (settings.preset.has_value() == settings.path.has_value())
    s.error("", "expected exactly one of 'preset' (a new model) and 'path' (a Hugging Face directory)");
}

void read_prompts(ConfigSection s, PromptStyle& style) {
  s.read("prompt", style.text, "text around a problem; {prompt} is the place of the problem");
  if (style.text.find("{prompt}") == std::string::npos)
    s.error("prompt",
            fmt::format("expected a text with {{prompt}} in the place of the problem, found '{}'", style.text));
  s.read("turn", style.turn,
         "without `chat`: text around the observation between two turns; {observation} is its place");
  if (style.turn.find("{observation}") == std::string::npos)
    s.error("turn", fmt::format("expected a text with {{observation}} in its place, found '{}'", style.turn));
  s.read("chat", style.chat,
         "use the model's chat template: the prompt becomes a user's message, followed by the start of an answer");
  s.read("system", style.system, "a message before the prompt; requires `chat`");
  style.chat_options_json =
      s.json("chat_options", "further names for the chat template, such as {enable_thinking: false}");
  if (!style.system.empty() && !style.chat) s.error("system", "is a message of a chat: set task.chat as well");
  if (style.chat_options_json != "{}" && !style.chat) s.error("chat_options", "are for a chat: set task.chat as well");
}

void read_stop(ConfigSection s, PromptStyle& style) {
  s.read("stop", style.stop,
         {"a response ends when its text contains one of these, such as [\"</answer>\"]; it stays part of the text",
          "none"});
  for (const std::string& stop : style.stop)
    if (stop.empty() || stop.size() > kStopBytesMax || style.stop.size() > kStopsMax)
      s.error("stop", fmt::format("expected at most {} texts of 1 to {} bytes, found {} of them, one '{}'", kStopsMax,
                                  kStopBytesMax, style.stop.size(), stop));
}

}  // namespace echoline::model
