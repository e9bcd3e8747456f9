// echoline delta diff and fold: make patches.
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

Result<DiffReport> diff(const DiffArguments& a, ProgressBar& bar) {
  const std::atomic<bool>& stop = stop_on_signals();
  if (!a.snapshot && a.prev.empty())
    return fail(Code::kInvalid, "arguments",
                "expected PREV and CUR, found only {}. Use --snapshot for a patch that contains a whole checkpoint",
                a.cur);
  std::optional<LockedCheckpoint> prev;
  if (!a.snapshot) {
    ECHO_ASSIGN(prev, open_checkpoint(a.prev, a.common));
  }
  ECHO_ASSIGN(const LockedCheckpoint cur, open_checkpoint(a.cur, a.common));
  std::vector<std::string> inputs;
  for (std::size_t i = 0; prev && i < (*prev)->file_count(); ++i) inputs.push_back((*prev)->file_path(i));
  for (std::size_t i = 0; i < cur->file_count(); ++i) inputs.push_back(cur->file_path(i));
  ECHO_TRY(check_output(a.output, inputs));

  DiffReport report;
  delta::PendingFile file(a.output, "write patch");
  const auto sink = [&](std::span<const std::byte> bytes) -> Status {
    ECHO_TRY(check_stop(stop));
    return file.write(bytes);
  };
  delta::LeafDigests prev_leaves;
  const delta::EncodeOptions encode{
      .threads = a.common.threads, .base = {}, .progress = bar.callback(), .count_entropy = true};
  bar.begin("encoding");
  const Stopwatch encoding;
  auto stats = prev ? delta::write_delta((*prev)->view(), cur->view(), sink, encode, &prev_leaves)
                    : delta::write_snapshot(cur->view(), sink, encode);
  if (!stats) {
    if (stats.error().code != Code::kInvalid) return as_mistake(std::move(stats).error());
    return with_file_and_advice(std::move(stats).error(), prev ? a.prev + " and " + a.cur : a.cur,
                                prev ? " (--snapshot makes one)" : "");
  }
  report.stats = *stats;
  report.encode_seconds = encoding.seconds();

  // The patch is proven before it gets its name: it is read back and applied without writing the result.
  ECHO_ASSIGN(const MappedFile patch, MappedFile::open(file.temporary()));
  const delta::DecodeOptions decode{
      .state_bytes_max = UINT64_MAX, .threads = a.common.threads, .progress = bar.callback()};
  bar.begin("proving");
  const Stopwatch applying;
  if (prev) {
    const auto discard = [&](delta::TensorWrite&&) { return check_stop(stop); };
    ECHO_TRY(delta::resolve_delta(patch.bytes(), (*prev)->view(), std::move(prev_leaves), discard, decode));
  } else {
    ECHO_TRY(delta::decode_snapshot(patch.bytes(), decode));
  }
  report.apply_seconds = applying.seconds();
  ECHO_TRY(check_stop(stop));
  ECHO_TRY(file.commit());
  return report;
}

void print_report(const DiffReport& r, const std::string& output) {
  const delta::PatchStats& s = r.stats;
  print_field("patch", fmt::format("{} ({})", output, kind_name(s.base.has_value())));
  print_field("elements", grouped(s.elements));
  print_field("changed", fmt::format("{} ({})", grouped(s.changed), percent(s.density())));
  print_field("payload", fmt::format("{} bytes, {:.2f} times less than the {} of the weights", grouped(s.patch_bytes),
                                     s.compression_ratio(), to_text(Bytes{s.state_bytes})));
  if (s.base && s.changed > 0)
    print_field("per change", fmt::format("{:.3f} bytes", ratio_or_zero(s.patch_bytes, s.changed)));
  if (s.entropy) {
    const double bound_bytes = s.entropy->bytes();
    print_field("entropy bound",
                fmt::format("{} bytes{}", grouped(static_cast<std::uint64_t>(bound_bytes)),
                            bound_bytes > 0 ? fmt::format("; the payload is {:.1f} % above it",
                                                          100 * (static_cast<double>(s.patch_bytes) / bound_bytes - 1))
                                            : ""));
  }
  print_field("encoded in", duration_and_rate(s.state_bytes, r.encode_seconds));
  print_field("proven in", duration_and_rate(s.state_bytes, r.apply_seconds));
  if (s.base) print_field("base", s.base->hex());
  print_field("result", s.result.hex());
}

json to_json(const DiffReport& r) {
  const delta::PatchStats& s = r.stats;
  const auto value_if = [](bool is_known, double value) { return is_known ? json(value) : json(nullptr); };
  return {{"schema_version", 1},
          {"kind", kind_name(s.base.has_value())},
          {"elements", s.elements},
          {"changed", s.changed},
          {"density", s.density()},
          {"state_bytes", s.state_bytes},
          {"payload_bytes", s.patch_bytes},
          {"ratio", s.compression_ratio()},
          {"bytes_per_change", value_if(s.changed > 0, ratio_or_zero(s.patch_bytes, s.changed))},
          {"entropy_bound_bytes", value_if(s.entropy.has_value(), s.entropy ? s.entropy->bytes() : 0)},
          {"encode_seconds", r.encode_seconds},
          {"apply_seconds", r.apply_seconds},
          {"base_digest", digest_json(s.base)},
          {"result_digest", s.result.hex()}};
}

// ---- fold ----

struct FoldArguments {
  DeltaOptions common;
  std::vector<std::string> patches;
  std::string output, base;
};

struct FoldReport {
  delta::PatchStats stats;
  std::uint64_t parts_bytes = 0;
  double seconds = 0;
};

