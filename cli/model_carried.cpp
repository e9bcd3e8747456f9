// echoline model info for a directory that this program can only carry.
#include <map>
#include <nlohmann/json.hpp>

#include "cli/delta.hpp"
#include "cli/model_verbs.hpp"
#include "cli/verbs.hpp"
#include "delta/checkpoint.hpp"

namespace echoline::cli {
namespace {

struct Tensors {
  std::size_t count = 0;
  std::uint64_t bytes = 0;
};

}  // namespace

int print_carried_model(const model::ModelConfig& config, const std::filesystem::path& folder, bool as_json) {
  const auto checkpoint = delta::Checkpoint::open(folder);
  if (!checkpoint) return report_error("model info", checkpoint.error());
  std::map<std::string, Tensors> by_type;
  Tensors all;
  const delta::TensorView* largest = nullptr;
  for (const delta::TensorView& tensor : checkpoint->view()) {
    for (Tensors* const tensors : {&all, &by_type[std::string(delta::dtype_name(tensor.dtype))]}) {
      ++tensors->count;
      tensors->bytes += tensor.bytes.size();
    }
    if (!largest || tensor.bytes.size() > largest->bytes.size()) largest = &tensor;
  }
  const auto shape_of = [](const delta::TensorView& tensor) {
    return fmt::format("[{}]", fmt::join(tensor.shape, ", "));
  };
  if (as_json) {
    nlohmann::json types = nlohmann::json::object(), largest_json;
    for (const auto& [type, tensors] : by_type) types[type] = {{"tensors", tensors.count}, {"bytes", tensors.bytes}};
    if (largest)
      largest_json = {{"name", largest->name},
                      {"dtype", delta::dtype_name(largest->dtype)},
                      {"shape", largest->shape},
                      {"bytes", largest->bytes.size()}};
    fmt::print("{}\n", nlohmann::json{{"schema_version", 1},
                                      {"computable", false},
                                      {"not_computable_because", config.reason_not_computable},
                                      {"tensors", all.count},
                                      {"policy_bytes", all.bytes},
                                      {"dtypes", types},
                                      {"largest_tensor", largest_json},
                                      {"vocab_size", config.vocab_size},
                                      {"max_position_embeddings", config.positions_max}}
                           .dump(2));
    return 0;
  }
  print_field("carried only", config.reason_not_computable);
  print_field("not possible",
              "learner.trainer: built_in, worker.engine: built_in, model generate, and checks of workers "
              "by computing their answers again");
  print_field("possible", "learner.trainer: external with worker.engine: vllm or sglang");
  print_field("policy", fmt::format("{} in {} tensors", to_text(Bytes{all.bytes}), grouped_digits(all.count)));
  for (const auto& [type, tensors] : by_type)
    print_field("  " + type,
                fmt::format("{} in {} tensors", to_text(Bytes{tensors.bytes}), grouped_digits(tensors.count)));
  if (largest)
    print_field("largest tensor", fmt::format("{}, {} {}, {}", largest->name, delta::dtype_name(largest->dtype),
                                              shape_of(*largest), to_text(Bytes{largest->bytes.size()})));
  print_field("vocabulary", fmt::format("{}, at most {} positions", config.vocab_size, config.positions_max));
  return 0;
}

}  // namespace echoline::cli
