// echoline store: the policies that a run has stored.
#include "cli/store.hpp"

#include <unistd.h>

#include "base/files.hpp"
#include "base/utc.hpp"
#include "cli/signals.hpp"
#include "delta/checkpoint.hpp"
#include "store/replica.hpp"
#include "store/tools.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;
using store::Manifest;
namespace fs = std::filesystem;

constexpr double kMsPerSecond = 1e3;
constexpr int kSchemaVersion = 1;

json to_json(const Manifest& manifest) {
  json object{{"version", manifest.name.version.value},
              {"epoch", manifest.name.epoch},
              {"kind", kind_name(!manifest.is_snapshot())},
              {"base", nullptr},
              {"digest", manifest.digest.hex()},
              {"patch_bytes", manifest.patch_bytes},
              {"state_bytes", manifest.state_bytes},
              {"published_unix_s", static_cast<double>(manifest.published_unix_ms) / kMsPerSecond}};
  if (manifest.base) object["base"] = manifest.base->version.value;
  return object;
}

// A folder below the system's for temporary files, removed at the end.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> make() {
    std::error_code error;
    std::string name = (fs::temp_directory_path(error) / "echoline-store-XXXXXX").string();
    if (error || ::mkdtemp(name.data()) == nullptr) return os_error("make folder", name);
    return TemporaryFolder(name);
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::move(other.path_)) { other.path_.clear(); }
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {}
  fs::path path_;
};

// ---- ls ----

struct ListReport {
  store::RunDescription run;
  store::Contents contents;
  std::optional<store::Latest> latest;
};

Result<ListReport> list(const StoreArguments& args, ProgressBar&) {
  ECHO_ASSIGN(const OpenStore open, open_store(args));
  ListReport report{.run = open.reader->run(), .contents = {}, .latest = std::nullopt};
  ECHO_ASSIGN(report.contents, open.reader->contents());
  auto latest = open.reader->latest();
  if (latest)
    report.latest = std::move(*latest);
  else if (latest.error().code != Code::kNotFound)
    return latest.error();
  return report;
}

void print_report(const ListReport& report) {
  print_field("run", report.run.run_id);
  print_field("run key", overlay::trust::to_hex(report.run.key));
  print_field("newest", report.latest ? fmt::format("version {} of epoch {}", report.latest->newest.name.version,
                                                    report.latest->newest.name.epoch)
                                      : std::string("none yet"));
  fmt::print("\n{:>8}  {:>5}  {:<8}  {:>8}  {:>15}  {:<19}  {}\n", "version", "epoch", "kind", "base", "bytes",
             "published (UTC)", "digest");
  std::uint64_t bytes = 0;
  for (const auto& [entry, manifest] : report.contents) {
    bytes += manifest.patch_bytes;
    fmt::print("{:>8}  {:>5}  {:<8}  {:>8}  {:>15}  {:<19}  {}\n", manifest.name.version, manifest.name.epoch,
               kind_name(!manifest.is_snapshot()),
               manifest.base ? fmt::format("{}", manifest.base->version) : std::string("-"),
               grouped_digits(manifest.patch_bytes),
               utc_text(static_cast<double>(manifest.published_unix_ms) / kMsPerSecond), manifest.digest.hex());
  }
  fmt::print("\n{} snapshots and deltas, {}\n", report.contents.size(), to_text(Bytes{bytes}));
}

json to_json(const ListReport& report) {
  json versions = json::array();
  for (const auto& [entry, manifest] : report.contents) versions.push_back(to_json(manifest));
  return {{"schema_version", kSchemaVersion},
          {"run", report.run.run_id},
          {"run_key", overlay::trust::to_hex(report.run.key)},
          {"newest", report.latest ? json(report.latest->newest.name.version.value) : json(nullptr)},
          {"versions", versions}};
}

// ---- verify ----

struct VerifyReport : store::VerifyReport {};

Result<VerifyReport> verify(const StoreArguments& args, ProgressBar&) {
  ECHO_ASSIGN(const OpenStore open, open_store(args));
  ECHO_ASSIGN(const TemporaryFolder folder, TemporaryFolder::make());
  ECHO_ASSIGN(auto report, store::verify(*open.reader, {.threads = args.common.threads, .folder = folder.path()}));
  return VerifyReport{std::move(report)};
}

