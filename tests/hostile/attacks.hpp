// Attacks of a machine that was admitted to a run, by name.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "overlay/types.hpp"

namespace echoline::hostile {

struct AttackOptions {
  overlay::Endpoint learner;
  std::vector<std::string> tokens;  // each for the instance "<name>-<i>"
  std::string name = "hostile";
  Duration length = std::chrono::seconds(10);  // at most; an attacker that is thrown out ends earlier
};

// A member that follows the protocol and computes nothing: the baseline of an attacker in the same place.
inline constexpr std::string_view kNoAttack = "none";

// The names of attacks, in the order of docs/threats.md.
std::vector<std::string> attack_names();

// {"attack", "worker", "messages", "bytes", "goodbye", "barred", "seconds"}: its traffic, the learner's last message,
// whether the learner refused it afterwards, and the time in the run when it was expelled. An error if it was not even
// admitted.
Result<nlohmann::json> attack(const std::string& name, const AttackOptions& options);

}  // namespace echoline::hostile
