#include "worker/engines/remote.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>

#include "base/http.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "model/model_files.hpp"
#include "worker/engines/child.hpp"
#include "worker/engines/fingerprints.hpp"
#include "worker/engines/policy_folder.hpp"
#include "worker/engines/protocol.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {
namespace {

constexpr std::string_view kOperation = "engine";
constexpr std::int64_t kPieceTokens =
    512;  // asked for at a time: what is lost with a connection, and how often progress is seen
constexpr std::int64_t kProbeTokens = 64;
constexpr int kTriesMax = 5;   // in a row, to get the engine to work
constexpr int kLossesMax = 3;  // of one sequence, before it is taken for the cause
constexpr Duration kSlice = std::chrono::milliseconds(50), kHealthEvery = std::chrono::milliseconds(200);
constexpr Duration kHealthPatience = std::chrono::seconds(5);
// For those that were aborted to come back: as long as some do. One that arrived when it was paused already waits
// there.
constexpr Duration kDrainMax = std::chrono::seconds(5), kDrainQuiet = std::chrono::milliseconds(150);
constexpr Duration kBackoffMax = std::chrono::seconds(30);
constexpr Duration kForever = std::chrono::hours(24);
constexpr std::size_t kAnswerMax = 64u << 20;
constexpr double kLogprobSlack = 1e-3;  // above 0, as rounding gives it
constexpr double kSpreadMin = 0.05;     // nats; less tells nothing about the temperature

// Shell words.
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

// One that nobody listens on now.
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
    const std::int64_t count = std::max<std::int64_t>(2, std::min(kProbeTokens, task.model.positions_max / 2));
    for (std::int64_t i = 0; i < count; ++i)
      probe_.push_back(static_cast<model::Token>(mix64(static_cast<std::uint64_t>(i)) %
                                                 static_cast<std::uint64_t>(task.model.vocab_size)));
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
    for (TimePoint now = clock_.now(); done_.empty() && !live_.empty() && !broken_ && now < end; now = clock_.now())
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
    if (phase_ == Phase::kWaking || phase_ == Phase::kLoading) rest();  // it may be reading the files
    ECHO_TRY(folder_->install(publication));
    if (!publication.activate) return ok();
    if (phase_ == Phase::kReady)
      load();
    else if (phase_ == Phase::kEmpty)
      phase_ = Phase::kDown;
    while (phase_ != Phase::kReady && !broken_) {
      if (host_.stop && *host_.stop) return fail(Code::kCancelled, "install policy", "asked to stop");
      pump(kSlice);
      if (host_.waiting) host_.waiting();
    }
    return state();
  }
  std::optional<Version> version() const override { return version_; }
  const overlay::Digest& digest() const override { return digest_; }
  Status state() const override {
    if (broken_) return *broken_;
    return ok();
  }

 private:
  enum class Phase {
    kEmpty,    // no policy yet
    kDown,     // until retry_at_
    kWaking,   // until it says that it is well
    kLoading,  // script_
    kReady,
  };
  struct Live {
    Sequence sequence;
    Response response;          // so far
    std::uint64_t request = 0;  // 0: in the queue
    int losses = 0;
  };
  // What is to be done before responses are asked for. Without a call: those that were aborted come back.
  struct Errand {
    std::optional<Call> call;
    std::function<Status(const HttpAnswer&)> then;
  };

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

  // ---- what happens ----

  void pump(Duration wait) {
    const TimePoint now = clock_.now();
    if (broken_ || phase_ == Phase::kEmpty) return;
    if (child_)
      if (const auto how = child_->ended()) {
        child_.reset();
        return lost("its process " + *how);
      }
    if (phase_ == Phase::kDown && now >= retry_at_) wake(now);
    if (phase_ == Phase::kWaking) look_after(now);
    if (phase_ == Phase::kLoading) advance(now);
    if (phase_ == Phase::kReady) send_queued(now);
    if (phase_ == Phase::kReady && !sent_.empty() && now - heard_at_ > options_.patience)
      return lost(fmt::format("no answer for {}", to_text(options_.patience)));
    if (phase_ != Phase::kReady && now - worked_at_ > std::chrono::seconds(1)) ++progress_, worked_at_ = now;
    for (const HttpAnswer& answer : http_.poll(wait)) {
      if (answer.request == control_) {
        control_ = 0;
        if (phase_ == Phase::kWaking)
          healthy(answer);
        else
          answered(answer);
      } else if (const auto it = sent_.find(answer.request); it != sent_.end()) {
        const std::uint64_t id = it->second;
        sent_.erase(it);
        heard_at_ = clock_.now();
        drawn(id, answer);
      }
      if (broken_) return;
    }
  }

  std::uint64_t send(const Call& call, Duration timeout) {
    return http_.send({call.method, url_ + call.path, call.body, timeout});
  }

  // ---- getting it to work ----

  void wake(TimePoint now) {
    phase_ = Phase::kWaking;
    deadline_ = now + options_.patience;
    health_at_ = now;
    if (!owns() || child_) return;
    const int port = free_port();
    url_ = fmt::format("http://127.0.0.1:{}", port);
    const std::string command = replaced(replaced(options_.command, "{model}", quoted(folder_->path().string())),
                                         "{port}", std::to_string(port));
    log::info("starts {}: {}", protocol_->name(), command);
    auto child =
        Child::start(command, protocol_->environment(), folder_->is_new() ? folder_->path() : std::filesystem::path());
    if (!child) return failed(child.error().message());
    child_ = std::move(*child);
    is_fresh_ = true;
  }

  void look_after(TimePoint now) {
    if (now >= deadline_)
      return failed(fmt::format("it was not ready within {}: {}", to_text(options_.patience), health_));
    if (control_ != 0 || now < health_at_) return;
    control_ = send(protocol_->health(), kHealthPatience);
    health_at_ = now + kHealthEvery;
  }

  void healthy(const HttpAnswer& answer) {
    health_ =
        answer.status == 0 ? answer.trouble : fmt::format("{} answered {}", protocol_->health().path, answer.status);
    if (answer.status != 200) return;
    if (suspected_) {
      // The same process is known to have its weights; whoever answers at an address may be another one by now.
      suspected_ = false;
      script_.clear();
      if (!owns()) look(Look::kWhetherSame);
      phase_ = Phase::kLoading;
    } else {
      load();
    }
  }

  // From whatever it holds to the policy in the folder.
  void load() {
    script_.clear();
    phase_ = Phase::kLoading;
    target_ = folder_->version();
    if (!target_) {
      broken_ = fail(Code::kIo, kOperation, "{} holds no whole policy any more", folder_->path().string());
      return;
    }
    if (is_fresh_) {
      for (const Step& step : protocol_->begun(*target_)) add(step);
      check_temperature();
    } else {
      add(protocol_->pause());
      script_.push_back({});
      for (const Step& step : protocol_->load(folder_->path(), *target_)) add(step);
      add(protocol_->resume());
      if (!owns()) check_temperature();
    }
    look(is_fresh_ ? Look::kFresh : Look::kLoaded);
  }

  void advance(TimePoint now) {
    if (control_ != 0) return;
    if (!script_.empty() && !script_.front().call) {
      if (drained_by_ == kNever) drained_by_ = now + kDrainMax, heard_at_ = now;
      if (!sent_.empty() && now < std::min(drained_by_, heard_at_ + kDrainQuiet)) return;
      recall();
      drained_by_ = kNever;
      script_.pop_front();
    }
    if (script_.empty()) {
      phase_ = Phase::kReady;
      is_fresh_ = false;
      heard_at_ = now;
      version_ = target_;
      digest_ = folder_->digest();
      return;
    }
    control_ = send(*script_.front().call, options_.patience);
  }

  void answered(const HttpAnswer& answer) {
    if (script_.empty()) return;
    ++progress_;
    const Errand task = std::move(script_.front());
    script_.pop_front();
    if (const Status done = task.then(answer); !done) failed(done.error().detail);
  }

  void add(const Step& step) {
    script_.push_back({step.call, [this, step](const HttpAnswer& answer) -> Status {
                         if (step.optional && (answer.status == 404 || answer.status == 405)) return ok();
                         ECHO_TRY(good(answer, step.call.path));
                         return step.accepts ? step.accepts(answer.body) : ok();
                       }});
  }

  Status good(const HttpAnswer& answer, const std::string& path) const {
    if (answer.status == 200) return ok();
    if (answer.status == 0) return fail(Code::kUnavailable, kOperation, "{}: {}", path, answer.trouble);
    return fail(
        Code::kUnavailable, kOperation, "{}: expected status 200, found {} ({}){}", path, answer.status,
        printable(answer.body, 300),
        answer.status == 404 ? fmt::format(": is it {}, with its calls for other weights?", protocol_->name()) : "");
  }

  // ---- whether it has the weights that it should have ----

  enum class Look { kFresh, kLoaded, kWhetherSame };

  void look(Look look) {
    const auto probe = [this](std::function<Status(Probed)> then) {
      script_.push_back({protocol_->probe(probe_), [this, then = std::move(then)](const HttpAnswer& answer) -> Status {
                           ECHO_TRY(good(answer, "probe"));
                           ECHO_ASSIGN(Probed probed, protocol_->probed(probe_, answer.body));
                           return then(std::move(probed));
                         }});
    };
    // Twice: what the same weights answer may differ a little.
    probe([this](Probed probed) {
      first_ = std::move(probed.logprobs);
      return ok();
    });
    probe([this, look](Probed probed) -> Status {
      const double noise = 2 * Fingerprints::distance(first_, probed.logprobs);
      if (!std::isfinite(noise))
        return fail(Code::kCorrupt, kOperation, "it says of the tokens of a text what is no number");
      const bool named = !probed.weights || *probed.weights == fmt::format("{}", *target_);
      const auto verdict = fingerprints_.judge(folder_->digest(), probed.logprobs, noise);
      using Verdict = Fingerprints::Verdict;
      if (look == Look::kWhetherSame) {
        if (!named || verdict != Verdict::kSame) load();
        return ok();
      }
      if (!named)
        return fail(Code::kStale, kOperation, "it says that it has version '{}' after it has loaded version {}",
                    printable(*probed.weights, 40), *target_);
      if (verdict == Verdict::kOther)
        return fail(Code::kStale, kOperation, "it answers otherwise than with version {} before", *target_);
      if (verdict == Verdict::kStale) {
        // Who has just read the files has what is in them.
        if (look == Look::kLoaded)
          return fail(Code::kStale, kOperation,
                      "it answers as under another version after it said that it has loaded version {}", *target_);
        log::info("version {} answers a probe exactly as one before", *target_);
      }
      fingerprints_.keep(folder_->digest(), std::move(probed.logprobs));
      return ok();
    });
  }

  // Log-probabilities have to be those of the temperature that tokens are drawn with; some report those of
  // temperature 1.
  void check_temperature() {
    const double temperature = task_.spec.temperature();
    if (temperature_checked_ || temperature == 1.0) return;
    const auto ask = [this](double t, std::function<Status(double)> then) {
      script_.push_back(
          {protocol_->spread(probe_, t), [this, then = std::move(then)](const HttpAnswer& answer) -> Status {
             ECHO_TRY(good(answer, "probe"));
             ECHO_ASSIGN(const double spread, protocol_->spread_of(answer.body));
             return then(spread);
           }});
    };
    ask(1.0, [this](double spread) {
      spread_ = spread;
      return ok();
    });
    ask(temperature, [this, temperature](double spread) -> Status {
      const double expected = spread_ / temperature;
      if (std::abs(expected - spread_) < kSpreadMin) {
        log::warn("whether {} reports log-probabilities at temperature {} cannot be seen", protocol_->name(),
                  temperature);
        return ok();
      }
      if (std::abs(spread - expected) < std::abs(spread - spread_)) {
        temperature_checked_ = true;
        return ok();
      }
      broken_ =
          fail(Code::kInvalid, kOperation,
               "{} reports log-probabilities of temperature 1, and tokens are drawn with rollout.temperature {}: {}",
               protocol_->name(), temperature, protocol_->temper_how());
      return ok();
    });
  }

  // ---- what goes wrong with it ----

  // Everything under way is asked for again.
  void recall() {
    for (const auto& [request, id] : sent_) {
      http_.cancel(request);
      Live& live = live_.at(id);
      live.request = 0;
      queue_.push_front(id);
    }
    sent_.clear();
  }

  void quiet() {
    if (control_ != 0) http_.cancel(std::exchange(control_, 0));
    script_.clear();
    drained_by_ = kNever;
    suspected_ = false;
  }

  // A process that reads the files is ended; of another one nothing is known from here on.
  void rest() {
    quiet();
    recall();
    child_.reset();
    is_fresh_ = false;
    phase_ = Phase::kDown;
  }

  void lost(const std::string& why) {
    for (const auto& [request, id] : sent_) ++live_.at(id).losses;
    failed(why);
    give_up_hopeless();
  }

  void failed(const std::string& why) {
    rest();
    log::warn("{}: {}{}", protocol_->name(), why, owns() ? "; it is started again" : "; it is tried again");
    if (++tries_ >= kTriesMax) {
      broken_ = fail(Code::kUnavailable, kOperation, "{} does not work after {} attempts; the last: {}{}",
                     protocol_->name(), tries_, why, owns() ? "" : ". Start it anew");
      return;
    }
    retry_at_ = clock_.now() + std::min(kBackoffMax, options_.retry_first * (1 << (tries_ - 1)));
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

  // An answer that says nothing about the sequence: others may come all the same, so the server is looked at first.
  void suspect(const std::string& why) {
    if (phase_ != Phase::kReady) return;
    log::warn("{}: {}", protocol_->name(), why);
    suspected_ = true;
    phase_ = Phase::kWaking;
    const TimePoint now = clock_.now();
    deadline_ = now + options_.patience;
    health_at_ = now + kHealthEvery;
  }

  // ---- responses ----

  Draw next_of(const Live& live) const {
    Draw draw;
    draw.context = live.sequence.prompt;
    draw.context.insert(draw.context.end(), live.response.tokens.begin(), live.response.tokens.end());
    const std::int64_t drawn = std::ssize(live.response.tokens);
    draw.tokens_max = std::min(kPieceTokens, live.sequence.tokens_max - drawn);
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
    if (answer.status >= 500) return again(true);
    if (answer.status == 404 || answer.status == 405) {
      broken_ = good(answer, protocol_->draw({}).path).error();
      return again(false);
    }
    if (answer.status != 200)
      return finish(fail(Code::kInvalid, "generate", "the engine refuses it with status {}: {}", answer.status,
                         printable(answer.body, 500)));
    const Draw asked = next_of(live);
    Result<Piece> piece = protocol_->drawn(asked, answer.body);
    if (!piece) return finish(std::move(piece).error());
    if (piece->weights && version_ && *piece->weights != fmt::format("{}", *version_)) {
      again(true);
      return failed(fmt::format("it answered with version '{}' where it was given {}", printable(*piece->weights, 40),
                                *version_));
    }
    const bool finite = std::ranges::all_of(piece->logprobs, [](double logprob) { return std::isfinite(logprob); });
    if (Status taken = take(live, asked, *piece); !taken) return finish(std::move(taken).error(), !finite);
    if (!piece->tokens.empty()) tries_ = 0;
    progress_ += piece->tokens.size();
    if (live.response.ended || std::ssize(live.response.tokens) == live.sequence.tokens_max)
      return finish(std::move(live.response));
    again(piece->aborted && piece->tokens.empty() && phase_ == Phase::kReady);
  }

  // Exactly as the engine says, or not at all.
  Status take(Live& live, const Draw& asked, const Piece& piece) const {
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
    // A stop string that only the server sees ends nothing, and it is asked to go on.
    const bool stopped = !asked.stop.empty() && count > 0;
    if (!piece.aborted && !live.response.ended && !stopped && std::ssize(piece.tokens) < asked.tokens_max)
      return wrong(fmt::format("it stops after {} of {} tokens, and none of them ends a response of this run", count,
                               asked.tokens_max));
    if (count == 0) return ok();
    const std::size_t before = live.response.tokens.size();
    live.response.tokens.insert(live.response.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    for (const double logprob : piece.logprobs)
      live.response.logprobs.push_back(static_cast<float>(std::min(logprob, 0.0)));
    if (const auto end = task_.phrasing->end(live.response.tokens, before)) {
      live.response.ended = true;
      live.response.tokens.resize(*end);  // servers may notice a stop string some tokens late
      live.response.logprobs.resize(*end);
    }
    std::vector<Span>& spans = live.response.spans;
    if (spans.empty() || spans.back().version != *version_) spans.push_back({*version_, 0});
    spans.back().end = live.response.tokens.size();
    return ok();
  }

  const SystemClock clock_;
  const EngineOptions options_;
  const Task& task_;
  const EngineHost host_;
  std::unique_ptr<Protocol> protocol_;
  std::unique_ptr<PolicyFolder> folder_;
  std::unique_ptr<Child> child_;  // ends before its folder goes
  HttpClient http_;
  std::string url_;

  std::map<std::uint64_t, Live> live_;
  std::deque<std::uint64_t> queue_;              // of those, without a request
  std::map<std::uint64_t, std::uint64_t> sent_;  // the others, by request
  std::vector<Outcome> done_;                    // to be told by poll()
  TimePoint heard_at_{};

  Phase phase_ = Phase::kEmpty;
  std::optional<Version> target_;   // the folder's, when the engine began to load it
  std::optional<Version> version_;  // that it generates with
  overlay::Digest digest_{};
  std::deque<Errand> script_;
  std::uint64_t control_ = 0;  // the request of the script, or of a look at its health
  bool is_fresh_ = false;      // a child that has read the folder as it is, and nothing else
  bool suspected_ = false;
  bool temperature_checked_ = false;
  TimePoint retry_at_{}, deadline_{}, health_at_{}, drained_by_ = kNever, refused_since_ = kNever, worked_at_{};
  std::string health_ = "nobody answers";
  int tries_ = 0;
  std::optional<Error> broken_;
  std::uint64_t progress_ = 0;

  std::vector<model::Token> probe_;
  std::vector<double> first_;
  double spread_ = 0;
  Fingerprints fingerprints_;
};

}  // namespace

Result<std::unique_ptr<Engine>> make_remote_engine(const EngineOptions& options, const Task& task,
                                                   const EngineHost& host) {
  const schema::RunSpec& spec = task.spec;
  auto protocol = options.kind == EngineKind::kSglang ? sglang_protocol() : vllm_protocol();
  if (spec.top_p() < 1 || spec.top_k() > 0 || spec.min_p() > 0)
    return fail(Code::kInvalid, kOperation,
                "the run draws with top_p {}, top_k {} and min_p {}, and {} does not say how likely a token was among "
                "those left: set "
                "rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0, or generate with the built-in engine",
                spec.top_p(), spec.top_k(), spec.min_p(), protocol->name());
  ECHO_ASSIGN(model::ModelFiles files, model::ModelFiles::make(
                                           [&] {
                                             model::ModelConfig config = task.model;
                                             config.eos = task.phrasing->eos();
                                             return config;
                                           }(),
                                           task.phrasing->tokenizer()));
  ECHO_ASSIGN(auto folder, PolicyFolder::make(files.content, options.folder));
  return std::unique_ptr<Engine>(std::make_unique<Remote>(options, task, host, std::move(protocol), std::move(folder)));
}

}  // namespace echoline::worker
