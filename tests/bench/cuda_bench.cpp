// Speed of extraction and application on a CUDA device, against a copy of the same weights on that device in the same
// run. A copy of n bytes reads n and writes n; a comparison of two versions of n bytes reads 2 n; so equal times mean
// equal bandwidth. Without a device it says so and succeeds.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "delta/cuda/device.hpp"
#include "delta/digest.hpp"
#include "tests/bench/measure.hpp"
#include "tests/delta/own_memory.hpp"

namespace echoline::bench {
namespace {

struct Settings {
  double mib = 2048;
  double percent = 1.44;
  int repeats = 9;
  int ordinal = 0;
};

[[noreturn]] void give_up(const Error& error) {
  fmt::print(stderr, "cuda_bench: {}\n", error.message());
  std::exit(1);
}

template <class T>
T must(Result<T> result) {
  if (!result) give_up(result.error());
  return std::move(result).value();
}

// bf16 tensors of about 64 MiB.
delta::OwnedState random_weights(double mib, Random& random) {
  const auto elements = static_cast<std::uint64_t>(mib * (1 << 19));
  const std::uint64_t tensors = elements / (32u << 20) + 1;
  delta::StateView layout;
  for (std::uint64_t t = 0; t < tensors; ++t)
    layout.push_back(
        {fmt::format("layer.{:04}", t), delta::DType::kBF16, {static_cast<std::int64_t>(elements / tensors)}, {}});
  delta::OwnedState state = must(delta::OwnedState::empty_like(layout));
  for (std::size_t t = 0; t < state.size(); ++t) {
    const auto bytes = state.mutable_bytes(t);
    for (std::size_t at = 0; at < bytes.size(); at += 8) {
      const std::uint64_t word = random.next();
      std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, bytes.size() - at));
    }
  }
  state.seal();
  return state;
}

// Changes the lowest bit of each element with probability `share`; gives their number.
std::uint64_t change(delta::OwnedState& state, double share, Random& random) {
  std::uint64_t changed = 0;
  for (std::size_t t = 0; t < state.size() && share > 0; ++t) {
    const auto bytes = state.mutable_bytes(t);
    const auto gap = [&] {  // elements before the next that changes
      return share < 1 ? std::log(1 - random.uniform()) / std::log(1 - share) : 0.0;
    };
    for (double at = std::floor(gap()); 2 * at < static_cast<double>(bytes.size()); at += 1 + std::floor(gap())) {
      bytes[2 * static_cast<std::size_t>(at)] ^= std::byte{1};
      ++changed;
    }
  }
  state.seal();
  return changed;
}

// Seconds of each repetition: on the device, and of the whole call.
struct Times {
  std::vector<double> device_s, call_s;
};

template <class F>
void measure(Times& times, F&& device_s_of) {
  double device_s = 0;
  times.call_s.push_back(seconds_of([&] { device_s = device_s_of(); }));
  times.device_s.push_back(device_s);
}

