// Rented machines that do not do what they should: what leaves them is changed, held back, repeated or invented. Their
// cores stay as they are.
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
  double flip_share = 0;      // of the chunks it forwards: one bit is wrong
  double replay_share = 0;    // of its messages: something it sent before is sent again
  double garbage_share = 0;   // of its messages: followed by random bytes, alone or in a well-formed frame
  bool freeze = false;        // forwards no chunks
  double withhold_share = 0;  // of the chunks it forwards: they never leave it
  double forge_share = 0;  // of what the learner signs: something like it comes before it that the learner never signed
  bool lie = false;        // says that it holds and sends other amounts than it does
  bool greedy = false;     // asks its parents for chunks again and again
  bool slander = false;    // accuses its parents of forwarding bad chunks, and of not forwarding at all
  std::function<std::vector<WorkerId>()> parents = {};   // of whom it slanders
  bool flood = false;                                    // says everything a hundred times
  std::optional<overlay::MessageBudget::Kind> flood_of;  // says one thing again and again
  bool reconnect = false;  // breaks its connections again and again, and goes on (the script does that)
  bool leak = false;       // gives what it was granted to an intruder
  bool floods() const { return flood || flood_of; }
  // Cuts itself off from the newest version, which nobody owes it: it is not listened to, or gets what it asks for
  // again before what it has not.
  bool starves_itself() const { return floods() || reconnect || greedy; }
  bool any() const {
    return flip_share > 0 || replay_share > 0 || garbage_share > 0 || withhold_share > 0 || forge_share > 0 || freeze ||
           lie || greedy || slander || floods() || reconnect || leak;
  }
};
std::string to_text(const MaliceOptions& options);

// What accomplices share.
struct Loot {
  std::vector<overlay::PeerHello> hellos;           // with what was granted to one of them
  std::shared_ptr<const overlay::Checker> checker;  // that reads what the learner signs
  overlay::trust::SigningKey key{{}};               // their own, which nobody trusts
};

class Malicious final : public Malice {
 public:
  Malicious(const MaliceOptions& options, std::uint64_t seed, std::uint64_t stream,
            std::shared_ptr<Loot> accomplices = {})
      : options_(options), random_(seed, stream), accomplices_(std::move(accomplices)) {}
  std::vector<overlay::act::Send> outgoing(overlay::act::Send&& send, TimePoint now) override;

  std::uint64_t chunks_flipped() const { return flipped_; }

 private:
  static constexpr std::size_t kRemembered = 32;  // frames
  static constexpr std::size_t kEdgesRemembered = 8;
  void lie(overlay::act::Send& send);
  void forge(const overlay::ControlMessage& message, overlay::act::Send& send, std::vector<overlay::act::Send>& out);
  void say_one_thing(ConnId conn, std::vector<overlay::act::Send>& out);
  void ask_again(const overlay::ControlMessage& message, std::vector<overlay::act::Send>& out);
  std::vector<std::byte> garbage(std::size_t bytes);

  MaliceOptions options_;
  Random random_;
  std::shared_ptr<Loot> accomplices_;
  std::vector<overlay::act::Send> remembered_;  // announcements, manifests, chunks
  std::set<ConnId> upstream_;                   // over which it introduced itself as a child
  std::uint64_t flipped_ = 0;
  std::optional<overlay::Signed> beacon_;  // the first that it passed on
};

}  // namespace echoline::sim
