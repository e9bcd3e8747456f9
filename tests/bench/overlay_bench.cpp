// One node of a broadcast between real processes. `overlay_bench learner` publishes random payloads; each
// `overlay_bench worker` receives, forwards and acknowledges them; with the name node:<i> it is a node of the trainer
// (overlay/trainer_node.hpp). Both write their measurements as one JSON object.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "chains/broadcast_model.hpp"
#include "overlay/trainer_node.hpp"
#include "overlay/trust/hash.hpp"
#include "overlay/uv/node.hpp"

namespace {

using namespace echoline;
using overlay::Digest;

// The digest that a worker must find in its payload: the first half of its BLAKE3.
Digest digest_of(std::span<const std::byte> payload) {
  const overlay::trust::Hash hash = overlay::trust::blake3(payload);
  Digest digest;
  std::copy_n(hash.begin(), digest.size(), digest.begin());
  return digest;
}

double memory_peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto s = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
  return s(usage.ru_utime) + s(usage.ru_stime);
}

int fail_with(const Error& error) {
  fmt::print(stderr, "overlay_bench: {}\n", error.message());
  return exit_code(error.code);
}

Result<overlay::Endpoint> parse_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) return fail(Code::kInvalid, "endpoint", "expected HOST:PORT, found '{}'", text);
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return overlay::Endpoint{host, static_cast<std::uint16_t>(std::stoul(text.substr(colon + 1)))};
}

void write_json(const std::string& path, const nlohmann::json& json) {
  if (path.empty() || path == "-")
    std::cout << json.dump() << std::endl;
  else
    std::ofstream(path) << json.dump() << "\n";
}

template <class Predicate>
bool wait(std::condition_variable& wake, std::unique_lock<std::mutex>& lock, double seconds, Predicate done) {
  return wake.wait_for(lock, std::chrono::duration<double>(seconds), done);
}

struct LearnerArgs {
  std::string listen = "127.0.0.1:0", json = "-", topology = "echo2", tokens, folder;
  std::uint64_t payload = 100'000'000, chunk = 64 * 1024;
  std::size_t workers = 1, spares = 0, nodes = 0, publications = 1;
  double up_mbit = 0, chain_mbit = 8, seconds_max = 600, pause = 0;
};

