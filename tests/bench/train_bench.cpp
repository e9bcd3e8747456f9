// The built-in trainer against the same learner step in eager PyTorch, step by step in turn, and its memory by length.
//
//   train_bench [--groups 4] [--members 8] [--prompt 256] [--response 256] [--steps 5] [--threads 1] [--python
//   /usr/bin/python3] train_bench --lengths 2048,4096,8192,16384 [--eager-max 2048]
//   train_bench --device cuda [--preset qwen3-0.6b] [--groups 8] [--prompt 128] [--response 384] [--steps 4]
//
// Two batches of GRPO, of a Qwen3 of 26 million parameters: rollouts as they come (a shared prompt, lengths that
// differ), and rows of one length without a shared prompt, where neither program has anything to leave out. Loss and
// gradient norm of both programs must agree. With --lengths: one sequence of each length, seconds and how far the
// process grew; the baseline up to --eager-max. With --device: tests/bench/train_on_device.hpp.
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/random.hpp"
#include "delta/safetensors.hpp"
#include "learner/training/trainer.hpp"
#include "model/runtime.hpp"
#include "model/weights.hpp"
#include "tests/bench/measure.hpp"
#include "tests/bench/train_on_device.hpp"

namespace echoline {
namespace {

using bench::must;
using bench::stop;
using nlohmann::json;

struct Size {
  std::int64_t groups = 4, members = 8, prompt = 256, response = 256, layers = 8, hidden = 512, vocabulary = 2048;
  std::int64_t microbatch = 8192;
  bool ragged = true;
};

model::ModelConfig shape(const Size& size) {
  model::ModelConfig c;
  c.vocab_size = size.vocabulary;
  c.hidden_size = size.hidden;
  c.intermediate_size = 3 * size.hidden;
  c.layers = size.layers;
  c.heads = std::max<std::int64_t>(2, size.hidden / 64);
  c.kv_heads = c.heads / 2;
  c.head_dim = 64;
  c.positions_max = 1 << 15;
  c.tie_embeddings = true;
  c.initializer_range = 0.02;
  return c;
}

// Rewards 0 and 1 in turn; response lengths from a quarter to the whole of size.response, or all of it.
std::vector<schema::Trajectory> rollouts(const Size& size) {
  Random random(3);
  const auto token = [&] {
    return static_cast<std::uint32_t>(random.below(static_cast<std::uint64_t>(size.vocabulary)));
  };
  std::vector<schema::Trajectory> batch;
  for (std::int64_t g = 0; g < size.groups; ++g) {
    std::vector<std::uint32_t> prompt;
    for (std::int64_t t = 0; t < size.prompt; ++t) prompt.push_back(token());
    for (std::int64_t m = 0; m < size.members; ++m) {
      schema::Trajectory& t = batch.emplace_back();
      t.set_id(fmt::format("{}-{}", g, m));
      t.set_group(static_cast<std::uint64_t>(g));
      t.set_reward(static_cast<double>(m % 2));
      t.set_finished(true);
      t.mutable_prompt_tokens()->Add(prompt.begin(), prompt.end());
      const std::int64_t length =
          size.ragged ? random.between(std::max<std::int64_t>(1, size.response / 4), size.response) : size.response;
      for (std::int64_t k = 0; k < length; ++k) {
        t.add_response_tokens(token());
        t.add_logprobs(static_cast<float>(-std::log(static_cast<double>(size.vocabulary)) + 0.3 * random.uniform()));
      }
    }
  }
  return batch;
}

// The baseline, a process that makes a step on request.
class Eager {
 public:
  Eager(const std::string& python, const std::filesystem::path& folder, int threads, std::int64_t microbatch) {
    int to[2], from[2];
    if (::pipe(to) != 0 || ::pipe(from) != 0) stop("no pipe");
    pid_ = ::fork();
    if (pid_ < 0) stop("no second process");
    if (pid_ == 0) {
      ::dup2(to[0], 0);
      ::dup2(from[1], 1);
      for (const int fd : {to[0], to[1], from[0], from[1]}) ::close(fd);
      ::setenv("OPENBLAS_NUM_THREADS", std::to_string(threads).c_str(), 1);
      ::setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 1);
      ::execl(python.c_str(), python.c_str(), ECHOLINE_EAGER_TRAINER, folder.c_str(), std::to_string(threads).c_str(),
              std::to_string(microbatch).c_str(), static_cast<char*>(nullptr));
      std::perror(python.c_str());
      ::_exit(127);
    }
    ::close(to[0]);
    ::close(from[1]);
    in_ = ::fdopen(from[0], "r");
    out_ = ::fdopen(to[1], "w");
    torch_ = answer().at("torch");
  }
  ~Eager() {
    std::fclose(out_);
    std::fclose(in_);
    ::waitpid(pid_, nullptr, 0);
  }
  Eager(const Eager&) = delete;
  Eager& operator=(const Eager&) = delete;
  const std::string& torch() const { return torch_; }
  json step() {
    std::fputs("step\n", out_);
    std::fflush(out_);
    return answer();
  }

