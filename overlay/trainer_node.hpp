// Nodes: further machines of a trainer whose ranks run on several machines. A node is a member of the overlay that
// generates nothing. It receives from the learner over the trainer's local network and forwards to workers.
//
// The learner signs the instance name into the join token, and the name of a node begins with kTrainerNodePrefix. So
// only the run's owner can make a machine a node.
#pragma once
#include <string_view>

namespace echoline::overlay {

inline constexpr std::string_view kTrainerNodePrefix = "node:";

// `instance`: the name in MemberInfo, and that of the join token.
inline bool is_trainer_node(std::string_view instance) { return instance.starts_with(kTrainerNodePrefix); }

}  // namespace echoline::overlay
