// Models that no part of the program can compute, for tests of carried policies.
#pragma once
#include <gtest/gtest.h>

#include <fstream>

#include "tests/cli/program.hpp"

namespace echoline::testing {

// Makes a model's folder and renames its family. The tokenizer is that of another model; the caller writes the weights.
inline void make_unknown_family(const std::filesystem::path& folder, const char* model_type, const char* architecture) {
  ASSERT_EQ(run_program({"model", "init", "--preset", "bytes-64", "-o", folder.string()}).status, 0);
  nlohmann::json config = json_file(folder / "config.json");
  config["model_type"] = model_type;
  config["architectures"] = {architecture};
  std::ofstream(folder / "config.json") << config;
}

}  // namespace echoline::testing
