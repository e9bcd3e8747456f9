// Malicious workers. They run the real protocol cores; only their outgoing messages are changed, withheld, repeated or
// forged.
#pragma once
#include <functional>
#include <set>
#include <vector>

#include "base/random.hpp"
#include "overlay/budget.hpp"
#include "overlay/wire/proof.hpp"
#include "sim/fifo.hpp"
#include "sim/world.hpp"

namespace echoline::sim {

struct MaliceOptions {
  double flip_share = 0;            // share of forwarded chunks in which one bit is flipped
  double replay_share = 0;          // share of messages before which an earlier one is repeated
  double garbage_share = 0;         // share of messages after which random bytes are sent, some in a valid frame
  bool forward_nothing = false;     // sends no chunks
  double withhold_share = 0;        // share of forwarded chunks that are not sent
  double forge_share = 0;           // share of forwarded messages of the learner before which a forged copy is sent
  bool misreport_progress = false;  // reports wrong amounts of held and sent data
  bool repeat_requests = false;     // requests the same chunks from its parents again and again
  bool slander = false;             // accuses its parents of forwarding bad chunks, and of not forwarding
  std::function<std::vector<WorkerId>()> parents = {};     // the parents that it accuses
  bool flood = false;                                      // repeats every message a hundred times
  std::optional<overlay::MessageBudget::Kind> flood_kind;  // it sends far too many messages of this kind
  bool reconnect = false;                                  // sim/soak.cpp breaks its connections at short intervals
  bool leak = false;  // gives its grants (permits to fetch from a parent) to an intruder
  bool floods() const { return flood || flood_kind; }
  // Whether its own behaviour may keep the worker from the newest version: peers ignore it, or serve its repeated
  // requests before the data that it lacks.
  bool starves_itself() const { return floods() || reconnect || repeat_requests; }
  bool any() const {
    return flip_share > 0 || replay_share > 0 || garbage_share > 0 || withhold_share > 0 || forge_share > 0 ||
           forward_nothing || misreport_progress || repeat_requests || slander || floods() || reconnect || leak;
  }
};
std::string to_text(const MaliceOptions& options);

// Grants and keys that malicious workers share with an intruder.
struct AccompliceState {
  std::vector<overlay::PeerHello> hellos;                    // requests of malicious workers, with their grants
  std::shared_ptr<const overlay::SignatureChecker> checker;  // reads the learner's signed messages
  overlay::trust::SigningKey key{{}};                        // of the malicious workers themselves; no peer trusts it
};

// Replaces each message of a malicious worker's core by the messages that its options demand.
class MaliciousRewriter final : public MessageRewriter {
 public:
  MaliciousRewriter(const MaliceOptions& options, std::uint64_t seed, std::uint64_t stream,
                    std::shared_ptr<AccompliceState> accomplices = {})
      : options_(options), random_(seed, stream), accomplices_(std::move(accomplices)) {}
  std::vector<overlay::act::Send> rewrite(overlay::act::Send&& send, TimePoint now) override;

  std::uint64_t chunks_flipped() const { return chunks_flipped_; }

 private:
  static constexpr std::size_t kRememberedFramesMax = 32;
  static constexpr std::size_t kParentConnectionsMax = 8;
  void falsify_progress(overlay::act::Send& send);
  void forge(const overlay::ControlMessage& message, overlay::act::Send& send,
             std::vector<overlay::act::Send>& to_send);
  void flood_with_kind(ConnId conn, std::vector<overlay::act::Send>& to_send);
  void repeat_requests(const overlay::ControlMessage& message, std::vector<overlay::act::Send>& to_send);
  std::vector<std::byte> garbage(std::size_t bytes);

  MaliceOptions options_;
  Random random_;
  std::shared_ptr<AccompliceState> accomplices_;
  std::vector<overlay::act::Send> remembered_frames_;  // sent announcements, manifests and chunks, for replays
  std::set<ConnId> parent_connections_;                // connections to its parents
  std::uint64_t chunks_flipped_ = 0;
  // A beacon is the learner's signed statement of the newest version and the revoked workers. This is the first one
  // that the worker forwarded, sent again in place of later ones.
  std::optional<overlay::Signed> first_beacon_;
};

}  // namespace echoline::sim
