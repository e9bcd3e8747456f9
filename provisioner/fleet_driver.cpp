#include "provisioner/fleet_driver.hpp"

#include <future>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.hpp"
#include "provisioner/eligibility.hpp"
#include "provisioner/fleet_rules.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "fleet";
constexpr std::size_t kQueueMax = 65'536;
constexpr std::size_t kInputsAtOnce = 4096;
constexpr Duration kGrace = std::chrono::seconds(5);  // between the request to end and a forced end
// How often instances are booked as alive. The ledger of a killed learner is short of at most this time.
constexpr Duration kSignsEvery = std::chrono::seconds(5);
constexpr Duration kSpentEvery = std::chrono::seconds(1);
constexpr Duration kCloseHere = kGrace + std::chrono::seconds(2), kCloseRemote = std::chrono::minutes(2);

void warn(const Status& status) {
  if (!status) log::error("{}", status.error().message());
}

}  // namespace

FleetDriver::FleetDriver(FleetOptions options)
    : options_(std::move(options)), queue_(kQueueMax), clock_(options_.clock ? *options_.clock : system_clock_) {
  for (const PlanRow& row : options_.plan.rows)
    if (row.rank > 0) offers_[row.offer.id] = &row.offer;
}

Result<std::unique_ptr<FleetDriver>> FleetDriver::start(FleetOptions options) {
  std::unique_ptr<FleetDriver> driver(new FleetDriver(std::move(options)));
  std::promise<Status> opened;
  std::future<Status> outcome = opened.get_future();
  // One thread for the whole life, because the kernel ends local instances when the thread that started them ends.
  FleetDriver* const raw = driver.get();
  driver->thread_ = std::thread([&opened, raw] {
    Status status = raw->open_on_thread();
    const bool good = status.has_value();
    if (!good) raw->close_all();
    opened.set_value(std::move(status));
    if (good) raw->loop();
  });
  ECHO_TRY(outcome.get());
  if (raw->options_.market)
    raw->watch_.emplace(raw->options_.market, raw->options_.market_every, [raw](std::vector<Offer> offers) {
      raw->queue_.try_push(Input(Refreshed{std::move(offers)}));
    });
  return driver;
}

FleetDriver::~FleetDriver() { stop(); }