int run(const Settings& settings) {
  if (const Status available = delta::cuda::device_available(); !available) {
    fmt::print("no CUDA device: {}\n", available.error().message());
    return 0;
  }
  delta::cuda::DeviceOptions options;
  options.ordinal = settings.ordinal;
  delta::cuda::Device device = must(delta::cuda::Device::open(options));

  Random random(1);
  delta::OwnedState host = random_weights(settings.mib, random);
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  const delta::Digest old_digest = host.digest(threads);
  delta::cuda::DeviceState prev = must(device.upload(host.view()));
  const std::uint64_t changed = change(host, settings.percent / 100, random);
  const delta::Digest new_digest = host.digest(threads);
  delta::cuda::DeviceState cur = must(device.upload(host.view()));
  delta::cuda::DeviceState target = must(device.upload(host.view()));
  host = {};

  // The changes are in the host's memory when the sink is called; `keep` copies them.
  const auto extract = [&](const delta::cuda::DeviceState& from, const delta::cuda::DeviceState& to,
                           std::vector<delta::TensorWrite>* keep) {
    const auto stats = must(device.extract(from, to, [&](std::span<const delta::cuda::ChangedPart> parts) {
      for (const delta::cuda::ChangedPart& p : parts)
        if (keep)
          keep->push_back(
              delta::in_own_memory({p.tensor, p.first_byte, p.byte_count, p.element_bytes, false, {}, {}, {}},
                                   {p.positions.begin(), p.positions.end()}, {p.values.begin(), p.values.end()}));
      return ok();
    }));
    if (stats.changed != changed)
      give_up(fail(Code::kInternal, "extract", "found {} changes, there are {}", stats.changed, changed));
    return stats.device_s;
  };

  delta::OwnedState pinned = must(device.pinned_like(prev.layout()));
  Times copying, downloading, uploading, extraction, digests, application;
  std::vector<delta::TensorWrite> writes, back;
  (void)extract(prev, cur, &writes);
  (void)extract(cur, prev, &back);
  for (int i = -1; i < settings.repeats; ++i) {
    Times warm_up;
    const auto to = [&](Times& times) -> Times& { return i < 0 ? warm_up : times; };
    measure(to(copying), [&] { return must(device.copy(prev, target)); });
    measure(to(extraction), [&] { return extract(prev, cur, nullptr); });
    measure(to(downloading), [&] {
      if (const Status done = device.download(prev, pinned); !done) give_up(done.error());
      return 0.0;
    });
    measure(to(uploading), [&] {
      if (const Status done = device.assign(target, pinned.view()); !done) give_up(done.error());
      return 0.0;
    });
    target.forget_leaf_digests();
    measure(to(digests), [&] {
      if (must(device.digest(target)) != old_digest)
        give_up(fail(Code::kCorrupt, "digest", "the device has another one than the CPU"));
      return 0.0;  // not told
    });
    measure(to(application), [&] { return must(device.apply(writes, new_digest, target)).device_s; });
    measure(to(application), [&] { return must(device.apply(back, old_digest, target)).device_s; });
  }

  const auto bytes = static_cast<double>(prev.total_bytes());
  fmt::print("{}: {:.2f} GB of bf16, {} elements changed ({:.2f} %), medians of {}\n", device.name(), bytes / 1e9,
             changed, settings.percent, settings.repeats);
  fmt::print("  GB/s of dense weights (the time of a copy over its own)\n");
  fmt::print("  {:<34} {:>18} {:>18}\n", "", "on the device", "whole call");
  const double copy_s = median(copying.device_s);
  const auto print = [&](const char* name, const Times& times) {
    const auto speed = [&](const std::vector<double>& s) {
      const double m = median(s);
      return m > 0 ? fmt::format("{:.1f} ({:.2f})", bytes / m / 1e9, copy_s / m) : std::string("-");
    };
    fmt::print("  {:<34} {:>18} {:>18}\n", name, speed(times.device_s), speed(times.call_s));
  };
  print("copy on the device", copying);
  print("copy to pinned memory", downloading);
  print("copy from pinned memory", uploading);
  print("extraction", extraction);
  print("digest of everything", digests);
  print("application and verification", application);
  return 0;
}

int run(int argc, char** argv) {
  Settings settings;
  bool smoke = false;
  CLI::App app{"Benchmark of the delta codec's CUDA kernels"};
  app.add_option("--mib", settings.mib, "size of the weights")->check(CLI::Range(0.1, 65536.0));
  app.add_option("--density", settings.percent, "changed elements, percent")->check(CLI::Range(0.0, 100.0));
  app.add_option("--repeats", settings.repeats, "measurements of which the median is taken")
      ->check(CLI::Range(1, 1000));
  app.add_option("--device", settings.ordinal, "number of the device")->check(CLI::Range(0, 1024));
  app.add_flag("--smoke", smoke, "few weights, once: does it work at all?");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (smoke) {
    settings.mib = 8;
    settings.repeats = 1;
  }
  return run(settings);
}

}  // namespace
}  // namespace echoline::bench

int main(int argc, char** argv) { return echoline::bench::run(argc, argv); }
