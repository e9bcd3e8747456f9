// VastProvider: rents and watches instances by vast.ai's REST interface.
#include "provisioner/providers/vast.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/http.hpp"
#include "base/log.hpp"
#include "base/secret.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr std::string_view kOperation = "vast.ai";
constexpr std::string_view kIdPrefix = "vast:";
constexpr std::size_t kLabelMax = 256, kCommandMax = 4096;  // characters; the service's limits
constexpr std::size_t kTextMax = 200;                       // characters of the service's messages that are kept
constexpr std::size_t kPagesMax = 2000;                     // of a listing
constexpr int kTriesMax = 7;                                // of a request
constexpr Duration kBackoffFirst = std::chrono::seconds(2), kBackoffMax = std::chrono::minutes(1);
constexpr Duration kOwnEndMax = std::chrono::minutes(5);  // how long an instance tries to end itself
constexpr double kUsdPerHourMax = 1e6;
constexpr double kDiskGbMin = 10;    // a smaller disk is rented with this size
constexpr double kBidFactor = 1.05;  // margin over the lowest accepted bid, so that a small rise does not outbid ours
constexpr Duration kResumeMax = std::chrono::minutes(2);  // an instance must run again this soon after a raised bid
constexpr Duration kOwnEndPollInterval = milliseconds(20);

enum Endpoint { kCreate, kDestroy, kShow, kList, kBid, kUser, kEndpoints };  // kEndpoints: their number
// By Endpoint: the service's minimum interval between requests with one key.
constexpr std::array<Duration, kEndpoints> kIntervals{milliseconds(4500), milliseconds(3000), milliseconds(2000),
                                                      milliseconds(1000), milliseconds(5500), milliseconds(2000)};
// By Endpoint: the most requests without an answer. The interval counts from request to request, so a slow answer does
// not delay the next request. A page of a listing is requested with a token of the page before it.
constexpr std::array<std::size_t, kEndpoints> kInFlightMax{8, 8, 4, 1, 2, 1};
// The most instances that one request destroys, as in the service's own client.
constexpr std::size_t kDestroyedTogetherMax = 64;
// After one request to destroy several instances, at most this many listings check whether they are gone, with this
// pause between two listings.
constexpr int kConfirmationsMax = 3;
constexpr Duration kConfirmationPause = std::chrono::seconds(5);
// How often the account's credit is read: normally, and while there is Impl::Trouble.
constexpr Duration kAccountEvery = std::chrono::minutes(5), kTroubleEvery = std::chrono::minutes(1);
constexpr Duration kAnswerlessMax = std::chrono::minutes(1);  // a longer time without any answer counts as trouble
constexpr double kCreditMin = 0.01;                           // US dollars of credit that end Trouble::kCredit
// Delays before the listings that look for the instance of a create with an unclear result; new instances appear late.
constexpr std::array<Duration, 3> kSearchDelays{std::chrono::seconds(2), std::chrono::seconds(5),
                                                std::chrono::seconds(15)};

InstanceId id_of(std::int64_t contract) { return {fmt::format("{}{}", kIdPrefix, contract)}; }

std::optional<std::int64_t> number_of(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (ec != std::errc{} || end != text.data() + text.size() || number <= 0) return std::nullopt;
  return number;
}

Result<std::int64_t> contract_of(const InstanceId& id) {
  if (id.text.starts_with(kIdPrefix))
    if (const auto number = number_of(std::string_view(id.text).substr(kIdPrefix.size()))) return *number;
  return fail(Code::kInvalid, kOperation, "expected an instance id like vast:1234, found '{}'", id.text);
}

// Parses an answer's body. field() of the result is null if the body is not JSON.
json parse_json(const std::string& body) { return json::parse(body, nullptr, /*allow_exceptions=*/false); }

// A field of an object; JSON null if it is missing or if `object` is something else.
const json& field(const json& object, const char* name) {
  static const json kNull;
  if (!object.is_object()) return kNull;
  const auto it = object.find(name);
  return it == object.end() ? kNull : *it;
}

std::string text_field(const json& object, const char* name) {
  const json& value = field(object, name);
  return value.is_string() ? value.get<std::string>() : std::string();
}

std::optional<std::int64_t> number_field(const json& object, const char* name) {
  const json& value = field(object, name);
  if (value.is_number_integer() && value.get<std::int64_t>() > 0) return value.get<std::int64_t>();
  if (value.is_string()) return number_of(value.get<std::string>());
  return std::nullopt;
}

std::optional<double> price_field(const json& object, const char* name) {
  const json& value = field(object, name);
  if (!value.is_number()) return std::nullopt;
  const double price = value.get<double>();
  return std::isfinite(price) && price >= 0 && price <= kUsdPerHourMax ? std::optional(price) : std::nullopt;
}

// Quotes a word for sh.
std::string quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) c == '\'' ? out += "'\\''" : out += c;
  return out + "'";
}

