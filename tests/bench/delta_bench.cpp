// The delta codec beside the published encodings, on the same pairs of versions, in one run: sizes against the dense
// weights and the entropy bound, speeds against memcpy. docs/how-to/measure-the-codec.md describes the columns.
//
// Usage:
//
//   delta_bench                                  the standard pairs
//   delta_bench --regime=pure --density=1.44     one of them
//   delta_bench --tensor-elements=3500           in thousands of small tensors, as of a mixture of experts
//   delta_bench --program=build/release/cli/echoline   `echoline delta diff` beside cp as well
//   delta_bench --pair=FOLDER                    prev.safetensors and cur.safetensors
//   delta_bench --benchmark_out=FILE             every measurement as JSON as well (Google Benchmark's options work)
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>

#include "delta/patch.hpp"
#include "delta/safetensors.hpp"
#include "tests/bench/measure.hpp"
#include "tests/bench/pairs.hpp"
#include "tests/bench/peers.hpp"
#include "tests/delta/entropy_pass.hpp"
#include "tests/delta/in_memory.hpp"

namespace echoline::bench {
namespace {

struct Settings {
  std::vector<PairOptions> cases;
  std::vector<std::string> files;
  std::vector<unsigned> threads = {1, 2};
  int repeats = 7;
  bool describe = false;
  bool memory = true;
  std::string program;   // echoline, whose `delta diff` is measured beside cp where it is given
  double ratio_min = 0;  // encoding and applying on one thread, of memcpy; less is a failure
};

bool by_cpu = false;  // times of memcpy, encoding and applying are processor time

template <class F>
double time_of(F&& work) {
  return by_cpu ? cpu_seconds_of(work) : seconds_of(work);
}

using Times = std::map<unsigned, std::vector<double>>;  // seconds by thread count

// Whether the digest of the old version is known, as on a learner that published it and on a worker that verified it,
// or has to be computed. The peers' encodings have no digests.
enum class Base { kKnown, kUnknown };

// One line of a table.
struct Line {
  std::uint64_t bytes = 0;
  std::map<Base, Times> encode_s, apply_s;
  std::optional<std::uint64_t> peak_bytes;  // of the encoder, over all thread counts
};

constexpr const char* kOurs = "echoline";

// A pair and all measured facts about it.
struct Case {
  Pair pair;
  delta::StateEntropy bound;
  delta::Digest prev_digest;
  Times copy_s;
  Times bound_s, counting_s;          // the bound in a pass of its own; encoding that takes its counts in passing
  Times left_s;                       // to apply our delta, once the last of its parts has come
  Times snapshot_s, snapshot_left_s;  // to decode a snapshot, whole and likewise
  Times snapshot_encode_s;
  std::uint64_t snapshot_bytes = 0;
  std::vector<double> files_copy_s, files_diff_s;  // cp of the new version's file, and `echoline delta diff` of both
  std::map<std::string, Line> lines;
  delta::OwnedState target;  // where deltas are applied and copies go
};

[[noreturn]] void give_up(const Error& error) {
  fmt::print(stderr, "delta_bench: {}\n", error.message());
  std::exit(exit_code(error.code));
}

template <class T>
T must(Result<T> result) {
  if (!result) give_up(result.error());
  return std::move(result).value();
}

void must(const Status& status) {
  if (!status) give_up(status.error());
}

bool same_bytes(const delta::StateView& a, const delta::StateView& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.bytes.size() == y.bytes.size() && std::equal(x.bytes.begin(), x.bytes.end(), y.bytes.begin());
  });
}

// Encodes and applies with echoline's codec or a peer's. echoline's writes into an existing buffer, as a publisher's
// chunks are; the peers allocate one.
struct Codec {
  const Peer* peer = nullptr;  // null: ours

