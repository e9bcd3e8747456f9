#include "learner/market.hpp"

#include <sys/stat.h>

#include "base/clock.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/throughput.hpp"
#include "provisioner/vast_search.hpp"

namespace echoline::learner {
namespace {

std::optional<double> written_unix_s(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return static_cast<double>(info.st_mtim.tv_sec);
}

}  // namespace

Result<RunMarket> run_market(const RunConfig& config, const model::ModelConfig& model,
                             const provisioner::PlanRequest& request) {
  provisioner::OfferReading reading;
  reading.format = config.fleet.offers_format;
  reading.disk = config.fleet.disk;
  reading.copies = config.fleet.catalogue_copies;
  RunMarket market;
  Result<provisioner::OfferList> list = provisioner::OfferList{};
  if (config.fleet.search) {
    provisioner::VastSearch search;
    if (!config.fleet.vast_url.empty()) search.url = config.fleet.vast_url;
    search.disk = config.fleet.disk;
    ECHO_ASSIGN(const std::string reply, provisioner::search_vast(search, request));
    reading.format = provisioner::OfferFormat::kVast;
    list = provisioner::parse_offers(reply, search.url, reading);
    market.from = {search.url, "", SystemClock().unix_seconds()};
  } else {
    list = provisioner::load_offers(config.fleet.offers, reading);
    market.from = {config.fleet.offers.string(), "", written_unix_s(config.fleet.offers)};
  }
  if (!list) return as_mistake(std::move(list).error());
  market.from.format = to_string(list->format);
  market.offers = std::move(list->offers);

  std::optional<provisioner::ThroughputProfile> profile;
  if (config.fleet.profile) {
    auto loaded = provisioner::ThroughputProfile::load(*config.fleet.profile);
    if (!loaded) return as_mistake(std::move(loaded).error());
    profile = std::move(*loaded);
  }
  std::vector<provisioner::MeasuredRate> measured;
  for (const provisioner::LedgerHost& host : provisioner::known_hosts(config.run.folder))
    if (host.promised_rollouts_per_s && host.measured_rollouts_per_s)
      measured.push_back({host.run, host.provider, host.host, host.gpu, host.gpu_count, *host.promised_rollouts_per_s,
                          *host.measured_rollouts_per_s});
  const provisioner::Workload work{
      static_cast<double>(model.parameters()),
      static_cast<double>(config.fleet.response_tokens_expected.value_or(config.rollout.response_tokens_max))};
  provisioner::predict_throughput(market.offers, work, profile ? &*profile : nullptr, measured);
  return market;
}

}  // namespace echoline::learner
