// A task that is a shared library with a C interface (clients/c/echoline_task.h). Loaded into this process, it could do
// everything the process can, and its mistakes would crash it. So a small program of ours loads it, in the sandbox for
// tasks that are programs.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "data_plane/adapters/library/elf.hpp"
#include "data_plane/adapters/library/host.hpp"
#include "data_plane/adapters/process/task.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::uint64_t kLibraryFileBytesMax = 16u << 20;

struct Options {
  std::filesystem::path library;
  std::string library_hex_json = "{}";  // the library's bytes: {"library": "<hexadecimal digits>"}
  process::TaskOptions task;

  void read(ConfigSection s, AdapterUse use) {
    if (use == AdapterUse::kProblems)
      s.require("library", library,
                "the shared library's file; the run sends it to the workers, which must be machines of the same kind");
    else
      library_hex_json = s.json("contents", "what the file holds");
    task.read(s);
  }
};

Result<std::string> library_bytes_from(const std::string& text) {
  const json contents = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!contents.is_object() || !contents.contains("library") || !contents["library"].is_string())
    return fail(Code::kInvalid, "task", "expected the contents of the library's file");
  return library::from_hex(contents["library"].get_ref<const std::string&>());
}

// The learner (kProblems) reads the file, and replaces the option `library` by `contents` in the options that it sends
// to the workers. A worker takes the library from `contents`.
Result<std::unique_ptr<Adapter>> make(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options task_options, options_from_json<Options>("library", options_json, use));
  const bool has_file = use == AdapterUse::kProblems;
  const std::string name_in_errors = has_file ? task_options.library.string() : "the task's library";
  auto bytes = has_file ? read_file(task_options.library, kLibraryFileBytesMax)
                        : library_bytes_from(task_options.library_hex_json);
  if (!bytes) return has_file ? as_user_error(std::move(bytes).error()) : std::move(bytes).error();
  ECHO_TRY(library::check_library(*bytes, name_in_errors));
  json options = json::parse(options_json, nullptr, /*allow_exceptions=*/false);
  options.erase("library");
  options["contents"] = {{"library", library::to_hex(*bytes)}};
  sandbox::Command command;
  command.argv = {"/task/host", "/task/library.so"};
  command.files = {{"/task/host", std::string(library::host_program())}, {"/task/library.so", *std::move(bytes)}};
  return process::make_task("library", std::move(command), task_options.task, options.dump(), seed, use);
}

}  // namespace

const BuiltIn kLibrary{.name = "library",
                       .meaning = "A shared library of your own, by a C interface (docs/how-to/write-a-task.md)",
                       .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
                       .make = make};

}  // namespace echoline::data_plane
