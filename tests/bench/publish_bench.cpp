// The cost of publishing for a trainer (docs/models.md). Measures the pause of a learner step if the trainer's own
// thread encodes the policy, and if the publisher encodes it beside the next step, in the same process. Also measures
// the cost of a fold of stored deltas against encoding one delta, and the memory of a publisher.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <deque>

#include "base/clock.hpp"
#include "delta/digest.hpp"
#include "learner/publisher.hpp"
#include "tests/bench/measure.hpp"
#include "tests/bench/pairs.hpp"

namespace echoline::bench {
namespace {

using learner::Publisher;
using learner::PublishReport;

struct Settings {
  std::uint64_t mega_elements = 64;
  double density = 1.44;  // percent
  int steps = 8;
  double train_ratio = 2;  // computing of a step, in encodings
  bool smoke = false;
};

std::unique_ptr<overlay::LearnerNode> start_node(const delta::OwnedState& policy) {
  overlay::LearnerOptions options;
  options.run_id = "bench";
  options.policy_bytes = {policy.total_bytes()};
  auto node = overlay::LearnerNode::start(std::move(options), {});
  ECHO_CHECK(node.has_value(), "{}", node ? "" : node.error().message());
  return std::move(*node);
}

// The trainer's policy for a version: a copy of one of the pair's two states, in turn.
delta::SharedState exported(const Pair& pair, int version) {
  auto copy = delta::copy_of((version % 2 == 0 ? pair.prev : pair.cur).view());
  ECHO_CHECK(copy.has_value());
  return delta::share(std::move(*copy));
}

// A thread that computes for the given time.
void train(double time) {
  volatile double sum = 0;
  const SystemClock clock;
  for (const TimePoint end = clock.now() + from_seconds(time); clock.now() < end;)
    for (int i = 0; i < 1000; ++i) sum = sum + i;
}

struct Steps {
  std::vector<double> all, still;  // seconds of a step; for which its computing stood still
};

// The trainer encodes the policy itself, and goes on when all of it has left.
Steps on_the_trainers_thread(const Pair& pair, const Settings& settings, double compute) {
  const auto node = start_node(pair.prev);
  Steps steps;
  delta::SharedState before;
  delta::Digest digest;
  for (int version = 0; version <= settings.steps; ++version) {
    double still = 0;
    const double all = seconds_of([&] {
      train(compute);
      still = seconds_of([&] {
        delta::SharedState policy = exported(pair, version);
        overlay::PublicationHead head;
        head.version = Version{static_cast<std::uint64_t>(version)};
        delta::EncodeOptions encoding;
        if (before)
          head.base = Version{head.version.value - 1}, head.base_digest = digest.bytes, encoding.base = digest;
        const auto writer = node->begin(head).value();
        const delta::PatchSink sink = [&](std::span<const std::byte> bytes) { return writer->write(bytes); };
        const auto stats = before ? delta::write_delta(before->view(), policy->view(), sink, encoding)
                                  : delta::write_snapshot(policy->view(), sink, encoding);
        ECHO_CHECK(stats.has_value() && writer->finish(stats->result.bytes).has_value());
        digest = stats->result;
        before = std::move(policy);
      });
    });
    if (version == 0) continue;
    steps.all.push_back(all);
    steps.still.push_back(still);
  }
  node->stop();
  return steps;
}

Steps on_the_publishers_thread(const Pair& pair, const Settings& settings, double compute,
                               std::vector<PublishReport>* reports) {
  const auto node = start_node(pair.prev);
  Publisher publisher({}, {{}, [&](const PublishReport& report) {
                             if (reports) reports->push_back(report);
                           }});
  publisher.attach(node.get());
  const auto settle = [&] {
    while (!publisher.wait_until_published(std::chrono::seconds(1)).value()) {
    }
  };
  Steps steps;
  for (int version = 0; version <= settings.steps; ++version) {
    double still = 0;
    const double all = seconds_of([&] {
      train(compute);
      still = seconds_of([&] {
        settle();
        publisher.publish(Version{static_cast<std::uint64_t>(version)}, exported(pair, version));
      });
    });
    if (version == 0) {
      settle();
      continue;
    }
    steps.all.push_back(all);
    steps.still.push_back(still);
  }
  settle();
  publisher.stop();
  node->stop();
  return steps;
}

void measure(const Settings& settings) {
  PairOptions options;
  options.elements = settings.smoke ? 1 << 20 : settings.mega_elements << 20;
  options.density = settings.density / 100;
  const Pair pair = make_pair(options).value();
  const auto bytes = static_cast<double>(pair.prev.total_bytes());
  fmt::print("a policy of {:.1f} MB, {} % of it changed in every step; one thread encodes\n\n", bytes / 1e6,
             settings.density);

  // Runs in a forked child, before the process has threads.
  Settings few = settings;
  few.steps = 4;
  std::uint64_t stored = 0;
  {
    delta::PatchSink count = [&](std::span<const std::byte> piece) {
      stored += piece.size();
      return ok();
    };
    ECHO_CHECK(delta::write_snapshot(pair.prev.view(), count).has_value());
    for (int step = 0; step < few.steps; ++step)
      ECHO_CHECK((step % 2 == 0 ? delta::write_delta(pair.prev.view(), pair.cur.view(), count)
                                : delta::write_delta(pair.cur.view(), pair.prev.view(), count))
                     .has_value());
  }
  const auto peak = peak_bytes_beyond_now([&] { on_the_publishers_thread(pair, few, 0, nullptr); });

  std::vector<double> encodings;
  std::vector<std::byte> delta, back;
  const auto keep = [](std::vector<std::byte>& all) {
    return [&all](std::span<const std::byte> piece) {
      all.insert(all.end(), piece.begin(), piece.end());
      return ok();
    };
  };
  delta::EncodeOptions known;
  for (int i = 0; i < 5; ++i) {
    delta.clear();
    known.base = delta::digest_state(pair.prev.view()).value();
    encodings.push_back(seconds_of(
        [&] { ECHO_CHECK(delta::write_delta(pair.prev.view(), pair.cur.view(), keep(delta), known).has_value()); }));
  }
  const double encoding = median(encodings);
  const double compute = settings.train_ratio * encoding;
  std::vector<PublishReport> reports;
  const Steps before = on_the_trainers_thread(pair, settings, compute);
  const Steps beside = on_the_publishers_thread(pair, settings, compute, &reports);
  fmt::print("{:<34} {:>9} {:>15} {:>14}\n", "publishing", "step, s", "stands still, s", "of the step");
  for (const auto& [name, steps] : {std::pair("on the trainer's thread", &before), std::pair("beside it", &beside)})
    fmt::print("{:<34} {:>9.4f} {:>15.4f} {:>12.1f} %\n", name, median(steps->all), median(steps->still),
               100 * median(steps->still) / median(steps->all));
  std::vector<double> exports;
  for (int i = 0; i < 5; ++i) exports.push_back(seconds_of([&] { exported(pair, i); }));
  fmt::print("copying the policy, which both do, takes {:.4f} s\n", median(exports));

  ECHO_CHECK(delta::write_delta(pair.cur.view(), pair.prev.view(), keep(back)).has_value());
  const std::vector<std::span<const std::byte>> parts{delta, back, delta, back};
  std::vector<double> folds;
  std::uint64_t folded = 0;
  for (int i = 0; i < 5; ++i)
    folds.push_back(seconds_of([&] {
      folded = delta::fold_deltas(parts, [](std::span<const std::byte>) { return ok(); }).value().patch_bytes;
    }));
  fmt::print(
      "\nfor a late worker: folding {} stored deltas takes {:.4f} s, encoding one delta {:.4f} s ({:.3f} of it); the "
      "fold has {:.3f} of their bytes\n",
      parts.size(), median(folds), encoding, median(folds) / encoding,
      static_cast<double>(folded) / static_cast<double>(2 * (delta.size() + back.size())));
  if (peak)
    fmt::print("memory beyond the trainer's: {:.2f} policies at most, of which {:.2f} are stored publications\n",
               static_cast<double>(*peak) / bytes, static_cast<double>(stored) / bytes);
}

}  // namespace
}  // namespace echoline::bench

int main(int argc, char** argv) {
  CLI::App app("The cost of publishing for a trainer");
  echoline::bench::Settings settings;
  app.add_option("--elements", settings.mega_elements, "of the policy, in 2^20")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--density", settings.density, "changed in every step, in percent")
      ->check(CLI::Range(0.1, 50.0))
      ->capture_default_str();
  app.add_option("--steps", settings.steps, "learner steps")->check(CLI::Range(2, 1000))->capture_default_str();
  app.add_option("--train-ratio", settings.train_ratio, "computing of a step, in encodings")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  app.add_flag("--smoke", settings.smoke, "only something small, to see that it works");
  CLI11_PARSE(app, argc, argv);
  echoline::bench::measure(settings);
}
