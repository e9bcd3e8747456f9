// An engine that drives an inference server over HTTP: starts it, gives it each policy, verifies its weights, and
// continues unfinished responses after failures. One thread: every wait is in process_events().
#include "worker/engines/remote.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <set>

#include "base/http.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "model/probe_text.hpp"
#include "worker/engines/child.hpp"
#include "worker/engines/fingerprints.hpp"
#include "worker/engines/gpus.hpp"
#include "worker/engines/learner_comparison.hpp"
#include "worker/engines/pieces.hpp"
#include "worker/engines/remote_phase.hpp"
#include "worker/engines/remote_state.hpp"
#include "worker/engines/served_adapters.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {
namespace {

// A request asks for at most this many tokens: a broken connection loses them, and they count as progress only when the
// answer comes.
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
// A wait for the server is logged after kWaitLogDelay, and then at an interval.
constexpr Duration kWaitLogDelay = std::chrono::seconds(10), kWaitLogInterval = std::chrono::minutes(1);
// Once the server is paused, the engine waits for the responses that this aborted: kDrainMax at most, kDrainQuiet after
// the last one. It cannot wait for all, because a paused server does not answer a request that reaches it then.
constexpr Duration kDrainMax = std::chrono::seconds(5), kDrainQuiet = std::chrono::milliseconds(150);
constexpr Duration kWaitStep = std::chrono::seconds(1);  // a wait this long for the server counts as one step of work
constexpr Duration kBackoffMax = std::chrono::seconds(30);
constexpr Duration kNoTimeout = std::chrono::hours(24);  // process_events() limits the wait for responses instead
constexpr std::size_t kAnswerBytesMax = 64u << 20;       // of a body; 64 MiB
constexpr double kSpreadDifferenceMin = 0.05;            // nats; a smaller difference does not show the temperature

class Remote final : public FolderEngine {
  using enum RemotePhase::Phase;
  using Verdict = Fingerprints::Verdict;

 public:
  Remote(const EngineOptions& options, const Task& task, const EngineHost& host, std::unique_ptr<Protocol> protocol,
         std::shared_ptr<PolicyFolder> folder)
      : options_(options),
        task_(task),
        host_(host),
        protocol_(std::move(protocol)),
        folder_(std::move(folder)),
        http_(/*key=*/"", kNoTimeout, {.answer_bytes_max = kAnswerBytesMax, .uses_proxies = false}),
        url_(without_trailing_slashes(options.url)) {
    proof_.text = model::probe_text(task.model);
  }

  std::size_t capacity() const override { return options_.rollouts_at_once; }
  std::size_t sequences_in_progress() const override { return unfinished_.size() + outcomes_.size(); }

  void submit(Sequence sequence) override {
    const std::uint64_t id = sequence.id;
    if (Status fits = check_sequence(sequence, task_.model, protocol_->name()); !fits)
      return outcomes_.push_back({id, std::move(fits).error()});
    unfinished_[id].sequence = std::move(sequence);
    queue_.push_back(id);
  }

  std::vector<Outcome> poll(Duration time) override {
    const TimePoint end = clock_.now() + time;
    process_events(Duration{});
    const auto has_reason_to_wait = [this] { return outcomes_.empty() && !unfinished_.empty() && !phase_.is(kBroken); };
    for (TimePoint now = clock_.now(); has_reason_to_wait() && now < end; now = clock_.now())
      process_events(std::min(end - now, kEventsWait));
    return std::exchange(outcomes_, {});
  }

  void abort(std::uint64_t id) override {
    if (const auto it = unfinished_.find(id); it != unfinished_.end()) {
      if (const std::uint64_t request = it->second.request; request != 0) {  // 0: the sequence is in the queue
        http_.cancel(request);
        in_flight_.erase(request);
      }
      std::erase(queue_, id);
      unfinished_.erase(it);
    }
    std::erase_if(outcomes_, [&](const Outcome& outcome) { return outcome.id == id; });
  }

  std::uint64_t progress() const override { return progress_; }

  void decode_part(const overlay::PublicationPart& part) override { folder_->decode_part(part); }
  Status install(const overlay::Publication& publication) override {
    ECHO_TRY(status());
    release_folder();
    ECHO_TRY(folder_->install(publication));
    begin_load(publication);
    // A policy that is not activated is not loaded, so there is nothing to wait for.
    while (publication.activate && !phase_.is(kReady) && !phase_.is(kBroken)) {
      if (host_.stop && *host_.stop) return fail(Code::kCancelled, "install policy", "asked to stop");
      process_events(kEventsWait);
      if (host_.on_wait) host_.on_wait();
    }
    return status();
  }
  void release_folder() override {
    if (phase_.is(kWaking) && starts_server())
      // No reset, because a second load costs less than a second start. The files of an adapter's base do not change.
      server_.read_changing_files = !folder_->has_adapter();
    else if (phase_.awaits_health_check() || phase_.is(kLoading))
      reset_server();  // otherwise the engine could become ready with the earlier policy
  }
  void begin_load(const overlay::Publication& publication) override {
    schema::PolicyNote note;
    if (!note.ParseFromString(publication.note)) note.Clear();  // the note only helps the check of the weights
    proof_.learner_logprobs.assign(note.probe_logprobs().begin(), note.probe_logprobs().end());
    if (!publication.activate) return;  // a newer policy waits, so the server need not load this one
    const bool has_these_weights = policy_.version && folder_->digest() == policy_.digest;
    if (phase_.is(kReady) && has_these_weights)
      announce_version();
    else if (phase_.is(kReady))
      load(WeightsSource::kLoaded);
    else if (phase_.is(kEmpty))
      phase_.move(kDown);
    // In the other phases, the server gets the folder's policy once it is healthy.
  }
  void advance(Duration wait) override { process_events(wait); }
  State state() const override {
    if (phase_.is(kReady)) return State::kReady;
    if (phase_.is(kLoading)) return State::kLoading;
    return phase_.is(kBroken) ? State::kBroken : State::kStarting;
  }
  std::optional<Version> version() const override { return policy_.version; }
  const overlay::Digest& digest() const override { return policy_.digest; }
  // A load ends soon, so sequences may wait in the queue meanwhile.
  bool can_take_work() const override { return phase_.is(kReady) || phase_.is(kLoading); }
  Status status() const override {
    if (phase_.error()) return *phase_.error();
    return ok();
  }

