// Reads the sections `fleet` and `network` of the run file.
#include "provisioner/settings.hpp"

#include "base/config.hpp"
#include "base/suggest.hpp"
#include "base/text.hpp"
#include "chains/planner.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

void read_assume(ConfigSection assume, Assumptions& values) {
  const Limits<double> usd{.min = 0.0, .max = 1e6};
  const Limits<BitRate> link{.min = BitRate{1000}, .max = BitRate{1e12}};
  // Each pair of texts: the meaning of the value, and what happens to an offer if neither states it.
  constexpr const char* kLeftOut = "such offers are not considered";
  assume.read("storage_usd_per_hour", values.storage_usd_per_hour, usd, {"price of the disk", kLeftOut});
  assume.read("upload_usd_per_gb", values.upload_usd_per_gb, usd,
              {"price of a worker's outgoing traffic; 1 GB is 10^9 bytes", kLeftOut});
  assume.read("download_usd_per_gb", values.download_usd_per_gb, usd, {"price of its incoming traffic", kLeftOut});
  assume.read("up", values.up, link, {"uplink", kLeftOut});
  assume.read("down", values.down, link, {"downlink", kLeftOut});
  assume.read("vram_gb", values.vram_gb, {.min = 0.0, .max = 1e5}, {"memory of one GPU", kLeftOut});
  assume.read("reliability", values.reliability, {.min = 0.0, .max = 1.0},
              {"share of the time that it is up", "such offers are not considered if fleet.reliability_min is set"});
  assume.read("duration", values.duration, {.min = Duration(0), .max = std::chrono::hours(24 * 3650)},
              {"longest rental", "such offers are not considered if fleet.duration_min is set"});
}

void read_where(ConfigSection where, OfferConditions& conditions) {
  const Limits<double> usd{.min = 0.0, .max = 1e6};
  const Limits<int> gpus{.min = 1, .max = 1024};
  where.read("gpus", conditions.gpus, {"names of GPUs as the market writes them, such as [RTX 4090]", "any"});
  where.read("gpu_count_min", conditions.gpu_count_min, gpus, {"GPUs of an offer, at least", "any"});
  where.read("gpu_count_max", conditions.gpu_count_max, gpus, {"and at most", "any"});
  where.read("verified", conditions.verified, "the market has tested the machine");
  where.read("datacenter", conditions.datacenter, "the market lists the machine's owner as a data centre");
  where.read("open_ports_min", conditions.open_ports_min, {.min = 0, .max = 65535},
             {"ports of the machine that can be reached from outside; a worker needs one to forward policies", "any"});
  where.read("cuda_min", conditions.cuda_min, {.min = 1.0, .max = 99.0},
             {"the CUDA version that the machine's driver must support, such as 12.8",
              "the version in the name of fleet.image (nvidia/cuda:12.8.1, cu128), if a GPU is used"});
  where.read("compute_capability_min", conditions.compute_capability_min, {.min = 1.0, .max = 99.0},
             {"of the GPUs, such as 8.9", "any"});
  where.read("memory_min", conditions.memory_min, {.min = Bytes{0}, .max = Bytes{1ull << 50}},
             {"host memory of an offer", "any; if worker.engine is a server, two copies of the policy"});
  where.read("down_min", conditions.down_min, {.min = BitRate{0}, .max = BitRate{1e12}},
             {"downlink of an offer", "any"});
  where.read("upload_usd_per_gb_max", conditions.upload_usd_per_gb_max, usd, {"price of outgoing traffic", "any"});
  where.read("download_usd_per_gb_max", conditions.download_usd_per_gb_max, usd, {"price of incoming traffic", "any"});
  if (conditions.gpu_count_min && conditions.gpu_count_max && *conditions.gpu_count_max < *conditions.gpu_count_min)
    where.error("gpu_count_max", fmt::format("expected at least gpu_count_min, {}", *conditions.gpu_count_min));
}

