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
  std::string written;
  std::optional<delta::InPlaceReport> in_place;
  double seconds = 0;
};

Error explain(Error error, const ApplyArguments& a, const PatchInfo& info) {
  if (error.code == Code::kStale) {
    // the error contains the digest found
    const bool is_result = error.detail.find(info.result.hex()) != std::string::npos;
    return with_file_and_advice(std::move(error), a.prev,
                                is_result ? ". The checkpoint is already the result"
                                          : ". Apply the patches in between first, or use another checkpoint");
  }
  for (const char* about_patch : {"apply delta", "read patch", "decode snapshot"})
    if (error.operation == about_patch) return with_file_and_advice(std::move(error), a.patch);
  return as_mistake(std::move(error));
}

Result<ApplyReport> apply(const ApplyArguments& a, ProgressBar& bar) {
  if (a.in_place == !a.output.empty())
    return fail(Code::kInvalid, "arguments",
                "expected either -o NEW, which does not change PREV, or --in-place, which turns PREV into the result");
  ECHO_ASSIGN(const MappedFile patch, open_patch(a.patch));
  ECHO_ASSIGN(const PatchInfo info, inspect_patch(patch, a.patch));
  const bool snapshot = info.kind == PatchKind::kSnapshot;
  if (!snapshot && a.prev.empty())
    return fail(Code::kInvalid, "arguments",
                "{} is a delta to the checkpoint with digest {}: name that checkpoint too, as in `echoline delta apply "
                "PREV {} ...`",
                a.patch, info.base->hex(), a.patch);
  if (snapshot && a.in_place)
    return fail(Code::kInvalid, "arguments", "{} is a snapshot, that is, a whole checkpoint: write it with -o NEW",
                a.patch);

  delta::ApplyOptions options{.threads = a.common.threads, .progress = bar.callback(), .stop = &stop_on_signals()};
  options.observer = [&](delta::ApplyStage stage) {
    if (stage == delta::ApplyStage::kCommitted) bar.begin("writing");
  };
  bar.begin("resolving");
  ApplyReport report;
  report.written = a.in_place ? a.prev : a.output;
  const Stopwatch applying;
  if (a.in_place) {
    auto done = delta::apply_in_place(a.prev, patch.bytes(), options);
    if (!done) return explain(std::move(done).error(), a, info);
    report.in_place = *done;
    report.info = std::move(done->patch);
  } else {
    std::optional<LockedCheckpoint> prev;
    if (!a.prev.empty()) {
      ECHO_ASSIGN(prev, open_checkpoint(a.prev, a.common));
    }
    auto done = snapshot ? delta::unpack_snapshot(patch.bytes(), prev ? &**prev : nullptr, a.output, options)
                         : delta::apply_to_new(**prev, patch.bytes(), a.output, options);
    if (!done) return explain(std::move(done).error(), a, info);
    report.info = std::move(done).value();
  }
  report.seconds = applying.seconds();
  return report;
}

void print_report(const ApplyReport& r) {
  if (r.in_place && r.in_place->recovery == delta::Recovery::kCompleted) report_recovery(r.written);
  const bool already = r.in_place && r.in_place->already_applied;
  print_field(already ? "already applied" : "wrote", r.written);
  print_field("result", r.info.result.hex());
  print_field("changed", fmt::format("{} of {} elements ({})", grouped(r.info.changed), grouped(r.info.elements),
                                     percent(r.info.density())));
  if (r.in_place && !already)
    print_field("on disk",
                fmt::format("{} of pages written, after a journal of {}", to_text(Bytes{r.in_place->written_bytes}),
                            to_text(Bytes{r.in_place->journal_bytes})));
  print_field("took", duration_and_rate(r.info.state_bytes, r.seconds));
}

json to_json(const ApplyReport& r) {
  json report{{"schema_version", 1},
              {"path", r.written},
              {"kind", kind_name(r.info.base.has_value())},
              {"in_place", r.in_place.has_value()},
              {"already_applied", r.in_place && r.in_place->already_applied},
              {"elements", r.info.elements},
              {"changed", r.info.changed},
              {"state_bytes", r.info.state_bytes},
              {"seconds", r.seconds},
              {"base_digest", digest_json(r.info.base)},
              {"result_digest", r.info.result.hex()}};
  if (r.in_place) {
    report["journal_bytes"] = r.in_place->journal_bytes;
    report["written_bytes"] = r.in_place->written_bytes;
  }
  return report;
}

// ---- verify ----

struct VerifyArguments {
  DeltaOptions common;
  std::string state, patch;
};

struct VerifyReport {
  std::string relation;  // "base", "result" or "neither"
  std::string reason;
  delta::Digest found;
  PatchInfo info;
};

