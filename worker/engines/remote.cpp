// An engine that drives an inference server over HTTP: starts it, gives it each policy, verifies its weights, and
// continues unfinished responses after failures. One thread: every wait is in process_events().
#include "worker/engines/remote.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <set>

#include "base/http.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "model/model_files.hpp"
#include "model/probe_text.hpp"
#include "worker/engines/child.hpp"
#include "worker/engines/fingerprints.hpp"
#include "worker/engines/policy_folder.hpp"
#include "worker/engines/protocol.hpp"
#include "worker/engines/remote_phase.hpp"
#include "worker/engines/truth.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {
namespace {

constexpr std::string_view kOperation = "engine";
// A request asks for at most this many tokens. That many are lost with a broken connection, and progress is reported
// at this interval.
constexpr std::int64_t kTokensPerRequestMax = 512;
constexpr int kFailedAttemptsMax = 5;  // consecutive failed attempts before the engine counts as broken
constexpr int kLossesMax = 3;          // lost requests of one sequence before the sequence counts as the cause
constexpr Duration kEventsWait = std::chrono::milliseconds(50);  // longest wait of one process_events()
constexpr Duration kHealthInterval = std::chrono::milliseconds(200);
constexpr Duration kHealthTimeout = std::chrono::seconds(5);
// While a call takes longer than kWatchDelay, the server's health is checked beside it. After kFailedChecksMax failed
// checks in a row, the server counts as dead.
constexpr Duration kWatchDelay = std::chrono::seconds(2), kWatchInterval = std::chrono::seconds(1);
constexpr int kFailedChecksMax = 3;
// Names of the errands that advance_script() treats differently.
constexpr std::string_view kResumeErrand = "resume", kProbeErrand = "probe";
// A wait for the server is logged after kWaitLogDelay, and then at an interval.
constexpr Duration kWaitLogDelay = std::chrono::seconds(10), kWaitLogInterval = std::chrono::minutes(1);
// Aborted responses have kDrainMax to return, but no more than kDrainQuiet after the last one. A request that arrived
// during the pause does not return, because it waits at the server.
constexpr Duration kDrainMax = std::chrono::seconds(5), kDrainQuiet = std::chrono::milliseconds(150);
constexpr Duration kBackoffMax = std::chrono::seconds(30);
constexpr Duration kNoTimeout = std::chrono::hours(24);
constexpr std::size_t kAnswerBytesMax = 64u << 20;
constexpr double kLogprobSlack = 1e-3;  // nats; rounding may give a log-probability up to this much above 0
const RepeatedTensor kSeparateHead{.name = "lm_head.weight", .of = "model.embed_tokens.weight"};
constexpr double kSpreadMin = 0.05;  // nats; smaller values say nothing about the temperature

// Quotes one shell word.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string replace_all(std::string text, std::string_view placeholder, const std::string& value) {
  for (std::size_t at = 0; (at = text.find(placeholder, at)) != std::string::npos; at += value.size())
    text.replace(at, placeholder.size(), value);
  return text;
}

// Returns a port of this machine without a listener; 0 if there is none.
int free_port() {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any_address = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), any_address, size) != 0 || ::getsockname(listener.get(), any_address, &size) != 0)
    return 0;
  return ntohs(address.sin_port);
}

class Remote final : public Engine {
  using enum RemotePhase::Phase;

 public:
  Remote(const EngineOptions& options, const Task& task, const EngineHost& host, std::unique_ptr<Protocol> protocol,
         std::unique_ptr<PolicyFolder> folder)
      : options_(options),
        task_(task),
        host_(host),
        protocol_(std::move(protocol)),
        folder_(std::move(folder)),
        http_("", kNoTimeout, {kAnswerBytesMax, false}),
        url_(without_trailing_slashes(options.url)) {
    proof_.text = model::probe_text(task.model);
  }

  std::size_t capacity() const override { return options_.rollouts_at_once; }
  std::size_t inside() const override { return unfinished_.size() + outcomes_.size(); }

  void submit(Sequence sequence) override {
    const std::uint64_t id = sequence.id;
    if (Status fits = check_fits(sequence); !fits) return outcomes_.push_back({id, std::move(fits).error()});
    unfinished_[id].sequence = std::move(sequence);
    queue_.push_back(id);
  }

  std::vector<Outcome> poll(Duration time) override {
    const TimePoint end = clock_.now() + time;
    process_events(Duration{});
    for (TimePoint now = clock_.now(); outcomes_.empty() && !unfinished_.empty() && !phase_.is(kBroken) && now < end;
         now = clock_.now())
      process_events(std::min(end - now, kEventsWait));
    return std::exchange(outcomes_, {});
  }

  void abort(std::uint64_t id) override {
    if (const auto it = unfinished_.find(id); it != unfinished_.end()) {
      if (it->second.request != 0) http_.cancel(it->second.request), in_flight_.erase(it->second.request);
      std::erase(queue_, id);
      unfinished_.erase(it);
    }
    std::erase_if(outcomes_, [&](const Outcome& outcome) { return outcome.id == id; });
  }

  std::uint64_t progress() const override { return progress_; }

