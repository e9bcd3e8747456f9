// Reads any bytes as offers in every format, as a profile and as a plan, and checks what must hold for every input.
// libFuzzer calls it when ECHOLINE_FUZZ is on; provisioner_test calls it on mutated files in every ordinary test run.
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "provisioner/offers.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/providers/registry.hpp"
#include "provisioner/throughput.hpp"

using namespace echoline;
using namespace echoline::provisioner;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const std::string& format : offer_format_names()) {
    const auto list = parse_offers(text, "fuzz", {format, Bytes{1'000'000'000}, 2});
    if (!list) {
      ECHO_CHECK(list.error().code == Code::kInvalid && list.error().detail.find("fuzz") != std::string::npos, "{}",
                 list.error().message());
      continue;
    }
    for (const Offer& o : list->offers) {
      for (const auto& price : {o.gpu_usd_per_hour, o.bid_usd_per_hour_min, o.storage_usd_per_hour, o.upload_usd_per_gb,
                                o.download_usd_per_gb, o.reliability, o.vram_gb, o.dlperf})
        ECHO_CHECK(!price || (std::isfinite(*price) && *price >= 0), "{}", *price);
      ECHO_CHECK(!o.id.empty() && !o.gpu.empty() && o.gpu_count >= 1);
      ECHO_CHECK(!o.up || o.up->bits_per_s > 0);
      ECHO_CHECK((o.rollouts_per_s > 0) == (o.rollouts_source != RateSource::kUnknown));
    }
  }
  (void)ThroughputProfile::parse(text, "fuzz");
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_discarded())
    if (const auto plan = Plan::from_json(json)) ECHO_CHECK(Plan::from_json(plan->to_json()).has_value());
  return 0;
}