int learner(const LearnerArgs& args) {
  std::mutex mutex;
  std::condition_variable wake;
  std::map<std::uint64_t, std::string> members;
  std::map<WorkerId, chains::WorkerLink> links;                        // as declared
  std::map<std::uint64_t, std::map<std::string, double>> completions;  // by version: worker's name, seconds
  std::map<std::uint64_t, TimePoint> begun;
  std::map<std::uint64_t, overlay::BroadcastReport> reports;
  std::vector<std::string> slow_hops;
  std::vector<std::pair<double, std::string>> changes;
  std::size_t wrong = 0, lost = 0;
  std::map<std::uint64_t, Digest> digests;  // by version
  const SystemClock clock;

  overlay::LearnerOptions options;
  const auto endpoint = parse_endpoint(args.listen);
  const auto policy = chains::parse_topology_policy(args.topology);
  if (!endpoint || !policy) return fail_with(!endpoint ? endpoint.error() : policy.error());
  options.network.bind = endpoint->host;
  options.network.port = endpoint->port;
  options.run_id = "bench";
  options.policy = *policy;
  options.network.chunk = {args.chunk};
  options.network.quorum = 1;
  options.chain_rate = BitRate::from_mbit_per_s(args.chain_mbit);
  options.folder = args.folder;
  if (args.up_mbit > 0) options.network.uplink = BitRate::from_mbit_per_s(args.up_mbit);
  options.policy_bytes = {args.payload};
  overlay::LearnerEvents events;
  events.joined = [&](const overlay::MemberInfo& member) {
    const std::lock_guard lock(mutex);
    members[member.id.value] = member.name;
    constexpr BitRate kUnlimited{1e12};
    links[member.id] = {member.id, member.up.value_or(kUnlimited), member.down.value_or(kUnlimited), Duration(0)};
    wake.notify_all();
  };
  events.away = [&](WorkerId id, const std::string&) {
    const std::lock_guard lock(mutex);
    members.erase(id.value);
    ++lost;
    wake.notify_all();
  };
  events.lost = [&](WorkerId id, const std::string&) {
    const std::lock_guard lock(mutex);
    lost += members.erase(id.value);
    wake.notify_all();
  };
  events.installed = [&](WorkerId id, Version version, const Digest& found) {
    const std::lock_guard lock(mutex);
    if (found != digests.at(version.value)) {
      fmt::print(stderr, "worker {} acknowledged version {} with a wrong digest\n", id, version);
      ++wrong;
    }
    completions[version.value][members[id.value]] = seconds(clock.now() - begun[version.value]);
    wake.notify_all();
  };
  events.broadcast_done = [&](const overlay::BroadcastReport& report) {
    const std::lock_guard lock(mutex);
    reports[report.version.value] = report;
    wake.notify_all();
  };
  events.slow_hop = [&](const overlay::SlowHop& hop) {
    const std::lock_guard lock(mutex);
    slow_hops.push_back(
        fmt::format("{:.3f} s: {}", begun.empty() ? 0.0 : seconds(clock.now() - begun.rbegin()->second), hop.text));
  };
  events.topology_changed = [&](const chains::Topology& topology) {
    const std::lock_guard lock(mutex);
    changes.emplace_back(begun.empty() ? 0.0 : seconds(clock.now() - begun.rbegin()->second), topology.to_text());
    nlohmann::json chains = nlohmann::json::array();
    for (std::uint32_t s = 0; s < topology.stripes(); ++s)
      for (const auto& chain : topology.stripe(s)) {
        chains.emplace_back(nlohmann::json::array());
        if (const WorkerId root = topology.parent_of_chain(s, chain.front()); root != kLearnerId)
          chains.back().push_back(members[root.value]);
        for (const WorkerId id : chain) chains.back().push_back(members[id.value]);
      }
    fmt::print(stderr, "topology {}\n", chains.dump());
  };
  auto node = overlay::LearnerNode::start(options, events);
  if (!node) return fail_with(node.error());
  std::vector<std::string> instances;
  for (std::size_t i = 0; i < args.workers + args.spares; ++i) instances.push_back(fmt::format("worker-{}", i));
  for (std::size_t i = 0; i < args.nodes; ++i) instances.push_back(fmt::format("{}{}", overlay::kTrainerNodePrefix, i));
  for (const std::string& instance : instances) {
    const auto token = (*node)->issue_token(instance, std::chrono::hours(1));
    if (!token) return fail_with(token.error());
    const std::string path = fmt::format("{}/{}.token", args.tokens, instance);
    if (const Status written = write_file_atomic(path, token->reveal()); !written) return fail_with(written.error());
  }
  fmt::print(stderr, "ready {}\n", overlay::to_text((*node)->endpoint()));

  std::unique_lock lock(mutex);
  if (!wait(wake, lock, 120, [&] { return members.size() >= args.workers + args.nodes; })) {
    fmt::print(stderr, "overlay_bench: {} of {} workers and nodes joined\n", members.size(), args.workers + args.nodes);
    return 1;
  }
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::seconds(1));  // edges are opened before the clock starts
  std::vector<std::byte> payload(args.payload);
  nlohmann::json out;
  out["publications"] = nlohmann::json::array();
  for (std::uint64_t v = 0; v < args.publications; ++v) {
    Random random(v + 1);
    for (std::size_t i = 0; i + 8 <= payload.size(); i += 8) {
      const std::uint64_t word = random.next();
      std::memcpy(&payload[i], &word, 8);
    }
    lock.lock();
    const Digest digest = digests[v] = digest_of(payload);
    begun[v] = clock.now();
    lock.unlock();
    fmt::print(stderr, "publishing {}\n", v);
    overlay::PublicationHead head{Version{v}, {}, {}, false};
    auto writer = (*node)->begin(head);
    if (!writer) return fail_with(writer.error());
    constexpr std::size_t kPiece = 4 << 20;
    for (std::size_t at = 0; at < payload.size(); at += kPiece)
      if (const Status written =
              (*writer)->write(std::span(payload).subspan(at, std::min(kPiece, payload.size() - at)));
          !written)
        return fail_with(written.error());
    if (const Status finished = (*writer)->finish(digest); !finished) return fail_with(finished.error());
    lock.lock();
    const bool done = wait(wake, lock, args.seconds_max, [&] {
      std::size_t have = 0;
      for (const auto& [id, name] : members) have += completions[v].contains(name);
      // At the end, waits for the workers that joined meanwhile.
      return reports.contains(v) && (v + 1 < args.publications || have >= members.size());
    });
    nlohmann::json p;
    p["version"] = v;
    p["done"] = done;
    p["workers"] = completions[v];
    if (reports.contains(v)) {
      p["t_b_seconds"] = seconds(reports[v].t_b);
      p["learner_bytes"] = reports[v].learner_bytes_sent.count;
      p["depth"] = reports[v].depth;
      std::vector<chains::WorkerLink> there;
      for (const WorkerId id : reports[v].topology.workers()) there.push_back(links.at(id));
      const auto model = chains::broadcast_time(reports[v].topology, {args.payload}, *options.network.chunk,
                                                options.network.uplink.value_or(BitRate{1e12}), there);
      if (model) p["model_seconds"] = seconds(model->quorum_time(1));  // formula 4.2
    }
    double last = 0;
    for (const auto& [name, s] : completions[v]) last = std::max(last, s);
    p["last_seconds"] = last;
    out["publications"].push_back(p);
    lock.unlock();
    if (!done) break;
    std::this_thread::sleep_for(std::chrono::duration<double>(args.pause));
  }
  const overlay::LearnerStats stats = (*node)->stats();
  out["payload_bytes"] = args.payload;
  out["chunk_bytes_sent"] = stats.chunk_bytes_sent.count;
  out["bytes_sent"] = stats.bytes_sent.count;
  out["wrong_digests"] = wrong;
  out["lost"] = lost;
  out["quarantined"] = stats.quarantined;
  out["slow_hops"] = slow_hops;
  for (const auto& [at, text] : changes) out["topologies"].push_back({at, text});
  out["memory_peak_mib"] = memory_peak_mib();
  out["cpu_seconds"] = cpu_seconds();
  (*node)->stop();
  write_json(args.json, out);
  return wrong == 0 ? 0 : 1;
}

