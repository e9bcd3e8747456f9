// The configuration of a worker's core.
#pragma once
#include <memory>

#include "overlay/core.hpp"
#include "overlay/publication_store.hpp"
#include "overlay/settings.hpp"
#include "overlay/state.hpp"

namespace echoline::overlay {

struct MemberConfig {
  CoreOptions core;
  Endpoint learner;
  Endpoint data;  // where other workers reach this one
  std::string name;
  trust::SigningKey key;
  WorkerState state;  // at the start: identity and floor, from EnrolCore or the state file
  std::shared_ptr<const SignatureChecker> checker;
  StoreLimits store;
  bool durable = false;  // the driver has a disk and performs act::SaveState; otherwise nothing survives a restart
  Duration join_timeout = kJoinTimeout;
  std::optional<Duration> away_max;  // without the learner, before the worker gives up; absent: the learner's value
  Bytes parts_unread_max{0};         // of act::DeliverPart, while a publication arrives; 0: no parts are delivered
  std::string place{};               // this machine's location, for the learner's regions; "": not known
};

}  // namespace echoline::overlay
