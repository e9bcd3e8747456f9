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
constexpr std::size_t kLabelMax = 256, kCommandMax = 4096, kTextMax = 200, kPagesMax = 2000;
constexpr int kTriesMax = 7;
constexpr Duration kBackoffFirst = std::chrono::seconds(2), kBackoffMax = std::chrono::minutes(1);
constexpr Duration kDestroyTimeMax = std::chrono::minutes(5);
constexpr double kUsdPerHourMax = 1e6;
constexpr double kDiskGbMin = 10;
constexpr double kBidFactor = 1.05;  // margin over the least bid, so that a small rise does not outbid it
constexpr Duration kResumeMax = std::chrono::minutes(2);  // from a raised bid until the instance runs again

enum Endpoint { kCreate, kDestroy, kShow, kList, kBid, kEndpoints };
// The service's minimum interval per endpoint and key.
constexpr std::array<Duration, kEndpoints> kIntervals{milliseconds(4500), milliseconds(3000), milliseconds(2000),
                                                      milliseconds(1000), milliseconds(5500)};
// Delays before listings that look for a create with an unclear result; new instances appear late.
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

// A field of an answer; null if it is missing.
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

std::string quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) c == '\'' ? out += "'\\''" : out += c;
  return out + "'";
}

struct Instance {
  std::int64_t contract = 0;
  InstanceInfo info;
  bool outbid = false, exited = false, ending = false, is_bid = false;
  std::optional<double> min_bid;
  std::string message;
};

Instance instance_of(std::int64_t contract, const json& object) {
  Instance i;
  i.contract = contract;
  const std::string actual = text_field(object, "actual_status"), message = text_field(object, "status_msg");
  i.info = {id_of(contract), text_field(object, "label"), price_field(object, "dph_total")};
  const auto stopped = [&](const char* name) { return text_field(object, name) == "stopped"; };
  i.is_bid = field(object, "is_bid") == json(true);
  i.min_bid = price_field(object, "min_bid");
  i.outbid = i.is_bid && stopped("cur_state") && stopped("intended_status") && stopped("next_state");
  i.ending = stopped("intended_status") && !stopped("cur_state");
  i.exited = actual == "exited";
  i.message = message.substr(0, kTextMax);
  return i;
}

