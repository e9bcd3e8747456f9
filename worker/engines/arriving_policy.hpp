// Decodes a policy while it arrives, for the two classes that keep a copy of the policy: Installer (in memory) and
// PolicyFolder (in files). Private to worker/.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// A publication is a snapshot (a whole policy) or a delta (the changes since its base version). It arrives in parts.
// Parts of a snapshot may arrive between those of deltas. Use from one thread.
class ArrivingPolicy {
 public:
  // Makes a decoder for a delta on the installed policy.
  using DeltaDecoderMaker = std::function<delta::IncomingDelta()>;
  explicit ArrivingPolicy(DeltaDecoderMaker make_delta_decoder, const delta::DecodeOptions& options = {})
      : make_delta_decoder_(std::move(make_delta_decoder)), options_(options) {}

  // Decodes bytes of a snapshot that is newer than `installed` (absent: no version is installed), or of a delta on
  // `installed`; ignores other parts. The first part of another snapshot replaces the one that is being decoded; the
  // same holds for deltas.
  void add(const overlay::PublicationPart& part, std::optional<Version> installed);
  // Decodes those bytes of a snapshot that add() has not received. Returns the policy. kCorrupt: the bytes are wrong,
  // or give another policy than announced. Drops what add() has decoded of other publications.
  Result<delta::OwnedState> finish_snapshot(const overlay::Publication& publication);
  // Decodes those bytes of the delta that add() has not received, and calls delta::IncomingDelta::apply(). If the
  // decoder was made for a delta::OwnedState (Installer), apply() has changed that state. The caller makes the returned
  // writes in every other copy (the files of PolicyFolder). kCorrupt: as above. kStale: the delta needs another base.
  // Drops what add() has decoded of other publications, except of a newer snapshot.
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