// An instance in the service's answer. The service calls an instance's number a contract.
struct Instance {
  std::int64_t contract = 0;
  InstanceInfo info;
  bool is_bid = false;            // rented by a bid
  bool outbid = false;            // stopped by a higher bid
  bool exited = false;            // its container has ended
  bool runs = false;              // its container runs
  bool ending = false;            // the service stops it now
  std::optional<double> bid_min;  // the lowest bid with which it would run
  std::string message;
};

Instance instance_of(std::int64_t contract, const json& object) {
  Instance instance;
  instance.contract = contract;
  instance.info = {.instance = id_of(contract),
                   .label = text_field(object, "label"),
                   .usd_per_hour = price_field(object, "dph_total")};
  const auto is_stopped = [&](const char* name) { return text_field(object, name) == "stopped"; };
  instance.is_bid = field(object, "is_bid") == json(true);
  instance.bid_min = price_field(object, "min_bid");
  instance.outbid =
      instance.is_bid && is_stopped("cur_state") && is_stopped("intended_status") && is_stopped("next_state");
  instance.ending = is_stopped("intended_status") && !is_stopped("cur_state");
  instance.exited = text_field(object, "actual_status") == "exited";
  instance.runs = text_field(object, "actual_status") == "running";
  instance.message = text_field(object, "status_msg").substr(0, kTextMax);
  return instance;
}

Result<json> create_body(const LaunchSpec& spec) {
  if (spec.image.empty()) return fail(Code::kInvalid, kOperation, "a container image is needed: set fleet.image");
  if (spec.label.empty() || spec.label.size() > kLabelMax)
    return fail(Code::kInvalid, kOperation, "a label has 1 to {} characters, this one {}", kLabelMax,
                spec.label.size());
  if (spec.argv.empty()) return fail(Code::kInvalid, kOperation, "there is no command to run");
  std::string command = "exec";
  for (const std::string& word : spec.argv) command += " " + quoted(word);
  const std::string shell = "/bin/sh", shell_option = "-c";
  if (shell.size() + shell_option.size() + command.size() > kCommandMax)
    return fail(Code::kInvalid, kOperation, "the command has {} characters, {} are allowed", command.size(),
                kCommandMax);
  json env = json::object();
  for (const std::uint16_t port : spec.ports)
    env[fmt::format("-p {}:{}", port, port)] = "1";  // the service's form of a port
  for (const auto& [name, value] : spec.env) env[name] = value;
  json body = {{"client_id", "me"},
               {"image", spec.image},
               {"disk", std::max(kDiskGbMin, std::ceil(static_cast<double>(spec.disk.count) / 1e9))},
               {"label", spec.label},
               {"runtype", "args"},
               {"onstart", shell},
               {"args", {shell_option, command}},
               {"env", env},
               {"cancel_unavail", true}};  // if the offer is taken: an error instead of a stopped instance
  if (spec.bid_usd_per_hour) body["price"] = *spec.bid_usd_per_hour;
  return body;
}

}  // namespace

Result<std::string> read_vast_key(const std::filesystem::path& file) {
  ECHO_ASSIGN(std::string key, read_secret(kVastKeyVariable, file));
  if (key.empty())
    return fail(Code::kInvalid, kOperation,
                "no key: set VAST_API_KEY, or name a file of mode 600 that holds it in fleet.vast.key_file");
  return key;
}

struct VastProvider::Impl {
  static constexpr bool kRepeatable = true, kNotRepeatable = false;
  using Done = std::function<void(const HttpAnswer&)>;
  using Destroyed = std::function<void(const Status& status, bool absent)>;
  struct Call {
    std::optional<Ticket> start;  // the ticket of start(), for a create
    HttpRequest request;
    bool repeatable = false;  // may be sent again even if the service has perhaps received it
    Done done;
    TimePoint not_before{};
    int tries = 0;
  };
  // The requests to one endpoint.
  struct RequestQueue {
    std::deque<Call> waiting;
    std::map<std::uint64_t, Call> in_flight;  // by HttpAnswer::request
    TimePoint next_call_at{};                 // keeps the endpoint's interval
  };
  // A listing of all instances of the account, page by page.
  struct Listing {
    Listed result;  // its instances are added by list(), which knows the prefix
    std::vector<Instance> instances;
    std::set<std::int64_t> contracts;  // the contracts of `instances`
    std::set<std::string> page_tokens;
    std::vector<std::function<void(const Listing&)>> done;
  };
  struct Rented {
    std::string label;
    std::optional<double> usd_per_hour;
    bool runs = false;
    bool exited_reported = false;
    bool ending_reported = false;
    double bid_usd_per_hour = 0, bid_max_usd_per_hour = 0;  // 0: rented on demand
    // After a raised bid: until then, a stopped instance does not count as outbid.
    TimePoint resume_deadline{};
  };

  VastOptions options;
  HttpClient http;
  std::array<RequestQueue, kEndpoints> queues;
  std::map<std::int64_t, Rented> rented;  // by contract, without instances that are being destroyed
  std::map<std::string, double> bids;     // the bids of pending creates per hour, by label

  std::map<std::int64_t, std::vector<Destroyed>> destroying;  // by contract: the callers to inform
  std::deque<std::int64_t> to_destroy;                        // contracts in `destroying` without a request
  std::set<std::int64_t> seen;                 // contracts known to be of this account: rented here, or listed
  std::set<std::int64_t> must_destroy_singly;  // contracts that a request for several did not destroy
  bool destroys_together = true;               // until the service refuses a request for several

  std::vector<std::pair<TimePoint, std::function<void()>>> delayed;  // functions to call, each with the earliest time
  std::vector<ProviderEvent> events;

  TimePoint now{}, next_watch_at{};
  std::vector<std::function<void(const Listing&)>> listing_callers;  // wait for the next listing
  bool is_listing = false;

  AccountChanged account;  // as reported last
  // Why nothing can be rented: a refused key, no credit left, or no answer for kAnswerlessMax.
  enum class Trouble { kNone, kKey, kCredit, kSilence } trouble = Trouble::kNone;
  TimePoint next_account_at{kNever};      // when the credit is read next; set by the first create
  bool reads_account = false;             // a request for the account's credit is in progress
  std::optional<TimePoint> silent_since;  // the first lost request since the last answer; absent: none was lost

  bool watching = false;        // the watch's listing is in progress
  bool failure_logged = false;  // a failure was logged since the last request that succeeded

  explicit Impl(VastOptions o) : options(std::move(o)), http(options.key, options.timeout) {
    options.url = without_trailing_slashes(options.url);
  }

  void call(Endpoint endpoint, const std::string& method, const std::string& path, const std::string& body,
            bool repeatable, Done done, std::optional<Ticket> start = std::nullopt) {
    Call new_call;
    new_call.start = start;
    new_call.request = {method, options.url + path, body};
    new_call.repeatable = repeatable;
    new_call.done = std::move(done);
    queues[endpoint].waiting.push_back(std::move(new_call));
  }

  // The service's error message, short and without the key.
  std::string message_of(const HttpAnswer& answer) const {
    if (answer.status == 0) return fmt::format("{}: {}", options.url, answer.trouble);  // there was no answer
    const json object = parse_json(answer.body);
    std::string message = text_field(object, "error");
    if (const std::string details = text_field(object, "msg"); !details.empty())
      message += (message.empty() ? "" : ": ") + details;
    if (message.empty()) message = answer.body;
    for (auto key = message.find(options.key); key != std::string::npos; key = message.find(options.key))
      message.replace(key, options.key.size(), "...");
    message = message.substr(0, kTextMax);
    const auto is_unprintable = [](unsigned char c) { return c < ' ' || c > '~'; };
    std::replace_if(message.begin(), message.end(), is_unprintable, ' ');
    return fmt::format("status {}: {}", answer.status, message);
  }

  static bool refuses_key(const HttpAnswer& answer) {
    return answer.status == 401 || answer.status == 403 || answer.body.find("auth_error") != std::string::npos;
  }

  Error error_of(const HttpAnswer& answer, const std::string& what) const {
    if (answer.status != 0 && refuses_key(answer))
      return fail(Code::kInvalid, kOperation, "{}: the key was refused ({}); check VAST_API_KEY", what,
                  message_of(answer));
    const bool is_gone = answer.status == 404 || answer.status == 410 || answer.status == 409;
    return fail(is_gone ? Code::kNotFound : Code::kUnavailable, kOperation, "{}: {}", what, message_of(answer));
  }

  void push_start_failed(Ticket ticket, Error error, bool retryable, bool perhaps_rented, bool by_account = false) {
    events.push_back(StartFailed{.ticket = ticket,
                                 .error = std::move(error),
                                 .retryable = retryable,
                                 .perhaps_rented = perhaps_rented,
                                 .by_account = by_account});
  }

  static bool lacks_credit(const HttpAnswer& answer) {
    return answer.status == 402 ||
           (answer.status != 200 && (answer.body.find("insufficient_credit") != std::string::npos ||
                                     answer.body.find("lacks credit") != std::string::npos));
  }

  void set_trouble(Trouble new_trouble, const std::string& text) {
    if (new_trouble == Trouble::kNone && trouble == Trouble::kNone) return;
    trouble = new_trouble;
    if (text == account.trouble) return;
    account.trouble = text;
    account.key_refused = new_trouble == Trouble::kKey;
    account.needs_user = account.key_refused || new_trouble == Trouble::kCredit;
    events.push_back(account);
    next_account_at = now + kTroubleEvery;
  }

