// Answers what episodes ask aside, from a server of language models: an earlier version of the policy, or another
// model. Private to data_plane/adapters/.
#pragma once
#include <memory>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct AsideServerOptions {
  std::optional<std::string> url, model;  // as of TextServerOptions; both have to be there
  bool chat = true;
  std::int64_t tokens_max = 64;  // of an answer
  double temperature = 1;
  Duration deadline = std::chrono::seconds(60);  // of a request
  int tries = 3;

  void read(ConfigSection s);
};

// One thread of its own asks, for all episodes.
class AsideServer {
 public:
  // kInvalid: what TextServer does not take.
  static Result<std::unique_ptr<AsideServer>> start(const AsideServerOptions& options);
  ~AsideServer();

  // An episode in which nothing is left to be asked aside; the server outlives it. What it cannot answer is an error of
  // the task.
  std::unique_ptr<Episode> answering(std::unique_ptr<Episode> episode, std::uint64_t seed);

 private:
  struct Impl;
  explicit AsideServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane
