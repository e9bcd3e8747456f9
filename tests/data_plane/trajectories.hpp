// A trajectory that passes every check, for tests to use and to spoil.
#pragma once
#include <fmt/format.h>

#include <string>

#include "data_plane/trajectory.hpp"

namespace echoline::data_plane {

inline Trajectory sound_trajectory(std::uint64_t group = 1, std::uint32_t member = 0, std::uint64_t version = 0,
                                   std::uint64_t lease = 1, std::uint64_t worker = 1,
                                   const std::string& digest = "digest") {
  Trajectory t;
  t.set_id(fmt::format("{}/{}", lease, member));
  t.set_problem_id(fmt::format("arithmetic/{}", group));
  t.set_group(group);
  t.set_member(member);
  for (const std::uint32_t token : {3u, 4u, 5u}) t.add_prompt_tokens(token);
  for (const std::uint32_t token : {7u, 8u, 1u}) t.add_response_tokens(token);
  for (const float logprob : {-0.5f, -1.25f, 0.f}) t.add_logprobs(logprob);
  auto* span = t.add_spans();
  span->set_begin(0);
  span->set_end(3);
  span->set_version(version);
  t.set_reward(1);
  (*t.mutable_components())["exact"] = 1;
  t.set_policy_digest(digest);
  t.set_lease(lease);
  t.set_worker(worker);
  t.set_finished(true);
  t.set_text("95");
  return t;
}

}  // namespace echoline::data_plane
