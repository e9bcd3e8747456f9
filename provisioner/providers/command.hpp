// Programs that providers run: beside each other, without waiting, with their output caught. Private to provisioner/.
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

struct CommandEnd {
  int status = 0;  // exit status; 128 + signal; -1: it could not be run
  std::string out, err;
  bool good() const { return status == 0; }
  // The status and the last line of what it said, for messages.
  std::string words() const;
};

class Commands {
 public:
  using Done = std::function<void(const CommandEnd&)>;
  Commands() = default;
  ~Commands();  // what still runs goes on by itself
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  // argv[0] is looked up in PATH. `input` is its stdin, where secrets belong: argv can be seen by everybody. Killed
  // after `limit`, counted from the next poll(). `done` is called by poll().
  void run(const std::vector<std::string>& argv, std::string_view input, Duration limit, Done done);
  // The same with a file as stdin.
  void run_file(const std::vector<std::string>& argv, const std::string& input_file, Duration limit, Done done);
  void poll(TimePoint now);

 private:
  struct Running;
  void spawn(const std::vector<std::string>& argv, int input, Duration limit, Done done);
  std::vector<Running> running_;
  std::vector<std::pair<CommandEnd, Done>> failed_;
};

struct Commands::Running {
  int pid = -1, out = -1, err = -1;
  Duration limit{};
  std::optional<TimePoint> kill_at;
  Done done;
};

// What providers of commands read alike: how long one may take, and how often what runs is looked at.
struct CommandTimes {
  Duration limit, watch_every;
};
void read_times(ConfigSection& section, CommandTimes& times);

// What `make` reads from fleet.provider_file; kInvalid where none is named.
Result<std::unique_ptr<Provider>> made_of_file(
    std::string_view provider, const std::filesystem::path& file,
    Result<std::unique_ptr<Provider>> (*make)(const std::filesystem::path& file));

// The name under which commands know an instance, or the beginning of such names for a label prefix.
std::string exec_name(std::string_view label);

// The rest of an instance's name, "" where it does not begin with the provider's prefix.
std::string name_after(std::string_view prefix, const InstanceId& instance);

// A word as sh reads it back.
std::string shell_quoted(std::string_view word);

// A script for sh that becomes `argv` with `env`: read from stdin, it shows none of it in a list of processes until
// then.
std::string shell_script(const std::vector<std::string>& argv,
                         const std::vector<std::pair<std::string, std::string>>& env);

}  // namespace echoline::provisioner
