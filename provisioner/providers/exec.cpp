// The provider "exec": instances through user-defined commands, for schedulers and clouds with a command line.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/config.hpp"
#include "provisioner/offer_formats.hpp"
#include "provisioner/providers/command.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "exec";
constexpr std::string_view kIdPrefix = "exec:";
constexpr std::size_t kIdMax = 200, kLinesMax = 100'000;
using Substitutions = std::map<std::string, std::string>;

// Replaces each known {name} in `text`. Other braces stay, because they may belong to the command.
std::string substituted(const std::string& text, const Substitutions& words) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text[at] == '{' ? text.find('}', at) : std::string::npos;
    const auto word = end == std::string::npos ? words.end() : words.find(text.substr(at + 1, end - at - 1));
    if (word == words.end()) {
      out += text[at++];
    } else {
      out += word->second;
      at = end + 1;
    }
  }
  return out;
}

std::vector<std::string> substituted(const std::vector<std::string>& texts, const Substitutions& words) {
  std::vector<std::string> out;
  for (const std::string& text : texts) out.push_back(substituted(text, words));
  return out;
}

bool is_plain_id(const std::string& id) {
  return !id.empty() && id.size() <= kIdMax && id.front() != '-' &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) { return c > ' ' && c < 127; });
}

std::string last_word(const std::string& text) {
  std::istringstream lines(text);
  std::string word, last;
  while (lines >> word) last = word;
  return last;
}

struct ListedInstance {
  std::string id, name, state;
};

// Reads the commands from YAML (configs/providers/README.md). An instance's name is its label in lower case, with
// digits and '-', at most 63 characters; the listing must show it. After a failed start it looks for that name and
// stops it before it reports the failure. A failed stop counts as done when a complete listing lacks the instance. An
// instance has ended when two consecutive listings lack it, or when its state is among `ended`.
struct ExecProvider final : Provider {
  struct Rented {
    std::string label;
    int missed = 0;
    bool ended = false;
  };
  std::vector<std::string> start_command, stop_command, list_command, ended;
  std::string input = "{script}";
  CommandTimes times{std::chrono::minutes(30), std::chrono::seconds(30)};
  CommandRunner commands;
  std::map<std::string, Rented> rented;  // by id
  std::vector<ProviderEvent> events;
  TimePoint watch_due{};
  bool watching = false;

