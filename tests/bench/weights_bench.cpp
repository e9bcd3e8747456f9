// The parts of a policy's way between GPUs: DeviceWeights::policy() with its check and encoding in a trainer, and its
// installation on a worker, part after part. The baseline is copies of the same weights in the same run. Without a
// device, it prints that and succeeds; --smoke uses an emulated device.
#include <fmt/format.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <thread>

#include "delta/digest.hpp"
#include "model/device_weights.hpp"
#include "model/finite.hpp"
#include "model/torch.hpp"
#include "model/weights.hpp"
#include "tests/bench/measure.hpp"
#include "tests/delta/in_memory.hpp"
#include "tests/model/on_device.hpp"
#include "tests/worker/publication.hpp"
#include "worker/engines/builtin_installer.hpp"

namespace echoline::bench {
namespace {

struct Settings {
  std::string preset = "qwen3-0.6b";
  std::vector<double> percents{1, 7};
  int repeats = 5;
  std::size_t part_kib = 256;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  bool smoke = false;
};

[[noreturn]] void give_up(const Error& error) {
  fmt::print(stderr, "weights_bench: {}\n", error.message());
  std::exit(1);
}
template <class T>
T must(Result<T> result) {
  if (!result) give_up(result.error());
  return std::move(result).value();
}
void must(const Status& status) {
  if (!status) give_up(status.error());
}

// A model and its weights on a device, emulated in --smoke.
struct OnDevice {
  OnDevice(const Settings& settings, std::uint64_t seed) {
    const model::ModelConfig config = must(model::preset(settings.preset));
    const torch::Device device = settings.smoke ? torch::kCPU : torch::Device(torch::kCUDA, 0);
    model = must(model::create(config, device, torch::kBFloat16));
    torch::NoGradGuard no_gradient;
    torch::manual_seed(seed);
    for (torch::Tensor& weight : model->parameters()) weight.normal_(0, 0.02);
    if (settings.smoke) played.emplace(model);
  }
  model::DeviceWeights attach() {
    if (played) return played->attach();
    auto weights = model::DeviceWeights::of(model);
    if (!weights) give_up(fail(Code::kUnavailable, "attach", "the kernels cannot work on the weights"));
    return std::move(*weights);
  }
  std::shared_ptr<model::Transformer> model;
  std::optional<model::test::OnDevice> played;
};

// Changes about the given number of weights by one step of bf16.
void train(model::Transformer& model, double percent) {
  torch::NoGradGuard no_gradient;
  for (torch::Tensor& weight : model.parameters()) {
    torch::Tensor bits = weight.view(torch::kInt16);
    bits.add_((torch::rand(weight.sizes(), torch::TensorOptions(weight.device())) < percent / 100).to(torch::kInt16));
  }
}

void synchronize(const model::Transformer& model) {
  if (model.device().is_cuda()) torch::cuda::synchronize();
}

class Table {
 public:
  explicit Table(double gigabytes) : gigabytes_(gigabytes) {}
  void row(const std::string& name, const std::vector<double>& times) const {
    const double t = median(times);
    fmt::print("  {:<52} {:>9.2f} ms {:>8.1f} GB/s   [{:.2f} .. {:.2f}]\n", name, 1e3 * t, gigabytes_ / t,
               1e3 * *std::ranges::min_element(times), 1e3 * *std::ranges::max_element(times));
    std::fflush(stdout);
  }

