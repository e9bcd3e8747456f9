// Makes the protobuf answers of tinker_server.hpp.
#include <cstring>

#include "learner/external/tinker.pb.h"
#include "learner/external/tinker_server.hpp"

namespace echoline::learner::tinker {
namespace {

namespace wire = echoline::tinker_wire;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace

Answer sample_answer(const std::vector<Sample>& samples) {
  wire::SampleResponse response;
  for (const Sample& sample : samples) {
    wire::SampledSequence& sequence = *response.add_sequences();
    sequence.set_stop_reason(sample.ended ? wire::STOP_REASON_STOP : wire::STOP_REASON_LENGTH);
    sequence.set_tokens(bytes_of(std::vector<std::int32_t>(sample.tokens.begin(), sample.tokens.end())));
    sequence.set_logprobs(bytes_of(sample.logprobs));
  }
  return {response.SerializeAsString(), true};
}

Answer forward_backward_answer(const DatumBatch& batch, const DatumResult& result) {
  wire::ForwardBackwardOutput output;
  output.set_loss_fn_output_type("ArrayRecord");
  wire::ArrayRecord& record = *output.add_loss_fn_outputs();
  record.set_type_tag("ArrayRecord");
  record.set_num_datums(static_cast<std::int64_t>(result.logprobs.size()));
  const auto add_field = [&](const char* name, const auto& values_of) {
    wire::BatchedTensor& tensor = (*record.mutable_fields())[name];
    tensor.set_dtype(wire::DATA_TYPE_FLOAT32);
    std::vector<std::int64_t> offsets{0};
    for (std::size_t i = 0; i < result.logprobs.size(); ++i) {
      tensor.mutable_data()->append(bytes_of(values_of(i)));
      offsets.push_back(static_cast<std::int64_t>(tensor.data().size()));
    }
    tensor.set_offsets(bytes_of(offsets));
  };
  add_field("logprobs", [&](std::size_t i) -> const std::vector<float>& { return result.logprobs[i]; });
  if (batch.loss == DatumLoss::kCrossEntropy)
    add_field("elementwise_loss", [&](std::size_t i) {
      std::vector<float> losses;
      for (std::size_t token = 0; token < result.logprobs[i].size(); ++token)
        losses.push_back(-batch.data[i].weights[token] * result.logprobs[i][token]);
      return losses;
    });
  (*output.mutable_metrics())["loss:sum"] = result.loss_sum;
  return {output.SerializeAsString(), true};
}

}  // namespace echoline::learner::tinker