 private:
  bool starts_server() const { return !options_.command.empty(); }

  // ---- events ----

  // Advances the engine by one step: sends what is due, and handles answers, for which it waits for at most `wait`.
  void process_events(Duration wait) {
    const TimePoint now = clock_.now();
    if (phase_.is(kBroken) || phase_.is(kEmpty)) return;  // no server is in use
    if (child_)
      if (const auto ending = child_->how_ended()) {
        child_.reset();
        return on_server_lost("its process " + *ending);
      }
    if (phase_.is(kDown) && now >= attempts_.next_attempt) start_attempt(now);
    if (phase_.awaits_health_check()) check_health(now);
    if (phase_.is(kLoading)) advance_script(now);
    if (phase_.is(kReady) || (phase_.is(kLoading) && script_.sampling_continues)) send_queued(now);
    if (phase_.is(kReady) && !in_flight_.empty() && now - last_answer_at_ > options_.patience)
      return on_server_lost(fmt::format("no answer for {}", to_text(options_.patience)));
    // A wait for the server counts as progress, so that the learner does not take the leases back meanwhile.
    if (!phase_.is(kReady) && now - last_wait_step_at_ > kWaitStep) {
      ++progress_;
      last_wait_step_at_ = now;
    }
    for (const HttpAnswer& answer : http_.poll(wait)) {
      if (answer.request == script_.request) {
        script_.request = 0;  // cleared before the calls below, which may send the next request
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
        on_sample_answer(id, answer);
      }
      if (phase_.is(kBroken)) return;  // the other answers are of no use
    }
  }

  std::uint64_t send(const Call& call, Duration timeout) {
    return http_.send({call.method, url_ + call.path, call.body, timeout});
  }

  // ---- start and policy ----

  // Starts the server. For a server at an address, only begins to wait.
  void start_attempt(TimePoint now) {
    phase_.move(kWaking);
    attempts_.deadline = now + options_.patience;
    attempts_.next_health_check = now;
    attempts_.wait_begun = now;
    attempts_.next_log = now + kWaitLogDelay;
    if (!starts_server()) return;  // check_health() contacts it
    const int port = free_port();
    url_ = fmt::format("http://127.0.0.1:{}", port);
    const std::string command = server_command(options_.command, folder_->path(), port, options_.gpus_per_engine);
    auto environment = protocol_->environment();
    if (!options_.visible_gpus.empty()) environment.emplace_back(kVisibleGpusVariable, options_.visible_gpus);
    log::info("starts {}{}: {}", protocol_->name(),
              options_.visible_gpus.empty() ? "" : " on GPU " + options_.visible_gpus, command);
    // A folder that the user has chosen is never removed.
    auto child = Child::start(command, environment,
                              /*remove_after=*/folder_->is_new() ? folder_->path() : std::filesystem::path());
    if (!child) return fail_attempt(child.error().message());
    child_ = std::move(*child);
  }

  void check_health(TimePoint now) {
    if (now >= attempts_.deadline)
      return fail_attempt(
          fmt::format("it was not ready within {}: {}", to_text(options_.patience), attempts_.last_health_answer));
    if (now >= attempts_.next_log) {
      log::info("waits for {} at {} since {} s, at most {}: {}", protocol_->name(), url_,
                std::chrono::duration_cast<std::chrono::seconds>(now - attempts_.wait_begun).count(),
                to_text(options_.patience), attempts_.last_health_answer);
      attempts_.next_log = now + kWaitLogInterval;
    }
    if (script_.request != 0 || now < attempts_.next_health_check) return;  // a check is in progress, or not due
    script_.request = send(protocol_->health(), kHealthTimeout);
    attempts_.next_health_check = now + kHealthInterval;
  }

  void on_health_answer(const HttpAnswer& answer) {
    attempts_.last_health_answer =
        answer.status == 0 ? answer.trouble : fmt::format("{} answered {}", protocol_->health().path, answer.status);
    if (answer.status != 200) return;  // check_health() asks again
    if (!phase_.is(kSuspected)) {
      const bool has_read_folder = starts_server() && !server_.read_changing_files;
      return load(has_read_folder ? WeightsSource::kStarted : WeightsSource::kLoaded);
    }
    // A server that this worker started is still the same process and keeps its weights: a script without errands makes
    // the engine ready again. At an address, another process may answer now, perhaps with another receiver.
    begin_script();
    if (!starts_server()) {
      server_.receiver_version.reset();
      check_weights(WeightsSource::kUnknown, adapters_.empty() ? std::string() : adapters_.newest().name);
      if (folder_->has_adapter()) return;  // the version would be the base's, which never changes
      for (const Step& step : protocol_->name_weights(*policy_.version)) add_errand("version", step);
    }
  }

  // Begins a new script without errands.
  void begin_script() {
    script_ = {};
    script_.begun = clock_.now();
    phase_.move(kLoading);
  }