  // Updates the account's trouble after an answer to any request.
  void judge_account(const HttpAnswer& answer) {
    if (answer.status == 0) {
      if (!silent_since) silent_since = now;
      if (trouble == Trouble::kNone && now - *silent_since >= kAnswerlessMax)
        set_trouble(Trouble::kSilence, fmt::format("the service does not answer ({})", answer.trouble));
      return;
    }
    silent_since.reset();
    if (refuses_key(answer)) {
      constexpr const char* kText =
          "the key is refused: nothing can be rented or returned; start with a valid one and --resume";
      return set_trouble(Trouble::kKey, kText);
    }
    const bool is_good = answer.status == 200 && parse_json(answer.body).is_object();
    if (trouble == Trouble::kSilence || (trouble == Trouble::kKey && is_good)) set_trouble(Trouble::kNone, "");
  }

  void report_no_credit() {
    set_trouble(Trouble::kCredit,
                "the account has no credit left: nothing can be rented, and vast.ai will stop the machines");
  }

  void read_account() {
    if (reads_account || now < next_account_at) return;
    reads_account = true;
    call(kUser, "GET", "/api/v0/users/current/", "", kRepeatable, [this](const HttpAnswer& answer) {
      reads_account = false;
      next_account_at = now + (trouble == Trouble::kNone ? kAccountEvery : kTroubleEvery);
      const json object = parse_json(answer.body);
      const json& credit = field(object, "credit");
      if (answer.status != 200 || !credit.is_number()) return;
      const double credit_usd = credit.get<double>();
      const bool is_new = account.credit_usd != credit_usd;
      account.credit_usd = credit_usd;
      if (credit_usd >= kCreditMin && trouble == Trouble::kCredit) return set_trouble(Trouble::kNone, "");
      if (is_new) events.push_back(account);
    });
  }