  void decode_part(const overlay::PublicationPart& part) override { folder_->decode_part(part); }
  Status install(const overlay::Publication& publication) override {
    ECHO_TRY(status());
    if (phase_.awaits_health_check() || phase_.is(kLoading)) reset_server();  // the server may be reading the files
    ECHO_TRY(folder_->install(publication));
    schema::PolicyNote note;
    if (!note.ParseFromString(publication.note)) note.Clear();
    proof_.learner_logprobs.assign(note.probe_logprobs().begin(), note.probe_logprobs().end());
    if (!publication.activate) return ok();
    if (phase_.is(kReady) && held_.version && folder_->digest() == held_.digest)
      announce_version();
    else if (phase_.is(kReady))
      load(WeightsSource::kLoaded);
    else if (phase_.is(kEmpty))
      phase_.move(kDown);
    while (!phase_.is(kReady) && !phase_.is(kBroken)) {
      if (host_.stop && *host_.stop) return fail(Code::kCancelled, "install policy", "asked to stop");
      process_events(kEventsWait);
      if (host_.on_wait) host_.on_wait();
    }
    return status();
  }
  std::optional<Version> version() const override { return held_.version; }
  const overlay::Digest& digest() const override { return held_.digest; }
  bool can_take_work() const override { return phase_.is(kReady) || phase_.is(kLoading); }
  Status status() const override {
    if (phase_.error()) return *phase_.error();
    return ok();
  }

 private:
  struct Unfinished {
    Sequence sequence;
    Response response;          // what was generated so far
    std::uint64_t request = 0;  // 0: in the queue
    Version requested_under{};  // the version that the server had at that time
    int losses = 0;
  };
  // One step of the script that brings the server to a policy: a call, and the function that takes the answer. Without
  // a call: wait for aborted responses to return.
  struct Errand {
    std::string_view name;  // for the log
    std::optional<Call> call;
    std::function<Status(const HttpAnswer&)> on_answer;
    bool long_work = false;    // loads weights or reads a text: its timeout is options.patience
    bool by_receiver = false;  // a call of hand_over()
  };
  // Checks of the health beside a long call.
  struct Watch {
    std::uint64_t request = 0;
    TimePoint next_check{};
    int failed_in_a_row = 0;
  };
  struct Script {
    std::deque<Errand> errands;
    std::uint64_t request = 0;      // of the first errand, or of a health check
    TimePoint drained_by = kNever;  // deadline of an errand without a call
    // The probe that follows the resumption, if it was sent before the resumption: see advance_script().
    std::uint64_t early_probe = 0;
    std::optional<HttpAnswer> early_probe_answer;
    TimePoint begun{}, step_begun{};
    std::vector<std::pair<std::string_view, Duration>> times;  // of the finished errands, by name
    Watch watch;
    bool handed_over = false;  // to the receiver
  };
  // Attempts to get the engine to work.
  struct Attempts {
    int failed = 0;  // consecutive
    TimePoint next_attempt{}, deadline{}, next_health_check{};
    TimePoint wait_begun{}, next_log = kNever;  // of the wait for a server; kNever: nothing was logged about it
    std::string last_health = "no answer";
  };
  // The policy that the server is to have (target), and the one that it has.
  struct Held {
    std::optional<Version> target, version;
    overlay::Digest digest{};
    std::set<Version> possible_versions;  // versions under which unfinished responses may have been drawn
  };
  // Knowledge about the current server, gathered since it started or came back.
  struct Server {
    bool is_interface_known = false;
    bool has_receiver = false;                // see Handover
    std::optional<Version> receiver_version;  // the version that the receiver has loaded
    ProbeNoise noise;
  };
  // Evidence that the server has the right weights: its log-probabilities of a text.
  struct Proof {
    std::vector<model::Token> text;
    std::vector<double> learner_logprobs;  // of the text under the policy in the folder; empty: the learner sent none
    Truth truth;
    Fingerprints fingerprints;
    double spread_at_1 = 0;  // Protocol::spread() at temperature 1
    bool temperature_checked = false;
  };
  // How the server got its weights: it has read only this folder since its start, it was told to load them, or another
  // process may have changed them.
  enum class WeightsSource { kStarted, kLoaded, kUnknown };

  bool starts_server() const { return !options_.command.empty(); }

  Status check_fits(const Sequence& sequence) const {
    const std::int64_t vocabulary = task_.model.vocab_size;
    if (sequence.prompt.empty() || sequence.tokens_max < 1 ||
        std::ssize(sequence.prompt) + sequence.tokens_max > task_.model.positions_max)
      return fail(Code::kInvalid, "generate",
                  "expected a prompt and room for {} tokens in {} positions, found a prompt of {}", sequence.tokens_max,
                  task_.model.positions_max, sequence.prompt.size());
    for (const model::Token token : sequence.prompt)
      if (token < 0 || token >= vocabulary)
        return fail(Code::kInvalid, "generate", "token {} of the prompt, the vocabulary ends at {}", token,
                    vocabulary - 1);
    return ok();
  }

  // ---- events ----

  // Advances the engine by one step: takes answers, which it awaits for at most `wait`, and sends what is due.
  void process_events(Duration wait) {
    const TimePoint now = clock_.now();
    if (phase_.is(kBroken) || phase_.is(kEmpty)) return;
    if (child_)
      if (const auto ending = child_->ended()) {
        child_.reset();
        return on_server_lost("its process " + *ending);
      }
    if (phase_.is(kDown) && now >= attempts_.next_attempt) start_attempt(now);
    if (phase_.awaits_health_check()) check_health(now);
    if (phase_.is(kLoading)) advance_script(now);
    if (phase_.is(kReady)) send_queued(now);
    if (phase_.is(kReady) && !in_flight_.empty() && now - last_answer_at_ > options_.patience)
      return on_server_lost(fmt::format("no answer for {}", to_text(options_.patience)));
    if (!phase_.is(kReady) && now - last_wait_step_at_ > std::chrono::seconds(1)) ++progress_, last_wait_step_at_ = now;
    for (const HttpAnswer& answer : http_.poll(wait)) {
      if (answer.request == script_.request) {
        script_.request = 0;
        if (phase_.awaits_health_check())
          on_health_answer(answer);
        else
          on_errand_answer(answer);
      } else if (answer.request == script_.early_probe) {
        script_.early_probe_answer = answer;
      } else if (answer.request == script_.watch.request) {
        on_watch_answer(answer);
      } else if (const auto it = in_flight_.find(answer.request); it != in_flight_.end()) {
        const std::uint64_t id = it->second;
        in_flight_.erase(it);
        last_answer_at_ = clock_.now();
        on_draw_answer(id, answer);
      }
      if (phase_.is(kBroken)) return;
    }
  }