struct WorkerArgs {
  std::string learner, token_file, json = "-", name, bind = "127.0.0.1", folder;
  bool check_late = false;
  double memory_mib = 0, up_mbit = 0, down_mbit = 0;
};

std::atomic<bool> g_drain{false};

int worker(const WorkerArgs& args) {
  overlay::WorkerOptions options;
  const auto endpoint = parse_endpoint(args.learner);
  if (!endpoint) return fail_with(endpoint.error());
  auto token = read_file(args.token_file, 4096);
  if (!token) return fail_with(token.error());
  options.learner = *endpoint;
  options.token = overlay::trust::Secret(std::move(*token));
  options.bind_host = args.bind;
  options.name = args.name;
  options.folder = args.folder;
  if (args.memory_mib > 0) options.memory_max = Bytes{static_cast<std::uint64_t>(args.memory_mib * 1048576)};
  if (args.up_mbit > 0) options.limits.up = BitRate::from_mbit_per_s(args.up_mbit);
  if (args.down_mbit > 0) options.limits.down = BitRate::from_mbit_per_s(args.down_mbit);
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<overlay::Publication> inbox;
  bool gone = false;
  std::string reason;
  overlay::WorkerEvents events;
  events.publication = [&](const overlay::Publication& p) {
    const std::lock_guard lock(mutex);
    inbox.push_back(p);
    wake.notify_all();
  };
  events.disconnected = [&](const std::string& why, bool) {
    const std::lock_guard lock(mutex);
    gone = true;
    reason = why;
    wake.notify_all();
  };
  auto node = overlay::WorkerNode::start(std::move(options), events);
  if (!node) return fail_with(node.error());
  std::signal(SIGTERM, [](int) { g_drain = true; });
  bool draining = false;
  std::size_t received = 0, wrong = 0;
  std::unique_lock lock(mutex);
  while (!gone) {
    wake.wait_for(lock, std::chrono::milliseconds(100), [&] { return gone || !inbox.empty(); });
    if (g_drain && !std::exchange(draining, true)) (*node)->drain();
    for (const overlay::Publication& p : std::exchange(inbox, {})) {
      lock.unlock();
      if (args.check_late) (*node)->installed(p.version, p.policy_digest);
      overlay::trust::Hasher hasher;
      const Status read = p.payload.visit([&](std::span<const std::byte> piece) {
        hasher.update(piece);
        return ok();
      });
      Digest found{};
      if (read) {
        const overlay::trust::Hash hash = hasher.finish();
        std::copy_n(hash.begin(), found.size(), found.begin());
      }
      if (found != p.policy_digest) {
        fmt::print(stderr, "version {} is wrong{}\n", p.version, read ? "" : ": " + read.error().message());
        ++wrong;
      }
      ++received;
      if (!args.check_late) (*node)->installed(p.version, found);
      lock.lock();
    }
  }
  lock.unlock();
  const overlay::WorkerStats stats = (*node)->stats();
  nlohmann::json out;
  out["name"] = args.name;
  out["received"] = received;
  out["wrong_digests"] = wrong;
  out["chunk_bytes_in"] = stats.chunk_bytes_in.count;
  out["chunk_bytes_forwarded"] = stats.chunk_bytes_forwarded.count;
  out["chunks_duplicate"] = stats.chunks_duplicate;
  out["chunks_corrupt"] = stats.chunks_corrupt;
  out["store_memory_peak_mib"] = static_cast<double>(stats.memory_peak.count) / 1048576;
  out["memory_peak_mib"] = memory_peak_mib();
  out["cpu_seconds"] = cpu_seconds();
  out["reason"] = reason;
  (*node)->stop();
  write_json(args.json, out);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("One node of a broadcast between real processes, for measurements.");
  app.require_subcommand(1);
  bool verbose = false;
  app.add_flag("-v,--verbose", verbose, "log what happens");
  LearnerArgs l;
  CLI::App* as_learner = app.add_subcommand("learner", "publishes random payloads");
  as_learner->add_option("--listen", l.listen, "HOST:PORT; port 0: any");
  as_learner->add_option("--payload", l.payload, "bytes of one publication");
  as_learner->add_option("--chunk", l.chunk, "bytes of a chunk");
  as_learner->add_option("--workers", l.workers, "waits for so many");
  as_learner->add_option("--spares", l.spares, "further tokens, for workers that come later");
  as_learner->add_option("--nodes", l.nodes, "waits for so many of its trainer's nodes as well");
  as_learner->add_option("--publications", l.publications, "how many, one after the other");
  as_learner->add_option("--pause", l.pause, "seconds between two of them");
  as_learner->add_option("--topology", l.topology, "echo2, best_chains, stripes, trees or star");
  as_learner->add_option("--up-mbit", l.up_mbit, "own limit of the uplink; 0: none");
  as_learner->add_option("--chain-mbit", l.chain_mbit, "rate of one chain, for echo2");
  as_learner->add_option("--tokens", l.tokens, "folder for worker-<i>.token and node:<i>.token")->required();
  as_learner->add_option("--folder", l.folder, "where state is kept; none: in memory");
  as_learner->add_option("--seconds-max", l.seconds_max, "gives up after so long");
  as_learner->add_option("--json", l.json, "where to write what was measured; -: standard output");
  WorkerArgs w;
  CLI::App* as_worker = app.add_subcommand("worker", "receives and forwards");
  as_worker->add_option("--learner", w.learner, "HOST:PORT")->required();
  as_worker->add_option("--token-file", w.token_file)->required();
  as_worker->add_option("--name", w.name, "the instance the token was issued for")->required();
  as_worker->add_option("--bind", w.bind, "address to listen on");
  as_worker->add_option("--folder", w.folder, "where state is kept; none: in memory");
  as_worker->add_option("--memory-mib", w.memory_mib, "budget for chunks in memory; 0: by the payload's size");
  as_worker->add_option("--up-mbit", w.up_mbit, "own limit of the uplink; 0: none");
  as_worker->add_option("--down-mbit", w.down_mbit, "own limit of the downlink; 0: none");
  as_worker->add_flag("--check-late", w.check_late, "acknowledge first; a wrong digest is still an error at the end");
  as_worker->add_option("--json", w.json, "where to write what was measured; -: standard output");
  CLI11_PARSE(app, argc, argv);
  log::configure(verbose ? log::Level::kDebug : log::Level::kWarn, *as_learner ? "learner" : w.name);
  return *as_learner ? learner(l) : worker(w);
}
