// Keys of a run file: which model is trained (section `model`), and how problems are put to it (of the sections `task`
// and `rollout`).
#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "model/phrasing.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::model {

struct ModelSettings {
  // Exactly one of the two: a preset initialised from the seed, or a Hugging Face directory.
  std::optional<std::string> preset;
  std::optional<std::filesystem::path> path;
};

// Each reads its keys of the section; mistakes are noted in it.
void read(ConfigSection model, ModelSettings& settings);
void read_prompts(ConfigSection task, PromptStyle& style);
void read_stop(ConfigSection rollout, PromptStyle& style);

}  // namespace echoline::model
