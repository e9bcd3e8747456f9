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
// Tokens per request: the loss with a broken connection, and the interval of progress.
constexpr std::int64_t kPieceTokens = 512;
constexpr int kTriesMax = 5;   // consecutive failed attempts before the engine counts as broken
constexpr int kLossesMax = 3;  // of one sequence, before it counts as their cause
constexpr Duration kSlice = std::chrono::milliseconds(50), kHealthEvery = std::chrono::milliseconds(200);
constexpr Duration kHealthPatience = std::chrono::seconds(5);
// A call that takes longer than this has the server's health checked beside it, as many times in a row.
constexpr Duration kCheckAfter = std::chrono::seconds(2), kCheckEvery = std::chrono::seconds(1);
constexpr int kChecksFailed = 3;
constexpr std::string_view kResume = "resume", kProbe = "probe";
constexpr Duration kSilenceMax = std::chrono::seconds(10), kSayEvery = std::chrono::minutes(1);
// Time for aborted responses to return: as long as some do. A request that arrived during the pause already waits at
// the server.
constexpr Duration kDrainMax = std::chrono::seconds(5), kDrainQuiet = std::chrono::milliseconds(150);
constexpr Duration kBackoffMax = std::chrono::seconds(30);
constexpr Duration kForever = std::chrono::hours(24);
constexpr std::size_t kAnswerMax = 64u << 20;
constexpr double kLogprobSlack = 1e-3;  // above 0, by rounding
const RepeatedTensor kOwnHead{"lm_head.weight", "model.embed_tokens.weight"};
constexpr double kSpreadMin = 0.05;  // nats; smaller values say nothing about the temperature

// Quotes one shell word.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string replaced(std::string text, std::string_view what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
    text.replace(at, what.size(), by);
  return text;
}