void print_report(const VerifyReport& report) {
  for (const std::string& damaged : report.damaged) fmt::print("{}\n", damaged);
  fmt::print("{} snapshots and {} deltas ({}) rebuild their versions; {} are damaged\n", report.snapshots,
             report.deltas, to_text(Bytes{report.patch_bytes}), report.damaged.size());
}

json to_json(const VerifyReport& report) {
  return {{"schema_version", kSchemaVersion},
          {"snapshots", report.snapshots},
          {"deltas", report.deltas},
          {"patch_bytes", report.patch_bytes},
          {"damaged", report.damaged}};
}

// ---- fetch, export ----

struct FetchArguments : StoreArguments {
  std::optional<std::uint64_t> version;
  std::string output;
};

struct FetchReport {
  Manifest manifest;
  std::string output;
};

Result<Manifest> find(store::PolicyReader& reader, const std::optional<std::uint64_t>& version) {
  if (version) return reader.find(Version{*version});
  ECHO_ASSIGN(store::Latest latest, reader.latest());
  return std::move(latest.newest);
}

Status check_is_new(const std::string& output) {
  std::error_code ignored;
  if (fs::exists(output, ignored))
    return fail(Code::kInvalid, "arguments", "{} exists already: choose another output", output);
  return ok();
}

Result<FetchReport> fetch(const FetchArguments& args, ProgressBar&) {
  ECHO_TRY(check_is_new(args.output));
  ECHO_ASSIGN(const OpenStore open, open_store(args));
  ECHO_ASSIGN(const Manifest manifest, find(*open.reader, args.version));
  ECHO_ASSIGN(const TemporaryFolder folder, TemporaryFolder::make());
  ECHO_ASSIGN(const delta::OwnedState state,
              store::rebuild(*open.reader, manifest, {.threads = args.common.threads, .folder = folder.path()}));
  if (args.output.ends_with(".safetensors"))
    ECHO_TRY(delta::write_safetensors(args.output, state.view(), {{"format", "pt"}}));
  else
    ECHO_TRY(delta::write_checkpoint(args.output, state.view()));
  return FetchReport{.manifest = manifest, .output = args.output};
}

Result<FetchReport> export_version(const FetchArguments& args, ProgressBar&) {
  ECHO_TRY(check_is_new(args.output));
  ECHO_ASSIGN(const OpenStore open, open_store(args));
  ECHO_ASSIGN(const Manifest manifest, find(*open.reader, args.version));
  ECHO_ASSIGN(
      store::Replica replica,
      store::Replica::open(args.output, *open.reader, {.threads = args.common.threads, .stop = &stop_on_signals()}));
  ECHO_TRY(replica.install(manifest));
  std::error_code error;
  fs::remove_all(fs::path(args.output) / ".echoline", error);
  if (error) return fail(Code::kIo, "export", "{}: {}", args.output, error.message());
  return FetchReport{.manifest = manifest, .output = args.output};
}

void print_report(const FetchReport& report) {
  print_field("wrote", report.output);
  print_field("version", fmt::format("{} of epoch {}", report.manifest.name.version, report.manifest.name.epoch));
  print_field("digest", report.manifest.digest.hex());
}

json to_json(const FetchReport& report) {
  json object = to_json(report.manifest);
  object["schema_version"] = kSchemaVersion;
  object["path"] = report.output;
  return object;
}

// ---- prune ----

struct PruneArguments : StoreArguments {
  store::RetentionRules rules;
  bool dry_run = false;
};

struct PruneReport {
  std::vector<Manifest> removed;
  bool dry_run = false;
};

Result<PruneReport> prune(const PruneArguments& args, ProgressBar&) {
  ECHO_ASSIGN(const OpenStore open, open_store(args));
  const SystemClock clock;
  const std::atomic<bool>& stop = stop_on_signals();
  const auto wait = [&](Duration pause) -> Status {
    std::this_thread::sleep_for(pause);
    return check_not_stopped(stop);
  };
  PruneReport report{.removed = {}, .dry_run = args.dry_run};
  ECHO_ASSIGN(report.removed, store::prune(*open.objects, *open.reader, args.rules, args.dry_run, clock, wait));
  return report;
}

void print_report(const PruneReport& report) {
  std::uint64_t bytes = 0;
  for (const Manifest& manifest : report.removed) {
    bytes += manifest.patch_bytes;
    fmt::print("{}\n", store::folder_key(manifest.kind, manifest.name));
  }
  fmt::print("{} {} snapshots and deltas, {}\n", report.dry_run ? "would remove" : "removed", report.removed.size(),
             to_text(Bytes{bytes}));
}