  // Brings the server from any policy to the policy in the folder. First asks a new server once for its features: the
  // interface of its release, the receiver, and limits of adapters.
  void load(WeightsSource source) {
    begin_script();
    policy_.target = folder_->version();
    if (!policy_.target)
      return phase_.mark_broken(
          fail(Code::kIo, kEngineOperation, "{} no longer holds a complete policy", folder_->path().string()));
    if (server_.are_features_known) return bring_to_target(source);
    const std::optional<Call> interface = protocol_->interface_request();
    if (!interface) return query_receiver(source);  // all releases have the same interface
    // Another worker may have left a server at an address paused. Then it would not answer the trial.
    if (!starts_server()) add_errand(kResumeErrand, protocol_->resume());
    script_.errands.push_back({.name = "interface",
                               .call = interface,
                               .on_answer = [this, source](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 0) return no_answer(answer, protocol_->interface_request()->path);
                                 ECHO_TRY(protocol_->on_interface_response(answer.status, answer.body));
                                 query_receiver(source);
                                 return ok();
                               },
                               .long_work = true});  // a trial: the server generates one token
  }

  // Asks the server for a receiver, which can load policies faster, and then loads the policy. With an adapter, asks
  // for its limits instead: a receiver only loads the base, which then never changes.
  void query_receiver(WeightsSource source) {
    if (folder_->has_adapter()) return query_adapter_limits(source);
    const std::optional<Call> call = protocol_->receiver_request(folder_->path());
    if (!call) {  // this kind of server has no receiver
      server_.are_features_known = true;
      return bring_to_target(source);
    }
    script_.errands.push_back(
        {"receiver", call, [this, source](const HttpAnswer& answer) -> Status {
           if (answer.status == 0) return no_answer(answer, "receiver");
           const Status receiver_status = protocol_->on_receiver_response(answer.status, answer.body);
           server_.has_receiver = receiver_status.has_value();
           if (server_.has_receiver)
             log::info("{} takes policies by echoline's plug-in, from memory", protocol_->name());
           else
             log::info(
                 "{} loads policies by reading its folder again, which takes longer; the server's answer about "
                 "echoline's plug-in: {}",
                 protocol_->name(), receiver_status.error().detail);
           server_.are_features_known = true;
           bring_to_target(source);
           return ok();
         }});
  }

  // Asks the server whether it takes adapters like those of this run, and then loads the policy.
  void query_adapter_limits(WeightsSource source) {
    script_.errands.push_back(
        {"adapters", protocol_->adapter_limits_request(), [this, source](const HttpAnswer& answer) -> Status {
           if (answer.status == 0) return no_answer(answer, protocol_->adapter_limits_request().path);
           const auto limits = protocol_->adapter_limits(answer.status, answer.body);
           // kInvalid: the server takes no adapters, so another attempt would not help. Other errors may pass.
           if (!limits && limits.error().code != Code::kInvalid) return limits.error();
           const std::string problem = limits ? why_unfit(*limits, *task_.model.adapter) : limits.error().detail;
           if (!problem.empty())
             return give_up(fail(Code::kInvalid, kEngineOperation,
                                 "{} cannot serve the run's adapter: {}. Start it with {}", protocol_->name(), problem,
                                 protocol_->adapter_options(task_.model.adapter->rank)));
           adapters_.set_limit(limits->at_once);
           log::info("{} computes up to {} adapters at once{}", protocol_->name(), limits->at_once,
                     limits->at_once > 1 ? "" : ", so unfinished responses change to the new one");
           server_.are_features_known = true;
           bring_to_target(source);
           return ok();
         }});
  }

  // Adds the errands that load the target's adapter beside the earlier adapters. The server keeps its base and is not
  // paused.
  void bring_adapter(WeightsSource source) {
    const bool is_new_server = server_.base_logprobs.empty();  // the probe below has not been answered
    if (is_new_server) {
      if (!starts_server()) check_served_folder();
      check_temperature();
      script_.errands.push_back(probe(/*adapter=*/{}, [this](TextScores probed) {
        server_.base_logprobs = std::move(probed.logprobs);
        return ok();
      }));
    }
    // Versions of different runs may be equal, so the name has a part of the digest, too.
    const std::string name =
        fmt::format("adapter-{}-{}", *policy_.target, overlay::to_hex(folder_->digest()).substr(0, 16));
    const auto folder = folder_->write_adapter(name, this);
    if (!folder) return phase_.mark_broken(folder.error());
    std::set<std::string> names_in_use;
    for (const auto& [id, unfinished] : unfinished_) names_in_use.insert(unfinished.adapter);
    for (const std::string& old_name : adapters_.make_room(name, names_in_use)) unload_adapter(old_name, name);
    // Another worker may have left an adapter of that name in a server at an address.
    if (is_new_server && !starts_server()) unload_adapter(name, name);
    // The adapter is loaded beside earlier ones, so responses can go on under these.
    script_.sampling_continues = policy_.version && !adapters_.empty();
    add_errand("load", protocol_->load_adapter(name, *folder));
    check_weights(source, name);
  }

