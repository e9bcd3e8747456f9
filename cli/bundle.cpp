// echoline bundle: packs this program and all its libraries into one archive, for machines without any of them.
#include "overlay/uv/bundle.hpp"

#include <link.h>

#include <algorithm>
#include <cstdio>

#include "base/child_process.hpp"
#include "base/files.hpp"
#include "cli/built_in.hpp"
#include "cli/output.hpp"
#include "cli/shared_files.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "make bundle";
constexpr const char* kFolderName = "echoline-worker";
constexpr const char* kModuleFile = "echoline_torch.so";  // the libtorch module (torch_module.hpp)
constexpr Duration kPollInterval = std::chrono::milliseconds(200);
// Starts the program with the loader (the program that loads shared libraries) and all libraries of the bundle, the C
// library included. {0} is the loader's file.
constexpr std::string_view kLauncher =
    "#!/bin/sh\n"
    "here=$(dirname \"$(readlink -f \"$0\")\")/../lib\n"
    "ECHOLINE_PROGRAM=$(readlink -f \"$0\") exec \"$here/{0}\" --library-path \"$here\" \"$here/echoline\" \"$@\"\n";

// Files that the loader has mapped into this process.
std::vector<fs::path> loaded_libraries() {
  std::vector<fs::path> libraries;
  const auto add_path = [](dl_phdr_info* info, std::size_t, void* paths) {
    std::error_code ignored;
    if (const fs::path path = info->dlpi_name; path.is_absolute() && fs::is_regular_file(path, ignored))
      static_cast<std::vector<fs::path>*>(paths)->push_back(path);
    return 0;
  };
  ::dl_iterate_phdr(add_path, &libraries);
  return libraries;
}

// Packs kFolderName below `staging` into `archive`.
Status run_tar(const fs::path& staging, const fs::path& archive) {
  std::vector<std::string> argv{"/usr/bin/env", "tar",       "--create",  "--dereference",  "--sort=name",
                                "--mtime=@0",   "--owner=0", "--group=0", "--numeric-owner"};
  // tar chooses the compression by the file's name; for .zst, zstd uses all processors.
  argv.push_back(archive.extension() == ".zst"  ? "--use-compress-program=zstd -T0 -9"
                 : archive.extension() == ".gz" ? "--use-compress-program=gzip -9"
                                                : "--auto-compress");
  argv.insert(argv.end(), {"--file", archive.string(), "--directory", staging.string(), kFolderName});
  ECHO_ASSIGN(ChildProcess tar, ChildProcess::start(argv));
  std::string last_line;
  std::optional<ProcessEnd> end;
  while (!end) end = tar.pump(kPollInterval, [&](const std::string& line) { last_line = line; });
  if (end->status == 0) return ok();
  return fail(Code::kIo, kOperation, "tar failed ({}): {}; tar must be installed, and zstd for .zst",
              end->status ? fmt::format("status {}", *end->status) : fmt::format("signal {}", *end->signal),
              last_line.empty() ? "it said nothing" : last_line);
}

// Starts the bundle's program once with its module, so that a missing library is found here and not on a rented
// machine.
Status check_program_starts(const fs::path& lib, const std::string& loader, bool with_engine) {
  std::vector<std::string> argv{(lib / loader).string(), "--library-path", lib.string()};
  if (with_engine) argv.insert(argv.end(), {"--preload", (lib / kModuleFile).string()});
  argv.insert(argv.end(), {(lib / "echoline").string(), "--version"});
  ECHO_ASSIGN(ChildProcess child, ChildProcess::start(argv));
  std::string output;
  std::optional<ProcessEnd> end;
  while (!end) end = child.pump(kPollInterval, [&](const std::string& line) { output += line + "; "; });
  if (end->status == 0 && output.empty()) return ok();
  return fail(Code::kInternal, kOperation, "the program does not start with the bundle's libraries: {}", output);
}