 private:
  json answer() {
    char line[4096];
    if (!std::fgets(line, sizeof line, in_))
      stop("the baseline ended: it needs Python with torch and numpy (Debian: python3-torch)");
    return json::parse(line);
  }
  pid_t pid_ = 0;
  std::FILE *in_ = nullptr, *out_ = nullptr;
  std::string torch_;
};

double status_bytes(const char* key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key)) return std::stod(line.substr(std::strlen(key))) * 1024;
  return 0;
}

struct Step {
  double seconds = 0, bytes = 0, loss = 0, gradient_norm = 0;
};

// A batch in a folder for the baseline, and a trainer for it.
struct Setup {
  std::vector<schema::Trajectory> batch;
  std::shared_ptr<model::Transformer> policy;
  std::unique_ptr<learner::Trainer> trainer;
  std::int64_t tokens = 0, padded = 0;

  Setup(const Size& size, const std::filesystem::path& folder, bool recompute) : batch(rollouts(size)) {
    policy = must(model::init(shape(size), 1));
    policy->recompute_layers(recompute);
    learner::TrainerConfig config;
    config.loss = *learner::loss_named("dapo");
    config.optimizer.learning_rate = 1e-6;
    config.microbatch_tokens = size.microbatch;
    trainer = must(learner::Trainer::create(policy, config));
    json rows = json::array();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const schema::Trajectory& t = batch[i];
      std::vector<std::uint32_t> all(t.prompt_tokens().begin(), t.prompt_tokens().end());
      all.insert(all.end(), t.response_tokens().begin(), t.response_tokens().end());
      tokens += std::ssize(all);
      // Half of the rewards are 1: the mean is 1/2 and so is the deviation.
      rows.push_back({{"tokens", all},
                      {"prompt", t.prompt_tokens_size()},
                      {"advantage", (t.reward() - 0.5) / (0.5 + 1e-6)},
                      {"logprobs", std::vector<float>(t.logprobs().begin(), t.logprobs().end())}});
    }
    must(make_folders(folder));
    must(write_file_atomic(folder / "batch.json", rows.dump()));
    must(write_file_atomic(folder / "model.json", policy->config().to_json()));
    must(delta::write_safetensors(folder / "model.safetensors", must(model::export_policy(*policy)).view()));
  }

  Step step() {
    std::ofstream("/proc/self/clear_refs") << "5";  // resets the process's high-water mark
    const double before = status_bytes("VmRSS:");
    Step done;
    learner::StepReport report;
    done.seconds = bench::seconds_of([&] { report = must(trainer->step(batch)); });
    done.bytes = status_bytes("VmHWM:") - before;
    done.loss = report.loss;
    done.gradient_norm = report.gradient_norm;
    return done;
  }
};

void check_same(const Step& ours, const json& eager) {
  const double loss = eager.at("loss"), norm = eager.at("gradient_norm");
  if (std::abs(ours.loss - loss) > 1e-4 * std::max(1.0, std::abs(loss)) ||
      std::abs(ours.gradient_norm - norm) > 1e-3 * norm)
    stop(fmt::format("loss {} and gradient norm {} differ from the baseline's {} and {}", ours.loss, ours.gradient_norm,
                     loss, norm));
}

void compare(const char* what, const Size& size, int steps, int threads, const std::string& python,
             const std::filesystem::path& folder) {
  Setup setup(size, folder, false);
  Eager eager(python, folder, threads, size.microbatch);
  std::vector<double> ours, theirs;
  for (int i = 0; i < steps; ++i) {
    const Step step = setup.step();
    const json other = eager.step();
    if (i == 0) check_same(step, other);
    if (i == 0 && steps > 1) continue;  // memory is laid out
    ours.push_back(step.seconds);
    theirs.push_back(other.at("seconds"));
  }
  const double a = bench::median(ours), b = bench::median(theirs);
  fmt::print("{:<38}{:>9}{:>12.0f}{:>12.0f}{:>9.2f}\n", what, setup.tokens, static_cast<double>(setup.tokens) / a,
             static_cast<double>(setup.tokens) / b, b / a);
  std::fflush(stdout);
}