  // Adds the errand that unloads the adapter `name`. Its unanswered requests are cancelled, and their sequences go on
  // under another adapter. `next_name`: the adapter that is loaded next; if it is the same one, its folder is kept.
  void unload_adapter(const std::string& name, const std::string& next_name) {
    std::vector<std::uint64_t> requests;
    for (const auto& [request, id] : in_flight_)
      if (unfinished_.at(id).adapter == name) requests.push_back(request);
    for (const std::uint64_t request : requests) cancel_and_requeue(request);
    script_.errands.push_back({"unload", protocol_->unload_adapter(name),
                               [this, name, is_next = name == next_name](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 0) return no_answer(answer, "unload of an adapter");
                                 if (!is_next) folder_->remove_adapter(name, this);
                                 return ok();  // an error status only means that the server did not have it
                               }});
  }

  // Adds the errands that load the target, unless the server started with it, and those that check the result.
  void bring_to_target(WeightsSource source) {
    if (folder_->has_adapter()) return bring_adapter(source);
    update_possible_versions();
    if (source == WeightsSource::kStarted) {  // it has the target already, but does not know the version
      for (const Step& step : protocol_->name_weights(*policy_.target)) add_errand("version", step);
      check_temperature();
      check_weights(source, /*adapter=*/{});
      if (task_.model.family == model::Family::kCarried) check_load();
      return;
    }
    if (!starts_server()) check_served_folder();
    add_load();
    check_weights(source, /*adapter=*/{});
    if (!starts_server() || server_.read_changing_files) check_temperature();  // else it was checked after the start
  }

  // Adds the errands that load the target, from the pause to the resumption.
  void add_load() {
    add_errand("pause", protocol_->pause());
    if (!protocol_->keeps_responses()) script_.errands.push_back({});  // an empty errand waits for aborted responses
    if (server_.has_receiver)
      hand_over();
    else
      for (const Step& step : protocol_->load(folder_->path(), *policy_.target)) add_errand("reload", step);
    add_errand(kResumeErrand, protocol_->resume());
  }

  // The server has started on the target, and its answers are known. Loads the target once more. If the answers change,
  // loads damage the weights of this model, as vLLM 0.32 on a CPU does with mixtures of experts. Only for carried
  // models, which echoline cannot compute: with other models, the learner's log-probabilities show the damage.
  void check_load() {
    add_load();
    script_.errands.push_back(probe(/*adapter=*/{}, [this](TextScores probed) -> Status {
      const double bound = server_.noise.bound(proof_.comparison.usual_distance()).value_or(ProbeNoise::kNoiseMin);
      if (judge(probed.logprobs, bound) == Verdict::kSame) return ok();
      const std::string_view way = server_.has_receiver ? "by echoline's plug-in" : "by reading its folder again";
      if (!server_.has_receiver)  // there is no other way to load a policy
        return give_up(
            fail(Code::kInvalid, kEngineOperation,
                 "{} answers otherwise after it has loaded the same policy {}: its loads damage the weights of this "
                 "model. Install echoline's Python package beside it (docs/how-to/generate-with-an-inference-server.md)"
                 ", or use another release of it",
                 protocol_->name(), way));
      log::warn("{} answers otherwise after it has loaded the same policy {}; it reads the folder", protocol_->name(),
                way);
      server_.has_receiver = script_.handed_over = false;
      server_.receiver_version.reset();
      check_load();
      return ok();
    }));
  }

  // Adds the errands by which the receiver loads the policy. If it cannot, the server reads the folder, now and until
  // it starts again.
  void hand_over() {
    script_.handed_over = true;
    std::vector<std::string> changed;
    if (server_.receiver_version) changed = folder_->changed_tensors(server_.receiver_revision);
    for (const Step& step : protocol_->hand_over({*policy_.target, server_.receiver_version, std::move(changed)}))
      script_.errands.push_back({.name = "update",
                                 .call = step.call,
                                 .on_answer = [this, step](const HttpAnswer& answer) -> Status {
                                   if (answer.status == 0) return no_answer(answer, step.call.path);
                                   // The server lives, so only its receiver has failed.
                                   const Status done = expect_success(answer, step.call.path);
                                   if (!done) fall_back_to_reload(done.error().detail);
                                   return ok();
                                 },
                                 .long_work = step.long_work,
                                 .by_receiver = true});
  }

  // Replaces the remaining errands of the receiver by those that end its update and read the folder.
  void fall_back_to_reload(const std::string& why) {
    log::warn("{}: the plug-in failed, its weights are of no known policy: {}; it reads the folder", protocol_->name(),
              why);
    server_.has_receiver = script_.handed_over = false;
    server_.receiver_version.reset();
    std::erase_if(script_.errands, [](const Errand& errand) { return errand.by_receiver; });
    std::deque<Errand> later_errands = std::exchange(script_.errands, {});
    for (const Step& step : protocol_->abort_handover())
      script_.errands.push_back({"update", step.call, [step](const HttpAnswer& answer) -> Status {
                                   if (answer.status == 0) return no_answer(answer, step.call.path);
                                   return ok();  // an error status only means that no update had begun
                                 }});
    for (const Step& step : protocol_->load(folder_->path(), *policy_.target)) add_errand("reload", step);
    script_.errands.insert(script_.errands.end(), std::make_move_iterator(later_errands.begin()),
                           std::make_move_iterator(later_errands.end()));
  }

  // A response may be of the server's version, of its target, or of any version since that of the oldest request
  // that the server still keeps. versions_of() refuses all other versions.
  void update_possible_versions() {
    std::optional<Version> oldest;
    if (protocol_->keeps_responses())  // else the pause makes the server return all of them
      for (const auto& [request, id] : in_flight_) {
        const Version version = unfinished_.at(id).requested_under;
        if (!oldest || version < *oldest) oldest = version;
      }
    std::erase_if(policy_.possible_versions, [&](Version version) { return !oldest || version < *oldest; });
    if (policy_.version) policy_.possible_versions.insert(*policy_.version);
    policy_.possible_versions.insert(*policy_.target);
  }

  // For a new version with the same weights: only the version is announced to the server.
  void announce_version() {
    policy_.target = folder_->version();
    if (folder_->has_adapter()) {  // the server knows no versions of adapters
      adapters_.set_newest_version(*policy_.target);
      policy_.version = policy_.target;
      return;
    }
    const std::vector<Step> steps = protocol_->name_weights(*policy_.target);
    update_possible_versions();
    if (steps.empty()) {  // the server reports no versions
      policy_.version = policy_.target;
      return;
    }
    begin_script();
    for (const Step& step : steps) add_errand("version", step);
  }

  // Adds the check that the server was started on this worker's folder, because it loads no other.
  void check_served_folder() {
    const std::optional<Call> call = protocol_->served_folder_request();
    if (!call) return;  // this kind of server does not tell its folder
    script_.errands.push_back({"model", call, [this](const HttpAnswer& answer) -> Status {
                                 // 404 or 405: the release lacks this call, so its folder is unknown.
                                 if (answer.status == 404 || answer.status == 405) return ok();
                                 ECHO_TRY(expect_success(answer, protocol_->served_folder_request()->path));
                                 const std::filesystem::path served = protocol_->parse_served_folder(answer.body);
                                 std::error_code ignored;
                                 // Empty: the answer names no folder. A path that does not exist here is on the
                                 // server's own machine or container, so it cannot be compared.
                                 const bool is_here = !served.empty() && std::filesystem::is_directory(served, ignored);
                                 if (!is_here || std::filesystem::equivalent(served, folder_->path(), ignored))
                                   return ok();
                                 return fail(Code::kInvalid, kEngineOperation,
                                             "it serves {}, expected the folder that this worker writes policies to, "
                                             "{}: start it on that one",
                                             served.string(), folder_->path().string());
                               }});
  }

  // Sends the next errand if the last one was answered.
  void advance_script(TimePoint now) {
    std::deque<Errand>& errands = script_.errands;
    if (script_.request != 0) return watch_health(now);  // not answered yet
    if (!errands.empty() && !errands.front().call) {     // the errand that waits for aborted responses
      if (script_.drain_deadline == kNever) {
        script_.drain_deadline = now + kDrainMax;
        last_answer_at_ = now;  // kDrainQuiet begins here if no response returns
      }
      const TimePoint drain_end = std::min(script_.drain_deadline, last_answer_at_ + kDrainQuiet);
      if (!in_flight_.empty() && now < drain_end) return;
      requeue_all();
      script_.drain_deadline = kNever;
      errands.pop_front();
    }
    if (errands.empty()) return finish_script(now);
    script_.errand_begun = now;
    script_.watch = {};
    if (script_.early_probe != 0 && errands.front().name != kResumeErrand) {  // this errand is the probe, sent already
      const std::uint64_t probe_request = std::exchange(script_.early_probe, 0);
      if (const auto answer = std::exchange(script_.early_probe_answer, std::nullopt))
        on_errand_answer(*answer);
      else
        script_.request = probe_request;
      return;
    }
    if (const Errand* probe_errand = script_.find_early_probe()) script_.early_probe = send_errand(*probe_errand);
    script_.request = send_errand(errands.front());
  }

  // All errands were answered, so the server has the target.
  void finish_script(TimePoint now) {
    phase_.move(kReady);
    if (std::exchange(attempts_.next_log, kNever) != kNever)
      log::info("{} works, after {:.1f} s", protocol_->name(), seconds(now - attempts_.wait_begun));
    last_answer_at_ = now;  // the wait for answers (options_.patience) begins again
    policy_.version = policy_.target;
    policy_.digest = folder_->digest();
    if (script_.handed_over) {
      server_.receiver_version = policy_.target;
      server_.receiver_revision = folder_->revision();
    }
    log::info("{} has version {} after {:.3f} s{}", protocol_->name(), *policy_.version, seconds(now - script_.begun),
              script_.times_to_text());
  }

  std::uint64_t send_errand(const Errand& errand) {
    return send(*errand.call, errand.long_work ? options_.patience : options_.control_timeout);
  }

  // If the engine behind a server dies during a call, the call may stay open for ever. New connections then fail, or
  // the health check reports the dead engine.
  void watch_health(TimePoint now) {
    Watch& watch = script_.watch;
    const bool is_due = now - script_.errand_begun >= kWatchDelay && now >= watch.next_check;
    if (watch.request != 0 || !is_due) return;
    watch.request = send(protocol_->health(), kHealthTimeout);
    watch.next_check = now + kWatchInterval;
  }

  void on_watch_answer(const HttpAnswer& answer) {
    Watch& watch = script_.watch;
    watch.request = 0;
    if (script_.request == 0) return;  // the call was answered meanwhile
    // Only a refused connection counts. Without an answer to a request that was sent, the server may be busy.
    const bool is_refused = answer.status == 0 && !answer.sent;
    const bool says_unhealthy = answer.status == 503;
    watch.failed_in_a_row = is_refused || says_unhealthy ? watch.failed_in_a_row + 1 : 0;
    if (watch.failed_in_a_row >= kFailedChecksMax)
      fail_attempt(fmt::format("{}: no answer, and its server {}", script_.errands.front().call->path,
                               is_refused ? "takes no connection" : "says that it is not healthy"));
  }

  void on_errand_answer(const HttpAnswer& answer) {
    if (script_.errands.empty()) return;  // no errand is in progress
    ++progress_;
    const Errand errand = std::move(script_.errands.front());
    script_.errands.pop_front();  // before on_answer(), which may add errands at the front
    script_.add_time(errand.name, clock_.now() - script_.errand_begun);
    if (const Status done = errand.on_answer(answer); !done) return fail_attempt(done.error().detail);
    if (phase_.is(kLoading)) advance_script(clock_.now());  // else on_answer() has broken the engine
  }

  void add_errand(std::string_view name, const Step& step) {
    script_.errands.push_back({.name = name,
                               .call = step.call,
                               .on_answer = [this, step](const HttpAnswer& answer) -> Status {
                                 const bool is_unknown_call = answer.status == 404 || answer.status == 405;
                                 if (step.optional && is_unknown_call) return ok();
                                 ECHO_TRY(expect_success(answer, step.call.path));
                                 return step.check_answer ? step.check_answer(answer.body) : ok();
                               },
                               .long_work = step.long_work});
  }

  // Returns an error unless the status is 200. `path` names the call in the error.
  Status expect_success(const HttpAnswer& answer, std::string_view path) const {
    if (answer.status == 200) return ok();
    if (answer.status == 0) return no_answer(answer, path);
    return fail(
        Code::kUnavailable, kEngineOperation, "{}: expected status 200, found {} ({}){}", path, answer.status,
        printable(answer.body, 300),
        answer.status == 404 ? fmt::format(": is it {}, with its calls for other weights?", protocol_->name()) : "");
  }

  // ---- check of its weights ----

  // Returns an errand that probes the weights, under `adapter` unless that is empty.
  Errand probe(const std::string& adapter, std::function<Status(TextScores)> on_scores) {
    return {.name = kProbeErrand,
            .call = protocol_->scores_request(proof_.text, adapter),
            .on_answer = [this, adapter, on_scores = std::move(on_scores)](const HttpAnswer& answer) -> Status {
              ECHO_TRY(expect_success(answer, "probe"));
              ECHO_ASSIGN(TextScores probed, protocol_->parse_scores(proof_.text, adapter, answer.body));
              for (const double logprob : probed.logprobs)
                if (!std::isfinite(logprob))
                  return fail(Code::kCorrupt, kEngineOperation, "its log-probabilities of a text are not finite");
              return on_scores(std::move(probed));
            },
            .long_work = true};
  }

  // Adds the probe of the weights. One answer is enough if the server's noise is known and does not explain the
  // answer's distance from earlier ones. Otherwise a second answer, under the same conditions, measures the noise.
  void check_weights(WeightsSource source, const std::string& adapter) {
    script_.errands.push_back(probe(adapter, [this, source, adapter](TextScores first) -> Status {
      if (const auto bound = server_.noise.bound(proof_.comparison.usual_distance())) {
        const Verdict verdict = judge(first.logprobs, *bound);
        if (verdict == Verdict::kNew || verdict == Verdict::kSame)
          return accept_weights(source, adapter, std::move(first), verdict);
      }
      script_.errands.push_front(
          probe(adapter, [this, source, adapter, first = std::move(first.logprobs)](TextScores second) -> Status {
            const double distance = Fingerprints::distance(first, second.logprobs);
            server_.noise.record_distance(distance);
            const Verdict verdict = judge(second.logprobs, 2 * distance);  // 2: as in ProbeNoise
            return accept_weights(source, adapter, std::move(second), verdict);
          }));
      return ok();
    }));
  }

  // Judges an answer to the probe, which should be that of the policy in the folder. `noise`: nats per token.
  Verdict judge(const std::vector<double>& logprobs, double noise) const {
    if (folder_->has_adapter()) {
      const double from_base = Fingerprints::distance(server_.base_logprobs, logprobs);
      if (folder_->adapter_is_zero())  // the adapter changes nothing, so the answer must be that of the base
        return from_base <= std::max(noise, ProbeNoise::kNoiseMin) ? Verdict::kSame : Verdict::kOther;
      if (from_base <= noise) return Verdict::kStale;  // as if the adapter were not applied
    }
    return proof_.fingerprints.judge(folder_->digest(), logprobs, noise);
  }

  // Accepts the weights that the probe shows, or returns why they are wrong.
  Status accept_weights(WeightsSource source, const std::string& adapter, TextScores probed, Verdict verdict) {
    const bool answers_as_base =
        Fingerprints::distance(server_.base_logprobs, probed.logprobs) <= ProbeNoise::kNoiseMin;
    const bool reports_target = !probed.weights_name || *probed.weights_name == fmt::format("{}", *policy_.target);
    if (source == WeightsSource::kUnknown) {
      if (reports_target && verdict == Verdict::kSame) return ok();  // the same weights, whatever process answers
      // Another process answers at the address: everything known about the server is void.
      server_ = {};
      adapters_.abandon_all();
      load(WeightsSource::kLoaded);
      return ok();
    }
    if (!reports_target)
      return fail(Code::kStale, kEngineOperation, "it reports version '{}' after loading version {}",
                  printable(*probed.weights_name, 40), *policy_.target);
    if (verdict == Verdict::kOther)
      return fail(Code::kStale, kEngineOperation,
                  "its answers to a probe differ from earlier ones under the same version {}", *policy_.target);
    if (verdict == Verdict::kStale && !adapter.empty())
      return fail(Code::kStale, kEngineOperation, "it answers as {} after loading {}: the adapter is not applied",
                  answers_as_base ? "without an adapter" : "under another version", adapter);
    if (verdict == Verdict::kStale) {
      // After a load, equal answers mean that the load had no effect. A server that has just started on the files has
      // their weights in any case.
      if (source == WeightsSource::kLoaded)
        return fail(Code::kStale, kEngineOperation, "it answers as under another version after loading version {}",
                    *policy_.target);
      log::info("version {} answers a probe exactly as one before", *policy_.target);
    }
    if (!proof_.learner_logprobs.empty())  // empty: the learner does not send them
      ECHO_TRY(proof_.comparison.check(LearnerComparison::distance(probed.logprobs, proof_.learner_logprobs),
                                       source == WeightsSource::kStarted));
    if (!adapter.empty()) adapters_.add({adapter, *policy_.target});
    // The answer of a zero adapter is the base's, with which judge() compares anyway, so it is not kept.
    if (!adapter.empty() && folder_->adapter_is_zero()) return ok();
    proof_.fingerprints.keep(folder_->digest(), std::move(probed.logprobs));
    return ok();
  }

  // Log-probabilities must be those of the sampling temperature, but some servers report those of temperature 1. At
  // temperature T, the spread (the difference of two logits) is 1/T of that at temperature 1.
  void check_temperature() {
    const double temperature = task_.spec.temperature();
    if (proof_.temperature_checked || temperature == 1.0) return;  // at 1, both are the same
    const auto measure_spread = [this](double at_temperature, std::function<Status(double)> on_spread) {
      script_.errands.push_back(
          {.name = "temperature",
           .call = protocol_->spread_request(proof_.text, at_temperature),
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
      if (std::abs(expected - proof_.spread_at_1) < kSpreadDifferenceMin) {
        log::warn("whether {} reports log-probabilities at temperature {} cannot be seen", protocol_->name(),
                  temperature);
        return ok();  // the run goes on: this shows no fault of the server
      }
      const bool follows_temperature = std::abs(spread - expected) < std::abs(spread - proof_.spread_at_1);
      if (follows_temperature) {
        proof_.temperature_checked = true;
        return ok();
      }
      return give_up(
          fail(Code::kInvalid, kEngineOperation,
               "{} reports log-probabilities of temperature 1, and tokens are drawn with rollout.temperature {}: {}",
               protocol_->name(), temperature, protocol_->temperature_logprobs_hint()));
    });
  }

  // ---- failures ----

  // Cancels an unanswered request and queues its sequence again.
  void cancel_and_requeue(std::uint64_t request) {
    http_.cancel(request);
    const std::uint64_t id = in_flight_.at(request);
    unfinished_.at(id).request = 0;
    requeue(id);
    in_flight_.erase(request);
  }
  void requeue_all() {
    while (!in_flight_.empty()) cancel_and_requeue(in_flight_.begin()->first);
  }

  // Breaks the engine permanently. Returns no error, because an errand's error would begin another attempt.
  Status give_up(Error error) {
    phase_.mark_broken(std::move(error));
    return ok();
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
    policy_.possible_versions.clear();
    adapters_.abandon_all();
    server_ = {};
    child_.reset();
    phase_.move(kDown);
  }

  // Requests in flight may have caused the loss of the server, so it counts for each of their sequences.
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
      return phase_.mark_broken(fail(Code::kUnavailable, kEngineOperation,
                                     "{} does not work after {} attempts; the last: {}{}", protocol_->name(),
                                     attempts_.failed, why, starts_server() ? "" : ". Restart it"));
    attempts_.next_attempt =
        clock_.now() + std::min(kBackoffMax, options_.first_retry_delay * (1 << (attempts_.failed - 1)));
  }

  // Ends the sequences that were lost with the server kLossesMax times: they may be the cause.
  void give_up_repeatedly_lost() {
    std::erase_if(unfinished_, [this](const auto& entry) {
      const auto& [id, unfinished] = entry;
      if (unfinished.losses < kLossesMax) return false;
      std::erase(queue_, id);
      outcomes_.push_back(
          {id, fail(Code::kInternal, "generate", "the engine was lost with it {} times", unfinished.losses)});
      return true;
    });
  }

  // Checks the server's health after an answer for which the server may be to blame, not the sequence.
  void suspect(const std::string& why) {
    if (!phase_.is(kReady)) return;  // a check or load is in progress already
    log::warn("{}: {}", protocol_->name(), why);
    phase_.move(kSuspected);
    const TimePoint now = clock_.now();
    attempts_.deadline = now + options_.patience;
    attempts_.next_health_check = now + kHealthInterval;
  }

  // ---- responses ----

  // The request for the next tokens of a response. A continuation has another seed, so that it draws other numbers.
  SampleRequest next_sample_request(const UnfinishedSequence& unfinished) const {
    SampleRequest request;
    request.context = unfinished.sequence.prompt;
    request.context.insert(request.context.end(), unfinished.response.tokens.begin(), unfinished.response.tokens.end());
    const std::int64_t tokens_drawn = std::ssize(unfinished.response.tokens);
    request.tokens_max = std::min(kTokensPerRequestMax, unfinished.sequence.tokens_max - tokens_drawn);
    request.weights_name = overlay::to_hex(policy_.digest);
    request.adapter = unfinished.adapter;
    request.seed = tokens_drawn == 0 ? unfinished.sequence.seed
                                     : mix64(unfinished.sequence.seed ^ static_cast<std::uint64_t>(tokens_drawn));
    request.temperature = task_.spec.temperature();
    request.end_tokens = task_.phrasing->eos();
    request.stop_strings = task_.phrasing->stop();
    return request;
  }

  void send_queued(TimePoint now) {
    while (!queue_.empty() && in_flight_.size() < options_.rollouts_at_once) {
      UnfinishedSequence& unfinished = unfinished_.at(queue_.front());
      if (in_flight_.empty()) last_answer_at_ = now;  // the wait for answers begins with this request
      unfinished.requested_under = *policy_.version;
      if (folder_->has_adapter()) choose_adapter(unfinished);
      unfinished.request = send(protocol_->sample_call(next_sample_request(unfinished)), kNoTimeout);
      in_flight_[unfinished.request] = queue_.front();
      queue_.pop_front();
    }
  }

  // A response keeps the adapter with which it began, while the server has that adapter, because the server has cached
  // the keys and values of its tokens. Other responses get the newest adapter.
  void choose_adapter(UnfinishedSequence& unfinished) const {
    const bool has_begun = !unfinished.response.tokens.empty();
    const auto* adapter = has_begun ? adapters_.find(unfinished.adapter) : nullptr;
    if (!adapter) adapter = &adapters_.newest();
    unfinished.adapter = adapter->name;
    unfinished.requested_under = adapter->version;
  }

  void end_sequence(std::uint64_t id, Result<Response> response, bool caused_by_policy = false) {
    outcomes_.push_back({id, std::move(response), caused_by_policy});
    unfinished_.erase(id);
  }
  void requeue(std::uint64_t id) { queue_.push_front(id); }  // in front, because it is older than those that wait
  // Like requeue(), after a failure that the sequence may have caused. Ends the sequence at its last allowed failure.
  void requeue_after_loss(std::uint64_t id, const HttpAnswer& answer) {
    const int losses = ++unfinished_.at(id).losses;
    if (losses < kLossesMax) return requeue(id);
    const std::string last =
        answer.status == 0 ? answer.trouble : fmt::format("status {}, {}", answer.status, printable(answer.body, 300));
    end_sequence(id, fail(Code::kInternal, "generate", "the engine failed {} times at this sequence; the last: {}",
                          losses, last));
  }

  void on_sample_answer(std::uint64_t id, const HttpAnswer& answer) {
    UnfinishedSequence& unfinished = unfinished_.at(id);
    unfinished.request = 0;
    if (answer.status != 200) return on_sample_failure(id, answer);
    busy_since_ = kNever;
    // The request as it was sent, because it follows from the response, which has not grown since.
    const SampleRequest sample_request = next_sample_request(unfinished);
    Result<SampleResponse> sampled = protocol_->parse_sample_response(sample_request, answer.body);
    if (!sampled && sampled.error().code == Code::kStale) {  // the answer is of another adapter
      requeue_after_loss(id, answer);
      return fail_attempt(sampled.error().detail);
    }
    if (!sampled) return end_sequence(id, std::move(sampled).error());
    // A request keeps its adapter, so all its tokens are of the adapter's version.
    const Result<std::vector<Span>> spans =
        folder_->has_adapter() ? std::vector<Span>{{unfinished.requested_under, sampled->tokens.size()}}
                               : policy_.versions_of(*sampled);
    if (!spans) {
      requeue_after_loss(id, answer);
      return fail_attempt(spans.error().detail);
    }
    // A log-probability that is not finite comes from the weights.
    const bool caused_by_policy =
        !std::ranges::all_of(sampled->logprobs, [](double logprob) { return std::isfinite(logprob); });
    if (Status taken = append_sampled(task_, sample_request, *sampled, *spans, unfinished.response); !taken)
      return end_sequence(id, std::move(taken).error(), caused_by_policy);
    if (!sampled->tokens.empty()) attempts_.failed = 0;  // the server works, so earlier failed attempts do not count
    progress_ += sampled->tokens.size();
    if (unfinished.response.ended || std::ssize(unfinished.response.tokens) == unfinished.sequence.tokens_max)
      return end_sequence(id, std::move(unfinished.response));
    // Unless the engine is pausing the server, an abort without tokens is a failure, which could repeat for ever.
    const bool is_loss = sampled->aborted && sampled->tokens.empty() && phase_.is(kReady);
    if (is_loss)
      requeue_after_loss(id, answer);
    else
      requeue(id);
  }

  // Handles the failure of a request: no answer, or a status other than 200.
  void on_sample_failure(std::uint64_t id, const HttpAnswer& answer) {
    script_.sampling_continues = false;  // if an adapter is being loaded meanwhile, that may have caused the failure
    const std::string adapter = unfinished_.at(id).adapter;
    const auto describe = [&] { return fmt::format("it answered {}: {}", answer.status, printable(answer.body, 200)); };
    if (answer.status == 503 || answer.status == 429) {  // the server is busy
      requeue(id);
      const TimePoint now = clock_.now();
      if (busy_since_ == kNever) busy_since_ = now;
      if (now - busy_since_ > options_.patience)
        return fail_attempt(fmt::format("it answers {} for {}", answer.status, to_text(options_.patience)));
      return suspect(describe());
    }
    busy_since_ = kNever;
    const bool is_refused = answer.status == 400 || answer.status == 404;
    if (is_refused && !adapter.empty() && answer.body.find(adapter) != std::string::npos) {  // the error names it
      requeue_after_loss(id, answer);
      return fail_attempt(fmt::format("it has lost an adapter: {}", printable(answer.body, 200)));
    }
    if (answer.status == 0 || answer.status >= 500) {  // caused by this sequence, or by a dead engine behind its server
      requeue_after_loss(id, answer);
      return suspect(answer.status == 0 ? answer.trouble : describe());
    }
    if (answer.status == 404 || answer.status == 405) {  // a server without this call can never generate
      phase_.mark_broken(expect_success(answer, protocol_->sample_call({}).path).error());  // {}: only its path matters
      return requeue(id);
    }
    end_sequence(id, fail(Code::kInvalid, "generate", "the engine refuses it with status {}: {}", answer.status,
                          printable(answer.body, 500)));
  }

  const SystemClock clock_;
  const EngineOptions options_;
  const Task& task_;
  const EngineHost host_;
  std::unique_ptr<Protocol> protocol_;
  std::shared_ptr<PolicyFolder> folder_;
  std::unique_ptr<Child> child_;  // must end before its folder is removed
  HttpClient http_;
  std::string url_;  // of the server, without a slash at the end
  Server server_;

  std::map<std::uint64_t, UnfinishedSequence> unfinished_;  // by the sequence's id
  std::deque<std::uint64_t> queue_;                         // ids of sequences without a request
  std::map<std::uint64_t, std::uint64_t> in_flight_;        // request -> id of its sequence
  std::vector<Outcome> outcomes_;                           // poll() returns them
  TimePoint last_answer_at_{};  // the newest answer for a sequence, or the beginning of the wait for one

  RemotePhase phase_;
  Attempts attempts_;
  Script script_;
  ServerPolicy policy_;
  ServedAdapters adapters_;
  Proof proof_;
  TimePoint busy_since_ = kNever;  // since then, the server only answers that it is busy; kNever: it does not
  TimePoint last_wait_step_at_{};  // when a second of waiting last counted as progress
  std::uint64_t progress_ = 0;
};

}  // namespace

std::unique_ptr<FolderEngine> make_folder_engine(const EngineOptions& options, const Task& task, const EngineHost& host,
                                                 std::unique_ptr<Protocol> protocol,
                                                 std::shared_ptr<PolicyFolder> folder) {
  return std::make_unique<Remote>(options, task, host, std::move(protocol), std::move(folder));
}

}  // namespace echoline::worker
