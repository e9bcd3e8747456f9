// Functions and options that the subcommands of `echoline delta` share. Private to cli/.
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

void add_delta_diff(Verb* group, int& exit_code);
void add_delta_apply(Verb* group, int& exit_code);
void add_delta_verify(Verb* group, int& exit_code);
void add_delta_inspect(Verb* group, int& exit_code);
void add_delta_fold(Verb* group, int& exit_code);

// Options of every subcommand.
struct DeltaOptions {
  unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, 256u);
  bool json = false;
};
void add_shared_options(Verb* verb, DeltaOptions& common, bool with_threads = true);

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

inline double ratio_or_zero(double numerator, double denominator) {
  return denominator > 0 ? numerator / denominator : 0;
}
inline double ratio_or_zero(std::uint64_t numerator, std::uint64_t denominator) {
  return ratio_or_zero(static_cast<double>(numerator), static_cast<double>(denominator));
}

std::string grouped_digits(std::uint64_t number);                          // "1,234,567"
std::string percent_text(double fraction);                                 // "1.234 %"
std::string duration_and_rate(std::uint64_t state_bytes, double seconds);  // "0.406 s, 2.65 GB/s of weights"
void print_field(std::string_view name, const std::string& value);
inline const char* kind_name(bool is_delta) { return is_delta ? "delta" : "snapshot"; }
inline nlohmann::json digest_json(const std::optional<delta::Digest>& digest) {
  return digest ? nlohmann::json(digest->hex()) : nlohmann::json(nullptr);
}

// Returns the error with `file` in front of its message and `advice` behind it.
Error with_file_and_advice(Error error, const std::string& file, std::string_view advice = "");
// kCancelled if `stop` is set.
Status check_not_stopped(const std::atomic<bool>& stop);
Result<delta::MappedFile> open_patch(const std::string& path);
Result<delta::PatchInfo> inspect_patch(const delta::MappedFile& file, const std::string& path);
// Opens a checkpoint. If an `apply --in-place` of it was interrupted, completes that first and reports it on stderr.
Result<delta::LockedCheckpoint> open_checkpoint(const std::string& path, const DeltaOptions& common);
void report_recovery(const std::string& path);
// kInvalid if the output is a folder or one of the inputs.
Status check_output(const std::string& output, const std::vector<std::string>& inputs);

// Runs `work` with a progress bar and prints its report as JSON or with `print`. Returns the exit code: of the error,
// or what `exit_code_of` makes of the report.
template <class Arguments, class Work, class Print, class ExitCodeOf>
int run_and_report(std::string_view verb, const Arguments& args, Work&& work, Print&& print,
                   ExitCodeOf&& exit_code_of) {
  ProgressBar bar;
  auto report = work(args, bar);
  bar.clear();
  if (!report) return report_error(verb, report.error());
  if (args.common.json) {
    fmt::print("{}\n", to_json(*report).dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace));
  } else {
    print(*report);
  }
  return exit_code_of(*report);
}
inline constexpr auto kExitZero = [](const auto&) { return 0; };

}  // namespace echoline::cli
