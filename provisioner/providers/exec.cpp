// The provider "exec": instances through user-defined commands, for schedulers and clouds with a command line.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/config.hpp"
#include "provisioner/offer_formats.hpp"
#include "provisioner/providers/command.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "exec";
constexpr std::string_view kIdPrefix = "exec:";
constexpr std::size_t kIdMax = 200;         // characters
constexpr std::size_t kLinesMax = 100'000;  // of a listing
constexpr int kMissedListingsMax = 2;       // consecutive listings without an instance after which it counts as ended
// The values of placeholders by name, such as "host" for {host}. Absent: the offer or the run does not state the value.
using Substitutions = std::map<std::string, std::optional<std::string>>;
using Names = std::set<std::string>;

std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump(/*indent=*/-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

// A name in braces: the value that it stands for, and the form in which the value is put into the text.
struct Placeholder {
  enum class Form { kPlain, kJson, kJsonOrNull } form = Form::kPlain;
  Substitutions::const_iterator value;  // the end if there is none of this name
};

Placeholder placeholder_of(std::string_view name, const Substitutions& values) {
  using enum Placeholder::Form;
  constexpr std::pair<std::string_view, Placeholder::Form> kSuffixes[] = {
      {"", kPlain}, {"_json", kJson}, {"_or_null", kJsonOrNull}};
  for (const auto& [suffix, form] : kSuffixes)
    if (name.ends_with(suffix))
      if (const auto value = values.find(std::string(name.substr(0, name.size() - suffix.size())));
          value != values.end())
        return {form, value};
  return {kPlain, values.end()};
}

// Replaces each {name} in `text` by the value of this name, {name_json} by the value as a JSON string, and
// {name_or_null} by the same string, or by null if the value is absent. Other braces stay, because they may belong to
// the command. Adds to `missing` the names of absent values that {name} or {name_json} needs.
std::string substituted(const std::string& text, const Substitutions& values, Names& missing) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t end = text[i] == '{' ? text.find('}', i) : std::string::npos;
    const std::string_view in_braces =
        end == std::string::npos ? "" : std::string_view(text).substr(i + 1, end - i - 1);
    const auto [form, value] = placeholder_of(in_braces, values);
    if (value == values.end()) {
      out += text[i++];
      continue;
    }
    if (value->second)
      out += form == Placeholder::Form::kPlain ? *value->second : json_string(*value->second);
    else if (form == Placeholder::Form::kJsonOrNull)
      out += "null";
    else
      missing.insert(value->first);
    i = end + 1;
  }
  return out;
}

std::vector<std::string> substituted(const std::vector<std::string>& texts, const Substitutions& values,
                                     Names& missing) {
  std::vector<std::string> out;
  for (const std::string& text : texts) out.push_back(substituted(text, values, missing));
  return out;
}

// The command that stops an instance. Its values are never absent.
std::vector<std::string> stop_argv(const std::vector<std::string>& command, const std::string& id,
                                   const std::string& name) {
  Names missing;
  return substituted(command, {{"instance", id}, {"name", name}}, missing);
}

// The values for a start. Those of `hidden` contain the join token, so process lists must not show them.
struct StartValues {
  Substitutions visible, hidden;
};

StartValues values_of(const LaunchSpec& spec) {
  const auto stated = [](const std::string& text) { return text.empty() ? std::nullopt : std::optional(text); };
  nlohmann::json env = nlohmann::json::object();
  for (const auto& [name, value] : spec.env) env[name] = value;
  return {.visible = {{"label", spec.label},
                      {"name", instance_name_of_label(spec.label)},
                      {"offer", spec.offer.id},
                      {"host", stated(spec.offer.host)},
                      {"place", stated(spec.offer.place)},
                      {"cloud", stated(spec.offer.cloud)},
                      {"region", stated(spec.offer.region)},
                      {"zone", stated(spec.offer.zone)},
                      {"machine_type", stated(spec.offer.machine_type)},
                      {"gpu", stated(spec.offer.gpu)},
                      {"gpu_count", std::to_string(spec.offer.gpu_count)},
                      {"spot", spec.bid_usd_per_hour ? "true" : "false"},
                      {"pricing", spec.bid_usd_per_hour ? "spot" : "on-demand"},
                      {"image", stated(spec.image)},
                      {"disk_gb", fmt::format("{:.0f}", std::ceil(static_cast<double>(spec.disk.count) / 1e9))}},
          .hidden = {{"script", shell_script(spec.argv, spec.env)},
                     {"command", shell_script(spec.argv, {})},
                     {"env_json",
                      env.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace)}}};
}

// Whether the id is safe as one word of a command (printable ASCII without spaces), and not taken for an option.
bool is_plain_id(const std::string& id) {
  return !id.empty() && id.size() <= kIdMax && id.front() != '-' &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) { return c > ' ' && c < 127; });
}

std::string last_word(const std::string& text) {
  std::istringstream words(text);
  std::string word, last;
  while (words >> word) last = word;
  return last;
}

// A line of the listing.
struct ListedInstance {
  std::string id, name, state;
};

