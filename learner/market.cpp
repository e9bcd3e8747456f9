// A run's offers: RunMarket for a plan, MarketSource for the fleet of a running learner.
#include "learner/market.hpp"

#include <sys/stat.h>

#include "base/clock.hpp"
#include "learner/planning.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/links.hpp"
#include "provisioner/providers/registry.hpp"
#include "provisioner/replacement.hpp"
#include "provisioner/throughput.hpp"

namespace echoline::learner {
namespace {

std::optional<double> modified_unix_s(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return static_cast<double>(info.st_mtim.tv_sec);
}

// A text that identifies the file's content, even if it is replaced within a second; "" if there is no file.
std::string identity_of(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return "";
  return fmt::format("{}/{}/{}/{}.{:09}", info.st_dev, info.st_ino, info.st_size, info.st_mtim.tv_sec,
                     info.st_mtim.tv_nsec);
}

// The measured and the promised rates of machines in earlier runs.
std::vector<provisioner::MeasuredRate> measured_rates(const std::vector<provisioner::LedgerHost>& hosts) {
  std::vector<provisioner::MeasuredRate> measured;
  for (const provisioner::LedgerHost& host : hosts)
    if (host.promised_rollouts_per_s && host.measured_rollouts_per_s)
      measured.push_back({.run = host.run,
                          .provider = host.provider,
                          .host = host.host,
                          .gpu = host.gpu,
                          .gpu_count = host.gpu_count,
                          .promised_rollouts_per_s = *host.promised_rollouts_per_s,
                          .measured_rollouts_per_s = *host.measured_rollouts_per_s,
                          .engine = host.engine});
  return measured;
}

std::vector<provisioner::KnownLinks> known_links(const std::vector<provisioner::LedgerHost>& hosts) {
  std::vector<provisioner::KnownLinks> links;
  for (const provisioner::LedgerHost& host : hosts)
    if (host.up || host.down)
      links.push_back({.provider = host.provider, .host = host.host, .up = host.up, .down = host.down});
  return links;
}

// Reads the offers file or searches the market, then predicts each offer's speed. A search ends early if `stop` (may be
// null) turns true.
Result<RunMarket> read_market(const RunConfig& config, const model::ModelConfig& model,
                              const provisioner::PlanRequest& request,
                              const std::vector<provisioner::MeasuredRate>& measured,
                              const std::vector<provisioner::KnownLinks>& links, const std::atomic<bool>* stop) {
  RunMarket market;
  if (config.fleet.search) {
    ECHO_ASSIGN(provisioner::MarketAnswer answer,
                provisioner::search_market(config.fleet.provider, provider_options(config),
                                           {.request = request, .stop = stop}));
    market = {
        .offers = std::move(answer.offers),
        .market = {.source = answer.source, .format = answer.format, .recorded_unix_s = SystemClock().unix_seconds()}};
  } else {
    auto list = provisioner::load_offers(config.fleet.offers, config.fleet.reading());
    if (!list) return as_user_error(std::move(list).error());
    market = {.offers = std::move(list->offers),
              .market = {.source = config.fleet.offers.string(),
                         .format = list->format,
                         .recorded_unix_s = modified_unix_s(config.fleet.offers)},
              .notes = std::move(list->notes)};
  }

  std::optional<provisioner::ThroughputProfile> profile;
  if (config.fleet.profile) {
    auto loaded = provisioner::ThroughputProfile::load(*config.fleet.profile);
    if (!loaded) return as_user_error(std::move(loaded).error());
    profile = std::move(*loaded);
  }
  const provisioner::Workload workload{
      .parameters = static_cast<double>(model.parameters()),
      .tokens_per_rollout =
          static_cast<double>(config.fleet.response_tokens_expected.value_or(config.rollout.response_tokens_max)),
      .engines = config.worker.worker_engines(),
      .kv_bytes_per_token = static_cast<double>(model::memory_estimate(model).kv_cache_per_token.count)};
  provisioner::fill_links(market.offers, links);
  provisioner::predict_throughput(market.offers, workload, profile ? &*profile : nullptr, measured);
  return market;
}

}  // namespace

Result<RunMarket> read_run_market(const RunConfig& config, const model::ModelConfig& model,
                                  const provisioner::PlanRequest& request) {
  const auto hosts = provisioner::known_hosts(config.run.folder);
  ECHO_ASSIGN(RunMarket market,
              read_market(config, model, request, measured_rates(hosts), known_links(hosts), /*stop=*/nullptr));
  std::vector<provisioner::PastRental> rentals;
  for (const provisioner::LedgerHost& host : hosts)
    rentals.push_back({.provider = host.provider, .host = host.host, .hours = host.hours, .lost = host.lost});
  provisioner::set_loss_history(market.offers, rentals);
  return market;
}

MarketSource::MarketSource(const RunConfig& config, model::ModelConfig model, provisioner::PlanRequest request,
                           const provisioner::Market& known)
    : config_(config), model_(std::move(model)), request_(std::move(request)) {
  const auto hosts = provisioner::known_hosts(config.run.folder);
  measured_ = measured_rates(hosts);
  links_ = known_links(hosts);
  // The plan has just used the market, so the fleet need not search or read it again at once.
  if (config.fleet.search)
    searched_unix_s_ = known.recorded_unix_s.value_or(0);
  else if (known.recorded_unix_s == modified_unix_s(config.fleet.offers))
    read_identity_ = identity_of(config.fleet.offers);
}

Result<std::optional<std::vector<provisioner::Offer>>> MarketSource::read_changed_offers(
    double now_unix_s, const std::atomic<bool>& stop) {
  using ChangedOffers = std::optional<std::vector<provisioner::Offer>>;
  if (config_.fleet.search) {
    // A clock that was set back must not stop the searches.
    const double since_search_s = now_unix_s - searched_unix_s_;
    if (since_search_s >= 0 && since_search_s < seconds(config_.fleet.search_every)) return ChangedOffers();
    searched_unix_s_ = now_unix_s;
  } else {
    const std::string identity = identity_of(config_.fleet.offers);
    if (identity.empty() || identity == read_identity_)
      return ChangedOffers();  // a missing file says nothing about the offers
    read_identity_ = identity;
  }
  ECHO_ASSIGN(RunMarket market, read_market(config_, model_, request_, measured_, links_, &stop));
  return ChangedOffers(std::move(market.offers));
}

}  // namespace echoline::learner