  void encode(const Case& c, unsigned threads, Base base, Blob& blob) const {
    if (peer) {
      blob = must(peer->encode(c.pair.prev.view(), c.pair.cur.view()));
      return;
    }
    delta::EncodeOptions options;
    options.threads = threads;
    if (base == Base::kKnown) options.base = c.prev_digest;
    blob.clear();
    const delta::PatchSink sink = [&](std::span<const std::byte> part) {
      blob.insert(blob.end(), part.begin(), part.end());
      return ok();
    };
    (void)must(delta::write_delta(c.pair.prev.view(), c.pair.cur.view(), sink, options));
  }
  Blob encode(const Case& c, unsigned threads, Base base) const {
    Blob blob;
    encode(c, threads, base, blob);
    return blob;
  }
  Status apply(const Blob& blob, delta::OwnedState& state, unsigned threads) const {
    if (peer) return peer->apply(blob, state);
    delta::DecodeOptions options;
    options.threads = threads;
    return delta::apply_delta(blob, state, options);
  }
  std::string name() const { return peer ? peer->name : kOurs; }
};

// Only one pair is in memory at a time: benchmarks run case by case.
class Cases {
 public:
  explicit Cases(Settings settings) : settings_(std::move(settings)) {}

  std::size_t size() const { return settings_.cases.size() + settings_.files.size(); }
  const Settings& settings() const { return settings_; }

  Case& at(std::size_t index) {
    if (!present_ || index != index_) {
      finish();
      index_ = index;
      present_ = make(index);
    }
    return *present_;
  }

  // Prints the table of the present case.
  void finish() {
    if (present_) print(*present_);
    present_.reset();
  }

 private:
  std::unique_ptr<Case> make(std::size_t index) const {
    auto c = std::make_unique<Case>();
    c->pair = index < settings_.cases.size() ? must(make_pair(settings_.cases[index]))
                                             : must(read_pair(settings_.files[index - settings_.cases.size()]));
    c->bound = must(delta::entropy_bound(c->pair.prev.view(), c->pair.cur.view(), settings_.threads.back()));
    c->prev_digest = c->pair.prev.digest();
    c->target = must(delta::copy_of(c->pair.prev.view()));
    return c;
  }

  void print(const Case& c) const;

  Settings settings_;
  std::unique_ptr<Case> present_;
  std::size_t index_ = 0;
};

std::vector<std::span<std::byte>> writable(delta::OwnedState& state) {
  std::vector<std::span<std::byte>> tensors;
  for (std::size_t t = 0; t < state.size(); ++t) tensors.push_back(state.mutable_bytes(t));
  return tensors;
}

// Restores the old version, so that an encoding can be applied.
void rewind(Case& c, Base base) {
  copy_dense(c.pair.prev.view(), writable(c.target), 1);
  c.target.seal();
  if (base == Base::kKnown) (void)c.target.digest();  // it is remembered
}

void prove(const Codec& codec, const Blob& blob, Case& c, unsigned threads) {
  rewind(c, Base::kUnknown);
  must(codec.apply(blob, c.target, threads));
  if (!same_bytes(c.target.view(), c.pair.cur.view()))
    give_up(fail(Code::kInternal, "delta_bench", "{} does not give back the new weights of '{}'", codec.name(),
                 c.pair.name));
}

void count(benchmark::State& state, const Case& c, const Line& line) {
  const double bytes = static_cast<double>(line.bytes);
  const double changed = static_cast<double>(std::max<std::uint64_t>(1, c.bound.total.changed));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(c.pair.cur.total_bytes()));
  state.counters["bytes"] = bytes;
  state.counters["bytes_per_change"] = bytes / changed;
  state.counters["x_dense"] = bytes > 0 ? static_cast<double>(c.pair.cur.total_bytes()) / bytes : 0;
  state.counters["x_bound"] = c.bound.total.bytes() > 0 ? bytes / c.bound.total.bytes() : 0;
  state.counters["density"] = c.bound.total.density();
  state.SetLabel(c.pair.name);
  if (line.peak_bytes) state.counters["encode_peak_bytes"] = static_cast<double>(*line.peak_bytes);
}