  std::uint64_t send(const Call& call, Duration timeout) {
    return http_.send({call.method, url_ + call.path, call.body, timeout});
  }

  // ---- start and policy ----

  // Starts the server, or only begins to wait for one at an address.
  void start_attempt(TimePoint now) {
    phase_.move(kWaking);
    attempts_.deadline = now + options_.patience;
    attempts_.next_health_check = now;
    attempts_.wait_begun = now;
    attempts_.next_log = now + kWaitLogDelay;
    if (!starts_server()) return;
    const int port = free_port();
    url_ = fmt::format("http://127.0.0.1:{}", port);
    const std::string command = replace_all(replace_all(options_.command, "{model}", quoted(folder_->path().string())),
                                            "{port}", std::to_string(port));
    log::info("starts {}: {}", protocol_->name(), command);
    auto child =
        Child::start(command, protocol_->environment(), folder_->is_new() ? folder_->path() : std::filesystem::path());
    if (!child) return fail_attempt(child.error().message());
    child_ = std::move(*child);
  }

  void check_health(TimePoint now) {
    if (now >= attempts_.deadline)
      return fail_attempt(
          fmt::format("it was not ready within {}: {}", to_text(options_.patience), attempts_.last_health));
    if (now >= attempts_.next_log) {
      log::info("waits for {} at {} since {} s, at most {}: {}", protocol_->name(), url_,
                std::chrono::duration_cast<std::chrono::seconds>(now - attempts_.wait_begun).count(),
                to_text(options_.patience), attempts_.last_health);
      attempts_.next_log = now + kWaitLogInterval;
    }
    if (script_.request != 0 || now < attempts_.next_health_check) return;
    script_.request = send(protocol_->health(), kHealthTimeout);
    attempts_.next_health_check = now + kHealthInterval;
  }

  void on_health_answer(const HttpAnswer& answer) {
    attempts_.last_health =
        answer.status == 0 ? answer.trouble : fmt::format("{} answered {}", protocol_->health().path, answer.status);
    if (answer.status != 200) return;
    if (!phase_.is(kSuspected)) return load(starts_server() ? WeightsSource::kStarted : WeightsSource::kLoaded);
    // A child of this worker is still the same process and keeps its weights. At an address, another process may answer
    // now.
    begin_script();
    if (!starts_server()) {
      server_.receiver_version.reset();
      check_weights(WeightsSource::kUnknown);
      for (const Step& step : protocol_->name_weights(*held_.version)) add_errand("version", step);
    }
  }

  // Begins a new script without errands.
  void begin_script() {
    script_ = {};
    script_.begun = clock_.now();
    phase_.move(kLoading);
  }