Result<FoldReport> fold(const FoldArguments& a, ProgressBar& bar) {
  const std::atomic<bool>& stop = stop_on_signals();
  std::vector<MappedFile> files;
  std::vector<std::span<const std::byte>> patches;
  FoldReport report;
  for (const std::string& path : a.patches) {
    ECHO_ASSIGN(MappedFile file, open_patch(path));
    ECHO_TRY(inspect_patch(file, path));
    report.parts_bytes += file.bytes().size();
    patches.push_back(file.bytes());
    files.push_back(std::move(file));
  }
  ECHO_TRY(check_output(a.output, a.patches));
  std::optional<LockedCheckpoint> base;
  if (!a.base.empty()) {
    ECHO_ASSIGN(base, open_checkpoint(a.base, a.common));
  }

  delta::PendingFile file(a.output, "write patch");
  const auto sink = [&](std::span<const std::byte> bytes) -> Status {
    ECHO_TRY(check_stop(stop));
    return file.write(bytes);
  };
  bar.begin("folding");
  const Stopwatch folding;
  const delta::EncodeOptions encode{.threads = a.common.threads, .base = {}, .progress = bar.callback()};
  auto stats = delta::fold_deltas(patches, sink, base ? &(*base)->view() : nullptr, encode);
  if (!stats)
    return stats.error().code == Code::kStale ? with_file_and_advice(std::move(stats).error(), a.base)
                                              : as_mistake(std::move(stats).error());
  report.stats = *stats;
  report.seconds = folding.seconds();

  ECHO_ASSIGN(const MappedFile patch, MappedFile::open(file.temporary()));
  if (base) {
    bar.begin("proving");
    const auto discard = [&](delta::TensorWrite&&) { return check_stop(stop); };
    ECHO_TRY(delta::resolve_delta(patch.bytes(), (*base)->view(), discard,
                                  {.threads = a.common.threads, .progress = bar.callback()}));
  } else {
    ECHO_TRY(inspect_patch(patch, a.output));
  }
  ECHO_TRY(check_stop(stop));
  ECHO_TRY(file.commit());
  return report;
}

void print_report(const FoldReport& r, const FoldArguments& a) {
  print_field("patch", fmt::format("{} ({} deltas in one)", a.output, a.patches.size()));
  print_field("changed",
              fmt::format("{}{}", grouped(r.stats.changed),
                          a.base.empty() ? ", counting an element once for each delta that changes it" : ""));
  print_field("size", fmt::format("{} bytes; the deltas together have {}", grouped(r.stats.patch_bytes),
                                  grouped(r.parts_bytes)));
  print_field("took", fmt::format("{:.3f} s", r.seconds));
  print_field("base", r.stats.base->hex());
  print_field("result", r.stats.result.hex());
}

json to_json(const FoldReport& r) {
  return {{"schema_version", 1},
          {"changed", r.stats.changed},
          {"elements", r.stats.elements},
          {"payload_bytes", r.stats.patch_bytes},
          {"parts_bytes", r.parts_bytes},
          {"seconds", r.seconds},
          {"base_digest", r.stats.base->hex()},
          {"result_digest", r.stats.result.hex()}};
}

}  // namespace

void add_delta_diff(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("diff", "Write the patch that turns checkpoint PREV into checkpoint CUR");
  auto a = std::make_shared<DiffArguments>();
  verb->add_option("PREV", a->prev, "the old checkpoint: a .safetensors file or a Hugging Face folder")->required();
  verb->add_option("CUR", a->cur, "the new checkpoint, with the same tensors");
  verb->add_option("-o,--output", a->output, "the patch; an existing file is replaced")->required();
  verb->add_flag("--snapshot", a->snapshot, "store all of CUR, for receivers without PREV; PREV can be left out");
  add_shared_options(verb, a->common);
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
      "is decoded in memory instead.\n"
      "Examples:\n"
      "  echoline delta diff step-100.safetensors step-101.safetensors -o 101.patch\n"
      "  echoline delta diff qwen3-8b/ qwen3-8b-tuned/ -o tuned.patch --json\n"
      "  echoline delta diff qwen3-8b/ -o whole.patch --snapshot");
  verb->callback([a, &exit_code] {
    if (a->cur.empty()) std::swap(a->prev, a->cur);
    exit_code = run_and_report(
        "delta diff", *a, diff, [&](const DiffReport& r) { print_report(r, a->output); }, kExitZero);
  });
}

void add_delta_fold(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("fold", "Combine consecutive deltas into one");
  auto a = std::make_shared<FoldArguments>();
  verb->add_option("PATCHES", a->patches, "deltas, oldest first")->required()->value_count(1, 4096);
  verb->add_option("-o,--output", a->output, "the patch; an existing file is replaced")->required();
  verb->add_option("--base", a->base,
                   "the checkpoint that the first delta applies to; makes the result as small as a direct delta");
  add_shared_options(verb, a->common);
  verb->footer(
      "Without --base, no weights are needed: the result contains the deltas side by side, is about as long as all "
      "together, and is applied in one pass. With --base, the changes are added up and encoded again, and the result "
      "is checked against the checkpoint.\n"
      "Examples:\n"
      "  echoline delta fold 101.patch 102.patch 103.patch -o 100-to-103.patch\n"
      "  echoline delta fold 101.patch 102.patch -o 100-to-102.patch \\\n"
      "    --base step-100.safetensors");
  verb->callback([a, &exit_code] {
    exit_code = run_and_report(
        "delta fold", *a, fold, [&](const FoldReport& r) { print_report(r, *a); }, kExitZero);
  });
}

}  // namespace echoline::cli