void encode_benchmark(benchmark::State& state, Cases& cases, std::size_t index, const Codec& codec, unsigned threads,
                      Base base) {
  Case& c = cases.at(index);
  Line& line = c.lines[codec.name()];
  Times& times = line.encode_s[base];
  if (times[threads].empty() && base == Base::kKnown) {
    const Blob blob = codec.encode(c, threads, base);
    line.bytes = blob.size();
    prove(codec, blob, c, threads);
    if (cases.settings().memory) {
      const auto peak = peak_bytes_beyond_now([&] { benchmark::DoNotOptimize(codec.encode(c, threads, base).data()); });
      line.peak_bytes = std::max(line.peak_bytes, peak);
    }
  }
  Blob blob;
  for ([[maybe_unused]] auto _ : state) {
    if (codec.peer) blob = {};
    const double s = time_of([&] { codec.encode(c, threads, base, blob); });
    state.SetIterationTime(s);
    times[threads].push_back(s);
  }
  count(state, c, line);
}

void apply_benchmark(benchmark::State& state, Cases& cases, std::size_t index, const Codec& codec, unsigned threads,
                     Base base) {
  Case& c = cases.at(index);
  Line& line = c.lines[codec.name()];
  const Blob blob = codec.encode(c, threads, Base::kKnown);
  line.bytes = blob.size();
  for ([[maybe_unused]] auto _ : state) {
    rewind(c, base);
    const double s = time_of([&] { must(codec.apply(blob, c.target, threads)); });
    state.SetIterationTime(s);
    line.apply_s[base][threads].push_back(s);
  }
  count(state, c, line);
}

// Feeds all but the last part to a decoder of arriving patches.
std::span<const std::byte> add_parts(auto& incoming, std::span<const std::byte> patch) {
  constexpr std::size_t kPart = 32 * 1024;  // as network.chunk
  for (; patch.size() > kPart; patch = patch.subspan(kPart)) must(incoming.add(patch.first(kPart)));
  return patch;
}

// As on a worker: parts arrive one after another, and only the work left after the last of them counts.
void arriving_benchmark(benchmark::State& state, Cases& cases, std::size_t index, unsigned threads) {
  Case& c = cases.at(index);
  const Blob blob = Codec{}.encode(c, threads, Base::kKnown);
  for ([[maybe_unused]] auto _ : state) {
    rewind(c, Base::kKnown);
    delta::IncomingDelta incoming(c.target, {.threads = threads});
    const auto last = add_parts(incoming, blob);
    const double s = seconds_of([&] {
      must(incoming.add(last));
      (void)must(incoming.apply());
    });
    state.SetIterationTime(s);
    c.left_s[threads].push_back(s);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(c.pair.cur.total_bytes()));
  state.SetLabel(c.pair.name);
}

void snapshot_benchmark(benchmark::State& state, Cases& cases, std::size_t index, unsigned threads) {
  Case& c = cases.at(index);
  Blob blob;
  for ([[maybe_unused]] auto _ : state) {
    c.snapshot_encode_s[threads].push_back(
        seconds_of([&] { blob = must(delta::encode_snapshot(c.pair.cur.view(), {.threads = threads})); }));
    c.snapshot_bytes = blob.size();
    c.snapshot_s[threads].push_back(
        seconds_of([&] { (void)must(delta::decode_snapshot(blob, {.threads = threads})); }));
    delta::IncomingSnapshot incoming({.threads = threads});
    const auto last = add_parts(incoming, blob);
    const double s = seconds_of([&] {
      must(incoming.add(last));
      (void)must(incoming.finish());
    });
    state.SetIterationTime(s);
    c.snapshot_left_s[threads].push_back(s);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(c.pair.cur.total_bytes()));
  state.SetLabel(c.pair.name);
}