  // Brings the server from any policy to the one in the folder.
  void load(WeightsSource source) {
    begin_script();
    held_.target = folder_->version();
    if (!held_.target)
      return phase_.mark_broken(
          fail(Code::kIo, kOperation, "{} no longer holds a complete policy", folder_->path().string()));
    if (server_.is_interface_known) return bring_to_target(source);
    const std::optional<Call> interface = protocol_->interface_request();
    if (!interface) return query_receiver(source);
    if (!starts_server()) add_errand("resume", protocol_->resume());  // another worker may have left it paused
    script_.errands.push_back({.name = "interface",
                               .call = interface,
                               .on_answer = [this, source](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 0)
                                   return expect_success(answer, protocol_->interface_request()->path);
                                 ECHO_TRY(protocol_->on_interface_response(answer.status, answer.body));
                                 query_receiver(source);
                                 return ok();
                               },
                               .long_work = true});
  }

  // Asks the server for a receiver, which can load policies faster, and then loads the policy.
  void query_receiver(WeightsSource source) {
    const std::optional<Call> call = protocol_->receiver_request(folder_->path());
    if (!call) {
      server_.is_interface_known = true;
      return bring_to_target(source);
    }
    script_.errands.push_back(
        {"receiver", call, [this, source](const HttpAnswer& answer) -> Status {
           if (answer.status == 0) return expect_success(answer, "receiver");
           const Status receiver_status = protocol_->on_receiver_response(answer.status, answer.body);
           server_.has_receiver = receiver_status.has_value();
           log::info("{} {}", protocol_->name(),
                     receiver_status ? "takes policies by echoline's plug-in, from memory"
                                     : fmt::format("loads policies by reading its folder again, which "
                                                   "takes longer; its answer about echoline's plug-in: {}",
                                                   receiver_status.error().detail));
           server_.is_interface_known = true;
           bring_to_target(source);
           return ok();
         }});
  }

  // Adds the errands that load the target, unless the server started with it, and those that check the result.
  void bring_to_target(WeightsSource source) {
    update_possible_versions();
    if (source == WeightsSource::kStarted) {
      for (const Step& step : protocol_->name_weights(*held_.target)) add_errand("version", step);
      check_temperature();
      check_weights(source);
      return;
    }
    if (!starts_server()) check_served_folder();
    add_errand("pause", protocol_->pause());
    if (!protocol_->keeps_responses()) script_.errands.push_back({});
    if (server_.has_receiver)
      hand_over();
    else
      for (const Step& step : protocol_->load(folder_->path(), *held_.target)) add_errand("reload", step);
    add_errand(kResumeErrand, protocol_->resume());
    check_weights(source);
    if (!starts_server()) check_temperature();
  }

  // Has the receiver load the policy. If it cannot, the server reads the folder, now and until it starts again.
  void hand_over() {
    script_.handed_over = true;
    std::vector<std::string> changed;
    if (server_.receiver_version) changed = folder_->changed_tensors();
    for (const Step& step : protocol_->hand_over({*held_.target, server_.receiver_version, std::move(changed)}))
      script_.errands.push_back({.name = "update",
                                 .call = step.call,
                                 .on_answer = [this, step](const HttpAnswer& answer) -> Status {
                                   const Status done = expect_success(answer, step.call.path);
                                   if (!done && answer.status != 0) {
                                     fall_back_to_reload(done.error().detail);
                                     return ok();
                                   }
                                   return done;
                                 },
                                 .long_work = step.long_work,
                                 .by_receiver = true});
  }

  void fall_back_to_reload(const std::string& why) {
    log::warn("{}: the plug-in failed, its weights are of no known policy: {}; it reads the folder", protocol_->name(),
              why);
    server_.has_receiver = script_.handed_over = false;
    server_.receiver_version.reset();
    std::erase_if(script_.errands, [](const Errand& errand) { return errand.by_receiver; });
    std::deque<Errand> later_errands = std::exchange(script_.errands, {});
    for (const Step& step : protocol_->abort_handover())
      script_.errands.push_back({"update", step.call, [this, step](const HttpAnswer& answer) -> Status {
                                   return answer.status == 0 ? expect_success(answer, step.call.path) : ok();
                                 }});
    for (const Step& step : protocol_->load(folder_->path(), *held_.target)) add_errand("reload", step);
    script_.errands.insert(script_.errands.end(), std::make_move_iterator(later_errands.begin()),
                           std::make_move_iterator(later_errands.end()));
  }

  // An answer may name the server's version, its target, or a version since the oldest request that the server keeps.
  void update_possible_versions() {
    std::optional<Version> oldest;
    if (protocol_->keeps_responses())
      for (const auto& [request, id] : in_flight_) {
        const Version version = unfinished_.at(id).requested_under;
        if (!oldest || version < *oldest) oldest = version;
      }
    std::erase_if(held_.possible_versions, [&](Version version) { return !oldest || version < *oldest; });
    if (held_.version) held_.possible_versions.insert(*held_.version);
    held_.possible_versions.insert(*held_.target);
  }

  // For a new version with the same weights: only the version is announced to the server.
  void announce_version() {
    held_.target = folder_->version();
    const std::vector<Step> steps = protocol_->name_weights(*held_.target);
    update_possible_versions();
    if (steps.empty()) {
      held_.version = held_.target;
      return;
    }
    begin_script();
    for (const Step& step : steps) add_errand("version", step);
  }

  // Adds the check that the server was started on this worker's folder, because it always loads that one.
  void check_served_folder() {
    const std::optional<Call> call = protocol_->served_model();
    if (!call) return;
    script_.errands.push_back({"model", call, [this](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 404 || answer.status == 405) return ok();
                                 ECHO_TRY(expect_success(answer, protocol_->served_model()->path));
                                 const std::filesystem::path served = protocol_->served_folder(answer.body);
                                 std::error_code ec;
                                 // A path that does not exist here is on the server's own machine or container.
                                 if (served.empty() || !std::filesystem::is_directory(served, ec) ||
                                     std::filesystem::equivalent(served, folder_->path(), ec))
                                   return ok();
                                 return fail(Code::kInvalid, kOperation,
                                             "it serves {}, expected the folder that this worker writes policies to, "
                                             "{}: start it on that one",
                                             served.string(), folder_->path().string());
                               }});
  }

  // Sends the next errand if the last one is answered. At the end of the script, the server has the target.
  void advance_script(TimePoint now) {
    std::deque<Errand>& errands = script_.errands;
    if (script_.request != 0) return watch_health(now);
    TimePoint& drained_by = script_.drained_by;
    if (!errands.empty() && !errands.front().call) {
      if (drained_by == kNever) drained_by = now + kDrainMax, last_answer_at_ = now;
      if (!in_flight_.empty() && now < std::min(drained_by, last_answer_at_ + kDrainQuiet)) return;
      requeue_all();
      drained_by = kNever;
      errands.pop_front();
    }
    if (errands.empty()) {
      phase_.move(kReady);
      if (std::exchange(attempts_.next_log, kNever) != kNever)
        log::info("{} works, after {:.1f} s", protocol_->name(), seconds(now - attempts_.wait_begun));
      last_answer_at_ = now;
      held_.version = held_.target;
      held_.digest = folder_->digest();
      if (script_.handed_over) {
        server_.receiver_version = held_.target;
        folder_->forget_changes();
      }
      std::string times;
      for (const auto& [name, time] : script_.times) times += fmt::format(", {} {:.3f}", name, seconds(time));
      log::info("{} has version {} after {:.3f} s{}", protocol_->name(), *held_.version, seconds(now - script_.begun),
                times);
      return;
    }
    script_.step_begun = now;
    script_.watch = {};
    if (script_.early_probe != 0 && errands.front().name != kResumeErrand) {
      script_.request = std::exchange(script_.early_probe, 0);
      if (const auto answer = std::exchange(script_.early_probe_answer, std::nullopt)) {
        script_.request = 0;
        on_errand_answer(*answer);
      }
      return;
    }
    // The probe is sent before the resumption, so the server reads the text in its first step, without a wait behind
    // the resumed responses. That is allowed only if no errand between the two changes weights.
    const auto probe_errand = std::ranges::find(errands, kProbeErrand, &Errand::name);
    const auto errands_before = probe_errand - errands.begin();
    if (script_.early_probe == 0 && probe_errand != errands.end() && errands_before > 0 &&
        errands[errands_before - 1].name == kResumeErrand &&
        (errands_before == 1 || (errands_before == 2 && !errands.front().long_work)))
      script_.early_probe = send_errand(*probe_errand);
    script_.request = send_errand(errands.front());
  }

  std::uint64_t send_errand(const Errand& errand) {
    return send(*errand.call, errand.long_work ? options_.patience : options_.control_timeout);
  }

  // An engine that died during a call may leave the call open for ever, while its server takes no connection or says
  // that the engine is dead.
  void watch_health(TimePoint now) {
    Watch& watch = script_.watch;
    if (watch.request != 0 || now - script_.step_begun < kWatchDelay || now < watch.next_check) return;
    watch.request = send(protocol_->health(), kHealthTimeout);
    watch.next_check = now + kWatchInterval;
  }

  void on_watch_answer(const HttpAnswer& answer) {
    Watch& watch = script_.watch;
    watch.request = 0;
    if (script_.request == 0) return;
    const bool refused = answer.status == 0 && !answer.sent;
    watch.failed_in_a_row = refused || answer.status == 503 ? watch.failed_in_a_row + 1 : 0;
    if (watch.failed_in_a_row >= kFailedChecksMax)
      fail_attempt(fmt::format("{}: no answer, and its server {}", script_.errands.front().call->path,
                               refused ? "takes no connection" : "says that it is not healthy"));
  }

  void on_errand_answer(const HttpAnswer& answer) {
    if (script_.errands.empty()) return;
    ++progress_;
    const Errand errand = std::move(script_.errands.front());
    script_.errands.pop_front();
    auto time = std::ranges::find(script_.times, errand.name, [](const auto& named_time) { return named_time.first; });
    if (time == script_.times.end()) time = script_.times.insert(time, {errand.name, Duration{}});
    time->second += clock_.now() - script_.step_begun;
    if (const Status done = errand.on_answer(answer); !done) return fail_attempt(done.error().detail);
    if (phase_.is(kLoading)) advance_script(clock_.now());
  }

  void add_errand(std::string_view name, const Step& step) {
    script_.errands.push_back({.name = name,
                               .call = step.call,
                               .on_answer = [this, step](const HttpAnswer& answer) -> Status {
                                 if (step.optional && (answer.status == 404 || answer.status == 405)) return ok();
                                 ECHO_TRY(expect_success(answer, step.call.path));
                                 return step.accepts ? step.accepts(answer.body) : ok();
                               },
                               .long_work = step.long_work});
  }

  // Returns an error unless the status is 200. `path` names the call in the error.
  Status expect_success(const HttpAnswer& answer, const std::string& path) const {
    if (answer.status == 200) return ok();
    if (answer.status == 0) return fail(Code::kUnavailable, kOperation, "{}: {}", path, answer.trouble);
    return fail(
        Code::kUnavailable, kOperation, "{}: expected status 200, found {} ({}){}", path, answer.status,
        printable(answer.body, 300),
        answer.status == 404 ? fmt::format(": is it {}, with its calls for other weights?", protocol_->name()) : "");
  }

  // ---- check of its weights ----

  // An errand that probes the weights and passes the scores of the text to `on_scores`.
  Errand probe(std::function<Status(TextScores)> on_scores) {
    return {.name = kProbeErrand,
            .call = protocol_->probe(proof_.text),
            .on_answer = [this, on_scores = std::move(on_scores)](const HttpAnswer& answer) -> Status {
              ECHO_TRY(expect_success(answer, "probe"));
              ECHO_ASSIGN(TextScores probed, protocol_->parse_scores(proof_.text, answer.body));
              for (const double logprob : probed.logprobs)
                if (!std::isfinite(logprob))
                  return fail(Code::kCorrupt, kOperation, "its log-probabilities of a text are not finite");
              return on_scores(std::move(probed));
            },
            .long_work = true};
  }

  // Probes the weights. One answer is enough if it differs, or agrees, clearly beyond the server's noise. Otherwise a
  // second answer, under the same conditions, measures the noise.
  void check_weights(WeightsSource source) {
    using Verdict = Fingerprints::Verdict;
    script_.errands.push_back(probe([this, source](TextScores first) -> Status {
      if (const auto bound = server_.noise.bound(proof_.truth.usual_distance())) {
        const Verdict verdict = proof_.fingerprints.judge(folder_->digest(), first.logprobs, *bound);
        if (verdict == Verdict::kNew || verdict == Verdict::kSame)
          return accept_weights(source, std::move(first), verdict);
      }
      script_.errands.push_front(probe([this, source, first = std::move(first.logprobs)](TextScores second) -> Status {
        const double distance = Fingerprints::distance(first, second.logprobs);
        server_.noise.record_distance(distance);
        const Verdict verdict = proof_.fingerprints.judge(folder_->digest(), second.logprobs, 2 * distance);
        return accept_weights(source, std::move(second), verdict);
      }));
      return ok();
    }));
  }

  // Accepts the weights that the probe shows, or returns why they are wrong.
  Status accept_weights(WeightsSource source, TextScores probed, Fingerprints::Verdict verdict) {
    using Verdict = Fingerprints::Verdict;
    const bool reports_target = !probed.weights || *probed.weights == fmt::format("{}", *held_.target);
    if (source == WeightsSource::kUnknown) {
      if (reports_target && verdict == Verdict::kSame) return ok();
      server_ = {};
      load(WeightsSource::kLoaded);
      return ok();
    }
    if (!reports_target)
      return fail(Code::kStale, kOperation, "it reports version '{}' after loading version {}",
                  printable(*probed.weights, 40), *held_.target);
    if (verdict == Verdict::kOther)
      return fail(Code::kStale, kOperation, "its answers to a probe differ from earlier ones under the same version {}",
                  *held_.target);
    if (verdict == Verdict::kStale) {
      // A server that has just read the files has their weights.
      if (source == WeightsSource::kLoaded)
        return fail(Code::kStale, kOperation, "it answers as under another version after loading version {}",
                    *held_.target);
      log::info("version {} answers a probe exactly as one before", *held_.target);
    }
    if (!proof_.learner_logprobs.empty())
      ECHO_TRY(proof_.truth.check(Truth::distance(probed.logprobs, proof_.learner_logprobs),
                                  source == WeightsSource::kStarted));
    proof_.fingerprints.keep(folder_->digest(), std::move(probed.logprobs));
    return ok();
  }

  // Log-probabilities must be those of the sampling temperature. Some servers report those of temperature 1.
  void check_temperature() {
    const double temperature = task_.spec.temperature();
    if (proof_.temperature_checked || temperature == 1.0) return;
    const auto measure_spread = [this](double at_temperature, std::function<Status(double)> on_spread) {
      script_.errands.push_back(
          {.name = "temperature",
           .call = protocol_->spread(proof_.text, at_temperature),
           .on_answer = [this, on_spread = std::move(on_spread)](const HttpAnswer& answer) -> Status {
             ECHO_TRY(expect_success(answer, "probe"));
             ECHO_ASSIGN(const double spread, protocol_->parse_spread(answer.body));
             return on_spread(spread);
           },
           .long_work = true});
    };
    measure_spread(1.0, [this](double spread) {
      proof_.spread_at_1 = spread;
      return ok();
    });
    measure_spread(temperature, [this, temperature](double spread) -> Status {
      const double expected = proof_.spread_at_1 / temperature;
      if (std::abs(expected - proof_.spread_at_1) < kSpreadMin) {
        log::warn("whether {} reports log-probabilities at temperature {} cannot be seen", protocol_->name(),
                  temperature);
        return ok();
      }
      if (std::abs(spread - expected) < std::abs(spread - proof_.spread_at_1)) {
        proof_.temperature_checked = true;
        return ok();
      }
      phase_.mark_broken(
          fail(Code::kInvalid, kOperation,
               "{} reports log-probabilities of temperature 1, and tokens are drawn with rollout.temperature {}: {}",
               protocol_->name(), temperature, protocol_->temperature_logprobs_hint()));
      return ok();
    });
  }

  // ---- failures ----

  // Queues all unfinished requests again.
  void requeue_all() {
    for (const auto& [request, id] : in_flight_) {
      http_.cancel(request);
      Unfinished& unfinished = unfinished_.at(id);
      unfinished.request = 0;
      queue_.push_front(id);
    }
    in_flight_.clear();
  }

  // Cancels the script, ends a child that may be reading the files, and waits for the next attempt (kDown). The state
  // of a server at an address is unknown from here on.
  void reset_server() {
    for (const std::uint64_t request : {script_.request, script_.early_probe, script_.watch.request})
      if (request != 0) http_.cancel(request);
    // The server may be paused, and would be unhealthy until it resumes. The answer does not matter.
    if (phase_.is(kLoading) && !starts_server()) send(protocol_->resume().call, options_.control_timeout);
    script_ = {};
    requeue_all();
    held_.possible_versions.clear();
    server_ = {};
    child_.reset();
    phase_.move(kDown);
  }

  // Requests in flight may have caused the loss, so it counts for each of their sequences.
  void on_server_lost(const std::string& why) {
    for (const auto& [request, id] : in_flight_) ++unfinished_.at(id).losses;
    fail_attempt(why);
    give_up_repeatedly_lost();
  }

  // Tries again after a delay that doubles each time. The engine is broken after kFailedAttemptsMax attempts.
  void fail_attempt(const std::string& why) {
    reset_server();
    log::warn("{}: {}{}", protocol_->name(), why, starts_server() ? "; it is started again" : "; it is tried again");
    if (++attempts_.failed >= kFailedAttemptsMax)
      return phase_.mark_broken(fail(Code::kUnavailable, kOperation,
                                     "{} does not work after {} attempts; the last: {}{}", protocol_->name(),
                                     attempts_.failed, why, starts_server() ? "" : ". Restart it"));
    attempts_.next_attempt =
        clock_.now() + std::min(kBackoffMax, options_.first_retry_delay * (1 << (attempts_.failed - 1)));
  }

  void give_up_repeatedly_lost() {
    for (auto it = unfinished_.begin(); it != unfinished_.end();) {
      if (it->second.losses < kLossesMax) {
        ++it;
        continue;
      }
      std::erase(queue_, it->first);
      outcomes_.push_back(
          {it->first, fail(Code::kInternal, "generate", "the engine was lost with it {} times", it->second.losses)});
      it = unfinished_.erase(it);
    }
  }

  // The answer tells nothing about the sequence, and other sequences may still succeed. So only the server's health is
  // checked.
  void suspect(const std::string& why) {
    if (!phase_.is(kReady)) return;
    log::warn("{}: {}", protocol_->name(), why);
    phase_.move(kSuspected);
    const TimePoint now = clock_.now();
    attempts_.deadline = now + options_.patience;
    attempts_.next_health_check = now + kHealthInterval;
  }

  // ---- responses ----

  // The request for the next tokens of a response. A continuation has another seed, so that it draws new numbers.
  Draw next_draw(const Unfinished& unfinished) const {
    Draw draw;
    draw.context = unfinished.sequence.prompt;
    draw.context.insert(draw.context.end(), unfinished.response.tokens.begin(), unfinished.response.tokens.end());
    const std::int64_t tokens_drawn = std::ssize(unfinished.response.tokens);
    draw.tokens_max = std::min(kTokensPerRequestMax, unfinished.sequence.tokens_max - tokens_drawn);
    draw.weights = overlay::to_hex(held_.digest);
    draw.seed = tokens_drawn == 0 ? unfinished.sequence.seed
                                  : mix64(unfinished.sequence.seed ^ static_cast<std::uint64_t>(tokens_drawn));
    draw.temperature = task_.spec.temperature();
    draw.ends = task_.phrasing->eos();
    draw.stop = task_.phrasing->stop();
    return draw;
  }

  void send_queued(TimePoint now) {
    while (!queue_.empty() && in_flight_.size() < options_.rollouts_at_once) {
      Unfinished& unfinished = unfinished_.at(queue_.front());
      if (in_flight_.empty()) last_answer_at_ = now;
      unfinished.request = send(protocol_->draw(next_draw(unfinished)), kNoTimeout);
      unfinished.requested_under = *held_.version;
      in_flight_[unfinished.request] = queue_.front();
      queue_.pop_front();
    }
  }

  void on_draw_answer(std::uint64_t id, const HttpAnswer& answer) {
    Unfinished& unfinished = unfinished_.at(id);
    unfinished.request = 0;
    const auto finish = [&](Result<Response> response, bool caused_by_policy = false) {
      outcomes_.push_back({id, std::move(response), caused_by_policy});
      unfinished_.erase(id);
    };
    const auto requeue = [&](bool is_loss) {
      if (is_loss && ++unfinished.losses >= kLossesMax)
        return finish(
            fail(Code::kInternal, "generate", "the engine failed at it {} times; the last: {}", unfinished.losses,
                 answer.status == 0 ? answer.trouble
                                    : fmt::format("status {}, {}", answer.status, printable(answer.body, 300))));
      queue_.push_front(id);
    };
    if (answer.status == 503 || answer.status == 429) {
      requeue(/*is_loss=*/false);
      const TimePoint now = clock_.now();
      if (refused_since_ == kNever) refused_since_ = now;
      if (now - refused_since_ > options_.patience)
        return fail_attempt(fmt::format("it answers {} for {}", answer.status, to_text(options_.patience)));
      return suspect(fmt::format("it answered {}: {}", answer.status, printable(answer.body, 200)));
    }
    refused_since_ = kNever;
    if (answer.status == 0) {
      requeue(/*is_loss=*/true);
      return suspect(answer.trouble);
    }
    if (answer.status >= 500) {  // caused by this sequence, or by a dead engine behind its server
      requeue(/*is_loss=*/true);
      return suspect(fmt::format("it answered {}: {}", answer.status, printable(answer.body, 200)));
    }
    if (answer.status == 404 || answer.status == 405) {
      phase_.mark_broken(expect_success(answer, protocol_->draw({}).path).error());
      return requeue(/*is_loss=*/false);
    }
    if (answer.status != 200)
      return finish(fail(Code::kInvalid, "generate", "the engine refuses it with status {}: {}", answer.status,
                         printable(answer.body, 500)));
    const Draw requested_draw = next_draw(unfinished);
    Result<Piece> piece = protocol_->parse_piece(requested_draw, answer.body);
    if (!piece) return finish(std::move(piece).error());
    const auto spans = versions_of(*piece);
    if (!spans) {
      requeue(/*is_loss=*/true);
      return fail_attempt(spans.error().detail);
    }
    const bool finite = std::ranges::all_of(piece->logprobs, [](double logprob) { return std::isfinite(logprob); });
    if (Status taken = append_piece(unfinished, requested_draw, *piece, *spans); !taken)
      return finish(std::move(taken).error(), !finite);
    if (!piece->tokens.empty()) attempts_.failed = 0;
    progress_ += piece->tokens.size();
    if (unfinished.response.ended || std::ssize(unfinished.response.tokens) == unfinished.sequence.tokens_max)
      return finish(std::move(unfinished.response));
    requeue(/*is_loss=*/piece->aborted && piece->tokens.empty() && phase_.is(kReady));
  }

  // The version under which each token was drawn. kStale: a version that the engine cannot have.
  Result<std::vector<Span>> versions_of(const Piece& piece) const {
    if (piece.spans.empty()) return std::vector<Span>{{held_.version.value_or(Version{}), piece.tokens.size()}};
    std::vector<Span> spans;
    for (const Piece::WeightSpan& span : piece.spans) {
      const auto known_version = std::ranges::find_if(
          held_.possible_versions, [&](Version version) { return fmt::format("{}", version) == span.weights; });
      if (known_version == held_.possible_versions.end())
        return fail(Code::kStale, kOperation, "it answered with version '{}', but version {} is loaded",
                    printable(span.weights, 40), held_.target.value_or(Version{}));
      spans.push_back({*known_version, span.end});
    }
    return spans;
  }

  // Takes all tokens of the answer, or none if any check fails.
  Status append_piece(Unfinished& unfinished, const Draw& requested_draw, const Piece& piece,
                      const std::vector<Span>& versions) const {
    const auto corrupt = [](std::string what) { return fail(Code::kCorrupt, "answer of the engine", "{}", what); };
    const std::size_t count = piece.tokens.size();
    if (piece.logprobs.size() != count)
      return corrupt(fmt::format("{} log-probabilities of {} tokens", piece.logprobs.size(), count));
    if (std::ssize(piece.tokens) > requested_draw.tokens_max)
      return corrupt(fmt::format("{} tokens, {} were asked for", count, requested_draw.tokens_max));
    for (std::size_t i = 0; i < count; ++i) {
      const double logprob = piece.logprobs[i];
      if (!std::isfinite(logprob) || logprob > kLogprobSlack)
        return corrupt(fmt::format("log-probability {} of token {}", logprob, i));
      if (piece.tokens[i] < 0 || piece.tokens[i] >= task_.model.vocab_size)
        return corrupt(fmt::format("token {}, the vocabulary ends at {}", piece.tokens[i], task_.model.vocab_size - 1));
      const bool ends = std::find(requested_draw.ends.begin(), requested_draw.ends.end(), piece.tokens[i]) !=
                        requested_draw.ends.end();
      if (ends && i + 1 < count)
        return corrupt(fmt::format("it goes on after token {}, which ends a response", piece.tokens[i]));
      unfinished.response.ended = ends;
    }
    // If only the server sees a stop string, the response has not ended: the next request continues it.
    const bool stopped = !requested_draw.stop.empty() && count > 0;
    if (!piece.aborted && !unfinished.response.ended && !stopped &&
        std::ssize(piece.tokens) < requested_draw.tokens_max)
      return corrupt(fmt::format("it stops after {} of {} tokens, and none of them ends a response of this run", count,
                                 requested_draw.tokens_max));
    if (count == 0) return ok();
    const std::size_t before = unfinished.response.tokens.size();
    unfinished.response.tokens.insert(unfinished.response.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    for (const double logprob : piece.logprobs)
      unfinished.response.logprobs.push_back(static_cast<float>(std::min(logprob, 0.0)));
    if (const auto end = task_.phrasing->response_end(unfinished.response.tokens, before)) {
      unfinished.response.ended = true;
      unfinished.response.tokens.resize(*end);  // servers may notice a stop string some tokens late
      unfinished.response.logprobs.resize(*end);
    }
    std::vector<Span>& spans = unfinished.response.spans;
    for (const Span& span : versions) {
      const std::size_t begin = spans.empty() ? 0 : spans.back().end;
      const std::size_t end = std::min(before + span.end, unfinished.response.tokens.size());
      if (end <= begin) continue;
      if (spans.empty() || spans.back().version != span.version) spans.push_back({span.version, 0});
      spans.back().end = end;
    }
    return ok();
  }

  const SystemClock clock_;
  const EngineOptions options_;
  const Task& task_;
  const EngineHost host_;
  std::unique_ptr<Protocol> protocol_;
  std::unique_ptr<PolicyFolder> folder_;
  std::unique_ptr<Child> child_;  // must end before its folder is removed
  HttpClient http_;
  std::string url_;
  Server server_;

  std::map<std::uint64_t, Unfinished> unfinished_;
  std::deque<std::uint64_t> queue_;                   // sequences without a request
  std::map<std::uint64_t, std::uint64_t> in_flight_;  // the other sequences, by request
  std::vector<Outcome> outcomes_;                     // poll() returns them
  TimePoint last_answer_at_{};

  RemotePhase phase_;
  Attempts attempts_;
  Script script_;
  Held held_;
  Proof proof_;
  TimePoint refused_since_ = kNever, last_wait_step_at_{};
  std::uint64_t progress_ = 0;
};

}  // namespace