// Runs the commands of a YAML file (configs/providers/README.md). The listing must show each instance's name
// (instance_name_of_label()). After a failed start, the provider looks for that name, and stops the instance if it
// exists, before it reports the failure. A failed stop counts as done when a complete listing lacks the instance. An
// instance has ended when two consecutive listings lack it, or when its state is among `ended`.
struct ExecProvider final : Provider {
  struct Rented {
    std::string label;
    int missed_listings = 0;  // consecutive listings without this instance
    bool ended = false;       // Exited was reported
  };
  std::vector<std::string> start_command, stop_command, list_command;
  std::vector<std::string> ended_states;  // words of the listing for an instance that has ended
  std::string start_input = "{script}";   // stdin of start_command
  CommandTimes times{.limit = std::chrono::minutes(30), .watch_every = std::chrono::seconds(30)};
  CommandRunner commands;
  std::map<std::string, Rented> rented;  // by id
  std::vector<ProviderEvent> events;
  TimePoint next_watch_at{};
  bool watching = false;  // a listing of watch_rented() is not answered yet

  void list_instances(std::function<void(std::vector<ListedInstance>, std::optional<Error>)> done) {
    commands.run(list_command, "", times.limit, [done = std::move(done)](const CommandResult& result) {
      if (!result.good()) return done({}, fail(Code::kUnavailable, kOperation, "list: {}", result.summary()));
      std::vector<ListedInstance> seen;
      std::istringstream lines(result.out);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        ListedInstance instance;
        if (!(words >> instance.id)) continue;
        words >> instance.name >> instance.state;
        if (instance.name.empty() || !is_plain_id(instance.id) || seen.size() >= kLinesMax)
          return done({}, fail(Code::kCorrupt, kOperation, "list: expected lines of 'id name state', found '{}'",
                               line.substr(0, 100)));
        seen.push_back(std::move(instance));
      }
      done(std::move(seen), std::nullopt);
    });
  }

  bool has_ended(const ListedInstance& instance) const {
    return std::find(ended_states.begin(), ended_states.end(), instance.state) != ended_states.end();
  }

  void start(Ticket ticket, const LaunchSpec& spec) override {
    const StartValues values = values_of(spec);
    Substitutions all_values = values.hidden;
    all_values.insert(values.visible.begin(), values.visible.end());
    Names missing;
    const std::vector<std::string> argv = substituted(start_command, values.visible, missing);
    const std::string input = substituted(start_input, all_values, missing);
    if (!missing.empty()) {
      events.push_back(StartFailed{
          .ticket = ticket,
          .error = fail(Code::kInvalid, kOperation, "the provider file uses {{{}}}, which offer '{}' does not state",
                        fmt::join(missing, "}, {"), spec.offer.id),
          .retryable = false,
          .perhaps_rented = false});
      return;
    }
    commands.run(argv, input, times.limit, [this, ticket, label = spec.label](const CommandResult& result) {
      const std::string id = last_word(result.out);
      if (result.good() && is_plain_id(id)) return on_started(ticket, label, id);
      const Error error = result.good() ? fail(Code::kCorrupt, kOperation,
                                               "start: expected the instance's id as the last word of the output")
                                        : fail(Code::kUnavailable, kOperation, "start: {}", result.summary());
      stop_after_failed_start(ticket, label, error);
    });
  }

  static InstanceId instance_of(const std::string& id) { return {std::string(kIdPrefix) + id}; }

  void on_started(Ticket ticket, const std::string& label, const std::string& id) {
    rented[id] = {.label = label, .missed_listings = 0, .ended = false};
    events.push_back(Started{.ticket = ticket, .instance = instance_of(id), .usd_per_hour = std::nullopt});
  }

  void push_start_failed(Ticket ticket, const Error& error, bool perhaps_rented) {
    events.push_back(
        StartFailed{.ticket = ticket, .error = error, .retryable = true, .perhaps_rented = perhaps_rented});
  }

  // Looks for the instance, which may exist in spite of the failure, and stops it. Then reports the failure.
  void stop_after_failed_start(Ticket ticket, const std::string& label, const Error& error) {
    list_instances([this, ticket, label, error](const std::vector<ListedInstance>& seen,
                                                const std::optional<Error>& list_error) {
      const std::string name = instance_name_of_label(label);
      const auto it =
          std::find_if(seen.begin(), seen.end(), [&](const ListedInstance& instance) { return instance.name == name; });
      if (list_error || it == seen.end()) return push_start_failed(ticket, error, list_error.has_value());
      commands.run(
          stop_argv(stop_command, it->id, it->name), "", times.limit,
          [this, ticket, error](const CommandResult& result) { push_start_failed(ticket, error, !result.good()); });
    });
  }

  void stop(Ticket ticket, const InstanceId& instance, Duration) override {
    const std::string id = id_after_prefix(kIdPrefix, instance);
    if (!is_plain_id(id)) {
      events.push_back(StopFailed{.ticket = ticket,
                                  .instance = instance,
                                  .error = fail(Code::kInvalid, kOperation,
                                                "expected an instance id like exec:1234, found '{}'", instance.text)});
      return;
    }
    // `rented` lacks an instance that an earlier process started. Its id then stands for its unknown name.
    const auto it = rented.find(id);
    const std::string name = it == rented.end() ? id : instance_name_of_label(it->second.label);
    if (it != rented.end()) rented.erase(it);  // so that its end is not reported as Exited
    commands.run(
        stop_argv(stop_command, id, name), "", times.limit, [this, ticket, instance, id](const CommandResult& result) {
          if (result.good()) {
            events.push_back(Stopped{.ticket = ticket, .instance = instance, .how = "stopped"});
            return;
          }
          const Error error = fail(Code::kUnavailable, kOperation, "stop {}: {}", id, result.summary());
          list_instances([=, this](const std::vector<ListedInstance>& seen, const std::optional<Error>& list_error) {
            const bool still_runs = std::any_of(seen.begin(), seen.end(), [&](const ListedInstance& listed) {
              return listed.id == id && !has_ended(listed);
            });
            if (list_error || still_runs)
              events.push_back(StopFailed{.ticket = ticket, .instance = instance, .error = error});
            else
              events.push_back(
                  Stopped{.ticket = ticket, .instance = instance, .how = "not in a complete listing", .absent = true});
          });
        });
  }

  void list(Ticket ticket, const std::string& prefix) override {
    list_instances(
        [this, ticket, prefix](const std::vector<ListedInstance>& seen, const std::optional<Error>& list_error) {
          Listed listed{.ticket = ticket, .complete = !list_error, .instances = {}, .error = list_error};
          // A name lacks its label's punctuation. So the label is composed of the prefix and the rest of the name,
          // which is the row's id.
          const std::string name_prefix = prefix.empty() ? "" : instance_name_of_label(prefix);
          for (const ListedInstance& instance : seen) {
            if (has_ended(instance) || !instance.name.starts_with(name_prefix)) continue;
            listed.instances.push_back({.instance = instance_of(instance.id),
                                        .label = prefix + instance.name.substr(name_prefix.size()),
                                        .usd_per_hour = std::nullopt});
          }
          events.push_back(std::move(listed));
        });
  }

  // Lists the instances at intervals and reports those that have ended.
  void watch_rented(TimePoint now) {
    if (watching || rented.empty() || now < next_watch_at) return;
    watching = true;
    next_watch_at = now + times.watch_every;
    list_instances([this](const std::vector<ListedInstance>& seen, const std::optional<Error>& list_error) {
      watching = false;
      if (list_error) return;
      for (auto& [id, known] : rented) {
        if (known.ended) continue;
        const auto it = std::find_if(seen.begin(), seen.end(),
                                     [&, &id = id](const ListedInstance& instance) { return instance.id == id; });
        const bool is_listed = it != seen.end();
        const bool is_listed_as_ended = is_listed && has_ended(*it);
        known.missed_listings = is_listed ? 0 : known.missed_listings + 1;
        if (!is_listed_as_ended && known.missed_listings < kMissedListingsMax) continue;
        known.ended = true;
        // An instance that is still listed may still cost, although it has ended.
        events.push_back(Exited{.instance = instance_of(id),
                                .label = known.label,
                                .why = is_listed_as_ended ? it->state : "it is not listed any more",
                                .outbid = false,
                                .still_rented = is_listed_as_ended});
      }
    });
  }

  std::vector<ProviderEvent> poll(TimePoint now) override {
    commands.poll(now);
    watch_rented(now);
    return std::exchange(events, {});
  }
};

