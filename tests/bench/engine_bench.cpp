// Measures continuous batching of the built-in engine, through its public interface.
//
//   engine_bench [--preset qwen3-0.6b | --layers 8] [--rows 16] [--responses 64] [--median 12] [--sigma 1.22] [--most
//   256]
//
// The same responses are drawn twice, with one set of weights and long-tailed lengths. The first run draws batches of
// `rows` responses, each until its last response has ended. The second run submits all of them at once and lets them
// enter and leave the running batch. Times are processor time of one thread. --smoke runs a tiny case.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>

#include "base/random.hpp"
#include "model/weights.hpp"
#include "tests/delta/in_memory.hpp"
#include "tests/worker/publication.hpp"
#include "worker/engines/builtin.hpp"

namespace echoline {
namespace {

template <class T>
T must(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "engine_bench: {}\n", result.error().message());
    std::exit(exit_code(result.error().code));
  }
  return std::move(result).value();
}
void must(const Status& status) {
  if (status) return;
  fmt::print(stderr, "engine_bench: {}\n", status.error().message());
  std::exit(exit_code(status.error().code));
}

// A model whose steps mostly read weights: a few layers of Qwen3-0.6B and a small vocabulary.
model::ModelConfig shape(std::int64_t layers) {
  model::ModelConfig config = must(model::preset("qwen3-0.6b"));
  config.layers = layers;
  config.vocab_size = 4096;
  config.eos = {};
  return config;
}

struct Lengths {
  double median, sigma;
  std::int64_t most;
};

std::vector<worker::Sequence> responses(std::size_t count, const Lengths& lengths, std::uint64_t seed) {
  Random random(seed);
  std::vector<worker::Sequence> out;
  for (std::uint64_t id = 0; id < count; ++id) {
    const double normal = std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(2 * M_PI * random.uniform());
    const auto tokens = std::llround(lengths.median * std::exp(lengths.sigma * normal));
    worker::Sequence s;
    s.id = id;
    for (model::Token t = 0; t < 6; ++t) s.prompt.push_back(static_cast<model::Token>(10 + (id + 7 * t) % 80));
    s.tokens_max = std::clamp<std::int64_t>(tokens, 1, lengths.most);
    s.seed = id;
    out.push_back(std::move(s));
  }
  return out;
}

struct Drawn {
  double seconds = 0;
  std::map<std::uint64_t, std::size_t> tokens;  // by response
};

// Submits `at_a_time` responses whenever the ones before have ended.
Drawn draw(worker::Engine& engine, const std::vector<worker::Sequence>& all, std::size_t at_a_time) {
  Drawn drawn;
  const std::clock_t begin = std::clock();
  for (std::size_t first = 0; first < all.size(); first += at_a_time) {
    for (std::size_t i = first; i < std::min(all.size(), first + at_a_time); ++i) engine.submit(all[i]);
    while (engine.sequences_in_progress() > 0)
      for (worker::Outcome& outcome : engine.poll(std::chrono::milliseconds(10)))
        drawn.tokens[outcome.id] = must(std::move(outcome.response)).tokens.size();
  }
  drawn.seconds = double(std::clock() - begin) / CLOCKS_PER_SEC;
  return drawn;
}

int run(const model::ModelConfig& config, std::size_t rows, std::size_t count, const Lengths& lengths, int repeats) {
  const auto all = responses(count, lengths, 1);
  const auto engine =
      must(worker::make_builtin_engine({.model = config, .sampling = {}, .ends = {}, .rows_max = rows}));
  {
    delta::OwnedState policy = must(model::init_policy(config, 1));
    const auto snapshot = must(delta::encode_snapshot(policy.view()));
    must(engine->install(worker::publication(1, std::nullopt, snapshot, policy.digest())));
  }
  draw(*engine, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size(), rows))},
       rows);  // warms up
  std::size_t tokens = 0;
  for (const worker::Sequence& s : all) tokens += static_cast<std::size_t>(s.tokens_max);
  fmt::print("{} parameters, {} rows; {} responses of {:.0f} tokens in the mean, {} at most\n", config.parameters(),
             rows, count, double(tokens) / double(count), lengths.most);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const Drawn batches = draw(*engine, all, rows), continuous = draw(*engine, all, all.size());
    for (const worker::Sequence& s : all) {
      const auto want = static_cast<std::size_t>(s.tokens_max);
      if (batches.tokens.at(s.id) == want && continuous.tokens.at(s.id) == want) continue;
      fmt::print(stderr, "engine_bench: response {} has {} and {} tokens, expected {}\n", s.id, batches.tokens.at(s.id),
                 continuous.tokens.at(s.id), want);
      return 1;
    }
    fmt::print("batch after batch {:8.2f} rollouts/s, continuously {:8.2f} rollouts/s ({:.0f} tokens/s): {:.2f} x\n",
               double(count) / batches.seconds, double(count) / continuous.seconds, double(tokens) / continuous.seconds,
               batches.seconds / continuous.seconds);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  using namespace echoline;
  std::string preset;
  std::int64_t layers = 8;
  std::size_t rows = 16, count = 64;
  Lengths lengths{12, 1.22, 256};
  int repeats = 1;
  bool smoke = false;
  CLI::App app{"Responses that enter and leave a running batch, against batch after batch"};
  app.add_option("--preset", preset, "a published shape; absent: a part of Qwen3-0.6B's");
  app.add_option("--layers", layers, "of that part")->check(CLI::Range(1, 28));
  app.add_option("--rows", rows, "drawn at once")->check(CLI::Range(1, 1024));
  app.add_option("--responses", count, "to draw")->check(CLI::Range(1, 1'000'000));
  app.add_option("--median", lengths.median, "of their lengths, tokens")->check(CLI::Range(1.0, 1e5));
  app.add_option("--sigma", lengths.sigma, "of the lengths' logarithms")->check(CLI::Range(0.0, 4.0));
  app.add_option("--most", lengths.most, "tokens of the longest")->check(CLI::Range(1, 30'000));
  app.add_option("--repeats", repeats, "of the comparison")->check(CLI::Range(1, 100));
  app.add_flag("--smoke", smoke, "a tiny shape and few responses");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (smoke) preset = "tiny-64", rows = 4, count = 12, lengths.most = 40;
  model::ModelConfig config = preset.empty() ? shape(layers) : must(model::preset(preset));
  return run(config, rows, count, lengths, repeats);
}