  void create(Ticket ticket, const LaunchSpec& spec) {
    const auto refuse = [&](Error error) {
      push_start_failed(ticket, std::move(error), /*retryable=*/false, /*perhaps_rented=*/false);
    };
    std::string_view ask = spec.offer.id;  // the service's word for an offer
    for (const std::string_view prefix : {"vast:", "vast-"})
      if (ask.starts_with(prefix)) ask.remove_prefix(prefix.size());
    if (!number_of(ask))
      return refuse(fail(Code::kInvalid, kOperation, "expected the number of an ask as the offer's id, found '{}'",
                         spec.offer.id));
    LaunchSpec full_spec = spec;
    if (options.url != kVastUrl)
      full_spec.env.emplace_back(kVastUrlVariable, options.url);  // the instance needs it to end itself
    auto body = create_body(full_spec);
    if (!body) return refuse(std::move(body).error());
    if (spec.bid_usd_per_hour) bids[spec.label] = *spec.bid_usd_per_hour;
    if (next_account_at == kNever) next_account_at = now;
    call(
        kCreate, "PUT", fmt::format("/api/v0/asks/{}/", ask),
        body->dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace), kNotRepeatable,
        [this, ticket, label = spec.label](const HttpAnswer& answer) { on_create_answer(ticket, label, answer); },
        ticket);
  }

  // A create that waits for another try was refused with 429 or never sent, so it has rented nothing.
  bool cancel(Ticket ticket) {
    return std::erase_if(queues[kCreate].waiting, [&](const Call& call) { return call.start == ticket; }) > 0;
  }

  void on_create_answer(Ticket ticket, const std::string& label, const HttpAnswer& answer) {
    const json object = parse_json(answer.body);
    const auto contract = number_field(object, "new_contract");
    const bool succeeded =
        answer.status == 200 && field(object, "success") != json(false) && field(object, "error").is_null();
    if (contract && succeeded) return on_started(ticket, *contract, label, std::nullopt);
    if (contract) {
      // After a bid that is too low, for example, a stopped instance exists, and its disk costs money.
      destroy(*contract, [this, ticket, error = error_of(answer, "create")](const Status& destroyed, bool) {
        push_start_failed(ticket, error, /*retryable=*/false, /*perhaps_rented=*/!destroyed);
      });
      return;
    }
    // A request with status 429 after all tries, or one that was never sent, has rented nothing.
    const bool success_is_false = answer.status == 200 && field(object, "success") == json(false);
    constexpr int kTimeOut = 408;  // leaves the result unclear
    const bool is_client_error = answer.status >= 400 && answer.status < 500 && answer.status != kTimeOut;
    const bool refused = success_is_false || is_client_error;
    if (refused || (answer.status == 0 && !answer.sent)) {
      const bool key_refused = answer.status != 0 && refuses_key(answer);
      const bool no_credit = answer.status != 0 && !key_refused && lacks_credit(answer);
      const bool retryable = answer.status == 0 || answer.status == 429;
      if (no_credit) report_no_credit();
      push_start_failed(ticket, error_of(answer, "create"), retryable, /*perhaps_rented=*/false,
                        /*by_account=*/key_refused || no_credit);
      return;
    }
    search_created(ticket, label, error_of(answer, "create"), /*attempt=*/0);
  }

  void on_started(Ticket ticket, std::int64_t contract, const std::string& label, std::optional<double> usd_per_hour) {
    const double bid_usd_per_hour = bids[label];  // 0: on demand
    bids.erase(label);
    Rented new_instance;
    new_instance.label = label;
    new_instance.usd_per_hour = usd_per_hour;
    new_instance.bid_usd_per_hour = bid_usd_per_hour;
    new_instance.bid_max_usd_per_hour = bid_usd_per_hour * (1 + options.bid_raise_max);
    rented[contract] = new_instance;
    seen.insert(contract);
    events.push_back(Started{.ticket = ticket, .instance = id_of(contract), .usd_per_hour = usd_per_hour});
  }

  // Looks for the instance of a create with an unclear result. If several have its label, destroys all but one.
  void search_created(Ticket ticket, const std::string& label, const Error& error, std::size_t attempt) {
    if (attempt == kSearchDelays.size())
      return push_start_failed(ticket, error, /*retryable=*/true, /*perhaps_rented=*/true);
    delayed.emplace_back(now + kSearchDelays[attempt], [=, this] {
      begin_listing([=, this](const Listing& listing) {
        bool is_found = false;
        for (const Instance& instance : listing.instances) {
          if (instance.info.label != label) continue;
          if (!std::exchange(is_found, true))
            on_started(ticket, instance.contract, label, instance.info.usd_per_hour);
          else
            destroy(instance.contract, [](const Status&, bool) {});
        }
        if (!is_found) search_created(ticket, label, error, attempt + 1);
      });
    });
  }

  void destroy(std::int64_t contract, Destroyed done) {
    auto& callbacks = destroying[contract];
    callbacks.push_back(std::move(done));
    if (callbacks.size() > 1) return;  // it is being destroyed already
    rented.erase(contract);
    to_destroy.push_back(contract);
  }

  void on_destroyed(std::int64_t contract, const Status& status, bool absent) {
    for (const Destroyed& callback : std::exchange(destroying[contract], {})) callback(status, absent);
    destroying.erase(contract);
    must_destroy_singly.erase(contract);
  }

  static bool is_success(const HttpAnswer& answer) {
    const json object = parse_json(answer.body);
    return answer.status == 200 && object.is_object() && field(object, "success") != json(false) &&
           field(object, "error").is_null();
  }

  // Forms a request to destroy instances only when it can be sent, so that it names all instances that wait by then.
  void form_destroy() {
    RequestQueue& queue = queues[kDestroy];
    // A request that waits for another try goes first.
    const bool has_due = std::any_of(queue.waiting.begin(), queue.waiting.end(),
                                     [&](const Call& waiting) { return now >= waiting.not_before; });
    if (to_destroy.empty() || has_due || now < queue.next_call_at || queue.in_flight.size() >= kInFlightMax[kDestroy])
      return;
    // A listing confirms that a request for several instances succeeded. It proves nothing about an instance that is
    // not in `seen`, so such an instance is destroyed by a request of its own.
    std::vector<std::int64_t> together;
    for (const std::int64_t contract : to_destroy)
      if (destroys_together && seen.contains(contract) && !must_destroy_singly.contains(contract) &&
          together.size() < kDestroyedTogetherMax)
        together.push_back(contract);
    if (together.size() > 1) {
      const std::set<std::int64_t> chosen(together.begin(), together.end());
      std::erase_if(to_destroy, [&](std::int64_t contract) { return chosen.contains(contract); });
      return destroy_together(together);
    }
    const std::int64_t contract = to_destroy.front();
    to_destroy.pop_front();
    destroy_singly(contract);
  }

  void destroy_singly(std::int64_t contract) {
    call(kDestroy, "DELETE", fmt::format("/api/v0/instances/{}/", contract), "", kRepeatable,
         [this, contract](const HttpAnswer& answer) {
           const bool absent = says_unknown(answer);
           Status status = ok();
           if (!absent && !is_success(answer)) status = error_of(answer, fmt::format("destroy {}", contract));
           on_destroyed(contract, status, absent);
         });
  }

  void destroy_together(const std::vector<std::int64_t>& contracts) {
    call(kDestroy, "DELETE", "/api/v0/instances/", json{{"instance_ids", contracts}}.dump(), kRepeatable,
         [this, contracts](const HttpAnswer& answer) {
           if (is_success(answer)) return confirm_destroyed(contracts, /*attempt=*/1);
           if (answer.status != 0 && refuses_key(answer)) {
             const Error error = error_of(answer, fmt::format("destroy {} instances", contracts.size()));
             for (const std::int64_t contract : contracts) on_destroyed(contract, Status(error), /*absent=*/false);
             return;
           }
           const bool is_temporary = answer.status == 0 || answer.status == 429 || answer.status >= 500;
           if (!is_temporary) destroys_together = false;
           destroy_each(contracts);
         });
  }

  void destroy_each(const std::vector<std::int64_t>& contracts) {
    must_destroy_singly.insert(contracts.begin(), contracts.end());
    to_destroy.insert(to_destroy.end(), contracts.begin(), contracts.end());
  }

  // Checks whether the instances are gone. Those that are left after kConfirmationsMax listings are destroyed one by
  // one.
  void confirm_destroyed(const std::vector<std::int64_t>& contracts, int attempt) {
    begin_listing([=, this](const Listing& listing) {
      // An empty listing may be an error of the service, so one of the instances is queried by itself.
      if (listing.result.complete && listing.contracts.empty()) return confirm_by_query(contracts);
      std::vector<std::int64_t> left;
      for (const std::int64_t contract : contracts)
        if (!listing.result.complete || listing.contracts.contains(contract))
          left.push_back(contract);
        else
          on_destroyed(contract, ok(), /*absent=*/false);
      if (left.empty()) return;
      if (attempt == kConfirmationsMax) return destroy_each(left);
      delayed.emplace_back(now + kConfirmationPause, [=, this] { confirm_destroyed(left, attempt + 1); });
    });
  }

  void confirm_by_query(const std::vector<std::int64_t>& contracts) {
    call(kShow, "GET", fmt::format("/api/v0/instances/{}/", contracts.back()), "", kRepeatable,
         [=, this](const HttpAnswer& answer) {
           if (!says_none(answer)) return destroy_each(contracts);
           for (const std::int64_t contract : contracts) on_destroyed(contract, ok(), /*absent=*/false);
         });
  }

  // Whether the answer to a query for an instance says that there is none.
  static bool says_none(const HttpAnswer& answer) {
    const json object = parse_json(answer.body);
    const bool has_no_instance =
        answer.status == 200 && object.is_object() && object.contains("instances") && object["instances"].is_null();
    return has_no_instance || (answer.status == 404 && says_unknown(answer));
  }

  // Whether the service says that it does not know the instance. A 404 of a proxy says nothing.
  static bool says_unknown(const HttpAnswer& answer) {
    const std::string error = text_field(parse_json(answer.body), "error");
    return !refuses_key(answer) && (error == "no_such_instance" || (answer.status == 404 && error == "not_found"));
  }

  // All callers that wait when a listing begins share it, because a listing of hundreds of instances takes many pages.
  void begin_listing(std::function<void(const Listing&)> done) {
    listing_callers.push_back(std::move(done));
    if (!is_listing) list_for_callers();  // otherwise the next listing begins when the present one ends
  }

  void list_for_callers() {
    is_listing = true;
    auto listing = std::make_shared<Listing>();
    listing->done = std::exchange(listing_callers, {});
    next_page(listing, "");
  }

  void next_page(const std::shared_ptr<Listing>& listing, const std::string& token) {
    std::string path = "/api/v1/instances/?limit=25";
    if (!token.empty()) path += "&after_token=" + url_escaped(token);
    call(kList, "GET", path, "", kRepeatable, [this, listing](const HttpAnswer& answer) { on_page(listing, answer); });
  }

  void on_page(const std::shared_ptr<Listing>& listing, const HttpAnswer& answer) {
    const auto finish_listing = [&](std::optional<Error> error) {
      listing->result.complete = !error;
      listing->result.error = std::move(error);
      for (const auto& done : listing->done) done(*listing);
      is_listing = false;
      if (!listing_callers.empty()) list_for_callers();
    };
    const json object = parse_json(answer.body);
    const json& page = field(object, "instances");
    if (answer.status != 200 || !page.is_array() || field(object, "success") == json(false))
      return finish_listing(error_of(answer, "list"));
    for (const json& item : page) {
      const auto contract = number_field(item, "id");
      if (!contract) return finish_listing(fail(Code::kCorrupt, kOperation, "list: an instance without an id"));
      if (listing->contracts.insert(*contract).second) listing->instances.push_back(instance_of(*contract, item));
      seen.insert(*contract);
    }
    const json& token = field(object, "next_token");
    if (token.is_null() || token == json("")) return finish_listing(std::nullopt);
    const std::string next_token = token.is_string() ? token.get<std::string>() : token.dump();
    if (!listing->page_tokens.insert(next_token).second || listing->page_tokens.size() > kPagesMax)
      return finish_listing(fail(Code::kCorrupt, kOperation, "list: the pages do not end"));
    next_page(listing, next_token);
  }

  void watch() {
    if (watching || rented.empty() || now < next_watch_at) return;
    watching = true;
    begin_listing([this](const Listing& listing) {
      watching = false;
      next_watch_at = now + options.watch_every;
      for (const Instance& instance : listing.instances) compare_with_known(instance);
      if (!listing.result.complete) return;  // a missing instance may be on the failed page
      for (const auto& [contract, known] : rented)
        if (!listing.contracts.contains(contract)) query(contract);
    });
  }

  // Reports what has changed since the last listing.
  void compare_with_known(const Instance& instance) {
    const auto it = rented.find(instance.contract);
    if (it == rented.end() || it->second.exited_reported) return;
    Rented& known = it->second;
    const auto& usd_per_hour = instance.info.usd_per_hour;
    if (usd_per_hour && usd_per_hour != known.usd_per_hour) {
      known.usd_per_hour = usd_per_hour;
      events.push_back(PriceChanged{.instance = instance.info.instance, .usd_per_hour = *usd_per_hour});
    }
    if (instance.runs && !std::exchange(known.runs, true)) events.push_back(Running{instance.info.instance});
    raise_bid(instance, known);
    if ((instance.ending || instance.outbid) && now < known.resume_deadline) return;
    if (instance.ending && !std::exchange(known.ending_reported, true))
      events.push_back(Ending{.instance = instance.info.instance,
                              .why = instance.is_bid ? "outbid: it is being stopped" : "it is being stopped",
                              .outbid = instance.is_bid});
    if (!instance.outbid && !instance.exited) return;
    known.exited_reported = true;
    std::string why = instance.outbid ? "outbid" : "its container has exited";
    if (!instance.message.empty()) why += ": " + instance.message;
    events.push_back(Exited{.instance = instance.info.instance,
                            .label = known.label,
                            .why = why,
                            .outbid = instance.outbid,
                            .still_rented = true});
  }

  // Raises our bid up to its limit if other bids are higher or about to win.
  void raise_bid(const Instance& instance, Rented& known) {
    if (!instance.is_bid || !instance.bid_min || known.bid_usd_per_hour <= 0 || now < known.resume_deadline) return;
    const bool must_raise = instance.outbid || instance.ending || *instance.bid_min > known.bid_usd_per_hour;
    const double new_bid = std::min(known.bid_max_usd_per_hour, *instance.bid_min * kBidFactor);  // $ per hour
    if (!must_raise || new_bid < *instance.bid_min || new_bid <= known.bid_usd_per_hour) return;
    known.resume_deadline = now + kResumeMax;
    const std::string path = fmt::format("/api/v0/instances/bid_price/{}/", instance.contract);
    call(kBid, "PUT", path, json{{"client_id", "me"}, {"price", new_bid}}.dump(), kRepeatable,
         [this, contract = instance.contract, new_bid, was_stopped = instance.outbid](const HttpAnswer& answer) {
           const auto it = rented.find(contract);
           if (it == rented.end()) return;
           const json object = parse_json(answer.body);
           if (answer.status != 200 || field(object, "success") == json(false)) {
             it->second.resume_deadline = {};
             it->second.bid_max_usd_per_hour = 0;  // no further try, so that the failure is reported only once
             return log::warn("{}: {}", kOperation,
                              error_of(answer, fmt::format("raise the bid for {}", contract)).detail);
           }
           log::info("the bid for {} was topped and is now ${:.4f} an hour (was ${:.4f})", it->second.label, new_bid,
                     it->second.bid_usd_per_hour);
           it->second.bid_usd_per_hour = new_bid;
           it->second.resume_deadline = now + kResumeMax;
           if (!was_stopped) return;
           call(kBid, "PUT", fmt::format("/api/v0/instances/{}/", contract), R"({"state":"running"})", kRepeatable,
                [](const HttpAnswer&) {});  // the next listing shows the result
         });
  }

  // Queries an instance that a listing lacks. It has ended only if the answer says so.
  void query(std::int64_t contract) {
    call(kShow, "GET", fmt::format("/api/v0/instances/{}/", contract), "", kRepeatable,
         [this, contract](const HttpAnswer& answer) {
           const auto it = rented.find(contract);
           if (it == rented.end() || it->second.exited_reported) return;
           if (!says_none(answer)) return;
           events.push_back(Exited{.instance = id_of(contract), .label = it->second.label, .why = "it is gone"});
           rented.erase(it);
         });
  }

  // Whether an answer with status 200 gives no result and no reason, so that another try may help: a page of a proxy,
  // or `success: false` for a request that the service has no reason to refuse.
  static bool is_empty_error(const Call& call, const HttpAnswer& answer) {
    if (answer.status != 200) return false;
    const json object = parse_json(answer.body);
    if (!object.is_object()) return true;
    const bool is_never_refused =
        call.request.method == "GET" || (call.request.method == "DELETE" && call.request.body.empty());
    return is_never_refused && field(object, "success") == json(false) && !says_unknown(answer) && !refuses_key(answer);
  }

  // Returns whether to repeat the call, and sets its delay if so. After 429 (too many requests), all calls of the
  // endpoint wait.
  bool schedule_retry(RequestQueue& queue, Call& call, const HttpAnswer& answer) {
    const bool is_too_frequent = answer.status == 429, is_unsent = answer.status == 0 && !answer.sent;
    const bool may_be_lost =
        call.repeatable && (answer.status == 0 || answer.status >= 500 || is_empty_error(call, answer));
    if (!is_too_frequent && !is_unsent && !may_be_lost) return false;
    if (++call.tries >= kTriesMax) return false;
    if (!is_too_frequent && !std::exchange(failure_logged, true))
      log::warn("{}: {}; retrying", kOperation, message_of(answer));
    Duration backoff = kBackoffFirst;
    for (int i = 1; i < call.tries; ++i) backoff *= 2;
    call.not_before = now + std::min(backoff, kBackoffMax);
    if (is_too_frequent) queue.next_call_at = std::max(queue.next_call_at, call.not_before);
    return true;
  }

  // Handles the answers, then starts the calls that are due.
  void advance() {
    for (const HttpAnswer& answer : http.poll())
      for (RequestQueue& queue : queues) {
        const auto it = queue.in_flight.find(answer.request);
        if (it == queue.in_flight.end()) continue;
        Call call = std::move(it->second);
        queue.in_flight.erase(it);
        if (answer.status == 200) failure_logged = false;
        judge_account(answer);
        if (schedule_retry(queue, call, answer))
          queue.waiting.push_front(std::move(call));
        else
          call.done(answer);
      }
    for (std::size_t i = 0; i < delayed.size();) {
      if (delayed[i].first > now) {
        ++i;
        continue;
      }
      const auto task = std::move(delayed[i].second);
      delayed.erase(delayed.begin() + static_cast<std::ptrdiff_t>(i));
      task();
    }
    watch();
    read_account();
    form_destroy();
    for (std::size_t endpoint = 0; endpoint < kEndpoints; ++endpoint) {
      RequestQueue& queue = queues[endpoint];
      if (queue.in_flight.size() >= kInFlightMax[endpoint] || now < queue.next_call_at) continue;
      // A call that waits for another try does not delay the others.
      const auto next = std::find_if(queue.waiting.begin(), queue.waiting.end(),
                                     [&](const Call& waiting) { return now >= waiting.not_before; });
      if (next == queue.waiting.end()) continue;
      Call call = std::move(*next);
      queue.waiting.erase(next);
      queue.next_call_at = now + kIntervals[endpoint];
      const std::uint64_t id = http.send(call.request);
      queue.in_flight.emplace(id, std::move(call));
    }
  }
};

