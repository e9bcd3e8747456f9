// echoline delta diff and fold: make patches. A patch is a delta between two checkpoints or a snapshot of one.
#include <optional>

#include "cli/delta.hpp"
#include "cli/signals.hpp"
#include "delta/known_leaves.hpp"
#include "delta/pending_file.hpp"

namespace echoline::cli {
namespace {

using delta::LockedCheckpoint;
using delta::MappedFile;
using nlohmann::json;

// ---- diff ----

struct DiffArguments {
  DeltaOptions common;
  std::string prev, cur, output;  // prev is empty when only one checkpoint is named
  bool snapshot = false;
};

struct DiffReport {
  delta::PatchStats stats;
  double encode_seconds = 0, apply_seconds = 0;
};

Result<DiffReport> diff(const DiffArguments& args, ProgressBar& bar) {
  const std::atomic<bool>& stop = stop_on_signals();
  if (!args.snapshot && args.prev.empty())
    return fail(Code::kInvalid, "arguments",
                "expected PREV and CUR, found only {}. Use --snapshot for a patch that contains a whole checkpoint",
                args.cur);
  std::optional<LockedCheckpoint> prev;
  if (!args.snapshot) {
    ECHO_ASSIGN(prev, open_checkpoint(args.prev, args.common));
  }
  ECHO_ASSIGN(const LockedCheckpoint cur, open_checkpoint(args.cur, args.common));
  std::vector<std::string> inputs;  // files that the output must not replace
  for (std::size_t i = 0; prev && i < (*prev)->file_count(); ++i) inputs.push_back((*prev)->file_path(i));
  for (std::size_t i = 0; i < cur->file_count(); ++i) inputs.push_back(cur->file_path(i));
  ECHO_TRY(check_output(args.output, inputs));

  DiffReport report;
  delta::PendingFile file(args.output, "write patch");
  const auto sink = [&](std::span<const std::byte> bytes) -> Status {
    ECHO_TRY(check_not_stopped(stop));
    return file.write(bytes);
  };
  delta::LeafDigests prev_leaves;  // PREV's digests from the encoding, so that the proof need not compute them again
  const delta::EncodeOptions encode{
      .threads = args.common.threads, .base = {}, .progress = bar.callback(), .count_entropy = true};
  bar.begin("encoding");
  const Stopwatch encoding;
  auto stats = prev ? delta::write_delta((*prev)->view(), cur->view(), sink, encode, &prev_leaves)
                    : delta::write_snapshot(cur->view(), sink, encode);
  if (!stats) {
    // kInvalid: the checkpoints have different tensors, so no delta between them is possible.
    if (stats.error().code != Code::kInvalid) return as_user_error(std::move(stats).error());
    return with_file_and_advice(std::move(stats).error(), prev ? args.prev + " and " + args.cur : args.cur,
                                prev ? " (--snapshot makes one)" : "");
  }
  report.stats = *stats;
  report.encode_seconds = encoding.seconds();

  // The patch is proven before it gets its name: it is read back and applied without writing the result, and the digest
  // of the result is compared.
  ECHO_ASSIGN(const MappedFile patch, MappedFile::open(file.temporary()));
  const delta::DecodeOptions decode{
      .state_bytes_max = UINT64_MAX, .threads = args.common.threads, .progress = bar.callback()};
  bar.begin("proving");
  const Stopwatch applying;
  if (prev) {
    const auto discard = [&](delta::TensorWrite&&) { return check_not_stopped(stop); };
    ECHO_TRY(delta::resolve_delta(patch.bytes(), (*prev)->view(), std::move(prev_leaves), discard, decode));
  } else {
    ECHO_TRY(delta::decode_snapshot(patch.bytes(), decode));
  }
  report.apply_seconds = applying.seconds();
  ECHO_TRY(check_not_stopped(stop));
  ECHO_TRY(file.commit());
  return report;
}

void print_report(const DiffReport& report, const std::string& output) {
  const delta::PatchStats& stats = report.stats;
  print_field("patch", fmt::format("{} ({})", output, kind_name(stats.base.has_value())));
  print_field("elements", grouped_digits(stats.elements));
  print_field("changed", fmt::format("{} ({})", grouped_digits(stats.changed), percent_text(stats.density())));
  print_field("payload",
              fmt::format("{} bytes, {:.2f} times less than the {} of the weights", grouped_digits(stats.patch_bytes),
                          stats.compression_ratio(), to_text(Bytes{stats.state_bytes})));
  if (stats.base && stats.changed > 0)
    print_field("per change", fmt::format("{:.3f} bytes", ratio_or_zero(stats.patch_bytes, stats.changed)));
  if (stats.entropy) {
    const double bound_bytes = stats.entropy->bytes();
    print_field(
        "entropy bound",
        fmt::format("{} bytes{}", grouped_digits(static_cast<std::uint64_t>(bound_bytes)),
                    bound_bytes > 0 ? fmt::format("; the payload is {:.1f} % above it",
                                                  100 * (static_cast<double>(stats.patch_bytes) / bound_bytes - 1))
                                    : ""));
  }
  print_field("encoded in", duration_and_rate(stats.state_bytes, report.encode_seconds));
  print_field("proven in", duration_and_rate(stats.state_bytes, report.apply_seconds));
  if (stats.base) print_field("base", stats.base->hex());
  print_field("result", stats.result.hex());
}

json to_json(const DiffReport& report) {
  const delta::PatchStats& stats = report.stats;
  const auto value_if = [](bool is_known, double value) { return is_known ? json(value) : json(nullptr); };
  return {{"schema_version", 1},
          {"kind", kind_name(stats.base.has_value())},
          {"elements", stats.elements},
          {"changed", stats.changed},
          {"density", stats.density()},
          {"state_bytes", stats.state_bytes},
          {"payload_bytes", stats.patch_bytes},
          {"ratio", stats.compression_ratio()},
          {"bytes_per_change", value_if(stats.changed > 0, ratio_or_zero(stats.patch_bytes, stats.changed))},
          {"entropy_bound_bytes", value_if(stats.entropy.has_value(), stats.entropy ? stats.entropy->bytes() : 0)},
          {"encode_seconds", report.encode_seconds},
          {"apply_seconds", report.apply_seconds},
          {"base_digest", digest_json(stats.base)},
          {"result_digest", stats.result.hex()}};
}

// ---- fold ----

struct FoldArguments {
  DeltaOptions common;
  std::vector<std::string> patches;
  std::string output, base;
};

struct FoldReport {
  delta::PatchStats stats;
  std::uint64_t parts_bytes = 0;  // sum of the sizes of the folded patches
  double seconds = 0;
};

Result<FoldReport> fold(const FoldArguments& args, ProgressBar& bar) {
  const std::atomic<bool>& stop = stop_on_signals();
  std::vector<MappedFile> files;  // keep the bytes of `patches`
  std::vector<std::span<const std::byte>> patches;
  FoldReport report;
  for (const std::string& path : args.patches) {
    ECHO_ASSIGN(MappedFile file, open_patch(path));
    ECHO_TRY(inspect_patch(file, path));  // for its checks only
    report.parts_bytes += file.bytes().size();
    patches.push_back(file.bytes());
    files.push_back(std::move(file));
  }
  ECHO_TRY(check_output(args.output, args.patches));
  std::optional<LockedCheckpoint> base;
  if (!args.base.empty()) {
    ECHO_ASSIGN(base, open_checkpoint(args.base, args.common));
  }

  delta::PendingFile file(args.output, "write patch");
  const auto sink = [&](std::span<const std::byte> bytes) -> Status {
    ECHO_TRY(check_not_stopped(stop));
    return file.write(bytes);
  };
  bar.begin("folding");
  const Stopwatch folding;
  const delta::EncodeOptions encode{.threads = args.common.threads, .base = {}, .progress = bar.callback()};
  // kStale: the base is not the checkpoint that the first delta applies to.
  auto stats = delta::fold_deltas(patches, sink, base ? &(*base)->view() : nullptr, encode);
  if (!stats)
    return stats.error().code == Code::kStale ? with_file_and_advice(std::move(stats).error(), args.base)
                                              : as_user_error(std::move(stats).error());
  report.stats = *stats;
  report.seconds = folding.seconds();

  // Proven like a diff. Without the base, only the patch's own checksums can be checked.
  ECHO_ASSIGN(const MappedFile patch, MappedFile::open(file.temporary()));
  if (base) {
    bar.begin("proving");
    const auto discard = [&](delta::TensorWrite&&) { return check_not_stopped(stop); };
    ECHO_TRY(delta::resolve_delta(patch.bytes(), (*base)->view(), discard,
                                  {.threads = args.common.threads, .progress = bar.callback()}));
  } else {
    ECHO_TRY(inspect_patch(patch, args.output));
  }
  ECHO_TRY(check_not_stopped(stop));
  ECHO_TRY(file.commit());
  return report;
}

void print_report(const FoldReport& report, const FoldArguments& args) {
  print_field("patch", fmt::format("{} ({} deltas in one)", args.output, args.patches.size()));
  print_field("changed",
              fmt::format("{}{}", grouped_digits(report.stats.changed),
                          args.base.empty() ? ", counting an element once for each delta that changes it" : ""));
  print_field("size", fmt::format("{} bytes; the deltas together have {}", grouped_digits(report.stats.patch_bytes),
                                  grouped_digits(report.parts_bytes)));
  print_field("took", fmt::format("{:.3f} s", report.seconds));
  print_field("base", report.stats.base->hex());
  print_field("result", report.stats.result.hex());
}

json to_json(const FoldReport& report) {
  return {{"schema_version", 1},
          {"changed", report.stats.changed},
          {"elements", report.stats.elements},
          {"payload_bytes", report.stats.patch_bytes},
          {"parts_bytes", report.parts_bytes},
          {"seconds", report.seconds},
          {"base_digest", report.stats.base->hex()},
          {"result_digest", report.stats.result.hex()}};
}

}  // namespace

void add_delta_diff(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("diff", "Write the patch that turns checkpoint PREV into checkpoint CUR");
  auto args = std::make_shared<DiffArguments>();
  verb->add_option("PREV", args->prev, "the old checkpoint: a .safetensors file or a Hugging Face folder")->required();
  verb->add_option("CUR", args->cur, "the new checkpoint, with the same tensors");
  verb->add_option("-o,--output", args->output, "the patch; an existing file is replaced")->required();
  verb->add_flag("--snapshot", args->snapshot, "store all of CUR, for receivers without PREV; PREV can be left out");
  add_shared_options(verb, args->common);
  verb->footer(
      "Reading the report:\n"
      "  elements, changed   all weights, and those whose bits differ; density is\n"
      "                      their ratio\n"
      "  payload             bytes of the patch, which a receiver must be sent\n"
      "  entropy bound       bytes of an ideal coder that knows how often, and by how\n"
      "                      much, weights of each magnitude change (delta/entropy.hpp);\n"
      "                      if rows differ, fewer bytes are possible\n"
      "  GB/s                10^9 bytes of dense weights per second, whatever the size\n"
      "                      of the patch\n"
      "Before the patch gets its name, it is read back and applied to PREV without writing anything, and the "
      "digest of the result is compared. \"proven in\" (JSON: apply_seconds) is the time of this check. A snapshot "
      "is decoded in memory instead.");
  verb->callback([args, &exit_code] {
    if (args->cur.empty()) std::swap(args->prev, args->cur);  // a single positional argument is CUR
    exit_code = run_and_report(
        "delta diff", *args, diff, [&](const DiffReport& report) { print_report(report, args->output); }, kExitZero);
  });
}

void add_delta_fold(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("fold", "Combine consecutive deltas into one");
  auto args = std::make_shared<FoldArguments>();
  verb->add_option("PATCHES", args->patches, "deltas, oldest first")->required()->value_count(1, 4096);
  verb->add_option("-o,--output", args->output, "the patch; an existing file is replaced")->required();
  verb->add_option("--base", args->base,
                   "the checkpoint that the first delta applies to; makes the result as small as a direct delta");
  add_shared_options(verb, args->common);
  verb->footer(
      "Without --base, no weights are needed: the result contains the deltas side by side, is about as long as all "
      "together, and is applied in one pass. With --base, the changes are added up and encoded again, and the result "
      "is checked against the checkpoint.");
  verb->callback([args, &exit_code] {
    exit_code = run_and_report(
        "delta fold", *args, fold, [&](const FoldReport& report) { print_report(report, *args); }, kExitZero);
  });
}

}  // namespace echoline::cli
