// Reads the pages of vast.ai's bill.
#include "provisioner/providers/vast_bill.hpp"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/http.hpp"
#include "base/text.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

constexpr std::string_view kOperation = "bill of vast.ai";
constexpr double kDaySeconds = 86'400, kUsdMax = 1e9;
constexpr std::size_t kPagesMax = 1000;
constexpr std::string_view kSource = "instance-";

Result<json> get(HttpClient& client, const VastBillQuestion& q, const std::string& path) {
  const std::string url = service_url(q.url) + path;
  std::string why;
  Duration pause = q.pause;
  for (int i = 0; i < q.tries; ++i, pause *= 2) {
    std::this_thread::sleep_for(i == 0 ? q.pause : pause);
    const HttpAnswer answer = client.ask({"GET", url, ""});
    json object = json::parse(answer.body, nullptr, false);
    if (answer.status == 200 && object.is_object() && object.value("success", json(true)) != json(false)) return object;
    why = answer.status == 0 ? answer.trouble : fmt::format("HTTP {}: {}", answer.status, printable(answer.body, 200));
    for (auto at = why.find(q.key); !q.key.empty() && at != std::string::npos; at = why.find(q.key))
      why.replace(at, q.key.size(), "...");
    const bool is_temporary =
        answer.status == 0 || answer.status == 200 || answer.status == 429 || answer.status >= 500;
    if (!is_temporary) break;
  }
  return fail(Code::kUnavailable, kOperation, "{}: {}", url.substr(0, url.find('?')), why);
}

// Amounts are numbers or texts.
std::optional<double> amount_of(const json& object) {
  const auto it = object.find("amount");
  if (it == object.end()) return std::nullopt;
  double amount = NAN;
  if (it->is_number()) amount = it->get<double>();
  if (it->is_string()) {
    const std::string text = it->get<std::string>();
    char* end = nullptr;
    amount = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0') return std::nullopt;
  }
  return std::isfinite(amount) && std::abs(amount) <= kUsdMax ? std::optional(amount) : std::nullopt;
}

}  // namespace

Result<std::string> read_vast_charges(const std::string& body, std::vector<Charge>& charges) {
  const json page = json::parse(body, nullptr, false);
  const auto wrong = [](std::string_view what) {
    return fail(Code::kCorrupt, kOperation, "charges: expected {}", what);
  };
  if (!page.is_object() || !page.contains("results") || !page["results"].is_array())
    return wrong("an object with 'results'");
  for (const json& row : page["results"]) {
    if (!row.is_object()) return wrong("objects in 'results'");
    const json source = row.value("source", json());
    if (!source.is_string()) return wrong("a 'source' of every row");
    const std::string name = source.get<std::string>();
    if (!name.starts_with(kSource)) continue;  // a volume or another charge of the account
    Charge charge;
    const auto amount = amount_of(row);
    const json start = row.value("start", json());
    char* end = nullptr;
    const long long contract = std::strtoll(name.c_str() + kSource.size(), &end, 10);
    if (*end != '\0' || contract <= 0 || !amount || !start.is_number())
      return wrong("number, 'amount' and 'start' of " + name);
    charge.instance = {fmt::format("{}:{}", kVastName, contract)};
    charge.day_unix_s = std::floor(start.get<double>() / kDaySeconds) * kDaySeconds;
    charge.usd = *amount;
    const json items = row.value("items", json());
    for (const json& item : items.is_array() ? items : json::array()) {
      const json type = item.is_object() ? item.value("type", json()) : json();
      const auto part = item.is_object() ? amount_of(item) : std::nullopt;
      if (!part || !type.is_string()) return wrong("'type' and 'amount' of every item of " + name);
      if (type == "gpu" || type == "disk") charge.usd_rent += *part;
      if (type == "bwd" || type == "bwu") charge.usd_traffic += *part;
    }
    charges.push_back(charge);
  }
  const json next = page.value("next_token", json());
  return next.is_string() ? next.get<std::string>() : next.is_null() ? std::string() : next.dump();
}

Result<Bill> ask_vast_bill(const VastBillQuestion& q) {
  HttpClient client(q.key, q.timeout);
  Bill bill;
  const json filters = {
      {"day",
       {{"gte", static_cast<std::int64_t>(std::floor(q.from_unix_s / kDaySeconds) * kDaySeconds)},
        {"lte", static_cast<std::int64_t>((std::floor(q.to_unix_s / kDaySeconds) + 1) * kDaySeconds) - 1}}},
      {"type", {{"in", {"instance"}}}}};
  const std::string path =
      "/api/v0/charges/?format=table&latest_first=false&limit=500&select_filters=" + url_escaped(filters.dump());
  std::set<std::string> tokens;
  for (std::string token;;) {
    ECHO_ASSIGN(const json page, get(client, q, token.empty() ? path : path + "&after_token=" + url_escaped(token)));
    ECHO_ASSIGN(token, read_vast_charges(page.dump(), bill.charges));
    if (token.empty()) break;
    if (!tokens.insert(token).second || tokens.size() > kPagesMax)
      return fail(Code::kCorrupt, kOperation, "charges: the pages do not end");
  }
  ECHO_ASSIGN(const json user, get(client, q, "/api/v0/users/current/"));
  if (const json credit = user.value("credit", json()); credit.is_number()) bill.credit_usd = credit.get<double>();
  return bill;
}

}  // namespace echoline::provisioner
