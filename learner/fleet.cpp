#include "learner/fleet.hpp"

#include <algorithm>
#include <future>
#include <utility>

#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQueueMax = 65'536;
constexpr Duration kTick = std::chrono::milliseconds(50);
constexpr Duration kGrace = std::chrono::seconds(5);  // between SIGTERM and SIGKILL
// What the ledger knows of an instance is so old at most: the most that a killed learner's fleet can be booked short of.
constexpr Duration kSignsEvery = std::chrono::seconds(5);

double usd_per_hour(const provisioner::Offer& offer) {
  return offer.usd_per_hour_known();
}

provisioner::FleetOffer fleet_offer(const provisioner::Offer& offer) {
  return {offer.id, offer.rollouts_per_s, usd_per_hour(offer)};
}

}  // namespace

Fleet::Fleet(FleetOptions options) : options_(std::move(options)), queue_(kQueueMax) {}

Result<std::unique_ptr<Fleet>> Fleet::start(FleetOptions options) {
  std::unique_ptr<Fleet> fleet(new Fleet(std::move(options)));
  std::promise<Status> opened;
  std::future<Status> outcome = opened.get_future();
  // One thread for the whole life: the kernel ends local instances when the thread that started them ends.
  fleet->thread_ = std::thread([&opened, raw = fleet.get()] {
    Status status = raw->open_on_thread();
    const bool good = status.has_value();
    if (!good) raw->close_all();
    opened.set_value(std::move(status));
    if (good) raw->loop();
  });
  ECHO_TRY(outcome.get());
  return fleet;
}

Fleet::~Fleet() { stop(); }