Result<std::unique_ptr<Provider>> make(const std::filesystem::path& file) {
  ECHO_ASSIGN(ConfigFile config, ConfigFile::load(file));
  auto provider = std::make_unique<ExecProvider>();
  ConfigSection root = config.root();
  root.require("start", provider->start_command,
               "starts an instance; the last word of its output is the instance's id");
  root.read("stdin", provider->start_input, "the input of `start`");
  root.require("stop", provider->stop_command, "ends {instance}; must succeed if it has ended already");
  root.require("list", provider->list_command, "prints a line 'id name state' for every instance");
  root.read("ended", provider->ended_states, "states of instances that have ended");
  std::vector<std::string> secrets;
  root.read("secrets", secrets, "environment variables with credentials that the commands need, such as VAST_API_KEY");
  provider->commands.keep_secrets(std::move(secrets));
  read_times(root, provider->times);
  for (const auto& [key, words] : {std::pair{"start", &provider->start_command},
                                   {"stop", &provider->stop_command},
                                   {"list", &provider->list_command}})
    if (words->empty()) root.error(key, "expected the words of a command, such as [scancel, \"{instance}\"]");
  ECHO_TRY(config.finish());
  return std::unique_ptr<Provider>(std::move(provider));
}

}  // namespace

const ProviderKind& exec_kind() {
  static const ProviderKind kind{
      .name = "exec",
      .meaning = "machines started by your commands",
      .make = [](const ProviderOptions& options) { return make_from_file("exec", options.file, make); },
      .offer_format = skypilot_format()};
  return kind;
}

}  // namespace echoline::provisioner