void lengths(const std::vector<std::int64_t>& all, std::int64_t eager_max, const Size& base, int threads,
             bool recompute, const std::string& python, const std::filesystem::path& folder) {
  fmt::print("{:>8}{:>12}{:>14}{:>12}{:>14}\n", "tokens", "seconds", "MB a 1000", "eager: s", "MB a 1000");
  for (const std::int64_t length : all) {
    Size size = base;
    size.groups = 1, size.members = 2, size.prompt = 1, size.response = length, size.ragged = false,
    size.microbatch = 1;
    Setup setup(size, folder, recompute);
    schema::Trajectory& other = setup.batch[0];  // a group needs two; one of them is short
    other.mutable_response_tokens()->Truncate(8), other.mutable_logprobs()->Truncate(8);
    const auto thousand = static_cast<double>(length) / 1000;
    const Step step = setup.step();
    fmt::print("{:>8}{:>12.1f}{:>14.0f}", length, step.seconds, step.bytes / 1e6 / thousand);
    if (length <= eager_max) {
      json rows = json::parse(must(read_file(folder / "batch.json")));
      rows[0]["tokens"].erase(rows[0]["tokens"].begin() + 9, rows[0]["tokens"].end());
      rows[0]["logprobs"].erase(rows[0]["logprobs"].begin() + 8, rows[0]["logprobs"].end());
      must(write_file_atomic(folder / "batch.json", rows.dump()));
      Eager eager(python, folder, threads, size.microbatch);
      const json answer = eager.step();
      check_same(step, answer);
      fmt::print("{:>12.1f}{:>14.0f}", answer.at("seconds").get<double>(),
                 answer.at("bytes").get<double>() / 1e6 / thousand);
    }
    fmt::print("\n");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  using namespace echoline;
  Size size;
  int steps = 5, threads = 1;
  bool smoke = false, recompute = false;
  std::int64_t eager_max = 2048;
  std::vector<std::int64_t> by_length;
  std::string python = "/usr/bin/python3";
  CLI::App app{"The built-in trainer against eager PyTorch"};
  app.add_option("--groups", size.groups);
  app.add_option("--members", size.members, "responses of a group, an even number");
  app.add_option("--prompt", size.prompt, "tokens");
  app.add_option("--response", size.response, "tokens, at most");
  app.add_option("--layers", size.layers);
  app.add_option("--hidden", size.hidden);
  app.add_option("--vocabulary", size.vocabulary);
  app.add_option("--microbatch-tokens", size.microbatch);
  app.add_option("--steps", steps);
  app.add_option("--threads", threads);
  app.add_option("--lengths", by_length)->delimiter(',');
  app.add_option("--eager-max", eager_max, "the longest sequence that the baseline is given");
  app.add_flag("--recompute", recompute, "learner.recompute, with --lengths");
  app.add_option("--python", python);
  app.add_flag("--smoke", smoke);
  bench::OnDevice on_device;
  std::string device;
  bool no_baseline = false, no_kernels = false, no_gradients = false, fp32 = false, unfused = false;
  app.add_option("--device", device, "cuda or cuda:N: a preset's shape on a GPU, beside transformers");
  app.add_option("--preset", on_device.preset, "with --device");
  app.add_flag("--fp32", fp32, "with --device");
  app.add_flag("--int8-moments", on_device.int8_moments, "with --device");
  app.add_flag("--reference", on_device.reference, "with --device: a term of a reference policy");
  app.add_flag("--unfused", unfused, "with --device: by libtorch's kernels alone");
  app.add_flag("--no-baseline", no_baseline, "with --device: without transformers");
  app.add_flag("--no-kernels", no_kernels, "with --device: without names of kernels");
  app.add_flag("--no-gradients", no_gradients, "with --device: without errors of gradients");
  CLI11_PARSE(app, argc, argv);
  if (smoke)
    size = {.groups = 2, .members = 2, .prompt = 8, .response = 12, .layers = 1, .hidden = 64, .vocabulary = 64},
    steps = 2;
  if (!device.empty()) {
    const auto folder = std::filesystem::temp_directory_path() / fmt::format("echoline-train-bench-{}", ::getpid());
    const auto given = [&](const char* name, std::int64_t value, std::int64_t& to) {
      if (app.count(name) > 0) to = value;
    };
    given("--groups", size.groups, on_device.groups);
    given("--members", size.members, on_device.members);
    given("--prompt", size.prompt, on_device.prompt);
    given("--response", size.response, on_device.response);
    given("--microbatch-tokens", size.microbatch, on_device.microbatch);
    if (app.count("--steps") > 0) on_device.steps = steps;
    if (app.count("--python") > 0) on_device.python = python;
    on_device.device = device, on_device.recompute = recompute, on_device.bf16 = !fp32, on_device.fused = !unfused;
    on_device.baseline = !no_baseline, on_device.kernels = !no_kernels, on_device.gradients = !no_gradients;
    bench::train_on_device(on_device, folder);
    std::filesystem::remove_all(folder);
    return 0;
  }
  if (smoke && std::system((python + " -c 'import torch, numpy' 2>/dev/null").c_str()) != 0) {
    fmt::print("{} has no torch: nothing to compare with\n", python);
    return 0;
  }

  model::use_threads(threads);
  model::keep_freed_memory();
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("echoline-train-bench-{}", ::getpid());
  if (!by_length.empty()) {
    lengths(by_length, eager_max, size, threads, recompute, python, folder);
  } else {
    fmt::print("{:<38}{:>9}{:>12}{:>12}{:>9}\n", "tokens a second, padding not counted", "tokens", "echoline", "eager",
               "ratio");
    compare("rollouts of shared prompts, ragged", size, steps, threads, python, folder);
    Size plain = size;
    plain.response += plain.prompt - 1, plain.prompt = 1, plain.ragged = false;
    compare("rows of one length, nothing shared", plain, steps, threads, python, folder);
  }
  std::filesystem::remove_all(folder);
  return 0;
}