// Returns the SHA-256 digest of the archive.
Result<std::string> make_bundle(const fs::path& archive, bool with_engine) {
  std::error_code error;
  std::optional<fs::path> module;
  if (with_engine) {
    ECHO_ASSIGN(module, open_built_in());
  }
  if (const fs::path folder = fs::absolute(archive, error).parent_path(); !fs::is_directory(folder, error))
    return fail(Code::kNotFound, kOperation, "there is no folder {}", folder.string());
  const fs::path staging = archive.string() + ".partial";
  const fs::path lib = staging / kFolderName / "lib", bin = staging / kFolderName / "bin";
  fs::remove_all(staging, error);
  const auto pack = [&]() -> Result<std::string> {
    fs::create_directories(lib, error);
    fs::create_directories(bin, error);
    if (error) return fail(Code::kIo, kOperation, "cannot create {}: {}", lib.string(), error.message());
    std::string loader;
    const fs::path program = own_program();
    // In an unpacked bundle, own_program() is the launcher and the program lies in lib.
    const fs::path bundled_program = program.parent_path().parent_path() / "lib/echoline";
    fs::create_symlink(fs::is_regular_file(bundled_program, error) ? bundled_program : program, lib / "echoline",
                       error);
    // Links are enough, because tar packs the files they point to. Loaded libraries that neither the program nor its
    // module needs are left out.
    std::vector<fs::path> files = loaded_libraries();
    std::vector<fs::path> roots;  // the program and its module; what they need is needed
    files.push_back(fs::canonical(lib / "echoline", error));
    roots.push_back(files.back());
    if (module) roots.push_back(*module);
    // Debian's libtorch names OpenCV and FFmpeg and uses neither. They bring Qt and GDAL along: 250 libraries in all.
    ECHO_ASSIGN(const std::set<fs::path> unneeded_files, find_unneeded(files, roots));
    std::set<std::string> unneeded_names;
    for (const fs::path& path : unneeded_files) unneeded_names.insert(path.filename());
    files.pop_back();  // the program, which is linked already
    for (const fs::path& path : files) {
      if (unneeded_files.contains(path)) continue;
      const std::string name = path == module ? kModuleFile : path.filename().string();
      if (name.starts_with("ld-")) loader = name;
      ECHO_ASSIGN(const std::vector<std::string> needed, needed_libraries(path));
      const bool names_unneeded = std::any_of(
          needed.begin(), needed.end(), [&](const std::string& library) { return unneeded_names.contains(library); });
      if (names_unneeded) {  // the loader would look for a library that is left out, so a changed copy is packed
        fs::copy_file(path, lib / name, error);
        if (!error) fs::permissions(lib / name, fs::perms::owner_write, fs::perm_options::add, error);
        if (!error) {
          ECHO_TRY(remove_needed(lib / name, unneeded_names));
        }
      } else {
        fs::create_symlink(path, lib / name, error);
      }
      if (error) return fail(Code::kIo, kOperation, "cannot take {}: {}", path.string(), error.message());
    }
    if (loader.empty()) return fail(Code::kInternal, kOperation, "none of the loaded libraries is a loader");
    ECHO_TRY(write_file_atomic(bin / "echoline", fmt::format(fmt::runtime(kLauncher), loader)));
    fs::permissions(bin / "echoline", fs::perms(0755), error);
    ECHO_TRY(check_program_starts(lib, loader, module.has_value()));
    const fs::path partial_archive = staging / archive.filename();
    ECHO_TRY(run_tar(staging, partial_archive));
    fs::rename(partial_archive, archive, error);
    if (error) return fail(Code::kIo, kOperation, "cannot write {}: {}", archive.string(), error.message());
    ECHO_ASSIGN(const overlay::BundleFile bundle, overlay::open_bundle(archive));
    return bundle.sha256;
  };
  auto digest = pack();
  fs::remove_all(staging, error);
  return digest;
}

}  // namespace

void add_bundle(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("bundle", "Pack this program and its libraries for machines that have none of them");
  auto archive = std::make_shared<std::string>("echoline-worker.tar.zst");
  verb->add_option("-o,--output", *archive,
                   "the archive; its name chooses the compression: .tar.zst, .tar.gz, .tar.xz");
  auto without_engine = std::make_shared<bool>(false);
  verb->add_flag("--without-engine", *without_engine,
                 "leave out libtorch with the built-in engine and trainer; such workers use sglang or vllm");
  verb->footer(
      "On the target machine:\n"
      "  tar xf echoline-worker.tar.zst\n"
      "  echoline-worker/bin/echoline worker --join HOST:PORT\n"
      "The target machine needs sh and a Linux kernel for this architecture. All libraries are in the bundle, "
      "including the C library and the loader.");
  verb->callback([archive, without_engine, &exit_code] {
    const auto digest = make_bundle(*archive, /*with_engine=*/!*without_engine);
    exit_code = digest ? 0 : report_error("bundle", digest.error());
    if (digest) fmt::print("{}  {}\n", *digest, *archive);  // the format of sha256sum --check
  });
}

}  // namespace echoline::cli