// Files in the page cache, from the start of a program to its end.
void files_benchmark(benchmark::State& state, Cases& cases, std::size_t index) {
  Case& c = cases.at(index);
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("echoline-delta-bench-{}", ::getpid());
  std::filesystem::create_directories(folder);
  const auto path = [&](std::string_view name) { return (folder / name).string(); };
  must(delta::write_safetensors(path("prev"), c.pair.prev.view()));
  must(delta::write_safetensors(path("cur"), c.pair.cur.view()));
  const auto run_program = [](const std::string& command) {
    if (std::system(command.c_str()) != 0) give_up(fail(Code::kInternal, "delta_bench", "failed: {}", command));
  };
  const std::string copy = fmt::format("cp {} {}", path("cur"), path("copy"));
  const std::string diff = fmt::format("{} delta diff {} {} -o {} --json > /dev/null", cases.settings().program,
                                       path("prev"), path("cur"), path("patch"));
  for ([[maybe_unused]] auto _ : state) {
    c.files_copy_s.push_back(seconds_of([&] { run_program(copy); }));
    const double s = seconds_of([&] { run_program(diff); });
    state.SetIterationTime(s);
    c.files_diff_s.push_back(s);
    std::filesystem::remove(path("copy"));
  }
  std::filesystem::remove_all(folder);
  state.SetLabel(c.pair.name);
}

void copy_benchmark(benchmark::State& state, Cases& cases, std::size_t index, unsigned threads) {
  Case& c = cases.at(index);
  const auto target = writable(c.target);
  for ([[maybe_unused]] auto _ : state) {
    const double s = time_of([&] { copy_dense(c.pair.cur.view(), target, threads); });
    state.SetIterationTime(s);
    c.copy_s[threads].push_back(s);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(c.pair.cur.total_bytes()));
  state.SetLabel(c.pair.name);
}

void bound_benchmark(benchmark::State& state, Cases& cases, std::size_t index, unsigned threads) {
  Case& c = cases.at(index);
  for ([[maybe_unused]] auto _ : state) {
    const double s =
        seconds_of([&] { (void)must(delta::entropy_bound(c.pair.prev.view(), c.pair.cur.view(), threads)); });
    state.SetIterationTime(s);
    c.bound_s[threads].push_back(s);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(c.bound.total.elements));
  state.SetLabel(c.pair.name);
}

void counting_benchmark(benchmark::State& state, Cases& cases, std::size_t index, unsigned threads) {
  Case& c = cases.at(index);
  const delta::EncodeOptions options{.threads = threads, .count_entropy = true};
  for ([[maybe_unused]] auto _ : state) {
    Blob blob;
    const double s =
        seconds_of([&] { blob = must(delta::encode_delta(c.pair.prev.view(), c.pair.cur.view(), options)); });
    state.SetIterationTime(s);
    c.counting_s[threads].push_back(s);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(c.bound.total.elements));
  state.SetLabel(c.pair.name);
}

std::vector<Codec> codecs() {
  std::vector<Codec> all = {{}};
  for (const Peer& peer : peers()) all.push_back({&peer});
  return all;
}

void add_benchmarks(Cases& cases) {
  const auto add = [&](const std::string& name, auto body) {
    benchmark::RegisterBenchmark(name.c_str(), std::move(body))
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(1)
        ->Repetitions(cases.settings().repeats)
        ->ReportAggregatesOnly();
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string prefix = fmt::format("pair:{}/", i);
    for (const unsigned t : cases.settings().threads) {
      add(fmt::format("{}memcpy/threads:{}", prefix, t),
          [&cases, i, t](benchmark::State& s) { copy_benchmark(s, cases, i, t); });
      add(fmt::format("{}entropy bound/threads:{}", prefix, t),
          [&cases, i, t](benchmark::State& s) { bound_benchmark(s, cases, i, t); });
      add(fmt::format("{}encode and count/threads:{}", prefix, t),
          [&cases, i, t](benchmark::State& s) { counting_benchmark(s, cases, i, t); });
    }
    for (const unsigned t : cases.settings().threads) {
      add(fmt::format("{}{}/apply what is left/threads:{}", prefix, kOurs, t),
          [&cases, i, t](benchmark::State& s) { arriving_benchmark(s, cases, i, t); });
      add(fmt::format("{}{}/decode what is left/threads:{}", prefix, kOurs, t),
          [&cases, i, t](benchmark::State& s) { snapshot_benchmark(s, cases, i, t); });
    }
    if (!cases.settings().program.empty())
      add(fmt::format("{}delta diff", prefix), [&cases, i](benchmark::State& s) { files_benchmark(s, cases, i); });
    for (const Codec& codec : codecs()) {
      for (const Base base : {Base::kKnown, Base::kUnknown}) {
        if (codec.peer && base == Base::kUnknown) continue;
        const std::string suffix = base == Base::kKnown ? "" : ", base digest unknown";
        for (const unsigned t : cases.settings().threads) {
          if (codec.peer && t != cases.settings().threads.front()) continue;  // they use one thread
          add(fmt::format("{}{}/encode{}/threads:{}", prefix, codec.name(), suffix, t),
              [&cases, i, codec, t, base](benchmark::State& s) { encode_benchmark(s, cases, i, codec, t, base); });
          add(fmt::format("{}{}/apply{}/threads:{}", prefix, codec.name(), suffix, t),
              [&cases, i, codec, t, base](benchmark::State& s) { apply_benchmark(s, cases, i, codec, t, base); });
        }
      }
    }
  }
}

