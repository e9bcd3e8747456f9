// Installs publications in the built-in engine: decodes and verifies them, and loads the policy into the model.
#pragma once
#include <memory>
#include <optional>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "model/device_weights.hpp"
#include "model/transformer.hpp"
#include "overlay/types.hpp"
#include "worker/engines/arriving_policy.hpp"

namespace echoline::worker {

// Use from the thread that generates: install() runs between two tokens.
class Installer {
 public:
  // `on_device`: the model's weights on its GPU; absent: the model is on the CPU.
  explicit Installer(std::shared_ptr<model::Transformer> model, unsigned threads = 1,
                     std::optional<model::DeviceWeights> on_device = std::nullopt)
      : model_(std::move(model)), on_device_(std::move(on_device)), threads_(threads) {}
  Installer(const Installer&) = delete;
  Installer& operator=(const Installer&) = delete;

  // Decodes bytes of a snapshot, or of a delta on the installed version; ignores other parts.
  void decode_part(const overlay::PublicationPart& part);

  // Installs a snapshot, or a delta on the installed version. The digest of the result must match the publication.
  // kStale: the delta needs another base. kCorrupt: bytes or digest are wrong. kInvalid: the policy does not fit the
  // model. If the model may hold a part of the new policy after a failure, no policy counts as installed until the next
  // snapshot. After any other failure, the installed policy stays.
  Status install(const overlay::Publication& publication);

  std::optional<Version> version() const { return version_; }
  const overlay::Digest& digest() const { return digest_; }

 private:
  Status load_changes(std::span<const delta::TensorWrite> writes);

  std::shared_ptr<model::Transformer> model_;
  std::optional<model::DeviceWeights> on_device_;
  unsigned threads_;
  delta::OwnedState state_;  // the policy as published, bf16; the model holds the same values in its compute type
  std::optional<Version> version_;
  overlay::Digest digest_{};
  ArrivingPolicy arriving_{[this] { return delta::IncomingDelta(state_, {.threads = threads_}); },
                           {.threads = threads_}};
};

}  // namespace echoline::worker