void FleetDriver::stop() {
  watch_.reset();
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

void FleetDriver::beat(const fleet::Beat& beat, Bytes received, Bytes forwarded, Bytes delivered) {
  queue_.try_push(Input(Traffic{beat.worker, received, forwarded, delivered, clock_.now()}));
  notify(beat);
}

Status FleetDriver::open_on_thread() {
  std::vector<std::string> wanted;
  for (const PlanRow* row : options_.plan.chosen()) {
    wanted.push_back(row->offer.id);
    if (const auto provider = provider_of(row->offer.provider); !provider)
      return fail(Code::kInvalid, kOperation, "offer '{}' is of provider '{}': {}", row->offer.id, row->offer.provider,
                  provider.error().message());
  }
  std::vector<FleetOffer> market;
  std::map<std::string, std::size_t> unusable;
  for (const PlanRow& row : options_.plan.rows) {
    if (row.rank == 0) continue;
    if (provider_of(row.offer.provider))
      market.push_back(fleet_offer(options_.plan.request, row.offer, row.cost));
    else
      ++unusable[row.offer.provider];
  }
  for (const auto& [provider, count] : unusable)
    log::info("{} offers are of provider '{}', which cannot be used here", count, provider);
  ECHO_ASSIGN(ledger_, Ledger::open(options_.ledger_file, options_.run));
  core_.emplace(rules_of(options_.plan), market, std::move(wanted));
  ECHO_TRY(take_up());
  tell_spent();
  carry_out(core_->tick(clock_.now()));
  poll_providers();
  update_summary();
  return ok();
}

// Replaces the offers by the current market, filtered by the plan's request.
void FleetDriver::take(Refreshed refreshed) {
  const PlanRequest& request = options_.plan.request;
  std::vector<FleetOffer> market;
  offers_.clear();
  refreshed_ = std::move(refreshed.offers);
  for (Offer& offer : refreshed_) {
    if (defect_of(request, offer) || !provider_of(offer.provider)) continue;
    offer.bid_usd_per_hour = bid_for(request, offer);
    market.push_back(fleet_offer(request, offer));
    offers_[offer.id] = &offer;
  }
  hear(fleet::OffersRefreshed{std::move(market)});
}

// Looks for the instances that the ledger has from an earlier process, and for unknown instances with this run's label.
Status FleetDriver::take_up() {
  for (const LedgerRow& row : ledger_->orphans()) {
    if (row.run != options_.run) continue;
    if (const auto provider = provider_of(row.provider); !provider)
      return fail(Code::kInvalid, kOperation,
                  "an earlier process of this run rented {} from '{}', and it may still cost: {}",
                  row.instance.empty() ? row.label : row.instance, row.provider, provider.error().message());
    labels_[row.id] = row.label;
    accounts_[row.id].last_known_unix_s = row.last_known_unix_s();
    FleetOffer offer{row.offer, row.provider, row.host, row.promised_rollouts_per_s.value_or(0), row.usd_per_hour, 0};
    offer.upload_usd_per_gb = row.upload_usd_per_gb.value_or(0);
    offer.download_usd_per_gb = row.download_usd_per_gb.value_or(0);
    hear(fleet::Recovered{row.id, offer, {row.instance}, !is_here(row.provider)});
  }
  for (const auto& [name, provider] : providers_)
    if (!is_here(name)) provider->list(0, ledger_->label_prefix());
  return ok();
}

void FleetDriver::loop() {
  while (true) {
    auto input = queue_.pop(options_.tick);
    if (!input && queue_.closed()) break;
    for (std::size_t n = 0; input; ++n) {
      if (const auto* event = std::get_if<FleetEvent>(&*input)) hear(*event);
      if (const auto* traffic = std::get_if<Traffic>(&*input)) count(*traffic);
      if (auto* refreshed = std::get_if<Refreshed>(&*input)) take(std::move(*refreshed));
      if (n == kInputsAtOnce) break;
      input = queue_.pop(Duration{});
    }
    poll_providers();
    const TimePoint now = clock_.now();
    if (now >= spent_due_) tell_spent();
    carry_out(core_->tick(now));
    if (now >= signs_due_) book_signs();
    update_summary();
  }
  close_all();
}

void FleetDriver::close_all() {
  stopping_ = true;
  if (ledger_ && core_) {
    book_signs();
    carry_out(core_->close("the run has ended", clock_.now()));
    bool remote = false;
    for (const auto& [key, machine] : core_->machines().all()) remote = remote || !is_here(machine.offer.provider);
    const TimePoint deadline = clock_.now() + (remote ? kCloseRemote : kCloseHere);
    while (!core_->machines().empty() && clock_.now() < deadline) {
      poll_providers();
      carry_out(core_->tick(clock_.now()));
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    for (const auto& [key, machine] : core_->machines().all())
      log::error("{} ({}) may still be rented; `echoline down` releases it", labels_[machine.ticket],
                 machine.instance.text);
    book_ends();
    update_summary();
  }
  providers_.clear();
  ledger_.reset();
}

// ---- actions of the core ----

void FleetDriver::carry_out(const std::vector<FleetAction>& actions) {
  for (const FleetAction& action : actions) std::visit([this](const auto& a) { act(a); }, action);
}

void FleetDriver::act(const fleet::Book& a) {
  const Offer* offer = offer_of(a.offer);
  ECHO_CHECK(offer != nullptr, "offer {}", a.offer);
  auto row = ledger_->intend(*offer, clock_.unix_seconds(), offer->bid_usd_per_hour);
  if (!row) return hear(fleet::BookingFailed{a.offer, row.error().message()});
  labels_[row->id] = row->label;
  accounts_[row->id] = {};
  hear(fleet::Booked{a.offer, row->id});
}

void FleetDriver::act(const fleet::Start& a) {
  const Offer* offer = offer_of(a.offer);
  const auto refuse = [&](const Error& error) { hear(fleet::StartFailed{a.ticket, error.message(), false, false}); };
  const auto provider = provider_of(offer->provider);
  if (!provider) return refuse(provider.error());
  auto spec = options_.launch(*offer);
  if (!spec) return refuse(spec.error());
  spec->offer = *offer;
  spec->label = labels_[a.ticket];
  spec->bid_usd_per_hour = offer->bid_usd_per_hour;
  (*provider)->start(a.ticket, *spec);
}

void FleetDriver::act(const fleet::Stop& a) {
  const auto* machine = core_->machines().of(a.ticket);
  ECHO_CHECK(machine != nullptr);
  const auto provider = provider_of(machine->offer.provider);
  if (!provider) return hear(fleet::StopFailed{a.ticket, provider.error().message()});
  warn(ledger_->stop_asked(a.ticket, clock_.unix_seconds()));
  (*provider)->stop(a.ticket, a.instance, kGrace);
}

void FleetDriver::act(const fleet::Look& a) {
  const auto* machine = core_->machines().of(a.ticket);
  ECHO_CHECK(machine != nullptr);
  if (const auto provider = provider_of(machine->offer.provider)) (*provider)->list(a.ticket, labels_[a.ticket]);
}

void FleetDriver::act(const fleet::BookEnd& a) {
  book_signs();
  if (a.rollouts_per_s)
    warn(ledger_->measured(a.ticket, {a.rollouts_per_s, std::nullopt, std::nullopt}, clock_.unix_seconds()));
  const Account account = std::exchange(accounts_[a.ticket], {});
  accounts_.erase(a.ticket);
  // An instance that ended with its process is booked at its last sign of life, not now.
  const bool with_process = account.last_known_unix_s && !account.runs;
  ends_.push_back({a, with_process ? *account.last_known_unix_s : clock_.unix_seconds()});
  if (with_process) options_.record("orphan", labels_[a.ticket], a.why);
  book_ends();
}

void FleetDriver::act(const fleet::GiveUp& a) {
  if (options_.machine_ended) options_.machine_ended(a.worker, a.why);
}

void FleetDriver::act(const fleet::Drain& a) {
  if (!options_.drain) return hear(fleet::Drained{a.worker});
  options_.drain(a.worker, a.why);
}

void FleetDriver::act(const fleet::Note& a) {
  if (stopping_) return;
  const FleetNumbers n = core_->numbers();
  nlohmann::json numbers = {{"required_rollouts_per_s", n.required_rollouts_per_s},
                            {"target_rollouts_per_s", n.target_rollouts_per_s},
                            {"expected_rollouts_per_s", n.expected_rollouts_per_s},
                            {"working_rollouts_per_s", n.working_rollouts_per_s},
                            {"working", n.working},
                            {"joining", n.joining},
                            {"step_seconds", seconds(n.step_time)},
                            {"t_b_seconds", seconds(n.broadcast_time)},
                            {"payload_bytes", n.payload.count},
                            {"idle_fraction", n.idle_fraction},
                            {"usd_per_hour", n.usd_per_hour},
                            {"usd", n.usd}};
  if (!a.offer.empty()) numbers["offer"] = a.offer;
  if (a.ticket != 0) numbers["row"] = a.ticket;  // of the ledger
  warn(ledger_->decided({clock_.unix_seconds(), a.what, a.why, numbers.dump()}));
  options_.record(a.what, a.offer, a.why);
  if (a.what == "lost" || a.what == "failed") {
    const std::lock_guard lock(mutex_);
    summary_.trouble = fmt::format("{} {}: {}", a.what, a.offer, a.why);
  }
  if (a.what == "lost" || a.what == "failed" || a.what == "short" || a.what == "budget" || a.what == "stop_failed")
    log::warn("{}{}{}: {}", a.what, a.offer.empty() ? "" : " ", a.offer, a.why);
  else
    log::info("{}{}{}: {}", a.what, a.offer.empty() ? "" : " ", a.offer, a.why);
}

// ---- events of providers ----

void FleetDriver::poll_providers() {
  for (const auto& [name, provider] : providers_)
    for (const ProviderEvent& event : provider->poll(clock_.now()))
      std::visit([&, &from = name](const auto& e) { on(from, e); }, event);
}

void FleetDriver::on(const std::string&, const Started& e) {
  const auto* machine = core_->machines().of(e.ticket);
  accounts_[e.ticket].runs = true;
  warn(ledger_->running(e.ticket, e.instance.text, clock_.unix_seconds()));
  if (e.usd_per_hour && machine != nullptr && *e.usd_per_hour != machine->offer.usd_per_hour)
    warn(ledger_->priced(e.ticket, *e.usd_per_hour, clock_.unix_seconds()));
  ++started_;
  options_.record("rented", machine ? machine->offer.id : "", e.instance.text);
  hear(fleet::Started{e.ticket, e.instance, e.usd_per_hour});
}

void FleetDriver::on(const std::string&, const StartFailed& e) {
  hear(fleet::StartFailed{e.ticket, e.error.message(), e.retryable, e.perhaps_rented});
}

void FleetDriver::on(const std::string&, const Stopped& e) { hear(fleet::Stopped{e.ticket}); }

void FleetDriver::on(const std::string&, const StopFailed& e) { hear(fleet::StopFailed{e.ticket, e.error.message()}); }

void FleetDriver::on(const std::string&, const Exited& e) {
  auto ticket = ticket_of(e.instance);
  for (const auto& [key, machine] : core_->machines().all())
    if (!ticket && machine.instance.text.empty() && labels_[machine.ticket] == e.label) ticket = machine.ticket;
  if (ticket) hear(fleet::Exited{*ticket, e.why, e.outbid, e.still_rented});
}

void FleetDriver::on(const std::string&, const Ending& e) {
  if (const auto ticket = ticket_of(e.instance)) hear(fleet::Ending{*ticket, e.why, e.outbid});
}

void FleetDriver::on(const std::string&, const PriceChanged& e) {
  const auto ticket = ticket_of(e.instance);
  if (!ticket) return;
  warn(ledger_->priced(*ticket, e.usd_per_hour, clock_.unix_seconds()));
  hear(fleet::PriceChanged{*ticket, e.usd_per_hour});
}

void FleetDriver::on(const std::string& provider, const Listed& e) {
  if (e.error) log::warn("{}", e.error->message());
  if (e.ticket == 0) {  // a listing of all instances with this run's label
    for (const InstanceInfo& info : e.instances) {
      const bool known = std::any_of(core_->machines().all().begin(), core_->machines().all().end(),
                                     [&](const auto& entry) { return labels_[entry.second.ticket] == info.label; });
      if (known) continue;  // the core already looks for it
      const auto row =
          ledger_->found(provider, info.instance.text, info.label, info.usd_per_hour, clock_.unix_seconds());
      warn(row ? ok() : Status(row.error()));
      if (!row) continue;
      labels_[row->id] = row->label;
      accounts_[row->id].runs = true;
      log::warn("{} has a label of this run but no row in its ledger: it is stopped", info.instance.text);
      hear(fleet::Recovered{row->id, {row->offer, provider, row->host, 0, row->usd_per_hour, 0}, info.instance, false});
    }
    return;
  }
  for (const InstanceInfo& info : e.instances) {
    if (info.label != labels_[e.ticket]) continue;
    const auto* machine = core_->machines().of(e.ticket);
    if (machine != nullptr && !accounts_[e.ticket].runs) {
      accounts_[e.ticket].runs = true;
      if (machine->instance.text.empty()) warn(ledger_->running(e.ticket, info.instance.text, clock_.unix_seconds()));
    }
    return hear(fleet::Found{e.ticket, info.instance, true});
  }
  if (e.complete) hear(fleet::Found{e.ticket, std::nullopt, is_here(provider)});
}

void FleetDriver::count(const Traffic& traffic) {
  const FleetMachine* machine = core_->machines().of(traffic.worker);
  if (machine == nullptr) return;
  Account& account = accounts_[machine->ticket];
  hear(fleet::Moved{traffic.worker, traffic.received, traffic.forwarded});
  // A worker's counters restart with its process.
  const auto since = [](Bytes now, Bytes before) { return Bytes{now.count - (now < before ? 0 : before.count)}; };
  account.received_unbooked += since(traffic.received, account.received);
  account.forwarded_unbooked += since(traffic.forwarded, account.forwarded);
  account.down.heard(traffic.received, traffic.at);
  account.up.heard(std::min(traffic.forwarded, traffic.delivered), traffic.at);  // the lesser of both ends' counts
  account.received = traffic.received;
  account.forwarded = traffic.forwarded;
}

void FleetDriver::book_signs() {
  std::vector<LedgerSign> signs;
  for (auto& [ticket, account] : accounts_) {
    if (!account.runs) continue;
    signs.push_back(
        {ticket, std::exchange(account.forwarded_unbooked, {}), std::exchange(account.received_unbooked, {})});
    const auto* machine = core_->machines().of(ticket);
    const auto measured = machine != nullptr && machine->measured ? machine->measured : account.measured;
    if (measured == account.measured && account.up.best() == account.up_booked &&
        account.down.best() == account.down_booked)
      continue;
    account.measured = measured;
    account.up_booked = account.up.best();
    account.down_booked = account.down.best();
    warn(ledger_->measured(ticket, {measured, account.up_booked, account.down_booked}, clock_.unix_seconds()));
  }
  warn(ledger_->alive(signs, clock_.unix_seconds()));
  signs_due_ = clock_.now() + kSignsEvery;
}

void FleetDriver::book_ends() {
  std::erase_if(ends_, [&](const End& e) {
    const Status booked = e.end.ran ? ledger_->ended(e.end.ticket, e.end.why, e.unix_s)
                                    : ledger_->failed(e.end.ticket, e.end.why, e.unix_s);
    warn(booked);
    return booked || booked.error().code != Code::kIo;  // a full disk may have room later, so retry
  });
}

void FleetDriver::tell_spent() {
  spent_due_ = clock_.now() + kSpentEvery;
  if (!ends_.empty()) book_ends();
  const auto totals = ledger_->totals(clock_.unix_seconds());
  if (!totals) return warn(totals.error());
  {
    const std::lock_guard lock(mutex_);
    summary_.usd = totals->usd;
    summary_.prices_known = totals->prices_known;
    if (!stopping_) summary_.usd_per_hour = totals->usd_per_hour;
  }
  hear(fleet::Spent{totals->usd + (options_.other_usd ? options_.other_usd() : 0)});
}

void FleetDriver::update_summary() {
  if (stopping_) tell_spent();
  const FleetNumbers numbers = core_->numbers();
  const std::lock_guard lock(mutex_);
  summary_.planned = options_.plan.chosen().size();
  summary_.started = started_;
  summary_.lost = numbers.lost;
  summary_.replaced = numbers.replaced;
  summary_.numbers = numbers;
}

FleetSummary FleetDriver::summary() const {
  const std::lock_guard lock(mutex_);
  return summary_;
}

Result<Provider*> FleetDriver::provider_of(const std::string& name) {
  if (const auto it = providers_.find(name); it != providers_.end()) return it->second.get();
  ECHO_ASSIGN(auto made, make_provider(name, options_.providers));
  return (providers_[name] = std::move(made)).get();
}

std::optional<Ticket> FleetDriver::ticket_of(const InstanceId& instance) const {
  for (const auto& [key, machine] : core_->machines().all())
    if (machine.instance == instance) return machine.ticket;
  return std::nullopt;
}

const Offer* FleetDriver::offer_of(const std::string& id) const {
  const auto it = offers_.find(id);
  return it == offers_.end() ? nullptr : it->second;
}

}  // namespace echoline::provisioner
