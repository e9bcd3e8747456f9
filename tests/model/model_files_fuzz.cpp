// Reads any bytes as the config.json of a model and as the adapter_config.json of an adapter. libFuzzer calls it when
// ECHOLINE_FUZZ is on; model_files_test calls it on mutated files in every ordinary test run.
#include <cstdint>
#include <string_view>

#include "model/config.hpp"

using namespace echoline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto adapter = model::AdapterConfig::from_json(text);
  if (adapter) {
    ECHO_CHECK(adapter->validate(), "an invalid adapter was read");
    const auto again = model::AdapterConfig::from_json(adapter->to_json());
    ECHO_CHECK(again && *again == *adapter, "an adapter changes when it is written");
  } else {
    ECHO_CHECK(adapter.error().code == Code::kInvalid, "{}", adapter.error().message());
  }
  for (const model::ModelUse use : {model::ModelUse::kCompute, model::ModelUse::kCarry}) {
    const auto config = model::ModelConfig::from_json(text, use);
    if (!config) {
      ECHO_CHECK(config.error().code == Code::kInvalid, "{}", config.error().message());
      continue;
    }
    ECHO_CHECK(config->validate(), "an invalid model was read");
    const auto again = model::ModelConfig::from_json(config->to_json(), use);
    ECHO_CHECK(again && *again == *config, "a model changes when it is written");
    model::memory_estimate(*config);
  }
  return 0;
}
