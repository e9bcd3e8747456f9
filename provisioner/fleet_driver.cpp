// The fleet's thread: passes events of providers and workers to FleetCore, and its actions to providers and the ledger.
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
constexpr std::size_t kQueueMax = 65'536;    // inputs that wait for the fleet's thread; further ones are dropped
constexpr std::size_t kInputsAtOnce = 4096;  // inputs handled before the providers are polled again

constexpr Duration kStopGrace = std::chrono::seconds(5);         // between the request to end and a forced end
constexpr Duration kSpendingInterval = std::chrono::seconds(1);  // between two reports of the money spent to FleetCore
// Interval of listings that look for instances that the ledger lacks. An instance that two successive listings show is
// stopped.
constexpr Duration kRunListingInterval = std::chrono::seconds(30);

// How long close_all() waits for the next instance to end: local ones, remote ones, remote ones without a valid key.
constexpr Duration kPatienceLocal = kStopGrace + std::chrono::seconds(2), kPatienceRemote = std::chrono::minutes(5);
constexpr Duration kPatienceWithoutKey = std::chrono::seconds(30);
constexpr int kFinalListingsMax = 3;  // rounds of listings at the end, if each shows instances that the ledger lacks
constexpr Duration kClosePollInterval = std::chrono::milliseconds(10);
// Tickets of listings of all instances with this run's label: during the run, and at its end. Tickets of machines are
// rows of the ledger, which begin at 1.
constexpr Ticket kListingOfRun = 0, kFinalListing = -1;

bool reports_phases(const std::string& provider) {
  const ProviderKind* kind = provider_kind(provider);
  return kind != nullptr && kind->reports_phases;
}

const Clock& clock_or_system(const Clock* clock) {
  static const SystemClock kSystemClock;
  return clock ? *clock : kSystemClock;
}

}  // namespace

FleetDriver::FleetDriver(FleetOptions options)
    : options_(std::move(options)), queue_(kQueueMax), clock_(clock_or_system(options_.clock)) {
  for (const PlanRow& row : options_.plan.rows)
    if (row.rank > 0) offers_.add(row.offer);  // 0: ineligible
}

Result<std::unique_ptr<FleetDriver>> FleetDriver::start(FleetOptions options) {
  std::unique_ptr<FleetDriver> driver(new FleetDriver(std::move(options)));
  std::promise<Status> opened;
  std::future<Status> outcome = opened.get_future();
  // The same thread opens and runs the fleet, because the kernel ends local instances with the thread that started
  // them.
  FleetDriver* const driver_ptr = driver.get();
  driver->thread_ = std::thread([opened = std::move(opened), driver_ptr]() mutable {
    Status status = driver_ptr->open_on_thread();
    const bool is_open = status.has_value();
    if (!is_open) driver_ptr->close_all();
    opened.set_value(std::move(status));
    if (is_open) driver_ptr->loop();
  });
  ECHO_TRY(outcome.get());
  if (driver_ptr->options_.market)
    driver_ptr->market_watch_.emplace(driver_ptr->options_.market, driver_ptr->options_.market_every,
                                      [driver_ptr](std::vector<Offer> offers) {
                                        driver_ptr->queue_.try_push(Input(RefreshedOffers{std::move(offers)}));
                                      });
  return driver;
}

FleetDriver::~FleetDriver() { stop(); }