void Fleet::stop() {
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

Status Fleet::open_on_thread() {
  ECHO_TRY(make_folders(options_.log_folder));
  ECHO_ASSIGN(provider_, provisioner::make_provider(options_.provider, options_.provider_options));
  ECHO_ASSIGN(ledger_, provisioner::Ledger::open(options_.ledger_file, options_.run));
  for (const provisioner::LedgerRow& orphan : ledger_->orphans()) {
    if (!orphan.instance.empty()) provider_->stop(orphan.id, {orphan.instance}, kGrace);
    // Its instances ended with that process, when it was last heard of and not now.
    ECHO_TRY(ledger_->ended(orphan.id, "left behind by an earlier process", orphan.last_known_unix_s()));
    options_.record("orphan", orphan.offer, orphan.instance);
  }
  std::map<std::string_view, const provisioner::Offer*> offers;
  for (const provisioner::Offer& offer : options_.offers) offers[offer.id] = &offer;
  std::vector<provisioner::FleetOffer> standby;
  for (const std::string& id : options_.plan.standby) standby.push_back(fleet_offer(*offers.at(id)));
  provisioner::ControllerConfig config;
  config.required_rollouts_per_s = options_.plan.target.required_rollouts_per_s;
  config.headroom = options_.plan.request.headroom;
  config.replace_lost = options_.replace_lost;
  controller_.emplace(config, std::move(standby));
  for (const provisioner::PlanRow* row : options_.plan.chosen()) ECHO_TRY(rent(row->offer));
  update_summary();
  return ok();
}

Status Fleet::rent(const provisioner::Offer& offer) {
  ECHO_ASSIGN(const provisioner::LedgerRow row, ledger_->intend(offer, clock_.unix_seconds()));
  provisioner::LaunchSpec spec;
  spec.offer = offer;
  spec.label = row.label;
  spec.image = options_.image;
  spec.disk = options_.disk;
  spec.argv = options_.worker_argv(offer);
  if (options_.worker_env) {
    ECHO_ASSIGN(spec.env, options_.worker_env(offer));
  }
  Instance& instance = instances_[offer.id];
  instance = Instance{};
  instance.offer = offer;
  instance.ledger_row = row.id;
  provider_->start(row.id, spec);
  start_error_.reset();
  take_events();
  if (start_error_) {
    instances_.erase(offer.id);
    return *start_error_;
  }
  ++started_;
  options_.record("rented", offer.id, instance.id.text);
  return ok();
}

void Fleet::take_events() {
  const auto by_id = [this](const provisioner::InstanceId& id) {
    return std::find_if(instances_.begin(), instances_.end(),
                        [&](const auto& entry) { return entry.second.id == id && !entry.second.ended; });
  };
  const auto warn = [](const Status& booked) {
    if (!booked) log::error("{}", booked.error().message());
  };
  for (const provisioner::ProviderEvent& event : provider_->poll(clock_.now())) {
    if (const auto* started = std::get_if<provisioner::Started>(&event)) {
      for (auto& [name, instance] : instances_)
        if (instance.ledger_row == started->ticket) instance.id = started->instance;
      warn(ledger_->running(started->ticket, started->instance.text, clock_.unix_seconds()));
    } else if (const auto* failed = std::get_if<provisioner::StartFailed>(&event)) {
      warn(ledger_->failed(failed->ticket, failed->error.message(), clock_.unix_seconds()));
      start_error_ = failed->error;
    } else if (const auto* stopped = std::get_if<provisioner::Stopped>(&event)) {
      if (const auto it = by_id(stopped->instance); it != instances_.end())
        instance_ended(it->second, stopped->how, false);
    } else if (const auto* unstopped = std::get_if<provisioner::StopFailed>(&event)) {
      log::warn("{}", unstopped->error.message());
    } else if (const auto* exited = std::get_if<provisioner::Exited>(&event)) {
      if (const auto it = by_id(exited->instance); it != instances_.end())
        instance_ended(it->second, exited->why, !it->second.released && !stopping_);
    }
  }
}

void Fleet::book_signs() {
  std::vector<provisioner::LedgerSign> signs;
  for (auto& [name, instance] : instances_) {
    if (instance.ended) continue;
    signs.push_back({instance.ledger_row, std::exchange(instance.forwarded_unbooked, Bytes{}),
                     std::exchange(instance.received_unbooked, Bytes{})});
  }
  if (const Status booked = ledger_->alive(signs, clock_.unix_seconds()); !booked)
    log::error("{}", booked.error().message());
  signs_due_ = clock_.now() + kSignsEvery;
}

void Fleet::loop() {
  while (true) {
    if (auto task = queue_.pop(kTick)) {
      (*task)();
    } else if (queue_.closed()) {
      break;
    }
    tick();
  }
  close_all();
}

void Fleet::tick() {
  take_events();
  for (const provisioner::FleetAction& action : controller_->tick(clock_.now())) {
    if (const auto* activate = std::get_if<provisioner::Activate>(&action)) {
      const provisioner::Offer* chosen = nullptr;
      for (const provisioner::Offer& offer : options_.offers)
        if (offer.id == activate->offer) chosen = &offer;
      Status rented = chosen ? rent(*chosen) : fail(Code::kInternal, "fleet", "no offer '{}'", activate->offer);
      if (rented) {
        if (activate->replaces_lost) ++replaced_;
        options_.record("activated", activate->offer, activate->reason);
        log::info("renting {}: {}", activate->offer, activate->reason);
      } else {
        controller_->start_failed(activate->offer, clock_.now());
        log::warn("cannot rent {}: {}", activate->offer, rented.error().message());
      }
    } else if (const auto* release = std::get_if<provisioner::Release>(&action)) {
      for (auto& [name, instance] : instances_) {
        if (instance.worker != release->worker || instance.ended) continue;
        instance.released = true;
        options_.record("released", name, release->reason);
        log::info("releasing {}: {}", name, release->reason);
        provider_->stop(instance.ledger_row, instance.id, kGrace);
      }
    }
  }
  if (clock_.now() >= signs_due_) book_signs();
  update_summary();
}

void Fleet::instance_ended(Instance& instance, const std::string& why, bool unexpected) {
  book_signs();
  instance.ended = true;
  if (const Status booked = ledger_->ended(instance.ledger_row, why, clock_.unix_seconds()); !booked)
    log::error("{}", booked.error().message());
  if (stopping_) return;
  if (unexpected) {
    ++lost_;
    options_.record("lost", instance.offer.id, why);
    log::warn("{} is lost: {}", instance.offer.id, why);
  }
  if (instance.worker) {
    if (unexpected && options_.machine_ended) options_.machine_ended(*instance.worker, "its machine has ended: " + why);
    controller_->lost(*instance.worker, clock_.now());
  } else {
    controller_->start_failed(instance.offer.id, clock_.now());
  }
}

void Fleet::worker_joined(WorkerId worker, const std::string& offer) {
  queue_.try_push([this, worker, offer] {
    const auto it = instances_.find(offer);
    if (it == instances_.end()) return;  // joined by hand, not rented by this run
    if (it->second.ended || it->second.worker == worker) return;  // it came back
    it->second.worker = worker;
    controller_->started(worker, fleet_offer(it->second.offer));
  });
}

void Fleet::worker_lost(WorkerId worker, const std::string& reason) {
  queue_.try_push([this, worker, reason] {
    for (auto& [name, instance] : instances_) {
      if (instance.worker != worker || instance.ended || stopping_) continue;
      // Whatever it still does, it is no use to the run: stop paying for it.
      provider_->stop(instance.ledger_row, instance.id, kGrace);
      instance_ended(instance, reason, !instance.released);
    }
  });
}

void Fleet::worker_progress(WorkerId worker, double rollouts, double busy_s) {
  queue_.try_push([this, worker, rollouts, busy_s] {
    controller_->completed(worker, rollouts, from_seconds(busy_s), clock_.now());
  });
}

void Fleet::worker_traffic(WorkerId worker, Bytes received, Bytes forwarded) {
  queue_.try_push([this, worker, received, forwarded] {
    // What it counts starts anew with the worker's process.
    const auto since = [](Bytes now, Bytes before) { return Bytes{now.count - (now < before ? 0 : before.count)}; };
    for (auto& [name, instance] : instances_) {
      if (instance.worker != worker || instance.ended) continue;
      instance.received_unbooked.count += since(received, instance.received).count;
      instance.forwarded_unbooked.count += since(forwarded, instance.forwarded).count;
      instance.received = received;
      instance.forwarded = forwarded;
    }
  });
}

void Fleet::update_summary() {
  const auto totals = ledger_->totals(clock_.unix_seconds());
  const std::lock_guard lock(mutex_);
  summary_.planned = options_.plan.chosen().size();
  summary_.started = started_;
  summary_.lost = lost_;
  summary_.replaced = replaced_;
  if (totals) {
    summary_.usd = totals->usd;
    summary_.prices_known = totals->prices_known;
    if (!stopping_) summary_.usd_per_hour = totals->usd_per_hour;
  }
  still_joining_ = 0;
  for (const auto& [name, instance] : instances_) still_joining_ += !instance.ended && !instance.worker ? 1 : 0;
}

void Fleet::close_all() {
  stopping_ = true;
  if (ledger_) book_signs();
  for (auto& [name, instance] : instances_)
    if (!instance.ended) provider_->stop(instance.ledger_row, instance.id, kGrace);
  const TimePoint deadline = clock_.now() + kGrace + std::chrono::seconds(2);
  for (bool alive = true; alive && clock_.now() < deadline;) {
    take_events();
    alive = false;
    for (const auto& [name, instance] : instances_) alive = alive || !instance.ended;
    if (alive) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (ledger_) update_summary();
  provider_.reset();
  ledger_.reset();
}

std::size_t Fleet::still_joining() const {
  const std::lock_guard lock(mutex_);
  return still_joining_;
}

FleetSummary Fleet::summary() const {
  const std::lock_guard lock(mutex_);
  return summary_;
}

}  // namespace echoline::learner