// The CUDA version in the name of a container image: 12.8 for "nvidia/cuda:12.8.1-base" and "vllm:cu128". Absent if the
// name has none.
std::optional<double> cuda_of_image(std::string_view image) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  for (std::size_t at = image.find("cu"); at != std::string_view::npos; at = image.find("cu", at + 2)) {
    std::string_view rest = image.substr(at + 2);
    if (rest.starts_with("da")) rest.remove_prefix(2);
    if (!rest.empty() && (rest.front() == ':' || rest.front() == '-' || rest.front() == '_')) rest.remove_prefix(1);
    std::size_t digits = 0;
    while (digits < rest.size() && is_digit(rest[digits])) ++digits;
    if (digits == 2 && rest.size() > 3 && rest[2] == '.' && is_digit(rest[3]))  // "12.8"
      return (rest[0] - '0') * 10 + (rest[1] - '0') + (rest[3] - '0') / 10.0;
    // "128"
    if (digits == 3) return (rest[0] - '0') * 10 + (rest[1] - '0') + (rest[2] - '0') / 10.0;
  }
  return std::nullopt;
}

// The meanings of all values of fleet.provider and of fleet.offers_format.
std::string provider_meanings() {
  std::string text;
  for (const ProviderKind* kind : provider_kinds()) text += fmt::format("{} ({}), ", kind->meaning, kind->name);
  return text + "or nothing is rented and workers join by hand (none)";
}
std::string format_meanings() {
  std::vector<std::string> texts;
  for (const ProviderKind* kind : provider_kinds())
    if (kind->offer_format)
      texts.push_back(fmt::format("{} ({})", kind->offer_format->meaning, kind->offer_format->name));
  texts.back() = "or " + texts.back();
  return fmt::format("the file's format: recognised by its content (auto), our own JSON or YAML (own), {}",
                     fmt::join(texts, ", "));
}

// Reads the regions, and the links between them (`ways`), each of which is valid in both directions.
void read_regions(ConfigSection& network, RegionMap& map) {
  const auto region_index = [&](ConfigSection& section, const char* key,
                                const std::string& name) -> std::optional<std::uint32_t> {
    std::vector<std::string> names;
    for (const Region& region : map.regions) names.push_back(region.name);
    const auto it = std::find(names.begin(), names.end(), name);
    if (it != names.end()) return static_cast<std::uint32_t>(it - names.begin());
    if (!name.empty())
      section.error(key,
                    fmt::format("no region '{}' in network.regions{}", printable(name, 60), did_you_mean(name, names)));
    return std::nullopt;
  };
  for (ConfigSection region_section :
       network.sections("regions",
                        "regions of machines; without any, all machines are in one place. Trees send "
                        "a policy between regions once, to a relay that forwards it")) {
    Region new_region;
    region_section.require("name", new_region.name, "of your own");
    new_region.places = {new_region.name};
    region_section.read(
        "places", new_region.places,
        {"a machine is in this region if the place of its offer, or of `echoline worker --place`, contains one "
         "of these words; all other machines are in the learner's region",
         "its name"});
    map.regions.push_back(std::move(new_region));
    if (map.regions.size() > chains::kRegionsMax) {
      region_section.error("name", fmt::format("more than {} regions", chains::kRegionsMax));
      return;
    }
  }
  std::string learner;
  network.read("region", learner, {"the learner's region, of network.regions", "the first of them"});
  const std::size_t region_count = map.regions.size();
  if (region_count > 0) map.graph.links.assign(region_count, std::vector<chains::RegionLink>(region_count));
  if (const auto region = region_index(network, "region", learner)) map.graph.learner_region = *region;
  for (ConfigSection way : network.sections(
           "ways", "properties of the links between two regions, in both directions; other links are unknown")) {
    std::string from, to;
    std::optional<Duration> delay;
    std::optional<BitRate> rate;
    way.require("from", from, "a region");
    way.require("to", to, "another, or the same");
    way.read("delay", delay, {.min = Duration(0), .max = std::chrono::seconds(60)},
             {"one way: half of a ping's round-trip time", "network.delay_expected, or the measured delay"});
    way.read("rate", rate, {.min = BitRate{1000}, .max = BitRate{1e15}},
             {"of all traffic between the regions together, each direction", "unlimited"});
    const auto from_index = region_index(way, "from", from), to_index = region_index(way, "to", to);
    if (!from_index || !to_index) continue;
    if (*from_index == *to_index && rate) way.error("rate", "within a region only the machines' own links count");
    for (chains::RegionLink* region_link :
         {&map.graph.links[*from_index][*to_index], &map.graph.links[*to_index][*from_index]}) {
      if (rate) region_link->rate = *rate;
      if (delay) region_link->delay = *delay;
    }
  }
}

}  // namespace

