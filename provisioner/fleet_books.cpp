// What FleetDriver writes to the ledger: intents, signs of life, measurements and ends of rentals.
#include "provisioner/fleet_books.hpp"

#include <utility>

namespace echoline::provisioner {
namespace {

// Interval at which the ledger records that instances are alive. If the learner is killed, the ledger lacks the costs
// of at most this time.
constexpr Duration kSignsOfLifeInterval = std::chrono::seconds(5);

}  // namespace

void MachineRecord::add_traffic(const WorkerTraffic& traffic) {
  // A worker's counters restart with its process.
  const auto increase = [](Bytes counter, Bytes earlier) {
    const bool has_restarted = counter < earlier;
    return has_restarted ? counter : Bytes{counter.count - earlier.count};
  };
  received_unbooked += increase(traffic.received, received);
  forwarded_unbooked += increase(traffic.forwarded, forwarded);
  down_meter.add_reading(traffic.received, traffic.at);
  // The lesser of the sender's and the receivers' counts, so that a worker cannot claim a faster link.
  up_meter.add_reading(std::min(traffic.forwarded, traffic.delivered), traffic.at);
  received = traffic.received;
  forwarded = traffic.forwarded;
}

Result<Ticket> FleetBooks::book(const Offer& offer) {
  ECHO_ASSIGN(const LedgerRow row, ledger_.record_intent(offer, clock_.unix_seconds(), offer.bid_usd_per_hour));
  records_[row.id].label = row.label;
  return row.id;
}

void FleetBooks::add_earlier(const LedgerRow& row) {
  records_[row.id].label = row.label;
  records_[row.id].last_known_unix_s = row.last_known_unix_s();
}

Result<LedgerRow> FleetBooks::book_unknown(const std::string& provider, const InstanceInfo& info) {
  auto row =
      ledger_.record_found_instance(provider, info.instance.text, info.label, info.usd_per_hour, clock_.unix_seconds());
  if (!row) {
    log_error(Status(row.error()));
    return row;
  }
  records_[row->id].label = row->label;
  records_[row->id].is_running = true;
  return row;
}

void FleetBooks::book_signs_of_life(const FleetMachines& machines) {
  std::vector<LedgerSignOfLife> signs;
  for (auto& [ticket, machine_record] : records_) {
    if (!machine_record.is_running) continue;
    signs.push_back({.row = ticket,
                     .uploaded = std::exchange(machine_record.forwarded_unbooked, {}),
                     .downloaded = std::exchange(machine_record.received_unbooked, {})});
    const auto* machine = machines.find(ticket);
    const bool is_measured = machine != nullptr && machine->measured_rollouts_per_s;
    const LedgerMeasurement newest{
        .rollouts_per_s = is_measured ? machine->measured_rollouts_per_s : machine_record.rollouts_per_s_booked,
        .up = machine_record.up_meter.highest(),
        .down = machine_record.down_meter.highest()};
    if (newest.rollouts_per_s == machine_record.rollouts_per_s_booked && newest.up == machine_record.up_booked &&
        newest.down == machine_record.down_booked)
      continue;
    machine_record.rollouts_per_s_booked = newest.rollouts_per_s;
    machine_record.up_booked = newest.up;
    machine_record.down_booked = newest.down;
    log_error(ledger_.record_measurement(ticket, newest, clock_.unix_seconds()));
  }
  log_error(ledger_.record_signs_of_life(signs, clock_.unix_seconds()));
  next_signs_of_life_at_ = clock_.now() + kSignsOfLifeInterval;
}

bool FleetBooks::end(const fleet::BookEnd& end) {
  if (end.rollouts_per_s)
    log_error(ledger_.record_measurement(end.ticket, {.rollouts_per_s = end.rollouts_per_s, .up = {}, .down = {}},
                                         clock_.unix_seconds()));
  const MachineRecord record = std::exchange(records_[end.ticket], {});
  records_[end.ticket].label = record.label;  // a late answer of the provider may still name it
  const bool ended_unwatched = record.last_known_unix_s && !record.is_running;
  unbooked_ends_.push_back({end, ended_unwatched ? *record.last_known_unix_s : clock_.unix_seconds()});
  return ended_unwatched;
}

void FleetBooks::book_ends() {
  std::erase_if(unbooked_ends_, [&](const UnbookedEnd& e) {
    const Status booked = e.end.ran ? ledger_.record_end(e.end.ticket, e.end.why, e.unix_s)
                                    : ledger_.record_failure(e.end.ticket, e.end.why, e.unix_s);
    log_error(booked);
    // kIo, such as a full disk, may pass, so the end is booked again later. Any other error would come again.
    return booked || booked.error().code != Code::kIo;
  });
}

}  // namespace echoline::provisioner
