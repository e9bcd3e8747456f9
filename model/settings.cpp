// Reads the keys of the run file for the model, its adapter and its prompts.
#include "model/settings.hpp"

#include <algorithm>

#include "base/config.hpp"

namespace echoline::model {

void read(ConfigSection section, ModelSettings& settings) {
  section.read("preset", settings.preset,
               "a new model, initialised from the seed; `echoline model init --help` lists the presets");
  section.read("path", settings.path, "a Hugging Face directory: config.json, safetensors and tokenizer.json");
  if (settings.preset.has_value() == settings.path.has_value())
    section.error("", "expected exactly one of 'preset' (a new model) and 'path' (a Hugging Face directory)");
}

void read(ConfigSection section, AdapterConfig& settings) {
  section.read("rank", settings.rank, {.min = 0, .max = kAdapterRankMax},
               "rows of A and columns of B; 0: no adapter, all weights are trained");
  settings.alpha = 2 * static_cast<double>(settings.rank);
  section.read("alpha", settings.alpha, {.min = 0.0, .max = 1e6},
               {"the adapter's output counts `alpha` / `rank` times", "twice the rank"});
  section.read("targets", settings.targets,
               "the last parts of the names of the adapted layers; each must be a matrix of the model");
  std::sort(settings.targets.begin(), settings.targets.end());
  settings.targets.erase(std::unique(settings.targets.begin(), settings.targets.end()), settings.targets.end());
  if (settings.rank == 0) return;
  if (const Status valid = settings.validate(); !valid) section.error("", valid.error().detail);
}

void read_prompts(ConfigSection section, PromptStyle& style) {
  section.read("prompt", style.text, "text around a problem; {prompt} is the place of the problem");
  if (style.text.find("{prompt}") == std::string::npos)
    section.error("prompt",
                  fmt::format("expected a text with {{prompt}} in the place of the problem, found '{}'", style.text));
  section.read("turn", style.turn,
               "without `chat`: text around the observation between two turns; {observation} is its place");
  if (style.turn.find("{observation}") == std::string::npos)
    section.error("turn", fmt::format("expected a text with {{observation}} in its place, found '{}'", style.turn));
  section.read(
      "chat", style.chat,
      "use the model's chat template: the prompt becomes a user's message, followed by the start of an answer");
  section.read("system", style.system, "a message before the prompt; requires `chat`");
  style.chat_options_json =
      section.json("chat_options", "further names for the chat template, such as {enable_thinking: false}");
  if (!style.system.empty() && !style.chat) section.error("system", "is a message of a chat: set task.chat as well");
  if (style.chat_options_json != "{}" && !style.chat)
    section.error("chat_options", "are for a chat: set task.chat as well");
}

void read_stop(ConfigSection section, PromptStyle& style) {
  section.read(
      "stop", style.stop,
      {"a response ends when its text contains one of these, such as [\"</answer>\"]; it stays part of the text",
       "none"});
  for (const std::string& stop : style.stop)
    if (stop.empty() || stop.size() > kStopBytesMax || style.stop.size() > kStopsMax)
      section.error("stop", fmt::format("expected at most {} texts of 1 to {} bytes, found {} of them, one '{}'",
                                        kStopsMax, kStopBytesMax, style.stop.size(), stop));
}

}  // namespace echoline::model