FILE* table_file = stdout;

// "12.34 (0.56)": GB/s of dense weights, and its ratio to memcpy with as many threads.
std::string speed(const Case& c, const Times& times, unsigned threads) {
  const auto found = times.find(threads), copy = c.copy_s.find(threads);
  if (found == times.end() || found->second.empty()) return "-";
  const double s = median(found->second);
  const std::string rate = fmt::format("{:.2f}", static_cast<double>(c.pair.cur.total_bytes()) / s / 1e9);
  return copy == c.copy_s.end() ? rate : fmt::format("{} ({:.2f})", rate, median(copy->second) / s);
}

const Times& times_of(const std::map<Base, Times>& all, Base base) {
  static const Times kNone;
  const auto found = all.find(base);
  return found == all.end() ? kNone : found->second;
}

void Cases::print(const Case& c) const {
  const double dense = static_cast<double>(c.pair.cur.total_bytes());
  const delta::EntropyBound& bound = c.bound.total;
  const double changed = static_cast<double>(std::max<std::uint64_t>(1, bound.changed));
  fmt::print(table_file, "\n{}: {:.1f} M elements, {:.1f} MB dense, {} changed ({:.2f} %)", c.pair.name,
             static_cast<double>(bound.elements) / 1e6, dense / 1e6, bound.changed, 100 * bound.density());
  if (c.pair.learning_rate > 0) fmt::print(table_file, ", learning rate {:.2g}", c.pair.learning_rate);
  fmt::print(table_file, "\n");
  if (settings_.describe) fmt::print(table_file, "{}", describe(c.pair));
  double by_tensor = 0;
  for (const delta::TensorEntropy& tensor : c.bound.tensors) by_tensor += tensor.bound.bytes();
  fmt::print(table_file,
             "  bound per change: position {:.2f} bits, step {:.2f} bits; with counts per tensor {:.3f} B\n",
             bound.position_bits / changed, bound.step_bits / changed, by_tensor / changed);

  const std::vector<unsigned>& threads = settings_.threads;
  fmt::print(table_file, "  {:<16} {:>11} {:>8} {:>8} {:>8}", "", "bytes", "B/change", "x dense", "x bound");
  for (const unsigned t : threads) fmt::print(table_file, " {:>13}", fmt::format("encode {}t", t));
  for (const unsigned t : threads) fmt::print(table_file, " {:>13}", fmt::format("apply {}t", t));
  fmt::print(table_file, " {:>9}\n", "peak MB");
  const auto print_line = [&](const std::string& name, double bytes, const Line& line) {
    fmt::print(table_file, "  {:<16} {:>11.0f} {:>8.3f} {:>8.1f} {:>8.2f}", name, bytes, bytes / changed,
               bytes > 0 ? dense / bytes : 0, bound.bytes() > 0 ? bytes / bound.bytes() : 0);
    for (const unsigned t : threads)
      fmt::print(table_file, " {:>13}", speed(c, times_of(line.encode_s, Base::kKnown), t));
    for (const unsigned t : threads)
      fmt::print(table_file, " {:>13}", speed(c, times_of(line.apply_s, Base::kKnown), t));
    fmt::print(table_file, " {:>9}\n",
               line.peak_bytes ? fmt::format("{:.1f}", static_cast<double>(*line.peak_bytes) / 1e6) : "-");
  };
  print_line("entropy bound", bound.bytes(), {});
  for (const Codec& codec : codecs())
    if (const auto line = c.lines.find(codec.name()); line != c.lines.end() && line->second.bytes > 0)
      print_line(codec.name(), static_cast<double>(line->second.bytes), line->second);
  for (const unsigned t : threads) {
    fmt::print(table_file, "  {} thread{}:", t, t == 1 ? "" : "s");
    if (const auto copy = c.copy_s.find(t); copy != c.copy_s.end())
      fmt::print(table_file, " memcpy {:.2f} GB/s;", dense / median(copy->second) / 1e9);
    if (const auto ours = c.lines.find(kOurs); ours != c.lines.end()) {
      const Times& plain = times_of(ours->second.encode_s, Base::kUnknown);
      fmt::print(table_file, " echoline with the base digest unknown: encode {}, apply {}", speed(c, plain, t),
                 speed(c, times_of(ours->second.apply_s, Base::kUnknown), t));
      if (plain.contains(t) && c.bound_s.contains(t) && c.counting_s.contains(t))
        fmt::print(table_file,
                   "; the bound takes {:.2f} of that encoding's time in passing, {:.2f} in a pass of its own",
                   median(c.counting_s.at(t)) / median(plain.at(t)) - 1, median(c.bound_s.at(t)) / median(plain.at(t)));
      const Times& whole = times_of(ours->second.apply_s, Base::kKnown);
      if (whole.contains(t) && c.left_s.contains(t))
        fmt::print(table_file, "; applied as it comes, {:.1f} ms of {:.1f} ms are left after the last 32 KiB",
                   1e3 * median(c.left_s.at(t)), 1e3 * median(whole.at(t)));
      if (c.snapshot_s.contains(t))
        fmt::print(table_file, ", and of a snapshot {:.1f} ms of {:.1f} ms", 1e3 * median(c.snapshot_left_s.at(t)),
                   1e3 * median(c.snapshot_s.at(t)));
    }
    if (c.snapshot_s.contains(t))
      fmt::print(table_file, "\n    a snapshot takes {:.3f} of the weights: encode {}, decode {}",
                 static_cast<double>(c.snapshot_bytes) / dense, speed(c, c.snapshot_encode_s, t),
                 speed(c, c.snapshot_s, t));
    fmt::print(table_file, "\n");
  }
  if (!c.files_diff_s.empty())
    fmt::print(table_file, "  files: cp {:.0f} ms, delta diff {:.0f} ms, {:.2f} of its speed\n",
               1e3 * median(c.files_copy_s), 1e3 * median(c.files_diff_s),
               median(c.files_copy_s) / median(c.files_diff_s));
  std::fflush(table_file);
  if (settings_.ratio_min == 0) return;
  const Line& ours = c.lines.at(kOurs);
  const double copy = median(c.copy_s.at(1));
  for (const auto& [what, times] : {std::pair{"encoding", &ours.encode_s}, std::pair{"applying", &ours.apply_s}})
    if (const double ratio = copy / median(times_of(*times, Base::kKnown).at(1)); ratio < settings_.ratio_min)
      give_up(fail(Code::kInternal, "delta_bench", "{}: {} takes place at {:.3f} of memcpy, expected at least {}",
                   c.pair.name, what, ratio, settings_.ratio_min));
}

