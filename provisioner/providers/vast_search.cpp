// Searches vast.ai's market; the provider's kind (vast_kind.cpp) calls it.
#include "provisioner/providers/vast_search.hpp"

#include <nlohmann/json.hpp>
#include <thread>

#include "base/http.hpp"
#include "base/text.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "search vast.ai";
constexpr auto kLook = std::chrono::milliseconds(5);

bool is_cancelled(const VastSearch& search) { return search.stop != nullptr && *search.stop; }

HttpAnswer search_once(const std::string& url, const std::string& body, const VastSearch& search) {
  HttpClient client("", search.timeout);
  client.send({"POST", url, body});
  while (!is_cancelled(search)) {  // the client's time-out ends the loop
    std::vector<HttpAnswer> answers = client.poll();
    if (!answers.empty()) return std::move(answers.front());
    std::this_thread::sleep_for(kLook);
  }
  HttpAnswer none;
  none.trouble = "given up";
  return none;
}

}  // namespace

std::string vast_search_body(const VastSearch& search, const PlanRequest& request) {
  nlohmann::json body = {{"rentable", {{"eq", true}}},
                         {"rented", {{"eq", false}}},
                         {"type", request.fleet.pricing == Pricing::kBid ? "bid" : "on-demand"},
                         {"limit", search.offers_max},
                         {"allocated_storage", static_cast<double>(search.disk.count) / 1e9},
                         {"disk_space", {{"gte", static_cast<double>(search.disk.count) / 1e9}}}};
  body["order"] = nlohmann::json::array({nlohmann::json::array({"dlperf_per_dphtotal", "desc"})});
  if (request.gpu_memory_min && !request.fleet.assume.vram_gb)
    body["gpu_ram"] = {{"gte", static_cast<double>(request.gpu_memory_min->count) / 1e6}};
  if (request.fleet.reliability_min && !request.fleet.assume.reliability)
    body["reliability"] = {{"gte", *request.fleet.reliability_min}};
  if (request.fleet.up_min && !request.fleet.assume.up) body["inet_up"] = {{"gte", request.fleet.up_min->mbit_per_s()}};
  if (request.fleet.duration_min && !request.fleet.assume.duration)
    body["duration"] = {{"gte", seconds(*request.fleet.duration_min)}};
  return body.dump();
}

Result<std::string> search_vast(const VastSearch& search, const PlanRequest& request) {
  const std::string url = service_url(search.url) + "/api/v0/bundles/";
  const std::string body = vast_search_body(search, request);
  std::string why;
  for (int i = 0; i < search.tries; ++i) {
    for (Duration waited{}; i > 0 && waited < search.pause && !is_cancelled(search); waited += kLook)
      std::this_thread::sleep_for(kLook);
    HttpAnswer answer = search_once(url, body, search);
    if (answer.status == 200) return std::move(answer.body);
    why = answer.status == 0 ? answer.trouble : fmt::format("HTTP {}: {}", answer.status, printable(answer.body, 200));
    const bool is_temporary = answer.status == 0 ? answer.sent : answer.status == 429 || answer.status >= 500;
    if (!is_temporary) break;
  }
  return fail(Code::kUnavailable, kOperation, "{}: {}; try again later, or plan from a recorded reply (fleet.offers)",
              url, why);
}

}  // namespace echoline::provisioner
