#include "replay_buffer/records.hpp"

#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {
namespace {

// Of the time that it made others wait: so nobody takes more than a twentieth of the learner's time.
constexpr double kNotWaitedForFactor = 20;

}  // namespace

Status Records::load() {
  std::map<WorkerId, Lapses> lapses;
  std::map<WorkerId, Misconduct> misconduct;
  ECHO_TRY(db_.each("SELECT worker, lapses, batches, malformed, failures FROM worker", [&](const Row& row) {
    const WorkerId worker{row.integer(0)};
    const auto number = [&](int column) { return static_cast<std::uint32_t>(row.integer(column)); };
    if (number(1) > 0) lapses[worker] = {number(1), number(2)};
    if (number(3) > 0 || number(4) > 0) misconduct[worker] = {number(3), number(4)};
  }));
  lapses_ = std::move(lapses);
  misconduct_ = std::move(misconduct);
  return ok();
}

Status Records::write(WorkerId worker) {
  const auto lapses = lapses_.find(worker);
  const auto misconduct = misconduct_.find(worker);
  const Lapses l = lapses == lapses_.end() ? Lapses{} : lapses->second;
  const Misconduct m = misconduct == misconduct_.end() ? Misconduct{} : misconduct->second;
  if (l.weight == 0 && m == Misconduct{}) return db_.run("DELETE FROM worker WHERE worker = ?1", worker.value);
  return db_.run("INSERT OR REPLACE INTO worker VALUES(?1, ?2, ?3, ?4, ?5)", worker.value, l.weight, l.batches,
                 m.malformed, m.failures);
}

Result<std::optional<std::string>> Records::lapsed(WorkerId worker, LapseKind kind) {
  Lapses& lapses = lapses_[worker];
  ++lapses.batches;
  lapses.weight = lapse_weight(lapses.weight, kind);
  std::optional<std::string> enough;
  if (lapses.weight >= kLapsesMax)
    enough = fmt::format("it took {} batches of work and returned nothing of them in time", lapses.batches);
  ECHO_TRY(write(worker));
  return enough;
}

Status Records::returned(WorkerId worker) {
  const auto it = lapses_.find(worker);
  if (it == lapses_.end()) return ok();
  if (--it->second.weight == 0) lapses_.erase(it);
  return write(worker);
}

void Records::kept_waiting(WorkerId worker, double waited_s, double now_unix_s) {
  double& until = not_waited_for_until_[worker];
  until = std::max(until, now_unix_s + kNotWaitedForFactor * waited_s);
}

bool Records::waited_for(WorkerId worker, double now_unix_s) const {
  const auto it = not_waited_for_until_.find(worker);
  return it == not_waited_for_until_.end() || now_unix_s >= it->second;
}

Status Records::keep(WorkerId worker, const Misconduct& misconduct) {
  if (misconduct == Misconduct{})
    misconduct_.erase(worker);
  else
    misconduct_[worker] = misconduct;
  return write(worker);
}

}  // namespace echoline::replay_buffer