// The tables replace one line per repetition. Errors are still shown.
class Quiet : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs)
      if (run.error_occurred) fmt::print(stderr, "{}: {}\n", run.benchmark_name(), run.error_message);
  }
};

// The pairs of the project's targets.
std::vector<PairOptions> standard_cases(const PairOptions& base, const std::string& regime,
                                        const std::vector<double>& percents) {
  std::vector<PairOptions> all;
  const auto add = [&](Regime r, double percent) {
    PairOptions options = base;
    options.regime = r;
    options.density = percent / 100;
    all.push_back(options);
  };
  for (const auto& [name, r] : {std::pair{"pure", Regime::kPureBf16}, std::pair{"master", Regime::kMaster}}) {
    if (regime != name && regime != "both") continue;
    for (const double percent : percents) add(r, percent);
  }
  return all;
}

int run(int argc, char** argv) {
  bool lines_wanted = false;
  for (int i = 1; i < argc; ++i) lines_wanted |= std::string_view(argv[i]).starts_with("--benchmark_format=");
  if (lines_wanted) table_file = stderr;
  benchmark::Initialize(&argc, argv);

  Settings settings;
  PairOptions base;
  double mi_elements = 64, untouched_percent = 0;
  std::string regime = "both";
  std::vector<double> percents = {1.0, 1.44, 3.9};
  bool smoke = false, no_memory = false;
  CLI::App app{"Benchmark of the delta codec; --benchmark_... options are Google Benchmark's"};
  app.add_option("--elements", mi_elements, "size of a pair, in 2^20 elements")->check(CLI::Range(0.01, 4096.0));
  app.add_option("--regime", regime, "pure, master or both")->check(CLI::IsMember({"pure", "master", "both"}));
  app.add_option("--density", percents, "changed elements, percent; several with commas")
      ->delimiter(',')
      ->check(CLI::Range(0.01, 90.0));
  app.add_option("--row-spread", base.row_spread, "sigma of a log-normal factor on each row's updates");
  app.add_option("--untouched", untouched_percent, "rows of the embedding without updates, percent")
      ->check(CLI::Range(0.0, 100.0));
  app.add_option("--seed", base.seed, "seed of the pairs");
  app.add_option("--pair", settings.files, "folder with prev.safetensors and cur.safetensors, or PREV,CUR");
  app.add_option("--threads", settings.threads, "thread counts; several with commas")
      ->delimiter(',')
      ->check(CLI::Range(1u, 256u));
  app.add_option("--repeats", settings.repeats, "measurements of which the median is taken")
      ->check(CLI::Range(1, 1000));
  app.add_flag("--describe", settings.describe, "statistics of each pair");
  app.add_flag("--no-memory", no_memory, "leave out the measurement of the encoder's memory");
  app.add_option("--tensor-elements", base.tensor_elements, "divide tensors into small ones of about so many elements")
      ->check(CLI::Range(64, 1 << 30));
  app.add_option("--program", settings.program, "the program echoline: measure `delta diff` beside cp")
      ->check(CLI::ExistingFile);
  app.add_option("--ratio-min", settings.ratio_min,
                 "fail when encoding or applying on one thread is slower than this part of memcpy, in processor time")
      ->check(CLI::Range(0.0, 10.0));
  app.add_flag("--smoke", smoke, "a tiny pair of each regime, measured once: does it work at all?");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }

  if (smoke) {
    mi_elements = 0.25;
    percents = {1.44};
    settings.repeats = 1;
    settings.describe = true;
  }
  settings.memory = !no_memory;
  by_cpu = settings.ratio_min > 0;
  std::sort(settings.threads.begin(), settings.threads.end());
  base.elements = static_cast<std::uint64_t>(mi_elements * (1 << 20));
  base.untouched_rows = untouched_percent / 100;
  if (settings.files.empty()) settings.cases = standard_cases(base, regime, percents);

  Cases cases(std::move(settings));
  add_benchmarks(cases);
  Quiet quiet;
  const std::size_t ran = benchmark::RunSpecifiedBenchmarks(lines_wanted ? nullptr : &quiet);
  cases.finish();
  benchmark::Shutdown();
  return ran > 0 ? 0 : 1;
}

}  // namespace
}  // namespace echoline::bench

int main(int argc, char** argv) { return echoline::bench::run(argc, argv); }
