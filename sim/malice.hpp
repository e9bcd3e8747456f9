// Malicious machines: they change, withhold, repeat or forge outgoing messages. Their cores are unchanged.
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
  double flip_share = 0;            // of forwarded chunks: one bit is flipped
  double replay_share = 0;          // of messages: an earlier one is repeated
  double garbage_share = 0;         // of messages: random bytes follow, alone or in a well-formed frame
  bool forward_nothing = false;     // sends no chunks
  double withhold_share = 0;        // of forwarded chunks: not sent
  double forge_share = 0;           // of the learner's signed messages: a forged one is sent before it
  bool misreport_progress = false;  // the amounts of held and sent data
  bool repeat_requests = false;     // for chunks, to its parents
  bool slander = false;             // accuses its parents of forwarding bad chunks, and of not forwarding
  std::function<std::vector<WorkerId>()> parents = {};     // the parents that it accuses
  bool flood = false;                                      // repeats every message a hundred times
  std::optional<overlay::MessageBudget::Kind> flood_kind;  // repeats one kind of message
  bool reconnect = false;                                  // breaks and reopens its connections (the script does that)
  bool leak = false;                                       // gives its grants to an intruder
  bool floods() const { return flood || flood_kind; }
  // Its own behaviour may keep it from the newest version: peers ignore it, or serve its repeated requests before data
  // that it lacks.
  bool starves_itself() const { return floods() || reconnect || repeat_requests; }
  bool any() const {
    return flip_share > 0 || replay_share > 0 || garbage_share > 0 || withhold_share > 0 || forge_share > 0 ||
           forward_nothing || misreport_progress || repeat_requests || slander || floods() || reconnect || leak;
  }
};
std::string to_text(const MaliceOptions& options);

// Grants and keys that malicious workers share with an intruder.
struct AccompliceState {
  std::vector<overlay::PeerHello> hellos;           // with the grants of one of them
  std::shared_ptr<const overlay::Checker> checker;  // reads the learner's signed messages
  overlay::trust::SigningKey key{{}};               // their own, which no peer trusts
};

class Malicious final : public Malice {
 public:
  Malicious(const MaliceOptions& options, std::uint64_t seed, std::uint64_t stream,
            std::shared_ptr<AccompliceState> accomplices = {})
      : options_(options), random_(seed, stream), accomplices_(std::move(accomplices)) {}
  std::vector<overlay::act::Send> outgoing(overlay::act::Send&& send, TimePoint now) override;

  std::uint64_t chunks_flipped() const { return flipped_; }

 private:
  static constexpr std::size_t kRememberedFramesMax = 32;  // frames
  static constexpr std::size_t kRememberedEdgesMax = 8;
  void falsify_progress(overlay::act::Send& send);
  void forge(const overlay::ControlMessage& message, overlay::act::Send& send, std::vector<overlay::act::Send>& out);
  void flood_with_kind(ConnId conn, std::vector<overlay::act::Send>& out);
  void repeat_requests(const overlay::ControlMessage& message, std::vector<overlay::act::Send>& out);
  std::vector<std::byte> garbage(std::size_t bytes);

  MaliceOptions options_;
  Random random_;
  std::shared_ptr<AccompliceState> accomplices_;
  std::vector<overlay::act::Send> remembered_;  // announcements, manifests, chunks
  std::set<ConnId> upstream_;                   // on which it introduced itself as a child
  std::uint64_t flipped_ = 0;
  std::optional<overlay::Signed> beacon_;  // the first that it forwarded
};

}  // namespace echoline::sim