 private:
  double gigabytes_;
};

// Measures copies of all weights.
void copies(const OnDevice& learner, const delta::SharedState& policy, const Settings& settings, const Table& table) {
  torch::NoGradGuard no_gradient;
  const auto parameters = learner.model->parameters();
  std::vector<torch::Tensor> twins;
  for (const torch::Tensor& weight : parameters) twins.push_back(torch::empty_like(weight));
  std::vector<double> within, down, up, host, fresh;
  std::vector<torch::Tensor> pinned;
  const double pinning = seconds_of([&] {
    for (const torch::Tensor& weight : parameters)
      pinned.push_back(torch::empty(
          weight.sizes(), torch::TensorOptions(torch::kBFloat16).pinned_memory(learner.model->device().is_cuda())));
  });
  delta::OwnedState twin = must(delta::copy_of(policy->view()));
  std::vector<std::span<std::byte>> to;
  for (std::size_t i = 0; i < twin.size(); ++i) to.push_back(twin.mutable_bytes(i));
  for (int i = 0; i < settings.repeats; ++i) {
    const auto copy = [&](std::vector<double>& times, const std::vector<torch::Tensor>& from,
                          std::vector<torch::Tensor>& into) {
      synchronize(*learner.model);
      times.push_back(seconds_of([&] {
        for (std::size_t t = 0; t < from.size(); ++t) into[t].copy_(from[t], /*non_blocking=*/true);
        synchronize(*learner.model);
      }));
    };
    copy(within, parameters, twins);
    copy(down, parameters, pinned);
    copy(up, pinned, twins);
    host.push_back(seconds_of([&] { copy_dense(policy->view(), to, settings.threads); }));
    if (i < 2) fresh.push_back(seconds_of([&] { must(delta::copy_of(policy->view())); }));
  }
  table.row("copy on the device", within);
  table.row("copy to pinned memory", down);
  table.row("copy from pinned memory", up);
  table.row(fmt::format("copy on the host, {} threads", settings.threads), host);
  table.row("copy on the host into fresh memory, 1 thread", fresh);
  table.row("pinning", {pinning});
}

struct Publishing {
  delta::SharedState before, now;
  std::vector<std::byte> patch;
  delta::Digest digest;
};

void run(const Settings& settings) {
  OnDevice learner(settings, 1), worker(settings, 2);
  model::DeviceWeights weights = learner.attach();
  delta::SharedState policy;
  synchronize(*learner.model);
  const double first = seconds_of([&] { policy = must(weights.policy()); });
  const double bytes = static_cast<double>(policy->total_bytes());
  const Table table(bytes / 1e9);
  fmt::print("{} in bf16, {:.3f} GB, {} threads, parts of {} KiB; medians of {}\n", settings.preset, bytes / 1e9,
             settings.threads, settings.part_kib, settings.repeats);
  table.row("policy(), the first", {first});
  const double second = seconds_of([&] { (void)must(weights.policy()); });
  table.row("policy(), the second", {second});
  copies(learner, policy, settings, table);

  worker::Installer installer(worker.model, settings.threads, worker.attach());
  delta::Digest digest;
  std::uint64_t version = 1;
  const auto snapshot = must(delta::encode_snapshot(policy->view(), {.threads = settings.threads}));
  digest = must(delta::digest_state(policy->view(), settings.threads));
  const double installing =
      seconds_of([&] { must(installer.install(worker::publication(version, std::nullopt, snapshot, digest))); });
  table.row("worker: a snapshot", {installing});
  const double decoding =
      seconds_of([&] { (void)must(delta::decode_snapshot(snapshot, {.threads = settings.threads})); });
  table.row("of it: decoding", {decoding});

  for (const double percent : settings.percents) {
    std::vector<double> policies, finite, on_device, arriving, install, wholes;
    std::map<unsigned, std::vector<double>> encoding;
    std::size_t patch_bytes = 0;
    for (int i = -1; i < settings.repeats; ++i) {
      train(*learner.model, percent);
      synchronize(*learner.model);
      delta::SharedState next;
      const double policy_s = seconds_of([&] { next = must(weights.policy()); });
      const double finite_s = seconds_of([&] { must(model::check_finite(next->view(), settings.threads)); });
      const double all_finite_s = seconds_of([&] {
        if (!weights.all_finite()) give_up(fail(Code::kInternal, "all_finite", "it finds other values"));
      });
      std::vector<std::byte> patch;
      delta::PatchStats stats;
      for (const unsigned threads : {1u, settings.threads / 2, settings.threads}) {
        if (threads == 1 && i != 0) continue;
        patch.clear();
        const delta::PatchSink sink = [&](std::span<const std::byte> part) {
          patch.insert(patch.end(), part.begin(), part.end());
          return ok();
        };
        const double s = seconds_of([&] {
          stats = must(delta::write_delta(policy->view(), next->view(), sink,
                                          {.threads = std::max(1u, threads), .base = digest}));
        });
        if (i >= 0) encoding[threads].push_back(s);
      }
      patch_bytes = patch.size();
      overlay::Publication publication = worker::publication(version + 1, version, std::move(patch), stats.result);
      publication.id = {std::byte{static_cast<unsigned char>(version)}};
      ++version;
      const overlay::Slice all = *publication.payload.bytes();
      const double arriving_s = seconds_of([&] {
        const std::size_t size = settings.part_kib << 10;
        for (std::size_t at = 0; at < all.size(); at += size)
          installer.decode_part({publication.id, publication.version, publication.base, at,
                                 all.part(at, std::min(size, all.size() - at))});
      });
      const double install_s = seconds_of([&] { must(installer.install(publication)); });
      digest = stats.result;
      policy = std::move(next);
      if (i < 0) continue;
      policies.push_back(policy_s);
      finite.push_back(finite_s);
      on_device.push_back(all_finite_s);
      arriving.push_back(arriving_s);
      install.push_back(install_s);
      wholes.push_back(arriving_s + install_s);
    }
    fmt::print("{} % changed, a delta of {:.1f} MB\n", percent, static_cast<double>(patch_bytes) / 1e6);
    table.row("trainer: policy()", policies);
    table.row("trainer: all_finite(), on the device", on_device);
    table.row("instead: check_finite(), on the host", finite);
    for (const auto& [threads, times] : encoding)
      table.row(fmt::format("trainer: encoding, {} threads", threads), times);
    table.row("worker: arriving parts", arriving);
    table.row("worker: install() of what has arrived", install);
    table.row("worker: both", wholes);
  }
  const delta::OwnedState installed = must(model::export_policy(*worker.model));
  if (must(delta::digest_state(installed.view(), settings.threads)) != digest)
    give_up(fail(Code::kCorrupt, "install", "the worker has another policy than the learner"));
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Benchmark of policies on their way from a GPU to a GPU"};
  app.add_option("--preset", settings.preset, "shape of the model");
  app.add_option("--density", settings.percents, "changed weights, percent")->delimiter(',');
  app.add_option("--repeats", settings.repeats, "measurements of which the median is taken")
      ->check(CLI::Range(1, 1000));
  app.add_option("--part", settings.part_kib, "KiB of a delta that arrive at a time")->check(CLI::Range(1, 1 << 20));
  app.add_option("--threads", settings.threads, "of encoding, and of a worker")->check(CLI::Range(1, 256));
  app.add_flag("--smoke", settings.smoke, "a tiny model, once: does it work at all?");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (settings.smoke) {
    settings.preset = "tiny-64";
    settings.repeats = 1;
    settings.threads = 2;
    settings.part_kib = 1;
  } else if (!torch::cuda::is_available()) {
    fmt::print("no CUDA device: libtorch sees none\n");
    return 0;
  }
  run(settings);
  return 0;
}

}  // namespace
}  // namespace echoline::bench

int main(int argc, char** argv) { return echoline::bench::run(argc, argv); }
