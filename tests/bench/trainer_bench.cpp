// The delays of an external trainer (docs/trainers.md): calls beside clients that stall, and the checks of a policy,
// each beside a baseline in the same process.
#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "learner/external/api.hpp"
#include "learner/external/trainer_link.hpp"
#include "model/finite.hpp"
#include "model/policy.hpp"
#include "model/probe.hpp"
#include "tests/bench/measure.hpp"

namespace echoline {
namespace {

template <class T>
T must(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "trainer_bench: {}\n", result.error().message());
    std::exit(exit_code(result.error().code));
  }
  return std::move(result).value();
}

// Seconds of each of `calls` calls by `clients` clients at once; NaN if one got no answer.
double calls(const std::string& socket, int clients, int count) {
  std::atomic<bool> failed = false;
  const double seconds = bench::seconds_of([&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < clients; ++i)
      threads.emplace_back([&] {
        httplib::Client client(socket, 1);
        client.set_address_family(AF_UNIX);
        client.set_keep_alive(true);
        for (int n = 0; n < count && !failed; ++n)
          if (!client.Get("/v1/status")) failed = true;
      });
    for (std::thread& thread : threads) thread.join();
  });
  return failed ? std::nan("") : seconds;
}

void clients_that_stall(int count) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("trainer_bench_{}", ::getpid());
  const SystemClock clock;
  learner::TrainerLink trainer_link({1, 10, 0}, clock, 0);
  learner::TrainerServerOptions options;
  options.folder = folder;
  const auto api = must(learner::TrainerServer::start(std::move(options), trainer_link));
  const std::string socket = api->address()["socket"];
  calls(socket, 4, count / 10 + 1);
  std::vector<double> alone, beside;
  for (int round = 0; round < 5; ++round) {
    alone.push_back(calls(socket, 4, count));
    std::vector<std::unique_ptr<Descriptor>> stalled;
    for (int i = 0; i < 4; ++i) {
      stalled.push_back(std::make_unique<Descriptor>(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)));
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::strncpy(address.sun_path, socket.c_str(), sizeof address.sun_path - 1);
      const std::string half = "POST /v1/policy/1 HTTP/1.1\r\nContent-Length: 1000\r\n\r\nhalf";
      if (::connect(stalled.back()->get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
          ::send(stalled.back()->get(), half.data(), half.size(), MSG_NOSIGNAL) != std::ssize(half))
        std::exit(1);
    }
    beside.push_back(calls(socket, 4, count));
  }
  const double one = bench::median(alone), other = bench::median(beside);
  fmt::print(
      "4 clients, {} calls each: alone {:.3f} s ({:.0f} calls/s), beside 4 clients that stall in a body {:.3f} s, "
      "ratio {:.2f}\n",
      count, one, 4 * count / one, other, other / one);
  std::filesystem::remove_all(folder);
}

void checks_of_a_policy(const std::string& preset, int rounds) {
  const model::ModelConfig config = must(model::preset(preset));
  delta::OwnedState policy = must(model::init_policy(config, 1)), copy = must(delta::copy_of(policy.view()));
  const delta::StateView view = policy.view();
  std::vector<std::span<std::byte>> to;
  for (std::size_t i = 0; i < copy.size(); ++i) to.push_back(copy.mutable_bytes(i));
  std::vector<double> copied, finite, probed, hashed;
  for (int i = 0; i < rounds; ++i) {
    copied.push_back(bench::seconds_of([&] { bench::copy_dense(view, to, 1); }));
    finite.push_back(bench::seconds_of(
        [&] { must(Result<int>(model::check_finite(view) ? Result<int>(0) : Result<int>(Error{}))); }));
    probed.push_back(bench::seconds_of([&] {
      if (!model::probe_policy(view, config, 1, 1)) std::exit(1);
    }));
    hashed.push_back(bench::seconds_of([&] {
      for (std::size_t t = 0; t < copy.size(); ++t) (void)copy.mutable_bytes(t);
      copy.seal();
      (void)copy.digest();
    }));
  }
  const double gb = static_cast<double>(policy.total_bytes()) / 1e9, base = bench::median(copied);
  fmt::print("{}, {:.3f} GB, one thread\n", preset, gb);
  const auto row = [&](const char* what, std::vector<double> seconds) {
    const double s = bench::median(std::move(seconds));
    fmt::print("  {:<40} {:>8.4f} s {:>7.1f} GB/s {:>6.2f} x a copy\n", what, s, gb / s, s / base);
  };
  row("a copy (baseline)", copied);
  row("its digest, as publishing takes it", hashed);
  row("check_finite", finite);
  row("probe_policy, 64 tokens", probed);
}

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  using namespace echoline;
  bool smoke = false;
  std::string preset = "qwen3-0.6b";
  CLI::App app("The trainer API and the checks of a policy");
  app.add_flag("--smoke", smoke);
  app.add_option("--preset", preset);
  CLI11_PARSE(app, argc, argv);
  clients_that_stall(smoke ? 20 : 2000);
  checks_of_a_policy(smoke ? "tiny-64" : preset, smoke ? 1 : 5);
}