Result<json> create_body(const LaunchSpec& spec) {
  if (spec.image.empty()) return fail(Code::kInvalid, kOperation, "a container image is needed: set fleet.image");
  if (spec.label.empty() || spec.label.size() > kLabelMax)
    return fail(Code::kInvalid, kOperation, "a label has 1 to {} characters, this one {}", kLabelMax,
                spec.label.size());
  if (spec.argv.empty()) return fail(Code::kInvalid, kOperation, "there is no command to run");
  std::string command = "exec";
  for (const std::string& word : spec.argv) command += " " + quoted(word);
  const std::string shell = "/bin/sh";
  if (command.size() + shell.size() + 2 > kCommandMax)
    return fail(Code::kInvalid, kOperation, "the command has {} characters, {} are allowed", command.size(),
                kCommandMax);
  json env = json::object();
  for (const std::uint16_t port : spec.ports) env[fmt::format("-p {}:{}", port, port)] = "1";
  for (const auto& [name, value] : spec.env) env[name] = value;
  json body = {{"client_id", "me"},
               {"image", spec.image},
               {"disk", std::max(kDiskGbMin, std::ceil(static_cast<double>(spec.disk.count) / 1e9))},
               {"label", spec.label},
               {"runtype", "args"},
               {"onstart", shell},
               {"args", {"-c", command}},
               {"env", env},
               {"cancel_unavail", true}};
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
  using Done = std::function<void(const HttpAnswer&)>;
  using Destroyed = std::function<void(const Status& status, bool absent)>;
  struct Call {
    HttpRequest request;
    bool repeatable = false;
    Done done;
    TimePoint not_before{};
    int tries = 0;
  };
  // The requests to one endpoint, which keep its interval.
  struct RequestQueue {
    std::deque<Call> waiting;
    std::optional<std::pair<std::uint64_t, Call>> in_flight;
    TimePoint due{};
  };
  struct Listing {
    Listed found;  // all instances; label_prefix is applied at the end
    std::vector<Instance> instances;
    std::set<std::int64_t> seen;
    std::set<std::string> tokens;
    std::function<void(Listing&)> done;
  };
  struct Rented {
    std::string label;
    std::optional<double> usd_per_hour;
    bool ended = false;   // Exited was reported
    bool ending = false;  // Ending was reported
    double bid = 0, bid_max = 0;
    TimePoint resumes_until{};  // while a bid is being raised
  };

  VastOptions options;
  HttpClient http;
  std::array<RequestQueue, kEndpoints> queues;
  std::map<std::int64_t, Rented> rented;  // known and not being destroyed
  std::map<std::string, double> bids;     // of pending creates, by label
  std::map<std::int64_t, std::vector<Destroyed>> destroying;
  std::vector<std::pair<TimePoint, std::function<void()>>> delayed;
  std::vector<ProviderEvent> events;
  TimePoint now{}, watch_due{};
  bool watching = false;
  bool failure_logged = false;  // until a request succeeds

  explicit Impl(VastOptions o) : options(std::move(o)), http(options.key, options.timeout) {
    options.url = service_url(options.url);
  }

  void call(Endpoint endpoint, const std::string& method, const std::string& path, const std::string& body,
            bool repeatable, Done done) {
    queues[endpoint].waiting.push_back({{method, options.url + path, body}, repeatable, std::move(done), {}, 0});
  }

  // The service's error message, short and without the key.
  std::string message_of(const HttpAnswer& answer) const {
    if (answer.status == 0) return fmt::format("{}: {}", options.url, answer.trouble);
    const json object = json::parse(answer.body, nullptr, false);
    std::string words = text_field(object, "error");
    if (const std::string more = text_field(object, "msg"); !more.empty()) words += (words.empty() ? "" : ": ") + more;
    if (words.empty()) words = answer.body;
    for (auto at = words.find(options.key); at != std::string::npos; at = words.find(options.key))
      words.replace(at, options.key.size(), "...");
    words = words.substr(0, kTextMax);
    std::replace_if(
        words.begin(), words.end(), [](unsigned char c) { return c < ' ' || c > 126; }, ' ');
    return fmt::format("status {}: {}", answer.status, words);
  }

  static bool refuses_key(const HttpAnswer& answer) {
    return answer.status == 401 || answer.status == 403 || answer.body.find("auth_error") != std::string::npos;
  }

  Error error_of(const HttpAnswer& answer, const std::string& what) const {
    if (answer.status != 0 && refuses_key(answer))
      return fail(Code::kInvalid, kOperation, "{}: the key was refused ({}); check VAST_API_KEY", what,
                  message_of(answer));
    const bool gone = answer.status == 404 || answer.status == 410 || answer.status == 409;
    return fail(gone ? Code::kNotFound : Code::kUnavailable, kOperation, "{}: {}", what, message_of(answer));
  }

  void create(Ticket ticket, const LaunchSpec& spec) {
    const auto refuse = [&](Error error) { events.push_back(StartFailed{ticket, std::move(error), false, false}); };
    std::string_view ask = spec.offer.id;  // vast.ai's word for an offer
    for (const std::string_view prefix : {"vast:", "vast-"})
      if (ask.starts_with(prefix)) ask.remove_prefix(prefix.size());
    if (!number_of(ask))
      return refuse(fail(Code::kInvalid, kOperation, "expected the number of an ask as the offer's id, found '{}'",
                         spec.offer.id));
    LaunchSpec full_spec = spec;
    if (options.url != kVastUrl) full_spec.env.emplace_back(kVastUrlVariable, options.url);  // for ending itself
    auto body = create_body(full_spec);
    if (!body) return refuse(std::move(body).error());
    if (spec.bid_usd_per_hour) bids[spec.label] = *spec.bid_usd_per_hour;
    call(kCreate, "PUT", fmt::format("/api/v0/asks/{}/", ask),
         body->dump(-1, ' ', false, json::error_handler_t::replace), false,
         [this, ticket, label = spec.label](const HttpAnswer& answer) { on_create_answer(ticket, label, answer); });
  }

  void on_create_answer(Ticket ticket, const std::string& label, const HttpAnswer& answer) {
    const json object = json::parse(answer.body, nullptr, false);
    const auto contract = number_field(object, "new_contract");
    const bool succeeded =
        answer.status == 200 && field(object, "success") != json(false) && field(object, "error").is_null();
    if (contract && succeeded) return started(ticket, *contract, label, std::nullopt);
    if (contract) {  // for example after a bid that is too low: it exists, stopped, and its disk costs
      destroy(*contract, [this, ticket, error = error_of(answer, "create")](const Status& destroyed, bool) {
        events.push_back(StartFailed{ticket, error, false, !destroyed});
      });
      return;
    }
    // 429 after all tries, and requests that were never sent, rented nothing.
    const bool refused_by_service = answer.status == 200 && field(object, "success") == json(false);
    const bool refused = refused_by_service || (answer.status >= 400 && answer.status < 500 && answer.status != 408);
    if (refused || (answer.status == 0 && !answer.sent)) {
      const bool retryable = answer.status == 0 || answer.status == 429;
      events.push_back(StartFailed{ticket, error_of(answer, "create"), retryable, false});
      return;
    }
    search_created(ticket, label, error_of(answer, "create"), 0);
  }

  void started(Ticket ticket, std::int64_t contract, const std::string& label, std::optional<double> usd_per_hour) {
    const double bid = bids[label];
    bids.erase(label);
    rented[contract] = {label, usd_per_hour, false, false, bid, bid * (1 + options.bid_raise_max), {}};
    events.push_back(Started{ticket, id_of(contract), usd_per_hour});
  }

  void search_created(Ticket ticket, const std::string& label, const Error& error, std::size_t attempt) {
    if (attempt == kSearchDelays.size()) {
      events.push_back(StartFailed{ticket, error, true, true});
      return;
    }
    delayed.emplace_back(now + kSearchDelays[attempt], [=, this] {
      begin_listing([=, this](Listing& listing) {
        bool found = false;
        for (const Instance& instance : listing.instances) {
          if (instance.info.label != label) continue;
          if (!std::exchange(found, true))
            started(ticket, instance.contract, label, instance.info.usd_per_hour);
          else
            destroy(instance.contract, [](const Status&, bool) {});
        }
        if (!found) search_created(ticket, label, error, attempt + 1);
      });
    });
  }

  void destroy(std::int64_t contract, Destroyed done) {
    auto& waiting = destroying[contract];
    waiting.push_back(std::move(done));
    if (waiting.size() > 1) return;
    rented.erase(contract);
    call(kDestroy, "DELETE", fmt::format("/api/v0/instances/{}/", contract), "", true,
         [this, contract](const HttpAnswer& answer) {
           const json object = json::parse(answer.body, nullptr, false);
           const bool absent = answer.body.find("no_such_instance") != std::string::npos && !refuses_key(answer);
           const bool is_destroyed = answer.status == 200 && object.is_object() &&
                                     field(object, "success") != json(false) && field(object, "error").is_null();
           const Status status =
               absent || is_destroyed ? ok() : Status(error_of(answer, fmt::format("destroy {}", contract)));
           for (const Destroyed& callback : std::exchange(destroying[contract], {})) callback(status, absent);
           destroying.erase(contract);
         });
  }

  void begin_listing(std::function<void(Listing&)> done) {
    auto listing = std::make_shared<Listing>();
    listing->done = std::move(done);
    next_page(listing, "");
  }

  void next_page(const std::shared_ptr<Listing>& listing, const std::string& token) {
    std::string path = "/api/v1/instances/?limit=25";
    if (!token.empty()) path += "&after_token=" + url_escaped(token);
    call(kList, "GET", path, "", true, [this, listing](const HttpAnswer& answer) { on_page(listing, answer); });
  }

  void on_page(const std::shared_ptr<Listing>& listing, const HttpAnswer& answer) {
    const auto finish_listing = [&](std::optional<Error> error) {
      listing->found.complete = !error;
      listing->found.error = std::move(error);
      listing->done(*listing);
    };
    const json object = json::parse(answer.body, nullptr, false);
    const json& page = field(object, "instances");
    if (answer.status != 200 || !page.is_array() || field(object, "success") == json(false))
      return finish_listing(error_of(answer, "list"));
    for (const json& item : page) {
      const auto contract = number_field(item, "id");
      if (!contract) return finish_listing(fail(Code::kCorrupt, kOperation, "list: an instance without an id"));
      if (listing->seen.insert(*contract).second) listing->instances.push_back(instance_of(*contract, item));
    }
    const json& token = field(object, "next_token");
    if (token.is_null() || token == json("")) return finish_listing(std::nullopt);
    const std::string text = token.is_string() ? token.get<std::string>() : token.dump();
    if (!listing->tokens.insert(text).second || listing->tokens.size() > kPagesMax)
      return finish_listing(fail(Code::kCorrupt, kOperation, "list: the pages do not end"));
    next_page(listing, text);
  }

  void watch() {
    if (watching || rented.empty() || now < watch_due) return;
    watching = true;
    begin_listing([this](Listing& listing) {
      watching = false;
      watch_due = now + options.watch_every;
      for (const Instance& instance : listing.instances) compare_with_known(instance);
      if (!listing.found.complete) return;  // a missing instance may be on the failed page
      for (const auto& [contract, known] : rented)
        if (listing.seen.count(contract) == 0) query(contract);
    });
  }

  // Reports what has changed since the last listing.
  void compare_with_known(const Instance& instance) {
    const auto it = rented.find(instance.contract);
    if (it == rented.end() || it->second.ended) return;
    const auto& price = instance.info.usd_per_hour;
    if (price && price != it->second.usd_per_hour) {
      it->second.usd_per_hour = price;
      events.push_back(PriceChanged{instance.info.instance, *price});
    }
    raise_bid(instance, it->second);
    if ((instance.ending || instance.outbid) && now < it->second.resumes_until) return;
    if (instance.ending && !std::exchange(it->second.ending, true))
      events.push_back(Ending{instance.info.instance,
                              instance.is_bid ? "outbid: it is being stopped" : "it is being stopped",
                              instance.is_bid});
    if (!instance.outbid && !instance.exited) return;
    it->second.ended = true;
    std::string why = instance.outbid ? "outbid" : "its container has exited";
    if (!instance.message.empty()) why += ": " + instance.message;
    events.push_back(Exited{instance.info.instance, it->second.label, why, instance.outbid, true});
  }

  // Raises our bid up to its limit if other bids are higher or about to win.
  void raise_bid(const Instance& instance, Rented& known) {
    if (!instance.is_bid || !instance.min_bid || known.bid <= 0 || now < known.resumes_until) return;
    const bool must_raise = instance.outbid || instance.ending || *instance.min_bid > known.bid;
    const double bid = std::min(known.bid_max, *instance.min_bid * kBidFactor);
    if (!must_raise || bid < *instance.min_bid || bid <= known.bid) return;
    known.resumes_until = now + kResumeMax;
    const std::string path = fmt::format("/api/v0/instances/bid_price/{}/", instance.contract);
    call(kBid, "PUT", path, json{{"client_id", "me"}, {"price", bid}}.dump(), true,
         [this, contract = instance.contract, bid, stopped = instance.outbid](const HttpAnswer& answer) {
           const auto it = rented.find(contract);
           if (it == rented.end()) return;
           const json object = json::parse(answer.body, nullptr, false);
           if (answer.status != 200 || field(object, "success") == json(false)) {
             it->second.resumes_until = {};
             it->second.bid_max = 0;  // report only once
             return log::warn("{}: {}", kOperation,
                              error_of(answer, fmt::format("raise the bid for {}", contract)).detail);
           }
           log::info("the bid for {} was topped and is now ${:.4f} an hour (was ${:.4f})", it->second.label, bid,
                     it->second.bid);
           it->second.bid = bid;
           it->second.resumes_until = now + kResumeMax;
           if (!stopped) return;
           call(kBid, "PUT", fmt::format("/api/v0/instances/{}/", contract), R"({"state":"running"})", true,
                [](const HttpAnswer&) {});  // the next listing shows the result
         });
  }

  // Queries an instance that a listing lacks; only a definite answer counts.
  void query(std::int64_t contract) {
    call(kShow, "GET", fmt::format("/api/v0/instances/{}/", contract), "", true,
         [this, contract](const HttpAnswer& answer) {
           const auto it = rented.find(contract);
           if (it == rented.end() || it->second.ended) return;
           const json object = json::parse(answer.body, nullptr, false);
           const bool none = answer.status == 200 && object.is_object() && object.contains("instances") &&
                             object["instances"].is_null();
           const bool absent = answer.status == 404 && !refuses_key(answer) &&
                               answer.body.find("no_such_instance") != std::string::npos;
           if (!none && !absent) return;
           events.push_back(Exited{id_of(contract), it->second.label, "it is gone", false, false});
           rented.erase(it);
         });
  }

  // Returns whether to repeat a call, and sets its delay if so.
  bool schedule_retry(Call& call, const HttpAnswer& answer) {
    const bool too_frequent = answer.status == 429, unsent = answer.status == 0 && !answer.sent;
    const bool broken = call.repeatable && (answer.status == 0 || answer.status >= 500);
    if (!(too_frequent || unsent || broken) || ++call.tries >= kTriesMax) return false;
    if (!too_frequent && !std::exchange(failure_logged, true))
      log::warn("{}: {}; retrying", kOperation, message_of(answer));
    Duration wait = kBackoffFirst;
    for (int i = 1; i < call.tries; ++i) wait *= 2;
    call.not_before = now + std::min(wait, kBackoffMax);
    return true;
  }

  void advance() {
    for (const HttpAnswer& answer : http.poll())
      for (RequestQueue& queue : queues) {
        if (!queue.in_flight || queue.in_flight->first != answer.request) continue;
        Call call = std::move(queue.in_flight->second);
        queue.in_flight.reset();
        if (answer.status == 200) failure_logged = false;
        if (schedule_retry(call, answer))
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
    for (std::size_t endpoint = 0; endpoint < kEndpoints; ++endpoint) {
      RequestQueue& queue = queues[endpoint];
      if (queue.in_flight || queue.waiting.empty() || now < queue.due || now < queue.waiting.front().not_before)
        continue;
      Call call = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      queue.due = now + kIntervals[endpoint];
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
  provider.stop(0, {std::string(kIdPrefix) + id}, {});
  const SystemClock clock;
  const TimePoint deadline = clock.now() + kDestroyTimeMax;
  while (clock.now() < deadline) {
    for (const ProviderEvent& event : provider.poll(clock.now())) {
      if (std::get_if<Stopped>(&event)) return ok();
      if (const auto* failed = std::get_if<StopFailed>(&event)) return failed->error;
    }
    std::this_thread::sleep_for(milliseconds(20));
  }
  return fail(Code::kUnavailable, kOperation, "destroy {}: no answer within {}", id, to_text(kDestroyTimeMax));
}

VastProvider::VastProvider(VastOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
VastProvider::~VastProvider() = default;

void VastProvider::start(Ticket ticket, const LaunchSpec& spec) { impl_->create(ticket, spec); }

void VastProvider::stop(Ticket ticket, const InstanceId& instance, Duration) {
  const auto contract = contract_of(instance);
  if (!contract) {
    impl_->events.push_back(StopFailed{ticket, instance, contract.error()});
    return;
  }
  impl_->destroy(*contract, [this, ticket, instance](const Status& destroyed, bool absent) {
    if (destroyed)
      impl_->events.push_back(Stopped{ticket, instance, absent ? "no such instance" : "destroyed", absent});
    else
      impl_->events.push_back(StopFailed{ticket, instance, destroyed.error()});
  });
}

void VastProvider::list(Ticket ticket, const std::string& label_prefix) {
  impl_->begin_listing([this, ticket, label_prefix](Impl::Listing& listing) {
    listing.found.ticket = ticket;
    for (const Instance& instance : listing.instances)
      if (instance.info.label.starts_with(label_prefix)) listing.found.instances.push_back(instance.info);
    impl_->events.push_back(std::move(listing.found));
  });
}

std::vector<ProviderEvent> VastProvider::poll(TimePoint now) {
  impl_->now = now;
  impl_->advance();
  return std::exchange(impl_->events, {});
}

}  // namespace echoline::provisioner