Result<VerifyReport> verify(const VerifyArguments& a, ProgressBar& bar) {
  const std::atomic<bool>& stop = stop_on_signals();
  ECHO_ASSIGN(const MappedFile patch, open_patch(a.patch));
  VerifyReport report;
  ECHO_ASSIGN(report.info, inspect_patch(patch, a.patch));
  ECHO_ASSIGN(const LockedCheckpoint state, open_checkpoint(a.state, a.common));
  bar.begin("verifying");
  if (report.info.kind == PatchKind::kDelta) {
    const auto discard = [&](delta::TensorWrite&&) { return check_stop(stop); };
    const auto resolved = delta::resolve_delta(patch.bytes(), state->view(), discard,
                                               {.threads = a.common.threads, .progress = bar.callback()});
    if (resolved) {
      report.relation = "base";
      report.reason = "the patch applies: it was decoded completely and produces the digest it states";
      report.found = *report.info.base;
      return report;
    }
    if (resolved.error().code == Code::kInvalid)
      report.reason = resolved.error().detail;
    else if (resolved.error().code != Code::kStale)
      return with_file_and_advice(resolved.error(), a.patch);
  }
  ECHO_ASSIGN(report.found, delta::digest_state(state->view(), a.common.threads));
  report.relation = report.found == report.info.result ? "result" : "neither";
  if (report.relation == "result") report.reason = "the patch is already applied";
  if (report.reason.empty()) report.reason = "the checkpoint is neither the base of the patch nor its result";
  return report;
}

void print_report(const VerifyReport& r, const VerifyArguments& a) {
  fmt::print("{} is {} of {}: {}\n", a.state, r.relation == "neither" ? "neither base nor result" : "the " + r.relation,
             a.patch, r.reason);
  print_field("found", r.found.hex());
  if (r.info.base) print_field("base", r.info.base->hex());
  print_field("result", r.info.result.hex());
}

