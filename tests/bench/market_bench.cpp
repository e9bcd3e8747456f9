// Time to read a market in each form and to plan with it, as a multiple of parsing as many bytes of JSON. With --smoke,
// it fails if YAML takes more than twice as long to read as JSON.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "provisioner/plan.hpp"
#include "provisioner/throughput.hpp"
#include "tests/bench/measure.hpp"
#include "tests/provisioner/market.hpp"

using namespace echoline;
using namespace echoline::provisioner;

namespace {

nlohmann::json own_json(const Offer& o) {
  return {{"id", o.id},
          {"provider", o.provider},
          {"host", o.host},
          {"owner", o.owner},
          {"gpu", o.gpu},
          {"gpu_count", o.gpu_count},
          {"gpu_ids", o.gpu_ids},
          {"vram_gb", *o.vram_gb},
          {"place", o.place},
          {"up_mbit_per_s", o.up->mbit_per_s()},
          {"down_mbit_per_s", o.down->mbit_per_s()},
          {"reliability", *o.reliability},
          {"gpu_usd_per_hour", *o.gpu_usd_per_hour},
          {"storage_usd_per_hour", *o.storage_usd_per_hour},
          {"upload_usd_per_gb", *o.upload_usd_per_gb},
          {"download_usd_per_gb", *o.download_usd_per_gb}};
}

// With as many unused fields as the real reply.
nlohmann::json vast_json(const Offer& o, std::size_t number) {
  nlohmann::json j = {{"id", number},
                      {"machine_id", o.host},
                      {"host_id", o.owner},
                      {"gpu_name", o.gpu},
                      {"num_gpus", o.gpu_count},
                      {"gpu_ids", o.gpu_ids},
                      {"gpu_ram", *o.vram_gb * 1000},
                      {"geolocation", o.place},
                      {"inet_up", o.up->mbit_per_s()},
                      {"inet_down", o.down->mbit_per_s()},
                      {"reliability2", *o.reliability},
                      {"dph_base", *o.gpu_usd_per_hour},
                      {"storage_cost", 0.15},
                      {"inet_up_cost", *o.upload_usd_per_gb},
                      {"inet_down_cost", *o.download_usd_per_gb},
                      {"rentable", true},
                      {"rented", false}};
  for (int i = 0; i < 55; ++i)
    j[fmt::format("of_no_use_{}", i)] = i % 3 == 0 ? nlohmann::json("some text of a host") : nlohmann::json(1.25 * i);
  return j;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Reading and planning large markets");
  bool smoke = false;
  app.add_flag("--smoke", smoke, "only something small, to see that it works");
  CLI11_PARSE(app, argc, argv);
  const auto profile = ThroughputProfile::load("configs/profiles/gpus.yaml");
  ECHO_CHECK(profile.has_value());
  PlanRequest request;
  request.fleet.provider = "none";  // of any
  request.pace = {512, 1, std::chrono::seconds(300)};
  request.staleness_budget = 3;
  request.delta_bytes = {250'000'000};
  request.full_bytes = {16'400'000'000};
  request.learner_up = BitRate::from_mbit_per_s(1000);
  request.gpu_memory_min = Bytes{20'000'000'000};
  fmt::print("{:>8} {:<9} {:>8} {:>9} {:>9} {:>9} {:>12}\n", "offers", "format", "MB", "read, s", "plan, s", "both, s",
             "x parsing");
  for (const std::size_t count :
       smoke ? std::vector<std::size_t>{200} : std::vector<std::size_t>{1000, 10'000, 100'000}) {
    const std::vector<Offer> market = seeded_market(1, count);
    nlohmann::json own = nlohmann::json::array(), vast = nlohmann::json::array();
    std::string csv =
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
        "AvailabilityZone\n";
    for (std::size_t i = 0; i < market.size(); ++i) {
      const Offer& o = market[i];
      own.push_back(own_json(o));
      vast.push_back(vast_json(o, i + 1));
      csv += fmt::format(
          "type{},{},{},8,61,\"{{'Gpus': [{{'MemoryInfo': {{'SizeInMiB': {:.0f}}}}}]}}\",{},{},region{},zone{}\n",
          i % 500, o.gpu, o.gpu_count, *o.vram_gb * 1000, *o.gpu_usd_per_hour, *o.bid_usd_per_hour_min, i % 30, i % 90);
    }
    const std::string own_text = nlohmann::json{{"schema_version", 1}, {"offers", own}}.dump();
    std::string yaml = "schema_version: 1\noffers:\n";
    std::string block = yaml;
    for (const auto& offer : own) {
      yaml += "  - " + offer.dump() + "\n";
      const char* indent = "  - ";
      for (const auto& [key, value] : offer.items())
        block += fmt::format("{}{}: {}\n", std::exchange(indent, "    "), key, value.dump());
    }
    const std::string texts[] = {own_text, yaml, block, nlohmann::json{{"success", true}, {"offers", vast}}.dump(),
                                 csv};
    const char* names[] = {"own json", "own yaml", "in blocks", "vast", "skypilot"};
    for (std::size_t f = 0; f < std::size(texts); ++f) {
      std::optional<OfferList> list;
      const double read = bench::seconds_of([&] {
        auto parsed = parse_offers(texts[f], names[f], {.disk = Bytes{40'000'000'000}});
        ECHO_CHECK(parsed.has_value(), "{}", parsed.error().message());
        list = std::move(*parsed);
      });
      PlanRequest asked = request;
      if (list->format == "skypilot")
        asked.fleet.assume = {.storage_usd_per_hour = 0.01,
                              .upload_usd_per_gb = 0.05,
                              .download_usd_per_gb = 0,
                              .up = BitRate::from_mbit_per_s(500),
                              .down = BitRate::from_mbit_per_s(500),
                              .vram_gb = {},
                              .reliability = {},
                              .duration = {}};
      const double planned = bench::seconds_of([&] {
        predict_throughput(list->offers, {8e9, 1000}, &*profile, {});
        const auto plan = make_plan(asked, list->offers);
        ECHO_CHECK(plan.has_value(), "{}", plan.error().message());
        ECHO_CHECK(!plan->to_table().empty());
      });
      const double parsing = bench::seconds_of([&] { ECHO_CHECK(!nlohmann::json::parse(own_text).is_discarded()); }) /
                             static_cast<double>(own_text.size()) * static_cast<double>(texts[f].size());
      fmt::print("{:>8} {:<9} {:>8.1f} {:>9.3f} {:>9.3f} {:>9.3f} {:>12.1f}\n", count, names[f],
                 static_cast<double>(texts[f].size()) / 1e6, read, planned, read + planned, (read + planned) / parsing);
    }
  }
  if (smoke) {
    const std::vector<Offer> market = seeded_market(1, 1000);
    std::string json = R"({"schema_version":1,"offers":[)", yaml = "schema_version: 1\noffers:\n";
    for (std::size_t i = 0; i < market.size(); ++i) {
      const std::string text = own_json(market[i]).dump();
      json += (i > 0 ? "," : "") + text;
      yaml += "  - " + text + "\n";
    }
    json += "]}";
    const auto best = [](const std::string& text) {
      double least = 1e9;
      const auto read = [&] { ECHO_CHECK(parse_offers(text, "offers").has_value()); };
      for (int i = 0; i < 7; ++i) least = std::min(least, bench::seconds_of(read));
      return least;
    };
    const double times = best(yaml) / best(json);
    fmt::print("reading YAML takes {:.2f} times as long as JSON\n", times);
    if (times > 2) return 1;
  }
  return 0;
}
