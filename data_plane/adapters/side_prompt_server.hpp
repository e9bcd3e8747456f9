// Answers the side prompts of episodes (adapter.hpp) by asking a server of language models: an earlier version of the
// policy, or another model. Private to data_plane/adapters/.
#pragma once
#include <memory>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct SidePromptServerOptions {
  std::optional<std::string> url, model;  // see TextServerOptions; both are required
  bool chat = true;
  std::int64_t tokens_max = 64;  // limit of an answer
  double temperature = 1;
  Duration deadline = std::chrono::seconds(60);  // time-out of each request
  int tries = 3;

  void read(ConfigSection s);
};

// One thread sends the requests of all episodes.
class SidePromptServer {
 public:
  // kInvalid if TextServerClient refuses the options.
  static Result<std::unique_ptr<SidePromptServer>> start(const SidePromptServerOptions& options);
  ~SidePromptServer();

  // Wraps an episode so that this server answers its side prompts. The server must outlive the wrapped episode. A
  // request that fails is an error of the task.
  std::unique_ptr<Episode> answer_side_prompts_of(std::unique_ptr<Episode> episode, std::uint64_t seed);

 private:
  struct Impl;
  explicit SidePromptServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane
