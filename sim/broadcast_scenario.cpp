#include "sim/broadcast_scenario.hpp"

#include <algorithm>

#include "chains/broadcast_model.hpp"
#include "overlay/learner_core.hpp"
#include "overlay/member_core.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

SharedBytes random_bytes(std::uint64_t seed, std::uint64_t count) {
  Random random(seed, 2);
  auto bytes = std::make_shared<std::vector<std::byte>>(count);
  for (std::size_t i = 0; i < count; i += 8) {
    const std::uint64_t r = random.next();
    for (std::size_t j = i; j < std::min<std::size_t>(i + 8, count); ++j)
      (*bytes)[j] = static_cast<std::byte>(r >> (8 * (j - i)));
  }
  return bytes;
}

Digest digest_of(Version v) {
  Digest digest{};
  for (std::size_t i = 0; i < 8; ++i) digest[i] = static_cast<std::byte>(v.value >> (8 * i));
  return digest;
}

// The whole cast of one scenario.
class Stage {
 public:
  explicit Stage(const BroadcastScenario& s) : s_(s), network_(s.delay, s.jitter, s.seed) {}
  Result<BroadcastResult> run();

 private:
  struct Member {
    HostId host;
    std::unique_ptr<MemberCore> core;
    std::optional<WorkerId> id;
    std::optional<Version> version;  // delivered last
    bool gone = false, joined = false;
  };

  LinkLimits link_of(std::size_t i) const { return i < s_.worker_links.size() ? s_.worker_links[i] : s_.worker_link; }
  AccessLink access(const LinkLimits& limits) const {
    return s_.limits_in_cores ? AccessLink{} : AccessLink{limits.up, limits.down};
  }
  void add_learner();
  void add_member();
  void on_learner(const Action& action);
  void on_member(std::size_t i, const Action& action);
  void publish(std::size_t index);
  bool live(const Member& m) const { return !m.gone && network_.alive(m.host); }
  bool everybody_has(Version v) const;
  Status predict();

  BroadcastScenario s_;
  Network network_;
  HostId learner_host_;
  std::unique_ptr<LearnerCore> learner_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<Publication> published_;
  std::vector<TimePoint> published_at_;
  std::map<Version, SharedBytes> snapshots_;
  std::string wrong_;
  BroadcastResult result_;
};

void Stage::add_learner() {
  const LinkLimits limits{s_.learner_up, {}};
  learner_host_ = network_.add_host(access(limits));
  LearnerConfig config;
  config.self = network_.endpoint_of(learner_host_);
  config.run_id = "simulation";
  config.limits = s_.limits_in_cores ? limits : LinkLimits{};
  config.chain_rate = s_.chain_rate;
  config.chains_max = static_cast<std::size_t>(std::max(1.0, s_.learner_up.bits_per_s / s_.chain_rate.bits_per_s));
  config.policy = s_.topology;
  config.quorum = s_.quorum;
  config.store_bytes_max = s_.learner_store;
  learner_ = std::make_unique<LearnerCore>(config);
  network_.attach(learner_host_, *learner_, [this](const Action& a) { on_learner(a); });
}

void Stage::add_member() {
  const std::size_t i = members_.size();
  auto member = std::make_unique<Member>();
  const LinkLimits limits = link_of(i);
  member->host = network_.add_host(access(limits));
  MemberConfig config;
  config.learner = network_.endpoint_of(learner_host_);
  config.data = network_.endpoint_of(member->host);
  config.run_id = "simulation";
  config.name = fmt::format("worker-{}", i);
  config.limits = s_.limits_in_cores ? limits : LinkLimits{};
  config.store_bytes_max = s_.worker_store;
  member->core = std::make_unique<MemberCore>(config);
  network_.attach(member->host, *member->core, [this, i](const Action& a) { on_member(i, a); });
  members_.push_back(std::move(member));
  network_.call(members_[i]->host, [&](TimePoint now) { members_[i]->core->start(now); });
}

void Stage::publish(std::size_t index) {
  const Version version{index};
  Publication p{version, std::nullopt, digest_of(version),
                random_bytes(s_.seed * 1000 + index, index ? s_.delta.count : s_.payload.count)};
  if (index) p.base = Version{index - 1};
  published_.push_back(p);
  published_at_.push_back(network_.now());
  result_.publications.push_back({version, {}, {}});
  if (index == 0) result_.topology = learner_->topology().chains;
  network_.call(learner_host_, [&](TimePoint now) {
    auto prepared = prepare(p, s_.chunk);
    const Status done = prepared ? learner_->publish(std::move(*prepared), now) : Status(prepared.error());
    if (!done) wrong_ = done.error().message();
  });
}

void Stage::on_learner(const Action& action) {
  if (const auto* done = std::get_if<act::BroadcastDone>(&action)) {
    result_.publications[done->report.version.value].t_b = done->report.t_b;
  } else if (const auto* acked = std::get_if<act::Acked>(&action)) {
    if (acked->policy_digest != digest_of(acked->version))
      wrong_ = fmt::format("worker {} acknowledged a wrong digest", acked->worker);
  } else if (const auto* need = std::get_if<act::NeedSnapshot>(&action)) {
    ++result_.snapshots_asked;
    auto& bytes = snapshots_[need->current];
    if (!bytes) bytes = random_bytes(s_.seed * 1000 + 500'000 + need->current.value, s_.payload.count);
    const Publication full{need->current, {}, digest_of(need->current), bytes};
    network_.at(network_.now(), [this, full] {
      network_.call(learner_host_, [&](TimePoint now) {
        auto prepared = prepare(full, s_.chunk);
        const Status done = prepared ? learner_->provide_snapshot(std::move(*prepared), now) : Status(prepared.error());
        if (!done) wrong_ = done.error().message();
      });
    });
  }
}

void Stage::on_member(std::size_t i, const Action& action) {
  Member& m = *members_[i];
  if (const auto* welcomed = std::get_if<act::Welcomed>(&action)) {
    m.id = welcomed->self;
  } else if (const auto* gone = std::get_if<act::Disconnected>(&action)) {
    m.gone = true;
    if (network_.alive(m.host) && wrong_.empty()) wrong_ = fmt::format("worker {} left: {}", i, gone->reason);
  } else if (const auto* deliver = std::get_if<act::Deliver>(&action)) {
    const Publication& p = deliver->publication;
    const bool in_order = p.base ? p.base == m.version : !m.version || p.version > *m.version;
    if (!in_order) wrong_ = fmt::format("worker {} was given version {} out of order", i, p.version);
    const Publication& source = published_.at(p.version.value);
    const SharedBytes expected = p.base == source.base ? source.payload : snapshots_.at(p.version);
    if (*p.payload != *expected) wrong_ = fmt::format("worker {} was given other bytes for version {}", i, p.version);
    const std::uint64_t first = m.version ? m.version->value + 1 : 0;
    m.version = p.version;
    for (std::uint64_t v = first; v <= p.version.value; ++v)
      result_.publications[v].completions.emplace_back(*m.id, network_.now() - published_at_[v]);
    network_.at(network_.now(), [this, i, p] {
      network_.call(members_[i]->host,
                    [&](TimePoint now) { members_[i]->core->installed(p.version, p.policy_digest, now); });
    });
  }
}

bool Stage::everybody_has(Version v) const {
  return std::all_of(members_.begin(), members_.end(),
                     [&](const auto& m) { return !live(*m) || (m->version && *m->version >= v); });
}

Status Stage::predict() {
  std::vector<chains::WorkerLink> links;
  const BitRate unlimited{1e12};
  for (std::size_t i = 0; i < s_.workers; ++i) {
    const LinkLimits limits = link_of(i);
    links.push_back({*members_[i]->id, limits.up.value_or(unlimited), limits.down.value_or(unlimited), s_.delay});
  }
  std::sort(links.begin(), links.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  result_.lower_bound = chains::lower_bound(s_.payload, s_.learner_up, links);
  chains::Topology topology;
  topology.policy = s_.topology;
  topology.chains = result_.topology;
  ECHO_ASSIGN(const auto times, chains::broadcast_time(topology, s_.payload, s_.chunk, s_.learner_up, links));
  result_.predicted = times.last();
  return ok();
}

Result<BroadcastResult> Stage::run() {
  constexpr std::string_view op = "simulate broadcast";
  if (s_.workers < 1) return fail(Code::kInvalid, op, "at least one worker is needed");
  if (s_.publications < 1) return fail(Code::kInvalid, op, "at least one publication is needed");
  if (!(s_.learner_up.bits_per_s > 0) || !(s_.chain_rate.bits_per_s > 0))
    return fail(Code::kInvalid, op, "rates must be positive");
  for (const WorkerKill& kill : s_.kills)
    if (kill.worker >= s_.workers + s_.late_joins.size())
      return fail(Code::kInvalid, op, "worker {} is to be killed, there are {}", kill.worker,
                  s_.workers + s_.late_joins.size());
  add_learner();
  for (std::size_t i = 0; i < s_.workers; ++i) add_member();
  // Everybody joins and settles before the first publication.
  const TimePoint start = network_.now() + std::chrono::seconds(1) + 20 * (s_.delay + s_.jitter);
  network_.run(start, [] { return false; });
  for (const auto& m : members_)
    if (!m->id) return fail(Code::kInternal, op, "a worker could not join: {}", wrong_);
  std::size_t events_left = s_.publications + s_.late_joins.size() + s_.kills.size() + s_.corruptions.size();
  const auto script = [&](Duration after, std::function<void()> work) {
    network_.at(start + after, [&events_left, work = std::move(work)] {
      --events_left;
      work();
    });
  };
  for (std::size_t i = 0; i < s_.publications; ++i)
    script(s_.publish_every * static_cast<std::int64_t>(i), [this, i] { publish(i); });
  for (const Duration join : s_.late_joins) script(join, [this] { add_member(); });
  for (const WorkerKill& kill : s_.kills)
    script(kill.at, [this, kill] { network_.kill(members_.at(kill.worker)->host, kill.death); });
  for (const Duration when : s_.corruptions)
    script(when,
           [this] { network_.corrupt_next(members_.front()->host, std::min<std::uint64_t>(1024, s_.chunk.count)); });
  const Version last{s_.publications - 1};
  const auto done = [&] {
    return !wrong_.empty() || (events_left == 0 && result_.publications.back().t_b && everybody_has(last));
  };
  result_.finished = network_.run(start + s_.time_max, done) && wrong_.empty();
  if (!result_.finished) {
    result_.unfinished = wrong_;
    for (std::size_t i = 0; i < members_.size(); ++i)
      if (const Member& m = *members_[i]; live(m) && (!m.version || *m.version < last))
        result_.unfinished +=
            fmt::format(" worker {} has {};", i, m.version ? fmt::format("version {}", *m.version) : "nothing");
  }
  const LearnerStats learner = learner_->stats();
  result_.learner_bytes_sent = learner.bytes_sent;
  result_.learner_chunk_bytes_sent = learner.chunk_bytes_sent;
  for (const auto& m : members_) {
    const WorkerStats stats = m->core->stats();
    result_.worker_chunk_bytes_in += stats.chunk_bytes_in;
    result_.chunks_duplicate += stats.chunks_duplicate;
    result_.chunks_corrupt += stats.chunks_corrupt;
  }
  result_.virtual_time = network_.now() - start;
  result_.trace_hash = network_.trace_hash();
  result_.events = network_.events();
  ECHO_TRY(predict());
  return std::move(result_);
}

}  // namespace

Duration PublicationTimes::last() const {
  Duration last{};
  for (const auto& [worker, time] : completions) last = std::max(last, time);
  return last;
}

Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario) { return Stage(scenario).run(); }

}  // namespace echoline::sim