Status end_own_vast_instance(const std::string& url, const std::string& key, const std::string& id) {
  VastOptions options;
  if (!url.empty()) options.url = url;
  options.key = key;
  VastProvider provider(std::move(options));
  constexpr Ticket kStop = 0;  // any number, because there is only one request
  provider.stop(kStop, {std::string(kIdPrefix) + id}, Duration{});
  const SystemClock clock;
  const TimePoint deadline = clock.now() + kOwnEndMax;
  while (clock.now() < deadline) {
    for (const ProviderEvent& event : provider.poll(clock.now())) {
      if (std::get_if<Stopped>(&event)) return ok();
      if (const auto* failed = std::get_if<StopFailed>(&event)) return failed->error;
    }
    std::this_thread::sleep_for(kOwnEndPollInterval);
  }
  return fail(Code::kUnavailable, kOperation, "destroy {}: no answer within {}", id, to_text(kOwnEndMax));
}

VastProvider::VastProvider(VastOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
VastProvider::~VastProvider() = default;

void VastProvider::start(Ticket ticket, const LaunchSpec& spec) { impl_->create(ticket, spec); }

bool VastProvider::cancel(Ticket ticket) { return impl_->cancel(ticket); }

void VastProvider::watch(const InstanceId& instance, const std::string& label) {
  if (const auto contract = contract_of(instance)) impl_->rented.try_emplace(*contract).first->second.label = label;
}

void VastProvider::stop(Ticket ticket, const InstanceId& instance, Duration) {
  const auto contract = contract_of(instance);
  if (!contract) {
    impl_->events.push_back(StopFailed{.ticket = ticket, .instance = instance, .error = contract.error()});
    return;
  }
  impl_->destroy(*contract, [this, ticket, instance](const Status& destroyed, bool absent) {
    if (destroyed)
      impl_->events.push_back(Stopped{
          .ticket = ticket, .instance = instance, .how = absent ? "no such instance" : "destroyed", .absent = absent});
    else
      impl_->events.push_back(StopFailed{.ticket = ticket, .instance = instance, .error = destroyed.error()});
  });
}

void VastProvider::list(Ticket ticket, const std::string& label_prefix) {
  impl_->begin_listing([this, ticket, label_prefix](const Impl::Listing& listing) {
    Listed result = listing.result;
    result.ticket = ticket;
    for (const Instance& instance : listing.instances)
      if (instance.info.label.starts_with(label_prefix)) result.instances.push_back(instance.info);
    impl_->events.push_back(std::move(result));
  });
}

std::vector<ProviderEvent> VastProvider::poll(TimePoint now) {
  impl_->now = now;
  impl_->advance();
  return std::exchange(impl_->events, {});
}

}  // namespace echoline::provisioner
