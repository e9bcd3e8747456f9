// For tests of the fleet's core: a manual clock, and a scripted provider and ledger.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "provisioner/fleet_core.hpp"

namespace echoline::provisioner {

using std::chrono::minutes;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using Names = std::vector<std::string>;

inline FleetOffer offer(const std::string& id, double rate, double usd, const std::string& host = "") {
  return {.id = id, .provider = "local", .host = host, .rollouts_per_s = rate, .usd_per_hour = usd};
}

// Answers the core's requests at once, unless a test clears the flag `auto_...` of a request. Records all actions.
class Fleet : public testing::Test {
 protected:
  // M* = 100: 1,000 rollouts in steps of 10 s that no broadcast delays; so 110 are wanted.
  Fleet() {
    rules.pace = {1000, 1, seconds(10)};
    rules.group_size = 4;
    rules.fleet.capacity_rule = CapacityRule::kEcho2;  // so that T_b moves the target
  }

  FleetCore& make(std::vector<FleetOffer> offers, Names wanted) {
    core.emplace(rules, std::move(offers), std::move(wanted));
    return *core;
  }
  void notify(const FleetEvent& event) {
    carry_out(core->handle(event, clock.now()));
    core->check();
  }
  void carry_out(const std::vector<FleetAction>& actions) {
    for (const FleetAction& action : actions) {
      if (const auto* book = std::get_if<fleet::Book>(&action)) {
        tickets[book->offer] = ++last_ticket;
        rented.push_back(book->offer);
        if (auto_book) notify(fleet::Booked{book->offer, last_ticket});
      } else if (const auto* start = std::get_if<fleet::Start>(&action)) {
        if (auto_start) notify(fleet::Started{start->ticket, {"i" + std::to_string(start->ticket)}, {}});
        if (auto_start && auto_join) join(start->offer);
      } else if (const auto* stop = std::get_if<fleet::Stop>(&action)) {
        stop_requests.push_back(stop->ticket);
        if (auto_stop) notify(fleet::Stopped{stop->ticket});
      } else if (const auto* drain = std::get_if<fleet::Drain>(&action)) {
        drain_requests.push_back(drain->worker.value);
        if (auto_drain) notify(fleet::Drained{drain->worker});
      } else if (const auto* look = std::get_if<fleet::FindInstance>(&action)) {
        find_requests.push_back(look->ticket);
      } else if (const auto* end = std::get_if<fleet::BookEnd>(&action)) {
        ended.push_back(end->ticket);
        ran[end->ticket] = end->ran;
      } else if (const auto* note = std::get_if<fleet::Note>(&action)) {
        notes.push_back(*note);
      }
    }
  }
  WorkerId worker(const std::string& offer) { return WorkerId{static_cast<std::uint64_t>(tickets.at(offer))}; }
  void join(const std::string& offer) { notify(fleet::Joined{worker(offer), offer}); }
  void heartbeat(const std::string& offer, double rollouts, double busy_s) {
    if (tickets.contains(offer)) notify(fleet::Heartbeat{worker(offer), rollouts, busy_s});
  }
  // Advances the clock second by second. Calls `on_second` before each tick of the core.
  void pass(Duration time, const std::function<void(int)>& on_second = {}) {
    for (int s = 0; s < time / seconds(1); ++s) {
      clock.advance(seconds(1));
      if (on_second) on_second(s);
      carry_out(core->tick(clock.now()));
    }
  }
  // For pass(): these workers submit `rollouts` every second.
  std::function<void(int)> submit_every_second(Names offers, double rollouts) {
    return [this, offers = std::move(offers), rollouts](int) {
      for (const std::string& offer : offers) heartbeat(offer, rollouts, 1);
    };
  }
  // For pass(): these workers generate `rate` rollouts/s for a part of each second, and lack work for the rest.
  std::function<void(int)> lack_work(Names offers, double rate, double share_without_work) {
    return [this, offers = std::move(offers), rate, share_without_work](int) {
      for (const std::string& offer : offers)
        if (const auto* machine = core->machines().find(offer); machine && machine->state == MachineState::kWorking)
          notify(fleet::Heartbeat{.worker = worker(offer),
                                  .rollouts = rate * (1 - share_without_work),
                                  .busy_s = 1 - share_without_work,
                                  .without_work_s = share_without_work});
    };
  }
  void set_learner_waiting(bool now_waits) { notify(fleet::LearnerWaiting{now_waits}); }
  // Waits for a batch that is not the first one.
  void wait_for_next_batch() {
    set_learner_waiting(false);
    set_learner_waiting(true);
  }
  Names noted(const std::string& what) const {
    Names offers;
    for (const fleet::Note& note : notes)
      if (note.what == what) offers.push_back(note.offer);
    return offers;
  }
  MachineState state(const std::string& offer) const { return core->machines().find(offer)->state; }

  ManualClock clock;
  FleetRules rules;
  std::optional<FleetCore> core;
  bool auto_book = true, auto_start = true, auto_join = true, auto_stop = true, auto_drain = true;
  Ticket last_ticket = 0;
  std::map<std::string, Ticket> tickets;
  std::map<Ticket, bool> ran;
  Names rented;
  std::vector<Ticket> stop_requests, find_requests, ended;
  std::vector<std::uint64_t> drain_requests;
  std::vector<fleet::Note> notes;
};

}  // namespace echoline::provisioner
