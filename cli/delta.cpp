// echoline delta: makes and applies patches between checkpoints on disk.
#include "cli/delta.hpp"

#include "cli/output.hpp"

namespace echoline::cli {

namespace fs = std::filesystem;

std::string grouped_digits(std::uint64_t number) {
  std::string text = std::to_string(number);
  for (std::size_t position = text.size(); position > 3;) {
    position -= 3;
    text.insert(position, 1, ',');
  }
  return text;
}

std::string percent_text(double fraction) {
  constexpr double kFixedPointMin = 1e-5;  // 0.001 %, the smallest percentage with a digit among three decimals
  return fraction == 0 || fraction >= kFixedPointMin ? fmt::format("{:.3f} %", 100 * fraction)
                                                     : fmt::format("{:.1e} %", 100 * fraction);
}

std::string duration_and_rate(std::uint64_t state_bytes, double seconds) {
  return fmt::format("{:.3f} s, {:.2f} GB/s of weights", seconds,
                     ratio_or_zero(static_cast<double>(state_bytes) / 1e9, seconds));
}

void print_field(std::string_view name, const std::string& value) { fmt::print("{:<18}{}\n", name, value); }

void add_shared_options(Verb* verb, DeltaOptions& common, bool with_threads) {
  if (with_threads)
    verb->add_option("--threads", common.threads, "number of threads; default: one for each processor")
        ->range(1u, 256u);
  verb->add_flag("--json", common.json, "print JSON");
}

Error with_file_and_advice(Error error, const std::string& file, std::string_view advice) {
  error.detail = fmt::format("{}: {}{}", file, error.detail, advice);
  return error;
}

Status check_not_stopped(const std::atomic<bool>& stop) {
  if (stop) return fail(Code::kCancelled, "stopped", "by a signal; nothing was written");
  return ok();
}

Result<delta::MappedFile> open_patch(const std::string& path) {
  auto file = delta::MappedFile::open(path, "open patch");
  if (!file) return as_user_error(std::move(file).error());
  return file;
}

// The size is not limited: inspect() allocates no memory according to the sizes stated in a patch, so false ones do no
// harm.
Result<delta::PatchInfo> inspect_patch(const delta::MappedFile& file, const std::string& path) {
  auto info = delta::inspect(file.bytes(), {.state_bytes_max = UINT64_MAX});
  if (!info)
    return with_file_and_advice(std::move(info).error(), path,
                                ". Fetch it again, or make it again with `echoline delta diff`");
  return info;
}

void report_recovery(const std::string& path) {
  print_stderr("echoline delta: {}: completed an interrupted `apply --in-place`\n", path);
}

Result<delta::LockedCheckpoint> open_checkpoint(const std::string& path, const DeltaOptions& common) {
  ECHO_ASSIGN(delta::LockedCheckpoint checkpoint, delta::LockedCheckpoint::open(path, {.threads = common.threads}));
  if (checkpoint.recovery() == delta::Recovery::kCompleted) report_recovery(path);
  return checkpoint;
}

Status check_output(const std::string& output, const std::vector<std::string>& inputs) {
  std::error_code ignored;  // both functions return false on an error, such as an output that does not exist
  if (fs::is_directory(output, ignored))
    return fail(Code::kInvalid, "write patch", "{} is a folder; -o must name the patch file", output);
  for (const std::string& input : inputs)
    if (fs::equivalent(output, input, ignored))
      return fail(Code::kInvalid, "write patch",
                  "{}: -o names an input, which would be overwritten; choose another name", output);
  return ok();
}

void add_delta(Verb& program, int& exit_code) {
  auto* group =
      program.add_verb("delta", "Lossless patches between checkpoints on disk: diff, apply, verify, inspect, fold");
  group->require_verb();
  group->footer(
      "A checkpoint is a .safetensors file, or a Hugging Face folder with model.safetensors or indexed shards.\n"
      "A patch is a delta (the changes between two checkpoints with the same tensors) or a snapshot (a whole "
      "checkpoint). Both are lossless to the bit and contain the digests of the checkpoints they apply to and "
      "produce.\n"
      "`diff` runs on the machine with both checkpoints, `apply` on the one with the old checkpoint.\n"
      "kB, MB, GB are 10^3, 10^6, 10^9 bytes. Exit codes: 0 done, 1 failed, 2 usage.");
  add_delta_diff(group, exit_code);
  add_delta_apply(group, exit_code);
  add_delta_verify(group, exit_code);
  add_delta_inspect(group, exit_code);
  add_delta_fold(group, exit_code);
}

}  // namespace echoline::cli