  void list_instances(std::function<void(std::vector<ListedInstance>, std::optional<Error>)> done) {
    commands.run(list_command, "", times.limit, [done = std::move(done)](const CommandResult& end) {
      std::vector<ListedInstance> seen;
      if (!end.good()) return done({}, fail(Code::kUnavailable, kOperation, "list: {}", end.summary()));
      std::istringstream lines(end.out);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        ListedInstance s;
        if (!(words >> s.id)) continue;
        words >> s.name >> s.state;
        if (s.name.empty() || !is_plain_id(s.id) || seen.size() >= kLinesMax)
          return done({}, fail(Code::kCorrupt, kOperation, "list: expected lines of 'id name state', found '{}'",
                               line.substr(0, 100)));
        seen.push_back(std::move(s));
      }
      done(std::move(seen), std::nullopt);
    });
  }

  bool has_ended(const ListedInstance& s) const {
    return std::find(ended.begin(), ended.end(), s.state) != ended.end();
  }

  void start(Ticket ticket, const LaunchSpec& spec) override {
    const std::string script = shell_script(spec.argv, spec.env);
    const Substitutions words{
        {"label", spec.label},
        {"name", instance_name_of_label(spec.label)},
        {"offer", spec.offer.id},
        {"host", spec.offer.host},
        {"place", spec.offer.place},
        {"gpu", spec.offer.gpu},
        {"gpu_count", std::to_string(spec.offer.gpu_count)},
        {"image", spec.image},
        {"disk_gb", std::to_string(static_cast<long>(std::ceil(static_cast<double>(spec.disk.count) / 1e9)))},
        {"script", script},
        {"script_json", nlohmann::json(script).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)}};
    Substitutions visible = words;  // visible in process lists
    visible.erase("script");
    visible.erase("script_json");
    commands.run(substituted(start_command, visible), substituted(input, words), times.limit,
                 [this, ticket, label = spec.label](const CommandResult& end) {
                   const std::string id = last_word(end.out);
                   if (end.good() && is_plain_id(id)) return started(ticket, label, id);
                   stop_after_failed_start(ticket, label,
                                           end.good()
                                               ? fail(Code::kCorrupt, kOperation,
                                                      "start: expected the instance's id as the last "
                                                      "word of the output")
                                               : fail(Code::kUnavailable, kOperation, "start: {}", end.summary()));
                 });
  }

  void started(Ticket ticket, const std::string& label, const std::string& id) {
    rented[id] = {label, 0, false};
    events.push_back(Started{ticket, {std::string(kIdPrefix) + id}, std::nullopt});
  }

  // The instance may exist in spite of the failure, so it is searched and stopped.
  void stop_after_failed_start(Ticket ticket, const std::string& label, const Error& error) {
    list_instances([this, ticket, label, error](const std::vector<ListedInstance>& seen,
                                                const std::optional<Error>& unknown) {
      const auto it = std::find_if(seen.begin(), seen.end(),
                                   [&](const ListedInstance& s) { return s.name == instance_name_of_label(label); });
      if (unknown || it == seen.end()) {
        events.push_back(StartFailed{ticket, error, true, unknown.has_value()});
        return;
      }
      commands.run(substituted(stop_command, {{"instance", it->id}, {"name", it->name}}), "", times.limit,
                   [this, ticket, error](const CommandResult& end) {
                     events.push_back(StartFailed{ticket, error, true, !end.good()});
                   });
    });
  }

  void stop(Ticket ticket, const InstanceId& instance, Duration) override {
    const std::string id = without_prefix(kIdPrefix, instance);
    if (!is_plain_id(id)) {
      events.push_back(StopFailed{
          ticket, instance,
          fail(Code::kInvalid, kOperation, "expected an instance id like exec:1234, found '{}'", instance.text)});
      return;
    }
    const auto it = rented.find(id);
    const std::string name = it == rented.end() ? id : instance_name_of_label(it->second.label);
    if (it != rented.end()) rented.erase(it);
    commands.run(
        substituted(stop_command, {{"instance", id}, {"name", name}}), "", times.limit,
        [this, ticket, instance, id](const CommandResult& end) {
          if (end.good()) {
            events.push_back(Stopped{ticket, instance, "stopped"});
            return;
          }
          const Error error = fail(Code::kUnavailable, kOperation, "stop {}: {}", id, end.summary());
          list_instances([=, this](const std::vector<ListedInstance>& seen, const std::optional<Error>& unknown) {
            const bool there = std::any_of(seen.begin(), seen.end(),
                                           [&](const ListedInstance& s) { return s.id == id && !has_ended(s); });
            if (unknown || there)
              events.push_back(StopFailed{ticket, instance, error});
            else
              events.push_back(Stopped{ticket, instance, "not in a complete listing", true});
          });
        });
  }

  void list(Ticket ticket, const std::string& prefix) override {
    list_instances(
        [this, ticket, prefix](const std::vector<ListedInstance>& seen, const std::optional<Error>& unknown) {
          Listed listed{ticket, !unknown, {}, unknown};
          const std::string start_of_name = instance_name_of_label(prefix);
          for (const ListedInstance& s : seen) {
            if (has_ended(s) || (!prefix.empty() && !s.name.starts_with(start_of_name))) continue;
            const std::string rest = prefix.empty() ? s.name : s.name.substr(start_of_name.size());
            listed.instances.push_back({{std::string(kIdPrefix) + s.id}, prefix + rest, std::nullopt});
          }
          events.push_back(std::move(listed));
        });
  }

  void watch(TimePoint now) {
    if (watching || rented.empty() || now < watch_due) return;
    watching = true;
    watch_due = now + times.watch_every;
    list_instances([this](const std::vector<ListedInstance>& seen, const std::optional<Error>& unknown) {
      watching = false;
      if (unknown) return;
      for (auto& [id, known] : rented) {
        if (known.ended) continue;
        const auto it =
            std::find_if(seen.begin(), seen.end(), [&, &id = id](const ListedInstance& s) { return s.id == id; });
        const bool over = it != seen.end() && has_ended(*it);
        if (it != seen.end()) known.missed = 0;
        if (!over && (it != seen.end() || ++known.missed < 2)) continue;
        known.ended = true;
        events.push_back(Exited{
            {std::string(kIdPrefix) + id}, known.label, over ? it->state : "it is not listed any more", false, over});
      }
    });
  }

  std::vector<ProviderEvent> poll(TimePoint now) override {
    commands.poll(now);
    watch(now);
    return std::exchange(events, {});
  }
};

Result<std::unique_ptr<Provider>> make(const std::filesystem::path& file) {
  ECHO_ASSIGN(ConfigFile config, ConfigFile::load(file));
  auto made = std::make_unique<ExecProvider>();
  ConfigSection root = config.root();
  root.require("start", made->start_command, "starts an instance; the last word of its output is the instance's id");
  root.read("stdin", made->input, "the input of `start`");
  root.require("stop", made->stop_command, "ends {instance}; must succeed if it has ended already");
  root.require("list", made->list_command, "prints a line 'id name state' for every instance");
  root.read("ended", made->ended, "states of instances that have ended");
  read_times(root, made->times);
  for (const auto& [key, words] :
       {std::pair{"start", &made->start_command}, {"stop", &made->stop_command}, {"list", &made->list_command}})
    if (words->empty()) root.error(key, "expected the words of a command, such as [scancel, \"{instance}\"]");
  ECHO_TRY(config.finish());
  return std::unique_ptr<Provider>(std::move(made));
}

}  // namespace

const ProviderKind& exec_kind() {
  static const ProviderKind kind{
      .name = "exec",
      .meaning = "machines started by your commands",
      .make = [](const ProviderOptions& options) { return make_from_file("exec", options.file, make); },
      .offers = skypilot_format()};
  return kind;
}

}  // namespace echoline::provisioner