json to_json(const VerifyReport& r) {
  return {{"schema_version", 1},
          {"state", r.relation},
          {"reason", r.reason},
          {"digest", r.found.hex()},
          {"base_digest", digest_json(r.info.base)},
          {"result_digest", r.info.result.hex()}};
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

constexpr std::size_t kTensorsShown = 20;

void print_tensors(std::vector<delta::PatchTensor> tensors, bool all) {
  std::ranges::stable_sort(tensors, std::greater<>(), &delta::PatchTensor::payload_bytes);
  const std::size_t total = tensors.size();
  if (!all && total > kTensorsShown) tensors.resize(kTensorsShown);
  std::size_t name_width = 6, shape_width = 5;
  const auto name = [](const delta::PatchTensor& t) {
    return t.coded_tensors == 1 ? t.name : fmt::format("{} and {} more", t.name, t.coded_tensors - 1);
  };
  const auto shape = [](const delta::PatchTensor& t) { return fmt::format("{}", fmt::join(t.shape, "x")); };
  for (const delta::PatchTensor& t : tensors) {
    name_width = std::max(name_width, name(t).size());
    shape_width = std::max(shape_width, shape(t).size());
  }
  fmt::print("\n{:<{}}  {:<7}  {:<{}}  {:>14}  {:>10}  {:>14}  {:>11}  {:>12}\n", "tensor", name_width, "type", "shape",
             shape_width, "changed", "density", "bytes", "bits/change", "bound");
  for (const delta::PatchTensor& t : tensors) {
    const auto per_change = [&](std::uint64_t bits) {
      return t.changed ? fmt::format("{:.2f}", ratio_or_zero(bits, t.changed)) : std::string("-");
    };
    fmt::print("{:<{}}  {:<7}  {:<{}}  {:>14}  {:>10}  {:>14}  {:>11}  {:>12}\n", name(t), name_width,
               delta::dtype_name(t.dtype), shape(t), shape_width, grouped(t.changed),
               percent(ratio_or_zero(t.changed, t.coded_elements)), grouped(t.payload_bytes),
               per_change(8 * t.payload_bytes), per_change(t.bound_bits));
  }
  if (tensors.size() < total)
    fmt::print("... and {} more of {} tensors; --all shows them\n", total - tensors.size(), total);
}

void print_report(const InspectReport& r, const InspectArguments& a) {
  const PatchInfo& info = r.info;
  print_field("patch", fmt::format("{} ({})", a.patch, kind_name(info.base.has_value())));
  if (info.base) print_field("base", info.base->hex());
  print_field("result", info.result.hex());
  print_field("weights", fmt::format("{} in {} elements of {} tensors", to_text(Bytes{info.state_bytes}),
                                     grouped(info.elements), info.tensors.size()));
  print_field("changed", fmt::format("{} ({})", grouped(info.changed), percent(info.density())));
  print_field("size",
              fmt::format("{} bytes, {} of them for values", grouped(info.patch_bytes), grouped(info.payload_bytes)));
  print_tensors(info.tensors, a.all);
}

json to_json(const InspectReport& r) {
  const PatchInfo& info = r.info;
  json tensors = json::array();
  for (const delta::PatchTensor& t : info.tensors)
    tensors.push_back({{"name", t.name},
                       {"dtype", delta::dtype_name(t.dtype)},
                       {"shape", t.shape},
                       {"elements", t.elements},
                       {"coded_tensors", t.coded_tensors},
                       {"changed", t.changed},
                       {"payload_bytes", t.payload_bytes},
                       {"bound_bits", t.bound_bits}});
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

Result<InspectReport> inspect(const InspectArguments& a, ProgressBar&) {
  ECHO_ASSIGN(const MappedFile patch, open_patch(a.patch));
  InspectReport report;
  ECHO_ASSIGN(report.info, inspect_patch(patch, a.patch));
  return report;
}

}  // namespace

void add_delta_apply(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("apply", "Turn checkpoint PREV into the result of a patch");
  auto a = std::make_shared<ApplyArguments>();
  verb->add_option("PREV", a->prev, "the checkpoint to change; for a snapshot, only its layout is used")->required();
  verb->add_option("PATCH", a->patch, "the patch; a snapshot does not need PREV");
  auto* output =
      verb->add_option("-o,--output", a->output, "the new checkpoint, a file or folder as PREV is; must not exist");
  verb->add_flag("--in-place", a->in_place, "change PREV itself")->excludes(output);
  add_shared_options(verb, a->common);
  verb->footer(
      "Everything is checked before anything takes effect: the patch by its checksums, PREV and the result by "
      "their digests.\n"
      "NEW appears complete or not at all. Headers, metadata and the order of tensors are those of PREV. From a "
      "folder, configuration, tokenizer and index are copied; subfolders and other weights are not. A snapshot "
      "without PREV becomes a file if NEW ends in .safetensors, otherwise a folder.\n"
      "--in-place needs disk space for a journal: for each weight that changes, four bytes and the weight itself. "
      "After a crash or power loss, the next `echoline delta` verb on PREV completes or discards the change; "
      "let it run before other programs read PREV. PREV must not be a link. If PREV is already the result, "
      "nothing is changed; that is not an error.\n"
      "Examples:\n"
      "  echoline delta apply step-100.safetensors 101.patch -o step-101.safetensors\n"
      "  echoline delta apply /models/policy 101.patch --in-place\n"
      "  echoline delta apply whole.patch -o qwen3-8b");
  verb->callback([a, &exit_code] {
    if (a->patch.empty()) std::swap(a->prev, a->patch);
    exit_code = run_and_report(
        "delta apply", *a, apply, [](const ApplyReport& r) { print_report(r); }, kExitZero);
  });
}

void add_delta_verify(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("verify", "Tell whether a checkpoint is the base of a patch, its result, or neither");
  auto a = std::make_shared<VerifyArguments>();
  verb->add_option("STATE", a->state, "the checkpoint: a .safetensors file or a Hugging Face folder")->required();
  verb->add_option("PATCH", a->patch, "patch")->required();
  add_shared_options(verb, a->common);
  verb->footer(
      "base: the patch applies; it was decoded completely and produces the digest it states. result: it is already "
      "applied.\n"
      "An interrupted `apply --in-place` is completed or discarded first. Nothing else is written.\n"
      "Exit codes: 0 base or result, 1 neither or damaged.\n"
      "Example:\n  echoline delta verify /models/policy 101.patch");
  verb->callback([a, &exit_code] {
    exit_code = run_and_report(
        "delta verify", *a, verify, [&](const VerifyReport& r) { print_report(r, *a); },
        [](const VerifyReport& r) { return r.relation == "neither" ? 1 : 0; });
  });
}

void add_delta_inspect(Verb* group, int& exit_code) {
  auto* verb = group->add_verb("inspect", "Show the contents of a patch; checks its form and checksums");
  auto a = std::make_shared<InspectArguments>();
  verb->add_option("PATCH", a->patch, "patch")->required();
  verb->add_flag("--all", a->all, fmt::format("show every tensor, not only the {} with the most bytes", kTensorsShown));
  add_shared_options(verb, a->common, false);
  verb->footer(
      "Columns: changed weights and their share of the tensor; bytes in the patch; bits per changed weight; the "
      "bound, which is the entropy of the changes under the encoder's model. In a fold, a weight counts once for "
      "each delta that changes it. Consecutive small tensors of the same type are coded together and counted with "
      "the first of them. JSON has every tensor, in order of name.\n"
      "Example:\n  echoline delta inspect 101.patch --all");
  verb->callback([a, &exit_code] {
    exit_code = run_and_report(
        "delta inspect", *a, inspect, [&](const InspectReport& r) { print_report(r, *a); }, kExitZero);
  });
}

}  // namespace echoline::cli
