// echoline delta apply, verify and inspect: use patches.
#include <optional>

#include "cli/delta.hpp"
#include "cli/signals.hpp"
#include "delta/digest.hpp"
#include "delta/new_checkpoint.hpp"

namespace echoline::cli {
namespace {

using delta::LockedCheckpoint;
using delta::MappedFile;
using delta::PatchInfo;
using delta::PatchKind;
using nlohmann::json;

// ---- apply ----

struct ApplyArguments {
  DeltaOptions common;
  std::string prev, patch, output;  // prev is empty when only a patch is named
  bool in_place = false;
};

struct ApplyReport {
  PatchInfo info;
  std::string written;  // path of the changed or new checkpoint
  std::optional<delta::InPlaceReport> in_place;
  double seconds = 0;
};

// Adds the name of the file that caused the error, and advice.
Error with_context(Error error, const ApplyArguments& args, const PatchInfo& info) {
  if (error.code == Code::kStale) {
    // The error contains the digest that was found.
    const bool is_result = error.detail.find(info.result.hex()) != std::string::npos;
    return with_file_and_advice(std::move(error), args.prev,
                                is_result ? ". The checkpoint is already the result"
                                          : ". Apply the patches in between first, or use another checkpoint");
  }
  for (const char* operation_on_patch : {"apply delta", "read patch", "decode snapshot"})
    if (error.operation == operation_on_patch) return with_file_and_advice(std::move(error), args.patch);
  return as_user_error(std::move(error));
}

Result<ApplyReport> apply(const ApplyArguments& args, ProgressBar& bar) {
  const bool has_output = !args.output.empty();
  if (args.in_place == has_output)  // both or neither
    return fail(Code::kInvalid, "arguments",
                "expected either -o NEW, which does not change PREV, or --in-place, which turns PREV into the result");
  ECHO_ASSIGN(const MappedFile patch, open_patch(args.patch));
  ECHO_ASSIGN(const PatchInfo info, inspect_patch(patch, args.patch));
  const bool is_snapshot = info.kind == PatchKind::kSnapshot;
  if (!is_snapshot && args.prev.empty())
    return fail(Code::kInvalid, "arguments",
                "{} is a delta to the checkpoint with digest {}: name that checkpoint too, as in `echoline delta apply "
                "PREV {} ...`",
                args.patch, info.base->hex(), args.patch);
  if (is_snapshot && args.in_place)
    return fail(Code::kInvalid, "arguments", "{} is a snapshot, that is, a whole checkpoint: write it with -o NEW",
                args.patch);

  delta::ApplyOptions options{.threads = args.common.threads, .progress = bar.callback(), .stop = &stop_on_signals()};
  options.observer = [&](delta::ApplyStage stage) {
    if (stage == delta::ApplyStage::kCommitted) bar.begin("writing");
  };
  bar.begin("resolving");
  ApplyReport report;
  report.written = args.in_place ? args.prev : args.output;
  const Stopwatch applying;
  if (args.in_place) {
    auto applied = delta::apply_in_place(args.prev, patch.bytes(), options);
    if (!applied) return with_context(std::move(applied).error(), args, info);
    report.in_place = *applied;
    report.info = std::move(applied->patch);
  } else {
    std::optional<LockedCheckpoint> prev;
    if (!args.prev.empty()) {
      ECHO_ASSIGN(prev, open_checkpoint(args.prev, args.common));
    }
    auto applied = is_snapshot ? delta::unpack_snapshot(patch.bytes(), prev ? &**prev : nullptr, args.output, options)
                               : delta::apply_to_new(**prev, patch.bytes(), args.output, options);
    if (!applied) return with_context(std::move(applied).error(), args, info);
    report.info = std::move(applied).value();
  }
  report.seconds = applying.seconds();
  return report;
}

void print_report(const ApplyReport& report) {
  if (report.in_place && report.in_place->recovery == delta::Recovery::kCompleted) report_recovery(report.written);
  const bool was_already_applied = report.in_place && report.in_place->already_applied;
  print_field(was_already_applied ? "already applied" : "wrote", report.written);
  print_field("result", report.info.result.hex());
  print_field("changed", fmt::format("{} of {} elements ({})", grouped_digits(report.info.changed),
                                     grouped_digits(report.info.elements), percent_text(report.info.density())));
  if (report.in_place && !was_already_applied)
    print_field("on disk", fmt::format("{} of pages written, after a journal of {}",
                                       to_text(Bytes{report.in_place->written_bytes}),
                                       to_text(Bytes{report.in_place->journal_bytes})));
  print_field("took", duration_and_rate(report.info.state_bytes, report.seconds));
}

json to_json(const ApplyReport& report) {
  json object{{"schema_version", 1},
              {"path", report.written},
              {"kind", kind_name(report.info.base.has_value())},
              {"in_place", report.in_place.has_value()},
              {"already_applied", report.in_place && report.in_place->already_applied},
              {"elements", report.info.elements},
              {"changed", report.info.changed},
              {"state_bytes", report.info.state_bytes},
              {"seconds", report.seconds},
              {"base_digest", digest_json(report.info.base)},
              {"result_digest", report.info.result.hex()}};
  if (report.in_place) {
    object["journal_bytes"] = report.in_place->journal_bytes;
    object["written_bytes"] = report.in_place->written_bytes;
  }
  return object;
}

// ---- verify ----

struct VerifyArguments {
  DeltaOptions common;
  std::string state, patch;
};

struct VerifyReport {
  std::string relation;  // what the checkpoint is to the patch: its "base", its "result" or "neither"
  std::string reason;
  delta::Digest found;
  PatchInfo info;
};

Result<VerifyReport> verify(const VerifyArguments& args, ProgressBar& bar) {
  const std::atomic<bool>& stop = stop_on_signals();
  ECHO_ASSIGN(const MappedFile patch, open_patch(args.patch));
  VerifyReport report;
  ECHO_ASSIGN(report.info, inspect_patch(patch, args.patch));
  ECHO_ASSIGN(const LockedCheckpoint state, open_checkpoint(args.state, args.common));
  bar.begin("verifying");
  if (report.info.kind == PatchKind::kDelta) {
    // The writes are discarded, because only the check of the digest matters.
    const auto discard = [&](delta::TensorWrite&&) { return check_not_stopped(stop); };
    const auto resolved = delta::resolve_delta(patch.bytes(), state->view(), discard,
                                               {.threads = args.common.threads, .progress = bar.callback()});
    if (resolved) {
      report.relation = "base";
      report.reason = "the patch applies: it was decoded completely and produces the digest it states";
      report.found = *report.info.base;
      return report;
    }
    if (resolved.error().code == Code::kInvalid)  // the checkpoint has other tensors than the patch
      report.reason = resolved.error().detail;
    else if (resolved.error().code != Code::kStale)
      return with_file_and_advice(resolved.error(), args.patch);
  }
  ECHO_ASSIGN(report.found, delta::digest_state(state->view(), args.common.threads));
  report.relation = report.found == report.info.result ? "result" : "neither";
  if (report.relation == "result") report.reason = "the patch is already applied";
  if (report.reason.empty()) report.reason = "the checkpoint is neither the base of the patch nor its result";
  return report;
}

void print_report(const VerifyReport& report, const VerifyArguments& args) {
  fmt::print("{} is {} of {}: {}\n", args.state,
             report.relation == "neither" ? "neither base nor result" : "the " + report.relation, args.patch,
             report.reason);
  print_field("found", report.found.hex());
  if (report.info.base) print_field("base", report.info.base->hex());
  print_field("result", report.info.result.hex());
}

json to_json(const VerifyReport& report) {
  return {{"schema_version", 1},
          {"state", report.relation},
          {"reason", report.reason},
          {"digest", report.found.hex()},
          {"base_digest", digest_json(report.info.base)},
          {"result_digest", report.info.result.hex()}};
}

// ---- inspect ----

struct InspectArguments {
  DeltaOptions common;
  std::string patch;
  bool all = false;
};

struct InspectReport {
  PatchInfo info;
};

constexpr std::size_t kTensorsShown = 20;  // without --all

void print_tensors(std::vector<delta::PatchTensor> tensors, bool all) {
  std::ranges::stable_sort(tensors, std::greater<>(), &delta::PatchTensor::payload_bytes);
  const std::size_t total = tensors.size();
  if (!all && total > kTensorsShown) tensors.resize(kTensorsShown);
  std::size_t name_width = 6, shape_width = 5;  // of the headings "tensor" and "shape"
  // Consecutive small tensors are coded together and counted with the first.
  const auto name = [](const delta::PatchTensor& tensor) {
    return tensor.coded_tensors == 1 ? tensor.name
                                     : fmt::format("{} and {} more", tensor.name, tensor.coded_tensors - 1);
  };
  const auto shape = [](const delta::PatchTensor& tensor) { return fmt::format("{}", fmt::join(tensor.shape, "x")); };
  for (const delta::PatchTensor& tensor : tensors) {
    name_width = std::max(name_width, name(tensor).size());
    shape_width = std::max(shape_width, shape(tensor).size());
  }
  fmt::print("\n{:<{}}  {:<7}  {:<{}}  {:>14}  {:>10}  {:>14}  {:>11}  {:>12}\n", "tensor", name_width, "type", "shape",
             shape_width, "changed", "density", "bytes", "bits/change", "bound");
  for (const delta::PatchTensor& tensor : tensors) {
    const auto bits_per_change = [&](std::uint64_t bits) {
      return tensor.changed ? fmt::format("{:.2f}", ratio_or_zero(bits, tensor.changed)) : std::string("-");
    };
    fmt::print("{:<{}}  {:<7}  {:<{}}  {:>14}  {:>10}  {:>14}  {:>11}  {:>12}\n", name(tensor), name_width,
               delta::dtype_name(tensor.dtype), shape(tensor), shape_width, grouped_digits(tensor.changed),
               percent_text(ratio_or_zero(tensor.changed, tensor.coded_elements)), grouped_digits(tensor.payload_bytes),
               bits_per_change(8 * tensor.payload_bytes), bits_per_change(tensor.bound_bits));
  }
  if (tensors.size() < total)
    fmt::print("... and {} more of {} tensors; --all shows them\n", total - tensors.size(), total);
}

void print_report(const InspectReport& report, const InspectArguments& args) {
  const PatchInfo& info = report.info;
  print_field("patch", fmt::format("{} ({})", args.patch, kind_name(info.base.has_value())));
  if (info.base) print_field("base", info.base->hex());
  print_field("result", info.result.hex());
  print_field("weights", fmt::format("{} in {} elements of {} tensors", to_text(Bytes{info.state_bytes}),
                                     grouped_digits(info.elements), info.tensors.size()));
  print_field("changed", fmt::format("{} ({})", grouped_digits(info.changed), percent_text(info.density())));
  print_field("size", fmt::format("{} bytes, {} of them for values", grouped_digits(info.patch_bytes),
                                  grouped_digits(info.payload_bytes)));
  print_tensors(info.tensors, args.all);
}

json to_json(const InspectReport& report) {
  const PatchInfo& info = report.info;
  json tensors = json::array();
  for (const delta::PatchTensor& tensor : info.tensors)
    tensors.push_back({{"name", tensor.name},
                       {"dtype", delta::dtype_name(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"elements", tensor.elements},
                       {"coded_tensors", tensor.coded_tensors},
                       {"changed", tensor.changed},
                       {"payload_bytes", tensor.payload_bytes},
                       {"bound_bits", tensor.bound_bits}});
  return {{"schema_version", 1},
          {"kind", kind_name(info.base.has_value())},
          {"base_digest", digest_json(info.base)},
          {"result_digest", info.result.hex()},
          {"state_bytes", info.state_bytes},
          {"elements", info.elements},
          {"changed", info.changed},
          {"density", info.density()},
          {"patch_bytes", info.patch_bytes},
          {"payload_bytes", info.payload_bytes},
          {"bound_bits", info.bound_bits},
          {"tensors", tensors}};
}

Result<InspectReport> inspect(const InspectArguments& args, ProgressBar&) {
  ECHO_ASSIGN(const MappedFile patch, open_patch(args.patch));
  InspectReport report;
  ECHO_ASSIGN(report.info, inspect_patch(patch, args.patch));
  return report;
}

}  // namespace

void add_delta_apply(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("apply", "Turn checkpoint PREV into the result of a patch");
  auto args = std::make_shared<ApplyArguments>();
  verb->add_option("PREV", args->prev, "the checkpoint to change; for a snapshot, only its layout is used")->required();
  verb->add_option("PATCH", args->patch, "the patch; a snapshot does not need PREV");
  auto* output =
      verb->add_option("-o,--output", args->output, "the new checkpoint, a file or folder as PREV is; must not exist");
  verb->add_flag("--in-place", args->in_place, "change PREV itself")->excludes(output);
  add_shared_options(verb, args->common);
  verb->footer(
      "Everything is checked before anything takes effect: the patch by its checksums, PREV and the result by "
      "their digests.\n"
      "NEW appears complete or not at all. Headers, metadata and the order of tensors are those of PREV. From a "
      "folder, configuration, tokenizer and index are copied; subfolders and other weights are not. A snapshot "
      "without PREV becomes a file if NEW ends in .safetensors, otherwise a folder.\n"
      "--in-place needs disk space for a journal: for each weight that changes, four bytes and the weight itself. "
      "After a crash or power loss, the next `echoline delta` verb on PREV completes or discards the change; "
      "let it run before other programs read PREV. PREV must not be a link. If PREV is already the result, "
      "nothing is changed; that is not an error.");
  verb->callback([args, &exit_code] {
    if (args->patch.empty()) std::swap(args->prev, args->patch);  // a single positional argument is the patch
    exit_code = run_and_report(
        "delta apply", *args, apply, [](const ApplyReport& report) { print_report(report); }, kExitZero);
  });
}

void add_delta_verify(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("verify", "Tell whether a checkpoint is the base of a patch, its result, or neither");
  auto args = std::make_shared<VerifyArguments>();
  verb->add_option("STATE", args->state, "the checkpoint: a .safetensors file or a Hugging Face folder")->required();
  verb->add_option("PATCH", args->patch, "patch")->required();
  add_shared_options(verb, args->common);
  verb->footer(
      "base: the patch applies; it was decoded completely and produces the digest it states. result: it is already "
      "applied.\n"
      "An interrupted `apply --in-place` is completed or discarded first. Nothing else is written.\n"
      "Exit codes: 0 base or result, 1 neither or damaged.");
  verb->callback([args, &exit_code] {
    exit_code = run_and_report(
        "delta verify", *args, verify, [&](const VerifyReport& report) { print_report(report, *args); },
        [](const VerifyReport& report) { return report.relation == "neither" ? 1 : 0; });
  });
}

void add_delta_inspect(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("inspect", "Show the contents of a patch; checks its form and checksums");
  auto args = std::make_shared<InspectArguments>();
  verb->add_option("PATCH", args->patch, "patch")->required();
  verb->add_flag("--all", args->all,
                 fmt::format("show every tensor, not only the {} with the most bytes", kTensorsShown));
  add_shared_options(verb, args->common, /*with_threads=*/false);
  verb->footer(
      "Columns: changed weights and their share of the tensor; bytes in the patch; bits per changed weight; the "
      "bound, which is the entropy of the changes under the encoder's model. In a fold, a weight counts once for "
      "each delta that changes it. Consecutive small tensors of the same type are coded together and counted with "
      "the first of them. JSON has every tensor, in order of name.");
  verb->callback([args, &exit_code] {
    exit_code = run_and_report(
        "delta inspect", *args, inspect, [&](const InspectReport& report) { print_report(report, *args); }, kExitZero);
  });
}

}  // namespace echoline::cli
