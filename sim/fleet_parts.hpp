// The processes of a fleet's hosts. Private to fleet*.cpp.
#pragma once
#include "sim/fleet.hpp"

namespace echoline::sim {

// First worker id and certificate number that the learner gives.
inline constexpr std::uint64_t kFirstEnrolledId = 1'000'000;

// Triggers rare but legal event orders. A site is a named place in a core where such an order can begin. The seed
// activates a quarter of the sites, and an active site fires a quarter of the time.
class Fleet::FaultSites final : public overlay::FaultPoints {
 public:
  explicit FaultSites(std::uint64_t seed) : seed_(seed), random_(seed, /*stream=*/4) {}
  bool fire(std::string_view site) override {
    if (stopped) return false;
    std::uint64_t site_hash = seed_;
    for (const char c : site) site_hash = mix64(site_hash ^ static_cast<unsigned char>(c));
    return site_hash % 4 == 0 && random_.below(4) == 0;
  }
  bool stopped = false;

 private:
  std::uint64_t seed_;
  Random random_;
};

class Fleet::LearnerProcess final : public Process {
 public:
  LearnerProcess(Fleet& fleet, overlay::LearnerConfig config) : fleet_(fleet), learner_(std::move(config)) {}
  overlay::LearnerCore& core() override { return learner_; }
  void on_action(overlay::Action&& action, TimePoint) override { fleet_.on_learner_action(std::move(action)); }

 private:
  Fleet& fleet_;
  overlay::LearnerCore learner_;
};

class Fleet::EnrolProcess final : public Process {
 public:
  EnrolProcess(Fleet& fleet, std::size_t worker, overlay::EnrolConfig config)
      : fleet_(fleet), worker_(worker), enrolment_(std::move(config)) {}
  overlay::EnrolCore& core() override { return enrolment_; }
  void on_action(overlay::Action&& action, TimePoint now) override {
    if (std::holds_alternative<overlay::act::Disconnected>(action))
      fleet_.on_enrolled(worker_, enrolment_.result(), now);
  }

 private:
  Fleet& fleet_;
  std::size_t worker_;
  overlay::EnrolCore enrolment_;
};

class Fleet::IntruderProcess final : public Process {
 public:
  explicit IntruderProcess(IntruderConfig config) : intruder_(std::move(config)) {}
  Intruder& core() override { return intruder_; }
  void on_action(overlay::Action&&, TimePoint) override {}

 private:
  Intruder intruder_;
};

class Fleet::MemberProcess final : public Process {
 public:
  MemberProcess(Fleet& fleet, std::size_t worker, overlay::MemberConfig config)
      : fleet_(fleet), worker_(worker), member_(std::move(config)) {}
  overlay::MemberCore& core() override { return member_; }
  void on_action(overlay::Action&& action, TimePoint now) override {
    fleet_.on_member_action(worker_, std::move(action), now);
  }

 private:
  Fleet& fleet_;
  std::size_t worker_;
  overlay::MemberCore member_;
};

}  // namespace echoline::sim