json to_json(const PruneReport& report) {
  json removed = json::array();
  for (const Manifest& manifest : report.removed) removed.push_back(to_json(manifest));
  return {{"schema_version", kSchemaVersion}, {"dry_run", report.dry_run}, {"removed", removed}};
}

template <class Arguments, class Work>
void set_callback(Verb* verb, const std::string& name, std::shared_ptr<Arguments> args, Work work, int& exit_code) {
  verb->callback([name, args, work, &exit_code] {
    exit_code = run_and_report(
        name, *args, work, [](const auto& report) { print_report(report); }, kExitZero);
  });
}

}  // namespace

void add_store_options(Verb* verb, StoreArguments& args, bool with_threads) {
  verb->add_option("URL", args.address.url, "s3://BUCKET/PREFIX, or a folder")->required();
  verb->add_option("--endpoint", args.address.endpoint,
                   "address of an S3-compatible service, such as https://minio.example:9000 (default: AWS)");
  verb->add_option("--region", args.address.region, "region of the bucket (default: by environment or profile)");
  verb->add_option("--profile", args.address.profile, "section of AWS's profile file with the access key");
  verb->add_option("--key", args.key, "the run key, as `echoline store ls` prints it (default: trust the store's)");
  add_shared_options(verb, args.common, with_threads);
}

Result<OpenStore> open_store(const StoreArguments& args) {
  std::optional<overlay::trust::PublicKey> key;
  if (!args.key.empty()) {
    ECHO_ASSIGN(key, store::parse_public_key(args.key));
  }
  OpenStore open;
  ECHO_ASSIGN(open.objects, store::open_object_store(args.address, &stop_on_signals()));
  ECHO_ASSIGN(open.reader, store::PolicyReader::open(*open.objects, key));
  return open;
}

void add_store(Verb& program, int& exit_code) {
  auto* group = program.add_verb("store", "Use the policies that a run has stored (`store.url` of its run file)");
  group->require_verb();
  {
    auto* verb = group->add_verb("ls", "List the stored versions");
    auto args = std::make_shared<StoreArguments>();
    add_store_options(verb, *args, /*with_threads=*/false);
    set_callback(verb, "store ls", args, list, exit_code);
  }
  {
    auto* verb = group->add_verb("verify", "Fetch and rebuild every stored version; check signatures and digests");
    auto args = std::make_shared<StoreArguments>();
    add_store_options(verb, *args, /*with_threads=*/true);
    verb->footer("Exit codes: 0 every version is in order, 1 some are damaged.");
    verb->callback([args, &exit_code] {
      exit_code = run_and_report(
          "store verify", *args, verify, [](const VerifyReport& report) { print_report(report); },
          [](const VerifyReport& report) { return report.damaged.empty() ? 0 : 1; });
    });
  }
  {
    auto* verb = group->add_verb("fetch", "Write the weights of a stored version");
    auto args = std::make_shared<FetchArguments>();
    add_store_options(verb, *args, /*with_threads=*/true);
    verb->add_option("--version", args->version, "the version")->required();
    verb->add_option("-o,--output", args->output, "a .safetensors file or a folder; must not exist")->required();
    set_callback(verb, "store fetch", args, fetch, exit_code);
  }
  {
    auto* verb = group->add_verb("export", "Write a stored version as a Hugging Face directory");
    auto args = std::make_shared<FetchArguments>();
    add_store_options(verb, *args, /*with_threads=*/true);
    verb->add_option("--version", args->version, "the version (default: the newest)");
    verb->add_option("-o,--output", args->output, "folder to create; must not exist")->required();
    set_callback(verb, "store export", args, export_version, exit_code);
  }
  {
    auto* verb = group->add_verb("prune", "Remove old versions; what a kept version needs stays");
    auto args = std::make_shared<PruneArguments>();
    add_store_options(verb, *args, /*with_threads=*/false);
    verb->add_option("--deltas", args->rules.deltas_kept, "newest deltas to keep")->required()->positive();
    verb->add_option("--anchors", args->rules.anchors_kept, "newest anchors to keep")->required()->positive();
    verb->add_flag("--dry-run", args->dry_run, "only list what would be removed");
    verb->footer("A learner that publishes to the prefix removes old versions itself (store.deltas_kept).");
    set_callback(verb, "store prune", args, prune, exit_code);
  }
  add_store_pull(group, exit_code);
}

}  // namespace echoline::cli