void FleetDriver::stop() {
  market_watch_.reset();
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

void FleetDriver::on_heartbeat(const fleet::Heartbeat& heartbeat, Bytes received, Bytes forwarded, Bytes delivered) {
  queue_.try_push(Input(WorkerTraffic{heartbeat.worker, received, forwarded, delivered, clock_.now()}));
  notify(heartbeat);
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
  std::map<std::string, std::size_t> unusable_offers;  // by provider
  for (const PlanRow& row : options_.plan.rows) {
    if (row.rank == 0) continue;
    if (provider_of(row.offer.provider))
      market.push_back(fleet_offer(options_.plan.request, row.offer, row.cost));
    else
      ++unusable_offers[row.offer.provider];
  }
  for (const auto& [provider, count] : unusable_offers)
    log::info("{} offers are of provider '{}', which cannot be used here", count, provider);
  ECHO_ASSIGN(Ledger ledger, Ledger::open(options_.ledger_file, options_.run));
  books_.emplace(std::move(ledger), clock_);
  FleetRules rules = fleet_rules_of(options_.plan);
  for (const ProviderKind* kind : provider_kinds())
    if (kind->starts_at_once > 0) rules.starts_at_once[kind->name] = kind->starts_at_once;
  core_.emplace(std::move(rules), market, std::move(wanted));
  ECHO_TRY(recover_instances());
  report_spending();
  carry_out(core_->tick(clock_.now()));
  poll_providers();
  update_summary();
  return ok();
}

// Replaces the offers by the current market, filtered by the plan's request.
void FleetDriver::replace_offers(RefreshedOffers refreshed) {
  const PlanRequest& request = options_.plan.request;
  std::vector<FleetOffer> market;
  std::erase_if(refreshed.offers, [&](const Offer& offer) {
    return ineligibility_reason(request, offer) || !provider_of(offer.provider);
  });
  for (Offer& offer : refreshed.offers) {
    offer.bid_usd_per_hour = bid_for(request, offer);
    market.push_back(fleet_offer(request, offer));
  }
  offers_.replace_all(std::move(refreshed.offers));
  handle(fleet::OffersRefreshed{std::move(market)});
}

// Looks for the instances that the ledger has from an earlier process, and for unknown instances with this run's label.
Status FleetDriver::recover_instances() {
  for (const LedgerRow& row : books_->ledger().orphans()) {
    if (row.run != options_.run) continue;
    if (const auto provider = provider_of(row.provider); !provider)
      return fail(Code::kInvalid, kOperation,
                  "an earlier process of this run rented {} from '{}', and this provider cannot be used now: {}. The "
                  "machine may still be rented and cost money, so the run does not begin. Make the provider usable; "
                  "then start the run again, or end its machines with: echoline down {}",
                  row.instance.empty() ? row.label : row.instance, row.provider, provider.error().message(),
                  options_.ledger_file.parent_path().string());
    listings_.rented_from.insert(row.provider);
    books_->add_earlier(row);
    FleetOffer offer{.id = row.offer, .provider = row.provider, .host = row.host};
    offer.rollouts_per_s = row.promised_rollouts_per_s.value_or(0);
    offer.usd_per_hour = row.usd_per_hour;
    offer.upload_usd_per_gb = row.upload_usd_per_gb.value_or(0);
    offer.download_usd_per_gb = row.download_usd_per_gb.value_or(0);
    // A local instance ends when the process that rented it ends, so only remote ones can be adopted.
    const bool adopt = !is_local_provider(row.provider);
    handle(fleet::Recovered{.ticket = row.id, .offer = offer, .instance = {row.instance}, .adopt = adopt});
  }
  for (const auto& [name, provider] : providers_)
    if (!is_local_provider(name)) provider->list(kListingOfRun, books_->ledger().label_prefix());
  return ok();
}

void FleetDriver::loop() {
  while (true) {
    auto input = queue_.pop(options_.tick);
    if (!input && queue_.closed()) break;
    for (std::size_t n = 0; input; ++n) {
      if (const auto* event = std::get_if<FleetEvent>(&*input)) handle(*event);
      if (const auto* traffic = std::get_if<WorkerTraffic>(&*input)) record_traffic(*traffic);
      if (auto* refreshed = std::get_if<RefreshedOffers>(&*input)) replace_offers(std::move(*refreshed));
      if (n == kInputsAtOnce) break;   // the other inputs wait until the providers have been polled
      input = queue_.pop(Duration{});  // does not wait
    }
    poll_providers();
    const TimePoint now = clock_.now();
    if (now >= next_spending_report_at_) report_spending();
    carry_out(core_->tick(now));
    if (now >= listings_.next_at) list_run();
    if (books_->are_signs_of_life_due()) books_->book_signs_of_life(core_->machines());
    update_summary();
  }
  close_all();
}

void FleetDriver::close_all() {
  stopping_ = true;
  if (books_ && core_) {
    books_->book_signs_of_life(core_->machines());
    carry_out(core_->close("the run has ended", clock_.now()));
    std::erase_if(listings_.rented_from, [](const std::string& name) { return is_local_provider(name); });
    const bool has_remote_machines = !listings_.rented_from.empty();
    wait_until_returned(has_remote_machines ? kPatienceRemote : kPatienceLocal);
    // A final listing by each provider shows machines that the ledger does not have. They are stopped, too.
    for (int i = 0; i < kFinalListingsMax && core_->machines().empty() && !listings_.rented_from.empty(); ++i) {
      for (const std::string& name : listings_.rented_from)
        if (const auto provider = provider_of(name)) {
          listings_.final_awaited.insert(name);
          (*provider)->list(kFinalListing, books_->ledger().label_prefix());
        }
      listings_.final_failures.clear();
      wait_until_returned(kPatienceRemote);
      const bool found_unknown = std::exchange(listings_.found_unknown, false);
      if (core_->machines().empty() && listings_.final_failures.empty() && !found_unknown) break;
    }
    for (const std::string& name : listings_.final_awaited) listings_.final_failures.push_back({name, "no answer"});
    report_unreturned();
    books_->book_ends();
    update_summary();
  }
  providers_.clear();
  books_.reset();
}

// Polls until no machine is left and no listing is awaited, or until nothing has changed for `patience`.
void FleetDriver::wait_until_returned(Duration patience) {
  const auto unfinished = [&] { return core_->machines().size() + listings_.final_awaited.size(); };
  std::size_t left = unfinished();
  const TimePoint began_at = clock_.now();
  TimePoint deadline = began_at + patience;
  while (unfinished() > 0 && clock_.now() < deadline) {
    poll_providers();
    carry_out(core_->tick(clock_.now()));
    if (unfinished() < left) deadline = clock_.now() + patience;
    // Without a valid key, no machine can be returned.
    if (is_any_key_refused()) deadline = std::min(deadline, began_at + kPatienceWithoutKey);
    left = unfinished();
    std::this_thread::sleep_for(kClosePollInterval);
  }
}

bool FleetDriver::is_any_key_refused() const {
  return std::any_of(provider_accounts_.begin(), provider_accounts_.end(),
                     [](const auto& entry) { return entry.second.key_refused; });
}

void FleetDriver::report_unreturned() {
  std::vector<std::string> lines;
  for (const auto& [key, machine] : core_->machines().all())
    lines.push_back(fmt::format("{} ({})", books_->record(machine.ticket).label,
                                machine.instance.text.empty() ? "unknown instance" : machine.instance.text));
  for (const std::string& line : lines) log::error("{} may still be rented", line);
  for (const auto& [provider, why] : listings_.final_failures) {
    log::error("{} could not list what is rented: {}", provider, why);
    lines.push_back("whatever " + provider + " did not list");
  }
  if (!lines.empty())
    log::error("to release what may be left, run: echoline down {}", options_.ledger_file.parent_path().string());
  const std::lock_guard lock(mutex_);
  summary_.unreturned = std::move(lines);
}

// ---- actions of the core ----

void FleetDriver::carry_out(const std::vector<FleetAction>& actions) {
  for (const FleetAction& action : actions) std::visit([this](const auto& a) { act(a); }, action);
}

void FleetDriver::act(const fleet::Book& a) {
  const Offer* offer = offers_.find(a.offer);
  ECHO_CHECK(offer != nullptr, "offer {}", a.offer);
  const auto ticket = books_->book(*offer);
  if (!ticket) return handle(fleet::BookingFailed{a.offer, ticket.error().message()});
  handle(fleet::Booked{a.offer, *ticket});
}

void FleetDriver::act(const fleet::Start& a) {
  const Offer* offer = offers_.find(a.offer);  // not null: act(Book) has just found it
  const auto refuse = [&](const Error& error) {
    handle(fleet::StartFailed{.ticket = a.ticket, .why = error.message(), .retryable = false, .perhaps_rented = false});
  };
  const auto provider = provider_of(offer->provider);
  if (!provider) return refuse(provider.error());
  auto spec = options_.launch(*offer);
  if (!spec) return refuse(spec.error());
  spec->offer = *offer;
  spec->label = books_->record(a.ticket).label;
  spec->bid_usd_per_hour = offer->bid_usd_per_hour;
  listings_.rented_from.insert(offer->provider);
  (*provider)->start(a.ticket, *spec);
}

void FleetDriver::act(const fleet::CancelStart& a) {
  const auto* machine = core_->machines().find(a.ticket);
  if (machine == nullptr) return;
  if (const auto provider = provider_of(machine->offer.provider); provider && (*provider)->cancel(a.ticket))
    handle(fleet::Cancelled{a.ticket});
}

void FleetDriver::act(const fleet::Stop& a) {
  const auto* machine = core_->machines().find(a.ticket);
  ECHO_CHECK(machine != nullptr);
  const auto provider = provider_of(machine->offer.provider);
  if (!provider) return handle(fleet::StopFailed{a.ticket, provider.error().message()});
  log_error(books_->ledger().record_stop_request(a.ticket, clock_.unix_seconds()));
  (*provider)->stop(a.ticket, a.instance, kStopGrace);
}

void FleetDriver::act(const fleet::FindInstance& a) {
  const auto* machine = core_->machines().find(a.ticket);
  ECHO_CHECK(machine != nullptr);
  if (const auto provider = provider_of(machine->offer.provider))
    (*provider)->list(a.ticket, books_->record(a.ticket).label);
}

void FleetDriver::act(const fleet::BookEnd& a) {
  books_->book_signs_of_life(core_->machines());
  const std::string label = books_->record(a.ticket).label;
  const bool ended_unwatched = books_->end(a);
  if (ended_unwatched) options_.record("orphan", label, a.why);
  books_->book_ends();
}

void FleetDriver::act(const fleet::GiveUp& a) {
  if (options_.machine_ended) options_.machine_ended(a.worker, a.why);
}

void FleetDriver::act(const fleet::Drain& a) {
  if (!options_.drain) return handle(fleet::Drained{a.worker});
  options_.drain(a.worker, a.why);
}

void FleetDriver::act(const fleet::Note& a) {
  if (stopping_) return;
  const FleetStatus fleet_now = core_->numbers();
  nlohmann::json numbers = {{"required_rollouts_per_s", fleet_now.required_rollouts_per_s},
                            {"target_rollouts_per_s", fleet_now.target_rollouts_per_s},
                            {"expected_rollouts_per_s", fleet_now.expected_rollouts_per_s},
                            {"working_rollouts_per_s", fleet_now.working_rollouts_per_s},
                            {"working", fleet_now.working},
                            {"joining", fleet_now.joining},
                            {"step_seconds", seconds(fleet_now.step_time)},
                            {"t_b_seconds", seconds(fleet_now.broadcast_time)},
                            {"payload_bytes", fleet_now.payload.count},
                            {"idle_fraction", fleet_now.idle_fraction},
                            {"usd_per_hour", fleet_now.usd_per_hour},
                            {"usd", fleet_now.usd}};
  if (!a.offer.empty()) numbers["offer"] = a.offer;
  if (a.ticket != 0) numbers["row"] = a.ticket;  // of the ledger
  if (a.what == "lost") numbers["joined"] = a.has_joined;
  log_error(books_->ledger().record_decision(
      {.unix_s = clock_.unix_seconds(), .what = a.what, .why = a.why, .numbers = numbers.dump()}));
  options_.record(a.what, a.offer, a.why);
  const bool is_trouble = a.what == "lost" || a.what == "failed";
  if (is_trouble) {
    const std::lock_guard lock(mutex_);
    summary_.trouble = fmt::format("{} {}: {}", a.what, a.offer, a.why);
  }
  if (is_trouble || a.what == "short" || a.what == "budget" || a.what == "stop_failed" || a.what == "blocked")
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

void FleetDriver::on(const std::string& provider, const Started& e) {
  const auto* machine = core_->machines().find(e.ticket);
  if (machine == nullptr)  // the answer came after the rental's end was booked
    return stop_unknown(provider, {e.instance, books_->record(e.ticket).label, e.usd_per_hour});
  books_->record(e.ticket).is_running = true;
  log_error(books_->ledger().record_start(e.ticket, e.instance.text, clock_.unix_seconds()));
  if (e.usd_per_hour && *e.usd_per_hour != machine->offer.usd_per_hour)
    log_error(books_->ledger().record_price(e.ticket, *e.usd_per_hour, clock_.unix_seconds()));
  {
    const std::lock_guard lock(mutex_);
    ++summary_.started;
  }
  options_.record("rented", machine->offer.id, e.instance.text);
  handle(fleet::Started{.ticket = e.ticket,
                        .instance = e.instance,
                        .usd_per_hour = e.usd_per_hour,
                        .running_follows = reports_phases(provider)});
}

void FleetDriver::on(const std::string&, const Running& e) {
  if (const auto ticket = ticket_of(e.instance)) handle(fleet::Running{*ticket});
}

void FleetDriver::on(const std::string&, const StartFailed& e) {
  handle(fleet::StartFailed{.ticket = e.ticket,
                            .why = e.error.message(),
                            .retryable = e.retryable,
                            .perhaps_rented = e.perhaps_rented,
                            .by_account = e.by_account});
}

void FleetDriver::on(const std::string&, const Stopped& e) { handle(fleet::Stopped{e.ticket}); }

void FleetDriver::on(const std::string&, const StopFailed& e) {
  handle(fleet::StopFailed{e.ticket, e.error.message()});
}

void FleetDriver::on(const std::string&, const Exited& e) {
  auto ticket = ticket_of(e.instance);
  // The exit can be reported before the start, while the instance's id is unknown; then the label identifies it.
  for (const auto& [key, machine] : core_->machines().all())
    if (!ticket && machine.instance.text.empty() && books_->record(machine.ticket).label == e.label)
      ticket = machine.ticket;
  if (ticket)
    handle(fleet::Exited{.ticket = *ticket, .why = e.why, .outbid = e.outbid, .still_rented = e.still_rented});
}

void FleetDriver::on(const std::string&, const Ending& e) {
  if (const auto ticket = ticket_of(e.instance))
    handle(fleet::Ending{.ticket = *ticket, .why = e.why, .outbid = e.outbid});
}

void FleetDriver::on(const std::string&, const PriceChanged& e) {
  const auto ticket = ticket_of(e.instance);
  if (!ticket) return;
  log_error(books_->ledger().record_price(*ticket, e.usd_per_hour, clock_.unix_seconds()));
  handle(fleet::PriceChanged{*ticket, e.usd_per_hour});
}

void FleetDriver::on(const std::string& provider, const AccountChanged& e) {
  provider_accounts_[provider] = e;
  handle(fleet::ProviderTrouble{provider, e.trouble});
  const std::lock_guard lock(mutex_);
  summary_.account_trouble.clear();
  summary_.account_needs_user = false;
  summary_.credit_usd.reset();
  for (const auto& [name, account] : provider_accounts_) {
    if (!account.trouble.empty())
      summary_.account_trouble +=
          fmt::format("{}{}: {}", summary_.account_trouble.empty() ? "" : "; ", name, account.trouble);
    summary_.account_needs_user = summary_.account_needs_user || account.needs_user;
    if (account.credit_usd)
      summary_.credit_usd = std::min(*account.credit_usd, summary_.credit_usd.value_or(*account.credit_usd));
  }
}

void FleetDriver::on(const std::string& provider, const Listed& e) {
  if (e.error) log::warn("{}", e.error->message());
  if (e.ticket == kListingOfRun || e.ticket == kFinalListing)
    on_run_listing(provider, e);
  else
    on_machine_listing(provider, e);
}

// Stops the listed instances that have no row.
void FleetDriver::on_run_listing(const std::string& provider, const Listed& e) {
  const bool answers_final_listing = e.ticket == kFinalListing && listings_.final_awaited.erase(provider) > 0;
  if (answers_final_listing && !e.complete)
    listings_.final_failures.push_back({provider, e.error ? e.error->message() : "incomplete"});
  // An instance is stopped as unknown only if two successive listings show it, because its end may have been booked
  // while the first was under way. One listing suffices at the start of the process and at its end.
  const bool is_first = !listings_.unknown.contains(provider);
  const std::set<std::string> unknown_before = std::exchange(listings_.unknown[provider], {});
  for (const InstanceInfo& info : e.instances) {
    const bool is_known =
        std::any_of(core_->machines().all().begin(), core_->machines().all().end(),
                    [&](const auto& entry) { return books_->record(entry.second.ticket).label == info.label; });
    if (is_known) continue;
    listings_.unknown[provider].insert(info.instance.text);
    if (!is_first && !stopping_ && !unknown_before.contains(info.instance.text)) continue;
    stop_unknown(provider, info);
  }
}

void FleetDriver::stop_unknown(const std::string& provider, const InstanceInfo& info) {
  const auto row = books_->book_unknown(provider, info);
  if (!row) return;  // the next listing shows the instance again
  log::warn("{} has a label of this run but no open row in its ledger: it is stopped", info.instance.text);
  listings_.found_unknown = true;
  listings_.rented_from.insert(provider);
  FleetOffer offer{.id = row->offer, .provider = provider, .host = row->host};
  offer.usd_per_hour = row->usd_per_hour;
  handle(fleet::Recovered{.ticket = row->id, .offer = offer, .instance = info.instance, .adopt = false});
}

// Answers FindInstance.
void FleetDriver::on_machine_listing(const std::string& provider, const Listed& e) {
  for (const InstanceInfo& info : e.instances) {
    MachineRecord& machine_record = books_->record(e.ticket);
    if (info.label != machine_record.label) continue;
    const auto* machine = core_->machines().find(e.ticket);
    if (machine != nullptr && !machine_record.is_running) {
      machine_record.is_running = true;
      if (machine->instance.text.empty())
        log_error(books_->ledger().record_start(e.ticket, info.instance.text, clock_.unix_seconds()));
    }
    if (const auto found_at = provider_of(provider)) (*found_at)->watch(info.instance, info.label);
    return handle(fleet::Found{
        .ticket = e.ticket, .instance = info.instance, .certain = true, .running_follows = reports_phases(provider)});
  }
  // A remote provider may list an instance only some time after the request; local processes are listed at once.
  const bool certain = is_local_provider(provider);
  if (e.complete) handle(fleet::Found{.ticket = e.ticket, .instance = std::nullopt, .certain = certain});
}

// Looks for instances with this run's label that have no row in the ledger.
void FleetDriver::list_run() {
  listings_.next_at = clock_.now() + kRunListingInterval;
  for (const std::string& name : listings_.rented_from)
    if (const auto provider = provider_of(name); provider && !is_local_provider(name))
      (*provider)->list(kListingOfRun, books_->ledger().label_prefix());
}

void FleetDriver::record_traffic(const WorkerTraffic& traffic) {
  const FleetMachine* machine = core_->machines().find(traffic.worker);
  if (machine == nullptr) return;
  const Ticket ticket = machine->ticket;
  handle(fleet::TrafficMeasured{traffic.worker, traffic.received, traffic.forwarded});
  books_->record(ticket).add_traffic(traffic);
}

void FleetDriver::report_spending() {
  next_spending_report_at_ = clock_.now() + kSpendingInterval;
  books_->book_ends();
  const auto totals = books_->ledger().totals(clock_.unix_seconds());
  if (!totals) return log_error(totals.error());
  {
    const std::lock_guard lock(mutex_);
    summary_.usd = totals->usd;
    summary_.prices_known = totals->prices_known;
    if (!stopping_) summary_.usd_per_hour = totals->usd_per_hour;
  }
  handle(fleet::SpendingMeasured{totals->usd + (options_.other_usd ? options_.other_usd() : 0)});
}

void FleetDriver::update_summary() {
  if (stopping_) report_spending();  // loop() does not any more
  const FleetStatus numbers = core_->numbers();
  const std::lock_guard lock(mutex_);
  summary_.planned = options_.plan.chosen().size();
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
  ECHO_ASSIGN(auto provider, make_provider(name, options_.providers));
  return (providers_[name] = std::move(provider)).get();
}

std::optional<Ticket> FleetDriver::ticket_of(const InstanceId& instance) const {
  for (const auto& [key, machine] : core_->machines().all())
    if (machine.instance == instance) return machine.ticket;
  return std::nullopt;
}

}  // namespace echoline::provisioner