std::optional<double> FleetSettings::cuda_needed() const {
  return where.cuda_min ? where.cuda_min : cuda_of_image(image);
}

bool FleetSettings::is_local() const { return is_local_provider(provider); }

void read(ConfigSection network, PathSettings& settings) {
  network.read("worker_rate", settings.worker_rate, {.min = BitRate{1000}, .max = BitRate{1e12}},
               {"b: the most that a worker sends, and the most that it receives", "the links of its offer"});
  network.read("delay_expected", settings.delay_expected, {.min = Duration(0), .max = std::chrono::seconds(60)},
               "one way between two machines, for planning only; network.ways states it by region");
  read_regions(network, settings.regions);
}

void read(ConfigSection fleet, FleetSettings& settings, bool simulated) {
  std::optional<std::filesystem::path> offers;
  fleet.read("offers", offers,
             {"file of the machines that can be rented; see configs/offers/README.md", "fleet.search is needed"});
  fleet.read("search", settings.search,
             "ask vast.ai (fleet.vast.url) for offers instead of reading a file; this needs no key");
  fleet.read("search_every", settings.search_every, {.min = std::chrono::seconds(10), .max = std::chrono::hours(24)},
             "interval of market searches during the run; a file is read again when it has changed");
  if (simulated && settings.search)
    fleet.error("search",
                "a simulated market is not searched: name a file of offers, or generate some with simulation.market");
  if (!simulated && offers.has_value() == settings.search)
    fleet.error(offers ? "search" : "", "expected exactly one of 'offers' (a file) and 'search: true'");
  settings.offers = offers.value_or(std::filesystem::path{});
  // Static, because the run file's reference keeps the pointers.
  static const std::string formats = format_meanings(), providers = provider_meanings();
  fleet.read_choice("offers_format", settings.offers_format, offer_format_names(), formats.c_str());
  fleet.read("catalogue_copies", settings.catalogue_copies, {.min = 1, .max = 4096},
             "number of machines of each kind in a catalogue that can be rented");
  fleet.read("profile", settings.profile,
             {"tokens per second by GPU and size of the model, for offers that do not state their throughput, such as "
              "profiles/gpus.yaml",
              "such offers are not considered"});
  fleet.read("response_tokens_expected", settings.response_tokens_expected, {.min = 1, .max = 1'000'000},
             {"average tokens of a rollout, to predict throughput", "rollout.response_tokens_max"});
  std::vector<std::string> names = provider_names();
  names.emplace_back("none");
  fleet.read_choice("provider", settings.provider, names, providers.c_str());
  fleet.read(
      "provider_file", settings.provider_file,
      {"the hosts of ssh, the commands of exec; see configs/providers/README.md", "none; ssh and exec need one"});
  fleet.read(
      "image", settings.image,
      {"the container image of rented hosts; it holds the program unless fleet.bundle is set", "none; vast needs one"});
  fleet.read("bundle", settings.bundle,
             {"the output of `echoline bundle`, best as .tar.gz, which every machine can unpack: rented hosts fetch it "
              "from the learner, on the port on which they join, and run its program",
              "the host has the program: in its image, or copied by ssh"});
  fleet.read("disk", settings.disk, {.min = Bytes{1'000'000'000}, .max = Bytes{1ull << 50}}, "of a rented host");
  for (const ProviderKind* kind : provider_kinds())
    if (kind->read_settings)
      kind->read_settings(fleet.section(kind->name, kind->settings_meaning), settings.services[kind->name]);
  fleet.read("headroom", settings.headroom, {.min = 0.0, .max = 10.0},
             "delta: (1 + delta) times the capacity that keeps the learner busy is rented, and more once half of the "
             "reserve is used up");
  fleet.require("step_time_expected", settings.step_time_expected,
                {.min = std::chrono::microseconds(1), .max = std::chrono::hours(1000)},
                "T, the time of a learner step, until it is measured");
  fleet.read("delta_ratio_expected", settings.delta_ratio_expected, {.min = 0.5, .max = 1e6},
             "bytes of the whole policy per byte of a delta, until they are measured");
  fleet.read("install_time_expected", settings.install_time_expected,
             {.min = Duration(0), .max = std::chrono::hours(1)},
             "the part of T_b without transfer, in which a worker pauses: applying the delta; until it is measured");
  fleet.read_choice("capacity_rule", settings.capacity_rule,
                    {{"overlap", CapacityRule::kOverlap}, {"echo2", CapacityRule::kEcho2}},
                    "the workers' engines go on during a broadcast and pause only to install the policy (overlap), or "
                    "generate nothing until they have it (echo2)");
  fleet.read("usd_per_hour_max", settings.usd_per_hour_max, {.min = 0.0, .max = 1e9},
             {"US dollars that the fleet may cost; without it a learner faster than step_time_expected gets no more "
              "machines than planned",
              "the cost of the plan"});
  fleet.read("usd_max", settings.usd_max, {.min = 0.0, .max = 1e9},
             {"US dollars that the whole run may cost, including the learner's own machine if its price is stated; the "
              "fleet is returned before more is spent",
              "unlimited"});
  fleet.read_choice("pricing", settings.pricing, {{"on_demand", Pricing::kOnDemand}, {"bid", Pricing::kBid}},
                    "rent at the on-demand price, or bid: cheaper, but a higher bid takes the machine away");
  fleet.read("bid_over_min", settings.bid_over_min, {.min = 0.0, .max = 100.0},
             "share by which a bid exceeds the least that would rent the offer; 0.1 is a tenth");
  fleet.read(
      "per_host_max", settings.per_host_max, {.min = 1, .max = 4096},
      {"offers of one owner that are rented at the same time; if an offer does not state its owner, offers of one "
       "machine",
       "unlimited"});
  fleet.read("places", settings.places, {"an offer's place must contain one of these words, such as [SE, US]", "any"});
  fleet.read("up_min", settings.up_min, {.min = BitRate{0}, .max = BitRate{1e12}}, {"uplink of an offer", "any"});
  read_where(fleet.section("where",
                           "Conditions on offers, besides those that follow from the model and the run. An offer that "
                           "does not state a value does not meet a condition on it, except for links and prices, "
                           "which fleet.assume can state."),
             settings.where);
  read_assume(fleet.section("assume", "Values for what an offer does not state. Nothing unstated counts as 0."),
              settings.assume);
  fleet.read("reliability_min", settings.reliability_min, {.min = 0.0, .max = 1.0},
             {"of an offer; offers that do not state theirs are not considered", "any"});
  fleet.read("duration_min", settings.duration_min, {.min = Duration(0), .max = std::chrono::hours(24 * 3650)},
             {"how long an offer must be rentable; offers that do not state it are not considered", "any"});
  fleet.read("workers_max", settings.workers_max,
             {.min = 1, .max = simulated ? static_cast<std::uint32_t>(chains::kChainWorkersMax) : 4096},
             "rented at the same time");
  fleet.read(
      "join_timeout", settings.join_timeout, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
      "a rented worker that has not joined by then, counted from the provider's answer, is returned, and another "
      "is rented in its place; for providers without pull_timeout and boot_timeout");
  fleet.read("queue_timeout", settings.queue_timeout, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
             "how long a provider may take to answer a request for a machine");
  fleet.read(
      "pull_timeout", settings.pull_timeout, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
      {"vast: from the answer until the container runs; it pulls its image", "15 min, or join_timeout if longer"});
  fleet.read("boot_timeout", settings.boot_timeout, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
             {"vast: from then until the worker has joined; the container fetches the bundle",
              "10 min, or join_timeout if longer"});
  fleet.read(
      "away_max", settings.away_max, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
      "how long the fleet keeps the machine and place of an absent worker, and how long a worker tries to reconnect");
  fleet.read("silence_max", settings.silence_max, {.min = std::chrono::seconds(1), .max = std::chrono::hours(72)},
             {"a rented container ends itself when its worker, or the learner, has been silent for this long",
              "15 min, or three times away_max if longer"});
  fleet.read("replace_lost", settings.replace_lost, "rent another machine when a worker is lost");
}

}  // namespace echoline::provisioner
