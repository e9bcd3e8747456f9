// Searches vast.ai's market; the provider's kind (vast_kind.cpp) calls it.
#include "provisioner/providers/vast_search.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/http.hpp"
#include "base/text.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "search vast.ai";
constexpr auto kSearchPollInterval = std::chrono::milliseconds(5);
constexpr std::size_t kBodyShown = 200;  // bytes of an error's body in the message

bool is_cancelled(const VastSearch& search) { return search.stop != nullptr && *search.stop; }

HttpAnswer search_once(const std::string& url, const std::string& body, const VastSearch& search) {
  HttpClient client("", search.timeout);
  client.send({"POST", url, body});
  while (!is_cancelled(search)) {  // the client's time-out ends the loop
    std::vector<HttpAnswer> answers = client.poll();
    if (!answers.empty()) return std::move(answers.front());
    std::this_thread::sleep_for(kSearchPollInterval);
  }
  HttpAnswer cancelled;
  cancelled.trouble = "given up";
  return cancelled;
}

// Two capital letters, as in "US".
bool is_country_code(std::string_view place) {
  return place.size() == 2 && std::ranges::all_of(place, [](char c) { return c >= 'A' && c <= 'Z'; });
}

}  // namespace

std::string vast_search_body(const VastSearch& search, const PlanRequest& request) {
  // Sets no limit on a value that fleet.assume supplies, because the service would leave out the offers that do not
  // state the value.
  const double disk_gb = static_cast<double>(search.disk.count) / 1e9;
  nlohmann::json body = {{"rentable", {{"eq", true}}},
                         {"rented", {{"eq", false}}},
                         {"type", request.fleet.pricing == Pricing::kBid ? "bid" : "on-demand"},
                         {"limit", search.offers_max},
                         {"allocated_storage", disk_gb},
                         {"disk_space", {{"gte", disk_gb}}}};
  // The cheapest per benchmark point first, because the reply is cut at `offers_max`.
  body["order"] = nlohmann::json::array({nlohmann::json::array({"dlperf_per_dphtotal", "desc"})});
  if (request.gpu_memory_min && !request.fleet.assume.vram_gb)
    body["gpu_ram"] = {{"gte", static_cast<double>(request.gpu_memory_min->count) / 1e6}};
  if (request.fleet.reliability_min && !request.fleet.assume.reliability)
    body["reliability"] = {{"gte", *request.fleet.reliability_min}};
  if (request.fleet.up_min && !request.fleet.assume.up) body["inet_up"] = {{"gte", request.fleet.up_min->mbit_per_s()}};
  // The service compares countries by their code only, so other places are left to the plan.
  if (const auto& places = request.fleet.places; !places.empty() && std::ranges::all_of(places, is_country_code))
    body["geolocation"] = {{"in", places}};
  const OfferConditions& where = request.fleet.where;
  if (!where.gpus.empty()) body["gpu_name"] = {{"in", where.gpus}};
  if (where.gpu_count_min) body["num_gpus"]["gte"] = *where.gpu_count_min;
  if (where.gpu_count_max) body["num_gpus"]["lte"] = *where.gpu_count_max;
  if (where.verified) body["verified"] = {{"eq", true}};
  if (where.datacenter) body["datacenter"] = {{"eq", true}};
  if (where.open_ports_min) body["direct_port_count"] = {{"gte", *where.open_ports_min}};
  if (request.cuda_min) body["cuda_max_good"] = {{"gte", *request.cuda_min}};
  if (where.compute_capability_min)
    body["compute_cap"] = {{"gte", std::lround(*where.compute_capability_min * kComputeCapabilityScale)}};
  if (where.down_min && !request.fleet.assume.down) body["inet_down"] = {{"gte", where.down_min->mbit_per_s()}};
  if (where.upload_usd_per_gb_max) body["inet_up_cost"] = {{"lte", *where.upload_usd_per_gb_max}};
  if (where.download_usd_per_gb_max) body["inet_down_cost"] = {{"lte", *where.download_usd_per_gb_max}};
  if (request.fleet.duration_min && !request.fleet.assume.duration)
    body["duration"] = {{"gte", seconds(*request.fleet.duration_min)}};
  return body.dump();
}

Result<std::string> search_vast(const VastSearch& search, const PlanRequest& request) {
  const std::string url = without_trailing_slashes(search.url) + "/api/v0/bundles/";
  const std::string body = vast_search_body(search, request);
  std::string why;
  for (int i = 0; i < search.tries; ++i) {
    for (Duration waited{}; i > 0 && waited < search.pause && !is_cancelled(search); waited += kSearchPollInterval)
      std::this_thread::sleep_for(kSearchPollInterval);
    HttpAnswer answer = search_once(url, body, search);
    if (answer.status == 200) return std::move(answer.body);
    why = answer.status == 0 ? answer.trouble
                             : fmt::format("HTTP {}: {}", answer.status, printable(answer.body, kBodyShown));
    const bool is_lost = answer.status == 0 && answer.sent;  // if it was not even sent, the URL or the network is wrong
    const bool is_temporary = is_lost || answer.status == 429 || answer.status >= 500;
    if (!is_temporary) break;
  }
  return fail(Code::kUnavailable, kOperation, "{}: {}; try again later, or plan from a recorded reply (fleet.offers)",
              url, why);
}

}  // namespace echoline::provisioner
