// The run file's keys for the trained model (section `model`), its adapter (`learner.adapter`) and its prompts (in the
// sections `task` and `rollout`).
#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "model/adapter.hpp"
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

// Each function reads its keys of the section and records mistakes in it.
void read(ConfigSection model, ModelSettings& settings);
void read(ConfigSection adapter, AdapterConfig& settings);
void read_prompts(ConfigSection task, PromptStyle& style);
void read_stop(ConfigSection rollout, PromptStyle& style);

}  // namespace echoline::model