// A port without a listener.
int free_port() {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), any, size) != 0 || ::getsockname(listener.get(), any, &size) != 0) return 0;
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
        http_("", kForever, {kAnswerMax, false}),
        url_(service_url(options.url)) {
    proof_.text = model::probe_text(task.model);
  }

  std::size_t capacity() const override { return options_.rollouts_at_once; }
  std::size_t inside() const override { return live_.size() + done_.size(); }

  void submit(Sequence sequence) override {
    const std::uint64_t id = sequence.id;
    if (Status fits = check(sequence); !fits) return done_.push_back({id, std::move(fits).error()});
    live_[id].sequence = std::move(sequence);
    queue_.push_back(id);
  }

  std::vector<Outcome> poll(Duration time) override {
    const TimePoint end = clock_.now() + time;
    pump(Duration{});
    for (TimePoint now = clock_.now(); done_.empty() && !live_.empty() && !phase_.is(kBroken) && now < end;
         now = clock_.now())
      pump(std::min(end - now, kSlice));
    return std::exchange(done_, {});
  }

  void abort(std::uint64_t id) override {
    if (const auto it = live_.find(id); it != live_.end()) {
      if (it->second.request != 0) http_.cancel(it->second.request), sent_.erase(it->second.request);
      std::erase(queue_, id);
      live_.erase(it);
    }
    std::erase_if(done_, [&](const Outcome& outcome) { return outcome.id == id; });
  }

  std::uint64_t progress() const override { return progress_; }

  void arriving(const overlay::PublicationPart& part) override { folder_->arriving(part); }
  Status install(const overlay::Publication& publication) override {
    ECHO_TRY(state());
    if (phase_.looked_at() || phase_.is(kLoading)) rest();  // the server may be reading the files
    ECHO_TRY(folder_->install(publication));
    schema::PolicyNote note;
    if (!note.ParseFromString(publication.note)) note.Clear();
    proof_.of_learner.assign(note.probe_logprobs().begin(), note.probe_logprobs().end());
    if (!publication.activate) return ok();
    if (phase_.is(kReady) && held_.version && folder_->digest() == held_.digest)
      name_again();
    else if (phase_.is(kReady))
      load(Look::kLoaded);
    else if (phase_.is(kEmpty))
      phase_.move(kDown);
    while (!phase_.is(kReady) && !phase_.is(kBroken)) {
      if (host_.stop && *host_.stop) return fail(Code::kCancelled, "install policy", "asked to stop");
      pump(kSlice);
      if (host_.waiting) host_.waiting();
    }
    return state();
  }
  std::optional<Version> version() const override { return held_.version; }
  const overlay::Digest& digest() const override { return held_.digest; }
  bool takes_work() const override { return phase_.is(kReady) || phase_.is(kLoading); }
  Status state() const override {
    if (phase_.error()) return *phase_.error();
    return ok();
  }

 private:
  struct Live {
    Sequence sequence;
    Response response;          // so far
    std::uint64_t request = 0;  // 0: in the queue
    Version asked_under{};      // of that request
    int losses = 0;
  };
  // A step before the engine takes sequences. Without a call: wait for aborted responses to return.
  struct Errand {
    std::string_view name;  // in the log
    std::optional<Call> call;
    std::function<Status(const HttpAnswer&)> then;
    bool long_work = false;  // loads weights or reads a text: its timeout is options.patience
    bool by_receiver = false;
  };
  // Checks of the health beside a long call.
  struct Watch {
    std::uint64_t request = 0;
    TimePoint next{};
    int failed = 0;  // in a row
  };
  struct Script {
    std::deque<Errand> errands;
    std::uint64_t request = 0;      // of the first errand, or of a health check
    TimePoint drained_by = kNever;  // deadline of an errand without a call
    // The call behind the resumption, which the server has received before it.
    std::uint64_t early = 0;
    std::optional<HttpAnswer> early_answer;
    TimePoint begun{}, step_begun{};
    std::vector<std::pair<std::string_view, Duration>> times;  // by name
    Watch watch;
    bool handed_over = false;  // to the receiver
  };
  // Attempts to get the engine to work.
  struct Attempts {
    int failed = 0;  // consecutive
    TimePoint next{}, deadline{}, next_look{};
    TimePoint since{}, say_at = kNever;  // of the wait for a server; kNever: no log message
    std::string health = "no answer";
  };
  // The target policy of the engine, and the policy it generates with.
  struct Held {
    std::optional<Version> target, version;
    overlay::Digest digest{};
    std::set<Version> named;  // versions under which unfinished responses may have been drawn
  };
  // The current server, since it started or came back.
  struct Server {
    bool known = false;               // its interface
    bool receives = false;            // by a receiver inside
    std::optional<Version> received;  // the receiver's version
    ProbeNoise noise;
  };
  // Evidence of the engine's weights: its log-probabilities of a text.
  struct Proof {
    std::vector<model::Token> text;
    std::vector<double> of_learner;  // log-probabilities of the text under the policy in the folder; empty: not sent
    Truth truth;
    Fingerprints fingerprints;
    double spread = 0;
    bool temperature_checked = false;
  };
  enum class Look { kFresh, kLoaded, kWhetherSame };

  bool owns() const { return !options_.command.empty(); }

  Status check(const Sequence& s) const {
    const std::int64_t vocabulary = task_.model.vocab_size;
    if (s.prompt.empty() || s.tokens_max < 1 || std::ssize(s.prompt) + s.tokens_max > task_.model.positions_max)
      return fail(Code::kInvalid, "generate",
                  "expected a prompt and room for {} tokens in {} positions, found a prompt of {}", s.tokens_max,
                  task_.model.positions_max, s.prompt.size());
    for (const model::Token token : s.prompt)
      if (token < 0 || token >= vocabulary)
        return fail(Code::kInvalid, "generate", "token {} of the prompt, the vocabulary ends at {}", token,
                    vocabulary - 1);
    return ok();
  }

  // ---- events ----

  void pump(Duration wait) {
    const TimePoint now = clock_.now();
    if (phase_.is(kBroken) || phase_.is(kEmpty)) return;
    if (child_)
      if (const auto how = child_->ended()) {
        child_.reset();
        return lost("its process " + *how);
      }
    if (phase_.is(kDown) && now >= attempts_.next) wake(now);
    if (phase_.looked_at()) look_after(now);
    if (phase_.is(kLoading)) advance(now);
    if (phase_.is(kReady)) send_queued(now);
    if (phase_.is(kReady) && !sent_.empty() && now - heard_at_ > options_.patience)
      return lost(fmt::format("no answer for {}", to_text(options_.patience)));
    if (!phase_.is(kReady) && now - worked_at_ > std::chrono::seconds(1)) ++progress_, worked_at_ = now;
    for (const HttpAnswer& answer : http_.poll(wait)) {
      if (answer.request == script_.request) {
        script_.request = 0;
        if (phase_.looked_at())
          healthy(answer);
        else
          answered(answer);
      } else if (answer.request == script_.early) {
        script_.early_answer = answer;
      } else if (answer.request == script_.watch.request) {
        watched(answer);
      } else if (const auto it = sent_.find(answer.request); it != sent_.end()) {
        const std::uint64_t id = it->second;
        sent_.erase(it);
        heard_at_ = clock_.now();
        drawn(id, answer);
      }
      if (phase_.is(kBroken)) return;
    }
  }

  std::uint64_t send(const Call& call, Duration timeout) {
    return http_.send({call.method, url_ + call.path, call.body, timeout});
  }

  // ---- getting it to work ----

  void wake(TimePoint now) {
    phase_.move(kWaking);
    attempts_.deadline = now + options_.patience;
    attempts_.next_look = now;
    attempts_.since = now;
    attempts_.say_at = now + kSilenceMax;
    if (!owns()) return;
    const int port = free_port();
    url_ = fmt::format("http://127.0.0.1:{}", port);
    const std::string command = replaced(replaced(options_.command, "{model}", quoted(folder_->path().string())),
                                         "{port}", std::to_string(port));
    log::info("starts {}: {}", protocol_->name(), command);
    auto child =
        Child::start(command, protocol_->environment(), folder_->is_new() ? folder_->path() : std::filesystem::path());
    if (!child) return failed(child.error().message());
    child_ = std::move(*child);
  }

  void look_after(TimePoint now) {
    if (now >= attempts_.deadline)
      return failed(fmt::format("it was not ready within {}: {}", to_text(options_.patience), attempts_.health));
    if (now >= attempts_.say_at) {
      log::info("waits for {} at {} since {} s, at most {}: {}", protocol_->name(), url_,
                std::chrono::duration_cast<std::chrono::seconds>(now - attempts_.since).count(),
                to_text(options_.patience), attempts_.health);
      attempts_.say_at = now + kSayEvery;
    }
    if (script_.request != 0 || now < attempts_.next_look) return;
    script_.request = send(protocol_->health(), kHealthPatience);
    attempts_.next_look = now + kHealthEvery;
  }

  void healthy(const HttpAnswer& answer) {
    attempts_.health =
        answer.status == 0 ? answer.trouble : fmt::format("{} answered {}", protocol_->health().path, answer.status);
    if (answer.status != 200) return;
    if (!phase_.is(kSuspected)) return load(owns() ? Look::kFresh : Look::kLoaded);
    // A child of this worker is still the same process and keeps its weights. At an address, another process may answer
    // now.
    begin_script();
    if (!owns()) {
      server_.received.reset();
      look(Look::kWhetherSame);
      for (const Step& step : protocol_->name_weights(*held_.version)) add("version", step);
    }
  }

  void begin_script() {
    script_ = {};
    script_.begun = clock_.now();
    phase_.move(kLoading);
  }

  // Brings the engine from any policy to the one in the folder. kFresh: a child of this worker that has read only this
  // folder.
  void load(Look how) {
    begin_script();
    held_.target = folder_->version();
    if (!held_.target)
      return phase_.break_down(
          fail(Code::kIo, kOperation, "{} no longer holds a complete policy", folder_->path().string()));
    if (server_.known) return bring_to_target(how);
    const std::optional<Call> interface = protocol_->which_interface();
    if (!interface) return query_receiver(how);
    if (!owns()) add("resume", protocol_->resume());  // another worker may have left it paused
    script_.errands.push_back({"interface", interface,
                               [this, how](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 0) return good(answer, protocol_->which_interface()->path);
                                 ECHO_TRY(protocol_->settle_interface(answer.status, answer.body));
                                 query_receiver(how);
                                 return ok();
                               },
                               true});
  }

  void query_receiver(Look how) {
    const std::optional<Call> call = protocol_->which_receiver(folder_->path());
    if (!call) {
      server_.known = true;
      return bring_to_target(how);
    }
    script_.errands.push_back({"receiver", call, [this, how](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 0) return good(answer, "receiver");
                                 const Status there = protocol_->settle_receiver(answer.status, answer.body);
                                 server_.receives = there.has_value();
                                 log::info("{} {}", protocol_->name(),
                                           there ? "takes policies by echoline's plug-in, from memory"
                                                 : fmt::format("loads policies by reading its folder again, which "
                                                               "takes longer; its answer about echoline's plug-in: {}",
                                                               there.error().detail));
                                 server_.known = true;
                                 bring_to_target(how);
                                 return ok();
                               }});
  }

  void bring_to_target(Look how) {
    expect_versions();
    if (how == Look::kFresh) {
      for (const Step& step : protocol_->name_weights(*held_.target)) add("version", step);
      check_temperature();
      look(how);
      return;
    }
    if (!owns()) ask_what_it_serves();
    add("pause", protocol_->pause());
    if (!protocol_->keeps_responses()) script_.errands.push_back({});
    if (server_.receives)
      hand_over();
    else
      for (const Step& step : protocol_->load(folder_->path(), *held_.target)) add("reload", step);
    add(kResume, protocol_->resume());
    look(how);
    if (!owns()) check_temperature();
  }

  // Has the receiver load the policy. If it cannot, the server reads the folder, now and until it starts again.
  void hand_over() {
    script_.handed_over = true;
    std::vector<std::string> changed;
    if (server_.received) changed = folder_->changed();
    for (const Step& step : protocol_->hand_over({*held_.target, server_.received, std::move(changed)}))
      script_.errands.push_back({"update", step.call,
                                 [this, step](const HttpAnswer& answer) -> Status {
                                   const Status done = good(answer, step.call.path);
                                   if (!done && answer.status != 0) {
                                     fall_back_to_reload(done.error().detail);
                                     return ok();
                                   }
                                   return done;
                                 },
                                 step.long_work, true});
  }

  void fall_back_to_reload(const std::string& why) {
    log::warn("{}: the plug-in failed, its weights are of no known policy: {}; it reads the folder", protocol_->name(),
              why);
    server_.receives = script_.handed_over = false;
    server_.received.reset();
    std::erase_if(script_.errands, [](const Errand& errand) { return errand.by_receiver; });
    std::deque<Errand> rest = std::exchange(script_.errands, {});
    for (const Step& step : protocol_->give_up_handing_over())
      script_.errands.push_back({"update", step.call, [this, step](const HttpAnswer& answer) -> Status {
                                   return answer.status == 0 ? good(answer, step.call.path) : ok();
                                 }});
    for (const Step& step : protocol_->load(folder_->path(), *held_.target)) add("reload", step);
    script_.errands.insert(script_.errands.end(), std::make_move_iterator(rest.begin()),
                           std::make_move_iterator(rest.end()));
  }

  // Answers may name the engine's version, its target, and versions since the oldest request that the server keeps.
  void expect_versions() {
    std::optional<Version> oldest;
    if (protocol_->keeps_responses())
      for (const auto& [request, id] : sent_) {
        const Version version = live_.at(id).asked_under;
        if (!oldest || version < *oldest) oldest = version;
      }
    std::erase_if(held_.named, [&](Version version) { return !oldest || version < *oldest; });
    if (held_.version) held_.named.insert(*held_.version);
    held_.named.insert(*held_.target);
  }

  // The engine's weights already equal the policy in the folder; only their version is new.
  void name_again() {
    held_.target = folder_->version();
    const std::vector<Step> steps = protocol_->name_weights(*held_.target);
    expect_versions();
    if (steps.empty()) {
      held_.version = held_.target;
      return;
    }
    begin_script();
    for (const Step& step : steps) add("version", step);
  }

  // A server that was started on another folder would always load that one.
  void ask_what_it_serves() {
    const std::optional<Call> call = protocol_->served_model();
    if (!call) return;
    script_.errands.push_back({"model", call, [this](const HttpAnswer& answer) -> Status {
                                 if (answer.status == 404 || answer.status == 405) return ok();
                                 ECHO_TRY(good(answer, protocol_->served_model()->path));
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

  void advance(TimePoint now) {
    std::deque<Errand>& errands = script_.errands;
    if (script_.request != 0) return watch(now);
    TimePoint& drained_by = script_.drained_by;
    if (!errands.empty() && !errands.front().call) {
      if (drained_by == kNever) drained_by = now + kDrainMax, heard_at_ = now;
      if (!sent_.empty() && now < std::min(drained_by, heard_at_ + kDrainQuiet)) return;
      recall();
      drained_by = kNever;
      errands.pop_front();
    }
    if (errands.empty()) {
      phase_.move(kReady);
      if (std::exchange(attempts_.say_at, kNever) != kNever)
        log::info("{} works, after {:.1f} s", protocol_->name(), seconds(now - attempts_.since));
      heard_at_ = now;
      held_.version = held_.target;
      held_.digest = folder_->digest();
      if (script_.handed_over) {
        server_.received = held_.target;
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
    if (script_.early != 0 && errands.front().name != kResume) {
      script_.request = std::exchange(script_.early, 0);
      if (const auto answer = std::exchange(script_.early_answer, std::nullopt)) {
        script_.request = 0;
        answered(*answer);
      }
      return;
    }
    // The server has the probe before it resumes, and so reads the text in its first step. No weights may change then.
    const auto next = std::ranges::find(errands, kProbe, &Errand::name);
    const auto before = next - errands.begin();
    if (script_.early == 0 && next != errands.end() && before > 0 && errands[before - 1].name == kResume &&
        (before == 1 || (before == 2 && !errands.front().long_work)))
      script_.early = send_errand(*next);
    script_.request = send_errand(errands.front());
  }

  std::uint64_t send_errand(const Errand& errand) {
    return send(*errand.call, errand.long_work ? options_.patience : options_.control_patience);
  }

  // An engine that died during a call may leave the call open for ever, while its server takes no connection or says
  // that the engine is dead.
  void watch(TimePoint now) {
    Watch& watch = script_.watch;
    if (watch.request != 0 || now - script_.step_begun < kCheckAfter || now < watch.next) return;
    watch.request = send(protocol_->health(), kHealthPatience);
    watch.next = now + kCheckEvery;
  }

  void watched(const HttpAnswer& answer) {
    Watch& watch = script_.watch;
    watch.request = 0;
    if (script_.request == 0) return;
    const bool refused = answer.status == 0 && !answer.sent;
    watch.failed = refused || answer.status == 503 ? watch.failed + 1 : 0;
    if (watch.failed >= kChecksFailed)
      failed(fmt::format("{}: no answer, and its server {}", script_.errands.front().call->path,
                         refused ? "takes no connection" : "says that it is not healthy"));
  }

  void answered(const HttpAnswer& answer) {
    if (script_.errands.empty()) return;
    ++progress_;
    const Errand task = std::move(script_.errands.front());
    script_.errands.pop_front();
    auto time = std::ranges::find(script_.times, task.name, [](const auto& t) { return t.first; });
    if (time == script_.times.end()) time = script_.times.insert(time, {task.name, Duration{}});
    time->second += clock_.now() - script_.step_begun;
    if (const Status done = task.then(answer); !done) return failed(done.error().detail);
    if (phase_.is(kLoading)) advance(clock_.now());
  }

  void add(std::string_view name, const Step& step) {
    script_.errands.push_back({name, step.call,
                               [this, step](const HttpAnswer& answer) -> Status {
                                 if (step.optional && (answer.status == 404 || answer.status == 405)) return ok();
                                 ECHO_TRY(good(answer, step.call.path));
                                 return step.accepts ? step.accepts(answer.body) : ok();
                               },
                               step.long_work});
  }

  Status good(const HttpAnswer& answer, const std::string& path) const {
    if (answer.status == 200) return ok();
    if (answer.status == 0) return fail(Code::kUnavailable, kOperation, "{}: {}", path, answer.trouble);
    return fail(
        Code::kUnavailable, kOperation, "{}: expected status 200, found {} ({}){}", path, answer.status,
        printable(answer.body, 300),
        answer.status == 404 ? fmt::format(": is it {}, with its calls for other weights?", protocol_->name()) : "");
  }

  // ---- check of its weights ----

  Errand probe(std::function<Status(Probed)> then) {
    return {kProbe, protocol_->probe(proof_.text),
            [this, then = std::move(then)](const HttpAnswer& answer) -> Status {
              ECHO_TRY(good(answer, "probe"));
              ECHO_ASSIGN(Probed probed, protocol_->probed(proof_.text, answer.body));
              for (const double logprob : probed.logprobs)
                if (!std::isfinite(logprob))
                  return fail(Code::kCorrupt, kOperation, "its log-probabilities of a text are not finite");
              return then(std::move(probed));
            },
            true};
  }

  // One answer is enough if it is clear beyond the server's noise. Otherwise a second one, under the same conditions,
  // measures the noise.
  void look(Look look) {
    using Verdict = Fingerprints::Verdict;
    script_.errands.push_back(probe([this, look](Probed first) -> Status {
      if (const auto bound = server_.noise.bound(proof_.truth.usual())) {
        const Verdict verdict = proof_.fingerprints.judge(folder_->digest(), first.logprobs, *bound);
        if (verdict == Verdict::kNew || verdict == Verdict::kSame) return conclude(look, std::move(first), verdict);
      }
      script_.errands.push_front(probe([this, look, first = std::move(first.logprobs)](Probed second) -> Status {
        const double distance = Fingerprints::distance(first, second.logprobs);
        server_.noise.measured(distance);
        const Verdict verdict = proof_.fingerprints.judge(folder_->digest(), second.logprobs, 2 * distance);
        return conclude(look, std::move(second), verdict);
      }));
      return ok();
    }));
  }

  Status conclude(Look look, Probed probed, Fingerprints::Verdict verdict) {
    using Verdict = Fingerprints::Verdict;
    const bool named = !probed.weights || *probed.weights == fmt::format("{}", *held_.target);
    if (look == Look::kWhetherSame) {
      if (named && verdict == Verdict::kSame) return ok();
      server_ = {};
      load(Look::kLoaded);
      return ok();
    }
    if (!named)
      return fail(Code::kStale, kOperation, "it reports version '{}' after loading version {}",
                  printable(*probed.weights, 40), *held_.target);
    if (verdict == Verdict::kOther)
      return fail(Code::kStale, kOperation, "its answers to a probe differ from earlier ones under the same version {}",
                  *held_.target);
    if (verdict == Verdict::kStale) {
      // A server that has just read the files has their weights.
      if (look == Look::kLoaded)
        return fail(Code::kStale, kOperation, "it answers as under another version after loading version {}",
                    *held_.target);
      log::info("version {} answers a probe exactly as one before", *held_.target);
    }
    if (!proof_.of_learner.empty())
      ECHO_TRY(proof_.truth.check(Truth::distance(probed.logprobs, proof_.of_learner), look == Look::kFresh));
    proof_.fingerprints.keep(folder_->digest(), std::move(probed.logprobs));
    return ok();
  }

  // Log-probabilities must be those of the sampling temperature. Some servers report those of temperature 1.
  void check_temperature() {
    const double temperature = task_.spec.temperature();
    if (proof_.temperature_checked || temperature == 1.0) return;
    const auto ask = [this](double t, std::function<Status(double)> then) {
      script_.errands.push_back({"temperature", protocol_->spread(proof_.text, t),
                                 [this, then = std::move(then)](const HttpAnswer& answer) -> Status {
                                   ECHO_TRY(good(answer, "probe"));
                                   ECHO_ASSIGN(const double spread, protocol_->spread_of(answer.body));
                                   return then(spread);
                                 },
                                 true});
    };
    ask(1.0, [this](double spread) {
      proof_.spread = spread;
      return ok();
    });
    ask(temperature, [this, temperature](double spread) -> Status {
      const double expected = proof_.spread / temperature;
      if (std::abs(expected - proof_.spread) < kSpreadMin) {
        log::warn("whether {} reports log-probabilities at temperature {} cannot be seen", protocol_->name(),
                  temperature);
        return ok();
      }
      if (std::abs(spread - expected) < std::abs(spread - proof_.spread)) {
        proof_.temperature_checked = true;
        return ok();
      }
      phase_.break_down(
          fail(Code::kInvalid, kOperation,
               "{} reports log-probabilities of temperature 1, and tokens are drawn with rollout.temperature {}: {}",
               protocol_->name(), temperature, protocol_->temper_how()));
      return ok();
    });
  }

  // ---- failures ----

  // Queues all unfinished requests again.
  void recall() {
    for (const auto& [request, id] : sent_) {
      http_.cancel(request);
      Live& live = live_.at(id);
      live.request = 0;
      queue_.push_front(id);
    }
    sent_.clear();
  }

  // Ends a child that reads the files. The state of a server at an address is unknown from here on.
  void rest() {
    for (const std::uint64_t request : {script_.request, script_.early, script_.watch.request})
      if (request != 0) http_.cancel(request);
    // The server may be paused, and would be unhealthy until it resumes. The answer does not matter.
    if (phase_.is(kLoading) && !owns()) send(protocol_->resume().call, options_.control_patience);
    script_ = {};
    recall();
    held_.named.clear();
    server_ = {};
    child_.reset();
    phase_.move(kDown);
  }

  void lost(const std::string& why) {
    for (const auto& [request, id] : sent_) ++live_.at(id).losses;
    failed(why);
    give_up_hopeless();
  }

  void failed(const std::string& why) {
    rest();
    log::warn("{}: {}{}", protocol_->name(), why, owns() ? "; it is started again" : "; it is tried again");
    if (++attempts_.failed >= kTriesMax)
      return phase_.break_down(fail(Code::kUnavailable, kOperation,
                                    "{} does not work after {} attempts; the last: {}{}", protocol_->name(),
                                    attempts_.failed, why, owns() ? "" : ". Restart it"));
    attempts_.next = clock_.now() + std::min(kBackoffMax, options_.retry_first * (1 << (attempts_.failed - 1)));
  }

  void give_up_hopeless() {
    for (auto it = live_.begin(); it != live_.end();) {
      if (it->second.losses < kLossesMax) {
        ++it;
        continue;
      }
      std::erase(queue_, it->first);
      done_.push_back(
          {it->first, fail(Code::kInternal, "generate", "the engine was lost with it {} times", it->second.losses)});
      it = live_.erase(it);
    }
  }

  // The answer tells nothing about the sequence, and others may still succeed: check the server's health first.
  void suspect(const std::string& why) {
    if (!phase_.is(kReady)) return;
    log::warn("{}: {}", protocol_->name(), why);
    phase_.move(kSuspected);
    const TimePoint now = clock_.now();
    attempts_.deadline = now + options_.patience;
    attempts_.next_look = now + kHealthEvery;
  }

  // ---- responses ----

  Draw next_of(const Live& live) const {
    Draw draw;
    draw.context = live.sequence.prompt;
    draw.context.insert(draw.context.end(), live.response.tokens.begin(), live.response.tokens.end());
    const std::int64_t drawn = std::ssize(live.response.tokens);
    draw.tokens_max = std::min(kPieceTokens, live.sequence.tokens_max - drawn);
    draw.weights = overlay::to_hex(held_.digest);
    draw.seed = drawn == 0 ? live.sequence.seed : mix64(live.sequence.seed ^ static_cast<std::uint64_t>(drawn));
    draw.temperature = task_.spec.temperature();
    draw.ends = task_.phrasing->eos();
    draw.stop = task_.phrasing->stop();
    return draw;
  }

  void send_queued(TimePoint now) {
    while (!queue_.empty() && sent_.size() < options_.rollouts_at_once) {
      Live& live = live_.at(queue_.front());
      if (sent_.empty()) heard_at_ = now;
      live.request = send(protocol_->draw(next_of(live)), kForever);
      live.asked_under = *held_.version;
      sent_[live.request] = queue_.front();
      queue_.pop_front();
    }
  }

  void drawn(std::uint64_t id, const HttpAnswer& answer) {
    Live& live = live_.at(id);
    live.request = 0;
    const auto finish = [&](Result<Response> response, bool of_policy = false) {
      done_.push_back({id, std::move(response), of_policy});
      live_.erase(id);
    };
    const auto again = [&](bool loss) {
      if (loss && ++live.losses >= kLossesMax)
        return finish(fail(Code::kInternal, "generate", "the engine failed at it {} times; the last: {}", live.losses,
                           answer.status == 0
                               ? answer.trouble
                               : fmt::format("status {}, {}", answer.status, printable(answer.body, 300))));
      queue_.push_front(id);
    };
    if (answer.status == 503 || answer.status == 429) {
      again(false);
      const TimePoint now = clock_.now();
      if (refused_since_ == kNever) refused_since_ = now;
      if (now - refused_since_ > options_.patience)
        return failed(fmt::format("it answers {} for {}", answer.status, to_text(options_.patience)));
      return suspect(fmt::format("it answered {}: {}", answer.status, printable(answer.body, 200)));
    }
    refused_since_ = kNever;
    if (answer.status == 0) {
      again(true);
      return suspect(answer.trouble);
    }
    if (answer.status >= 500) {  // caused by this sequence, or by a dead engine behind its server
      again(true);
      return suspect(fmt::format("it answered {}: {}", answer.status, printable(answer.body, 200)));
    }
    if (answer.status == 404 || answer.status == 405) {
      phase_.break_down(good(answer, protocol_->draw({}).path).error());
      return again(false);
    }
    if (answer.status != 200)
      return finish(fail(Code::kInvalid, "generate", "the engine refuses it with status {}: {}", answer.status,
                         printable(answer.body, 500)));
    const Draw asked = next_of(live);
    Result<Piece> piece = protocol_->drawn(asked, answer.body);
    if (!piece) return finish(std::move(piece).error());
    const auto spans = versions_of(*piece);
    if (!spans) {
      again(true);
      return failed(spans.error().detail);
    }
    const bool finite = std::ranges::all_of(piece->logprobs, [](double logprob) { return std::isfinite(logprob); });
    if (Status taken = take(live, asked, *piece, *spans); !taken) return finish(std::move(taken).error(), !finite);
    if (!piece->tokens.empty()) attempts_.failed = 0;
    progress_ += piece->tokens.size();
    if (live.response.ended || std::ssize(live.response.tokens) == live.sequence.tokens_max)
      return finish(std::move(live.response));
    again(piece->aborted && piece->tokens.empty() && phase_.is(kReady));
  }

  // The version under which each token was drawn. kStale: a version that the engine cannot have.
  Result<std::vector<Span>> versions_of(const Piece& piece) const {
    if (piece.spans.empty()) return std::vector<Span>{{held_.version.value_or(Version{}), piece.tokens.size()}};
    std::vector<Span> spans;
    for (const Piece::WeightSpan& span : piece.spans) {
      const auto named = std::ranges::find_if(
          held_.named, [&](Version version) { return fmt::format("{}", version) == span.weights; });
      if (named == held_.named.end())
        return fail(Code::kStale, kOperation, "it answered with version '{}', but version {} is loaded",
                    printable(span.weights, 40), held_.target.value_or(Version{}));
      spans.push_back({*named, span.end});
    }
    return spans;
  }

  // Takes all tokens of the answer, or none if any check fails.
  Status take(Live& live, const Draw& asked, const Piece& piece, const std::vector<Span>& versions) const {
    const auto wrong = [](std::string what) { return fail(Code::kCorrupt, "answer of the engine", "{}", what); };
    const std::size_t count = piece.tokens.size();
    if (piece.logprobs.size() != count)
      return wrong(fmt::format("{} log-probabilities of {} tokens", piece.logprobs.size(), count));
    if (std::ssize(piece.tokens) > asked.tokens_max)
      return wrong(fmt::format("{} tokens, {} were asked for", count, asked.tokens_max));
    for (std::size_t i = 0; i < count; ++i) {
      const double logprob = piece.logprobs[i];
      if (!std::isfinite(logprob) || logprob > kLogprobSlack)
        return wrong(fmt::format("log-probability {} of token {}", logprob, i));
      if (piece.tokens[i] < 0 || piece.tokens[i] >= task_.model.vocab_size)
        return wrong(fmt::format("token {}, the vocabulary ends at {}", piece.tokens[i], task_.model.vocab_size - 1));
      const bool ends = std::find(asked.ends.begin(), asked.ends.end(), piece.tokens[i]) != asked.ends.end();
      if (ends && i + 1 < count)
        return wrong(fmt::format("it goes on after token {}, which ends a response", piece.tokens[i]));
      live.response.ended = ends;
    }
    // If only the server sees a stop string, the response has not ended: the next request continues it.
    const bool stopped = !asked.stop.empty() && count > 0;
    if (!piece.aborted && !live.response.ended && !stopped && std::ssize(piece.tokens) < asked.tokens_max)
      return wrong(fmt::format("it stops after {} of {} tokens, and none of them ends a response of this run", count,
                               asked.tokens_max));
    if (count == 0) return ok();
    const std::size_t before = live.response.tokens.size();
    live.response.tokens.insert(live.response.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    for (const double logprob : piece.logprobs)
      live.response.logprobs.push_back(static_cast<float>(std::min(logprob, 0.0)));
    if (const auto end = task_.phrasing->response_end(live.response.tokens, before)) {
      live.response.ended = true;
      live.response.tokens.resize(*end);  // servers may notice a stop string some tokens late
      live.response.logprobs.resize(*end);
    }
    std::vector<Span>& spans = live.response.spans;
    for (const Span& span : versions) {
      const std::size_t begin = spans.empty() ? 0 : spans.back().end;
      const std::size_t end = std::min(before + span.end, live.response.tokens.size());
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

  std::map<std::uint64_t, Live> live_;
  std::deque<std::uint64_t> queue_;              // sequences without a request
  std::map<std::uint64_t, std::uint64_t> sent_;  // the other sequences, by request
  std::vector<Outcome> done_;                    // poll() returns them
  TimePoint heard_at_{};

  RemotePhase phase_;
  Attempts attempts_;
  Script script_;
  Held held_;
  Proof proof_;
  TimePoint refused_since_ = kNever, worked_at_{};
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
  const bool own_head = !carried && task.model.tie_embeddings && protocol->wants_own_head();
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
                                              own_head ? std::optional(kOwnHead) : std::nullopt));
  return std::unique_ptr<Engine>(std::make_unique<Remote>(options, task, host, std::move(protocol), std::move(folder)));
}

}  // namespace echoline::worker