Result<std::unique_ptr<Engine>> make_remote_engine(const EngineOptions& options, const Task& task,
                                                   const EngineHost& host) {
  const schema::RunSpec& spec = task.spec;
  auto protocol = options.kind == EngineKind::kSglang ? sglang_protocol() : vllm_protocol();
  if (spec.top_p() < 1 || spec.top_k() > 0 || spec.min_p() > 0)
    return fail(Code::kInvalid, kOperation,
                "the run samples with top_p {}, top_k {} and min_p {}, and {} does not report log-probabilities "
                "under these: set rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0, or generate with the "
                "built-in engine",
                spec.top_p(), spec.top_k(), spec.min_p(), protocol->name());
  const bool carried = task.model.family == model::Family::kCarried;
  const bool own_head = !carried && task.model.tie_embeddings && protocol->needs_separate_head();
  ECHO_ASSIGN(model::ModelFiles files, model::ModelFiles::make(
                                           [&] {
                                             model::ModelConfig config = task.model;
                                             config.eos = task.phrasing->eos();
                                             if (own_head) config.tie_embeddings = false;
                                             return config;
                                           }(),
                                           task.phrasing->tokenizer()));
  for (const auto& [name, text] : spec.model_files()) files.content[name] = text;
  ECHO_ASSIGN(auto folder, PolicyFolder::make(files.content, options.folder, kMemoryFolder, threads_of(options),
                                              own_head ? std::optional(kSeparateHead) : std::nullopt));
  return std::unique_ptr<Engine>(std::make_unique<Remote>(options, task, host, std::move(protocol), std::move(folder)));
}

}  // namespace echoline::worker
