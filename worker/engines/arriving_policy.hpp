// Decodes a policy while it arrives, for engines that hold a copy. Private to worker/.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// A publication is a snapshot (a whole policy) or a delta (the changes since its base version). It arrives in parts. A
// snapshot may arrive while deltas are decoded. Use from one thread.
class ArrivingPolicy {
 public:
  // Makes a decoder of a delta on the installed policy.
  using DeltaDecoderMaker = std::function<delta::IncomingDelta()>;
  explicit ArrivingPolicy(DeltaDecoderMaker make_delta_decoder, const delta::DecodeOptions& options = {})
      : make_delta_decoder_(std::move(make_delta_decoder)), options_(options) {}

  // Decodes bytes of a snapshot, or of a delta on the `installed` version; ignores other parts. Decodes at most one
  // snapshot and one delta at a time.
  void add(const overlay::PublicationPart& part, std::optional<Version> installed);
  // Decodes the remaining bytes of `publication` and returns the policy. kCorrupt: the bytes are wrong, or give another
  // policy than announced. Drops parts of other publications, except a newer snapshot when a delta is applied.
  Result<delta::OwnedState> finish_snapshot(const overlay::Publication& publication);
  // Decodes the remaining bytes of the delta and applies it, see delta::IncomingDelta::apply(). Returns the writes that
  // turn the installed policy into the new one. kStale: the delta needs another base.
  Result<std::vector<delta::TensorWrite>> finish_delta(const overlay::Publication& publication,
                                                       std::optional<Version> installed);

 private:
  template <class Decoder>
  struct Incoming {
    overlay::PublicationId id;
    Version version;
    Decoder decoder;
  };

  DeltaDecoderMaker make_delta_decoder_;
  delta::DecodeOptions options_;
  std::optional<Incoming<delta::IncomingSnapshot>> snapshot_;
  std::optional<Incoming<delta::IncomingDelta>> delta_;
};

}  // namespace echoline::worker
