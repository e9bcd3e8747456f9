// Runs external programs of providers concurrently, without blocking, and captures their output. Private to
// provisioner/.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/config.hpp"
#include "base/files.hpp"
#include "base/result.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// How a program ended, with the first 4 MiB of each output.
struct CommandResult {
  int status = 0;        // exit status; 128 + signal; -1: the program could not be run
  std::string out, err;  // standard output and standard error
  bool good() const { return status == 0; }
  // The status and the last line of `err`, or of `out` if `err` is empty; for messages.
  std::string summary() const;
};

// Use from one thread.
class CommandRunner {
 public:
  using Done = std::function<void(const CommandResult&)>;
  CommandRunner() = default;
  ~CommandRunner();  // running programs continue; their output is lost
  CommandRunner(const CommandRunner&) = delete;
  CommandRunner& operator=(const CommandRunner&) = delete;

  // Programs inherit the environment without provider_secrets(), because schedulers copy the environment to their jobs.
  // The secrets with these names stay in it, and so do other credentials, such as those of a cloud's own program.
  void keep_secrets(std::vector<std::string> names) { kept_secrets_ = std::move(names); }
  // From now on, programs inherit no credential at all (is_credential()).
  void remove_all_credentials() { without_credentials_ = true; }
  // Starts a program; argv[0] is looked up in PATH. `input` is its stdin. Secrets belong there, because all users can
  // see argv. The program is killed after `limit`, counted from the next poll(). poll() calls `done`.
  void run(const std::vector<std::string>& argv, std::string_view input, Duration limit, Done done);
  // The same with a file as stdin.
  void run_file(const std::vector<std::string>& argv, const std::string& input_file, Duration limit, Done done);
  // Calls `done` of the programs that have ended, and kills those that exceed their limit. Call it often.
  void poll(TimePoint now);

 private:
  struct Running;
  void spawn(const std::vector<std::string>& argv, int input_fd, Duration limit, Done done);
  std::vector<std::string> kept_secrets_;
  bool without_credentials_ = false;
  std::vector<Running> running_;
  std::vector<std::pair<CommandResult, Done>> failed_;  // could not be started; poll() reports them
};

struct CommandRunner::Running {
  int pid = -1, out_fd = -1, err_fd = -1;
  Duration limit{};
  std::optional<TimePoint> kill_at;  // set by the first poll()
  Done done;
};

// Settings common to providers that run commands: the time limit of a command, and the interval between listings.
struct CommandTimes {
  Duration limit, watch_every;
};
void read_times(ConfigSection& section, CommandTimes& times);

// Makes a provider from `file`, the setting fleet.provider_file. kInvalid if it is empty.
Result<std::unique_ptr<Provider>> make_from_file(
    std::string_view provider, const std::filesystem::path& file,
    Result<std::unique_ptr<Provider>> (*make)(const std::filesystem::path& file));

// The name by which commands know the instance with this label: lower-case letters, digits and '-', beginning with a
// letter, because schedulers and clouds accept no others. For a prefix of labels, returns the prefix of their names.
std::string instance_name_of_label(std::string_view label);

// The instance's id after the provider's prefix; "" if it has another prefix.
std::string id_after_prefix(std::string_view prefix, const InstanceId& instance);

std::string shell_quoted(std::string_view word);

// A shell script that executes `argv` with `env`. If it is passed by stdin, no process list shows either before the
// script runs.
std::string shell_script(const std::vector<std::string>& argv,
                         const std::vector<std::pair<std::string, std::string>>& env);

}  // namespace echoline::provisioner
