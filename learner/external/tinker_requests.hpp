// Parses the requests of a Tinker client. Without I/O; fuzzed by tests/learner/tinker_fuzz.cpp.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "learner/datum_trainer.hpp"
#include "learner/sample_desk.hpp"

namespace echoline::learner::tinker {

inline constexpr std::size_t kNameBytesMax = 128;  // of a checkpoint, a session or a model

// Requests that the learner executes one after another, in order of the client's sequence numbers.
struct CreateModel {
  std::string base_model;
  std::optional<std::int64_t> rank;  // absent: the client gave no LoRA settings
  std::optional<std::uint64_t> seed;
  bool train_mlp = true, train_attention = true, train_unembedding = true;
};
struct OptimStep {
  AdamSettings adam;
};
struct SaveWeights {
  std::string name;
  bool overwrite = false;
};
struct LoadWeights {
  std::string path;  // tinker://MODEL/weights/NAME
  bool optimizer = false;
};
struct SaveForSampler {
  std::string name;                             // empty: the client wants a sampling session at once
  std::optional<std::uint64_t> session_number;  // of that session
  bool follows_newer = false;                   // the session follows later versions
};
// A request with a sequence number that cannot be executed. It takes its turn, and fails.
struct Refused {
  std::string reason;
};
using Operation = std::variant<CreateModel, DatumBatch, OptimStep, SaveWeights, LoadWeights, SaveForSampler, Refused>;

// An operation on a model, with its place in the order.
struct Numbered {
  std::string model;         // the model's id; empty: see `session`
  std::uint64_t number = 0;  // from 1 on; 0: the operation makes the model
  std::string session;       // of a model that is made, with its number there
  std::uint64_t model_number = 0;
  Operation operation;
};

struct SamplingSession {
  std::string session;
  std::uint64_t number = 0;
  std::string base_model, model_path;  // one of them is empty
};

// A request for samples in a sampling session.
struct SessionSample {
  std::string sampling_session;
  std::uint64_t number = 0;
  SampleRequest request;          // its id and version are the caller's
  bool has_seed = false;          // otherwise the seed is the caller's too
  bool has_default_stop = false;  // the run's ending tokens end a response as well
};

// Limits of requests, from the run.
struct Limits {
  std::uint32_t response_tokens_max = 1;
  std::int64_t positions_max = 1;
  std::int64_t vocab_size = 1;
};

// These return kInvalid, with what was expected and found, for a request that no answer can be numbered for.
Result<Numbered> parse_forward_backward(std::string_view protobuf);
Result<Numbered> parse_create_model(std::string_view json);
Result<Numbered> parse_optim_step(std::string_view json);
Result<Numbered> parse_save_weights(std::string_view json);
Result<Numbered> parse_load_weights(std::string_view json);
Result<Numbered> parse_save_for_sampler(std::string_view json);
Result<SamplingSession> parse_sampling_session(std::string_view json);
Result<SessionSample> parse_sample(std::string_view json, const Limits& limits);
// One text field of a JSON object, of at most kNameBytesMax bytes.
Result<std::string> parse_text(std::string_view json, const char* field);

// The model's id and the checkpoint's name in tinker://MODEL/KIND/NAME.
struct CheckpointPath {
  std::string model, name;
};
Result<CheckpointPath> parse_path(std::string_view path, std::string_view kind);
std::string to_text(const CheckpointPath& path, std::string_view kind);

}  // namespace echoline::learner::tinker
