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
constexpr double kAmountMax = 1e9;                       // US dollars
constexpr std::size_t kPagesMax = 1000;                  // of a bill
constexpr std::size_t kMessageMax = 200;                 // bytes of an answer in a message
constexpr std::string_view kSourcePrefix = "instance-";  // before the instance's number

// Reads an object from the service, with retries.
Result<json> get_object(HttpClient& client, const VastBillQuestion& question, const std::string& path) {
  const std::string url = without_trailing_slashes(question.url) + path;
  std::string why;
  Duration pause = question.pause;
  for (int i = 0; i < question.tries; ++i, pause *= 2) {
    std::this_thread::sleep_for(pause);  // before the first try too, because the service limits the rate of requests
    const HttpAnswer answer = client.ask({"GET", url, ""});
    json object = json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    if (answer.status == 200 && object.is_object() && object.value("success", json(true)) != json(false)) return object;
    why = answer.status == 0 ? answer.trouble
                             : fmt::format("HTTP {}: {}", answer.status, printable(answer.body, kMessageMax));
    const std::string& key = question.key;
    for (auto begin = why.find(key); !key.empty() && begin != std::string::npos; begin = why.find(key))
      why.replace(begin, key.size(), "...");  // the message must not show the key
    // 200: a page of a proxy, or a failure for which the service has no status.
    const bool is_temporary =
        answer.status == 0 || answer.status == 200 || answer.status == 429 || answer.status >= 500;
    if (!is_temporary) break;
  }
  return fail(Code::kUnavailable, kOperation, "{}: {}", url.substr(0, url.find('?')), why);
}

// Returns the object's amount, which is a number or a text.
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
  return std::isfinite(amount) && std::abs(amount) <= kAmountMax ? std::optional(amount) : std::nullopt;
}

}  // namespace

Result<std::string> read_vast_charges(const std::string& body, std::vector<Charge>& charges) {
  const json page = json::parse(body, nullptr, /*allow_exceptions=*/false);
  const auto malformed = [](std::string_view what) {
    return fail(Code::kCorrupt, kOperation, "charges: expected {}", what);
  };
  if (!page.is_object() || !page.contains("results") || !page["results"].is_array())
    return malformed("an object with 'results'");
  for (const json& row : page["results"]) {
    if (!row.is_object()) return malformed("objects in 'results'");
    const json source = row.value("source", json());
    if (!source.is_string()) return malformed("a 'source' of every row");
    const std::string name = source.get<std::string>();
    if (!name.starts_with(kSourcePrefix)) continue;  // a volume or another charge of the account
    Charge charge;
    const auto amount = amount_of(row);
    const json start = row.value("start", json());
    char* end = nullptr;
    const long long contract = std::strtoll(name.c_str() + kSourcePrefix.size(), &end, 10);
    if (*end != '\0' || contract <= 0 || !amount || !start.is_number())
      return malformed("number, 'amount' and 'start' of " + name);
    charge.instance = {fmt::format("{}:{}", kVastName, contract)};
    charge.day_unix_s = std::floor(start.get<double>() / kSecondsPerDay) * kSecondsPerDay;
    charge.usd = *amount;
    const json items = row.value("items", json());
    for (const json& item : items.is_array() ? items : json::array()) {
      const json type = item.is_object() ? item.value("type", json()) : json();
      const auto item_usd = item.is_object() ? amount_of(item) : std::nullopt;
      if (!item_usd || !type.is_string()) return malformed("'type' and 'amount' of every item of " + name);
      if (type == "gpu" || type == "disk") charge.usd_rent += *item_usd;
      if (type == "bwd" || type == "bwu") charge.usd_traffic += *item_usd;  // bytes down and up
    }
    charges.push_back(charge);
  }
  const json next = page.value("next_token", json());
  return next.is_string() ? next.get<std::string>() : next.is_null() ? std::string() : next.dump();
}

Result<Account> ask_vast_account(const VastBillQuestion& question) {
  HttpClient client(question.key, question.timeout);
  const std::string url = without_trailing_slashes(question.url) + "/api/v0/users/current/";
  HttpAnswer answer;
  for (int i = 0; i < question.tries; ++i) {
    if (i > 0) std::this_thread::sleep_for(question.pause);
    answer = client.ask({"GET", url, ""});
    if (answer.status == 401 || answer.status == 403 || answer.body.find("auth_error") != std::string::npos)
      return fail(Code::kInvalid, "vast.ai", "{} refuses the key; check VAST_API_KEY or fleet.vast.key_file",
                  question.url);
    const json object = json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    if (answer.status != 200 || !object.is_object()) continue;
    Account account;
    if (const json credit = object.value("credit", json()); credit.is_number())
      account.credit_usd = credit.get<double>();
    return account;
  }
  return fail(Code::kUnavailable, "vast.ai", "{}: {}", url,
              answer.status == 0 ? answer.trouble : fmt::format("HTTP {}", answer.status));
}

Result<Bill> ask_vast_bill(const VastBillQuestion& question) {
  HttpClient client(question.key, question.timeout);
  Bill bill;
  const double first_day = std::floor(question.from_unix_s / kSecondsPerDay);
  const double last_day = std::floor(question.to_unix_s / kSecondsPerDay);
  const json filters = {{"day",
                         {{"gte", static_cast<std::int64_t>(first_day * kSecondsPerDay)},
                          {"lte", static_cast<std::int64_t>((last_day + 1) * kSecondsPerDay) - 1}}},
                        {"type", {{"in", {"instance"}}}}};
  const std::string path =
      "/api/v0/charges/?format=table&latest_first=false&limit=500&select_filters=" + url_escaped(filters.dump());
  std::set<std::string> tokens;  // of all pages so far; a repeated token would repeat the pages for ever
  for (std::string token;;) {
    ECHO_ASSIGN(const json page,
                get_object(client, question, token.empty() ? path : path + "&after_token=" + url_escaped(token)));
    ECHO_ASSIGN(token, read_vast_charges(page.dump(), bill.charges));
    if (token.empty()) break;
    if (!tokens.insert(token).second || tokens.size() > kPagesMax)
      return fail(Code::kCorrupt, kOperation, "charges: the pages do not end");
  }
  ECHO_ASSIGN(const json user, get_object(client, question, "/api/v0/users/current/"));
  if (const json credit = user.value("credit", json()); credit.is_number()) bill.credit_usd = credit.get<double>();
  return bill;
}

}  // namespace echoline::provisioner
