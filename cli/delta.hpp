// Functions that the subcommands of `echoline delta` share. Private to cli/.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/progress_bar.hpp"
#include "cli/verbs.hpp"
#include "delta/in_place.hpp"
#include "delta/mapped_file.hpp"
#include "delta/patch.hpp"

namespace echoline::cli {

void add_delta_diff(Verb* group, int& exit);
void add_delta_apply(Verb* group, int& exit);
void add_delta_verify(Verb* group, int& exit);
void add_delta_inspect(Verb* group, int& exit);
void add_delta_fold(Verb* group, int& exit);

struct DeltaCommon {
  unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, 256u);
  bool json = false;
};
void add_common(Verb* verb, DeltaCommon& common, bool threads = true);

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// amount / of; 0 when `of` is 0.
inline double per(double amount, double of) { return of > 0 ? amount / of : 0; }
inline double per(std::uint64_t amount, std::uint64_t of) {
  return per(static_cast<double>(amount), static_cast<double>(of));
}

std::string grouped(std::uint64_t number);  // "1,234,567"
std::string percent(double fraction);
std::string rate(std::uint64_t state_bytes, double seconds);  // "0.406 s, 2.65 GB/s of weights"
void line(std::string_view name, const std::string& value);
inline const char* kind_name(bool is_delta) { return is_delta ? "delta" : "snapshot"; }
inline nlohmann::json digest_json(const std::optional<delta::Digest>& digest) {
  return digest ? nlohmann::json(digest->hex()) : nlohmann::json(nullptr);
}

// The same error with the file first and `advice` last.
Error about(Error error, const std::string& file, std::string_view advice = "");
Status check_stop(const std::atomic<bool>& stop);
Result<delta::MappedFile> open_patch(const std::string& path);
Result<delta::PatchInfo> inspect_patch(const delta::MappedFile& file, const std::string& path);
// Says on stderr when it completed an interrupted `apply --in-place`.
Result<delta::SettledCheckpoint> open_checkpoint(const std::string& path, const DeltaCommon& common);
void say_completed(const std::string& path);
// Fails when the output is one of the inputs.
Status check_output(const std::string& output, const std::vector<std::string>& inputs);

// Runs `work` with a progress bar and prints its report as JSON or with `print`. `exit_of` turns the report into the
// exit code.
template <class Arguments, class Work, class Print, class ExitOf>
int report(std::string_view verb, const Arguments& a, Work&& work, Print&& print, ExitOf&& exit_of) {
  ProgressBar bar;
  auto done = work(a, bar);
  bar.clear();
  if (!done) return complain(verb, done.error());
  if (a.common.json) {
    fmt::print("{}\n", to_json(*done).dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  } else {
    print(*done);
  }
  return exit_of(*done);
}
inline constexpr auto kAlwaysDone = [](const auto&) { return 0; };

}  // namespace echoline::cli
