// Registers runs, hands out tickets, and applies the limits per run. Called by relay.cpp.
#include "overlay/relay/runs.hpp"

#include <algorithm>

namespace echoline::overlay::relay {
namespace {

constexpr std::string_view kOperation = "relay";

}  // namespace

Result<std::optional<ConnId>> Runs::add(const std::string& name, ConnId control, const Mac& session) {
  const auto it = all_.find(name);
  const bool is_new = it == all_.end() || !it->second->control;
  if (is_new && registered() >= limits_.runs)
    return fail(Code::kExhausted, kOperation, "{} runs are registered, at most {} may be; end one, or raise --runs",
                registered(), limits_.runs);
  if (it != all_.end() && is_used_up(*it->second))
    return fail(Code::kExhausted, kOperation, "this run has passed {}, all that --run-bytes allows",
                echoline::to_text(Bytes{it->second->bytes}));
  if (it == all_.end()) forget_unused();
  std::unique_ptr<RelayRun>& run = all_[name];
  if (!run) {
    run = std::make_unique<RelayRun>();
    run->name = name;
    run->pacer = Pacer(limits_.rate_per_run);
  }
  run->session = session;
  return std::exchange(run->control, control);
}

// Makes room for one more run. A run without learner and clients is forgotten, and with it the bytes it has passed.
void Runs::forget_unused() {
  if (all_.size() < kRememberedMax) return;
  for (auto it = all_.begin(); it != all_.end();)
    it = !it->second->control && it->second->clients.empty() ? all_.erase(it) : std::next(it);
}

void Runs::remove_control(ConnId control) {
  for (const auto& [name, run] : all_)
    if (run->control == control) run->control.reset();
}

RelayRun* Runs::find(const std::string& server_name) {
  if (const auto it = all_.find(server_name); it != all_.end()) return it->second.get();
  if (server_name.ends_with(kNameEnd) || registered() != 1) return nullptr;
  const auto only = std::find_if(all_.begin(), all_.end(), [](const auto& entry) { return entry.second->control; });
  return only->second.get();
}

Result<Runs::Invited> Runs::invite(const std::string& server_name, ConnId client, const std::string& network) {
  RelayRun* const run = find(server_name);
  if (!run) return fail(Code::kNotFound, kOperation, "no run has the name '{}'", server_name);
  if (!run->control) return fail(Code::kUnavailable, kOperation, "{}: its learner is not connected", run->name);
  if (is_used_up(*run)) return fail(Code::kExhausted, kOperation, "{}: its bytes are used up", run->name);
  if (run->clients.size() >= limits_.connections_per_run)
    return fail(Code::kExhausted, kOperation, "{}: it has {} connections, all that --connections allows", run->name,
                run->clients.size());
  Invited invited{.run = run, .ticket = make_ticket_(), .to_close = std::nullopt};
  run->clients.insert(client);
  run->waiting.add(client, network);
  tickets_[client] = invited.ticket;
  waiting_[invited.ticket] = {.run = run, .client = client, .network = network};
  if (run->waiting.size() > limits_.waiting_per_run) invited.to_close = run->waiting.oldest_of_largest_network();
  return invited;
}

Result<Runs::Redeemed> Runs::redeem(const Ticket& ticket, const Mac& proof) {
  const auto it = waiting_.find(ticket);
  if (it == waiting_.end()) return fail(Code::kNotFound, kOperation, "the ticket is unknown, or its client has left");
  const Redeemed redeemed{.run = it->second.run, .client = it->second.client};
  if (!equal(proof, ticket_proof(redeemed.run->session, ticket)))
    return fail(Code::kInvalid, kOperation, "{}: a ticket with a wrong proof", redeemed.run->name);
  stop_waiting(redeemed.client);
  return redeemed;
}

void Runs::stop_waiting(ConnId client) {
  const auto ticket = tickets_.find(client);
  if (ticket == tickets_.end()) return;
  const auto waiting = waiting_.find(ticket->second);
  waiting->second.run->waiting.remove(client, waiting->second.network);
  waiting_.erase(waiting);
  tickets_.erase(ticket);
}

void Runs::remove_client(RelayRun& run, ConnId client) {
  stop_waiting(client);
  run.clients.erase(client);
}

std::size_t Runs::read_bytes_max(RelayRun& run, std::uint64_t& round, TimePoint now) {
  if (run.turn != turn_) {
    run.turn = turn_;
    run.turn_bytes = 0;
    if (!std::exchange(run.turn_was_too_short, false)) ++run.round;
  }
  if (round == run.round) return 0;
  if (run.pacer.rate() && run.pacer.free_at() > now) {
    run.is_paced_now = true;
    return 0;
  }
  if (run.turn_bytes >= (active_before_ > 1 ? kTurnBytes : kTurnBytesAlone)) {
    run.turn_was_too_short = true;
    return 0;
  }
  round = run.round;
  return run.pacer.slice_bytes(kReadBytesMax);
}

bool Runs::on_passed(RelayRun& run, std::size_t bytes, TimePoint now) {
  if (run.turn_bytes == 0) ++active_;
  run.bytes += bytes;
  run.turn_bytes += bytes;
  run.pacer.occupy(Bytes{bytes}, now, std::exchange(run.is_paced_now, false));
  return !is_used_up(run);
}

std::size_t Runs::registered() const {
  return static_cast<std::size_t>(
      std::count_if(all_.begin(), all_.end(), [](const auto& entry) { return entry.second->control.has_value(); }));
}

void Runs::check() const {
  std::size_t waiting = 0;
  for (const auto& [name, run] : all_) {
    run->waiting.check();
    waiting += run->waiting.size();
    ECHO_CHECK(run->clients.size() <= limits_.connections_per_run, "{} has {} clients", name, run->clients.size());
  }
  ECHO_CHECK(waiting == waiting_.size() && waiting == tickets_.size(), "{} clients wait, {} tickets, {} holders",
             waiting, waiting_.size(), tickets_.size());
}

}  // namespace echoline::overlay::relay
