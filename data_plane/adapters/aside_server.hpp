// Answers the asides of episodes (adapter.hpp) by asking a server of language models: an earlier version of the policy,
// or another model. Private to data_plane/adapters/.
#pragma once
#include <memory>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct AsideServerOptions {
  std::optional<std::string> url, model;  // as in TextServerOptions; both are required
  bool chat = true;
  std::int64_t tokens_max = 64;  // per answer
  double temperature = 1;
  Duration deadline = std::chrono::seconds(60);  // per request
  int tries = 3;

  void read(ConfigSection s);
};

// One thread sends the requests of all episodes.
class AsideServer {
 public:
  // kInvalid if TextServer refuses the options.
  static Result<std::unique_ptr<AsideServer>> start(const AsideServerOptions& options);
  ~AsideServer();

  // Wraps an episode so that this server answers its asides. The server must outlive it. A request that fails is an
  // error of the task.
  std::unique_ptr<Episode> answering(std::unique_ptr<Episode> episode, std::uint64_t seed);

 private:
  struct Impl;
  explicit AsideServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane
