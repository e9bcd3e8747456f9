// echoline publish: hands policies that the user's own trainer has saved to the learner of its run.
#include <httplib.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/files.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "delta/checkpoint.hpp"
#include "learner/external/source.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr auto kPollInterval = std::chrono::milliseconds(500);
constexpr auto kReadTimeout = std::chrono::minutes(10);  // the learner reads and checks a policy before it answers
// A checkpoint is complete when none of its files has changed for this long.
constexpr Duration kQuietTime = std::chrono::seconds(2);

struct Arguments {
  std::string run, policy, watch, strip_prefix;
  std::size_t version = 0;         // 0: the policy the run starts with
  std::size_t version_offset = 0;  // how much the numbers of watched folders are ahead of the run's versions
};

// Calls the HTTP interface for trainers of a run's learner.
class RunClient {
 public:
  static Result<RunClient> open(const fs::path& folder) {
    const fs::path file = folder / learner::kTrainerAddressFile;
    constexpr std::size_t kAddressFileBytesMax = 1 << 16;
    auto text = read_file(file, kAddressFileBytesMax);
    if (!text)
      return fail(Code::kUnavailable, "publish", "{}: no learner with `learner.trainer: external` runs there ({})",
                  folder.string(), text.error().detail);
    const json address = json::parse(*text, nullptr, /*allow_exceptions=*/false);
    const auto text_field = [&](const char* key) {
      return address.is_object() && address.contains(key) && address[key].is_string() ? address[key].get<std::string>()
                                                                                      : std::string();
    };
    RunClient client;
    if (const std::string socket = text_field("socket"); !socket.empty()) {
      client.client_ = std::make_unique<httplib::Client>(socket, /*port=*/1);  // the port is ignored
      client.client_->set_address_family(AF_UNIX);
    } else if (const std::string url = text_field("url"); !url.empty()) {
      client.client_ = std::make_unique<httplib::Client>(url);
      client.client_->set_bearer_token_auth(text_field("token"));
    } else {
      return fail(Code::kCorrupt, "publish", "{}: expected `socket` or `url`, found neither", file.string());
    }
    client.client_->set_read_timeout(kReadTimeout);
    client.client_->set_default_headers({{"Host", "localhost"}});  // over a socket, httplib would send its path
    return client;
  }

  Result<json> status() { return parse_response(client_->Get("/v1/status")); }

  Result<json> publish(std::uint64_t version, const fs::path& policy, const std::string& strip_prefix) {
    json body{{"path", fs::absolute(policy).string()}};
    if (!strip_prefix.empty()) body["strip_prefix"] = strip_prefix;
    return parse_response(client_->Post(fmt::format("/v1/policy/{}", version), body.dump(), "application/json"));
  }

 private:
  static Result<json> parse_response(const httplib::Result& result) {
    if (!result)
      return fail(Code::kUnavailable, "publish", "the learner does not answer: {}", httplib::to_string(result.error()));
    json body = json::parse(result->body, nullptr, /*allow_exceptions=*/false);
    if (result->status == 200 && body.is_object()) return body;
    if (body.is_object() && body.contains("error")) {
      const Code code = result->status == 400   ? Code::kInvalid
                        : result->status == 409 ? Code::kStale
                                                : Code::kUnavailable;
      return Error{code, "publish", body["error"].value("message", "")};
    }
    return fail(Code::kUnavailable, "publish", "the learner answers with HTTP {}", result->status);
  }

  std::unique_ptr<httplib::Client> client_;
};

// Returns the number at the end of a name, such as step_12, checkpoint-12, global_step12.
std::optional<std::uint64_t> number_in_name(const std::string& name) {
  // Numbers of so many digits always fit into 64 bits.
  constexpr std::size_t kDigitsMax = 12;
  const std::size_t first_digit = name.find_last_not_of("0123456789") + 1;  // npos + 1 is 0
  const std::size_t digits = name.size() - first_digit;
  if (digits == 0 || digits > kDigitsMax) return std::nullopt;
  return std::stoull(name.substr(first_digit));
}

// The Hugging Face or PEFT folder in a checkpoint, or the checkpoint itself. verl saves into actor/huggingface.
fs::path weights_folder(const fs::path& checkpoint) {
  for (const char* subfolder : {"", "hf", "huggingface", "model", "weights", "actor/huggingface", "policy"})
    for (const char* file : {"model.safetensors", delta::kCheckpointIndexName, delta::kAdapterFileName})
      if (std::error_code error; fs::exists(checkpoint / subfolder / file, error)) return checkpoint / subfolder;
  return checkpoint;
}

// Returns the time of the last write to the folder or anything in it; absent while files come and go.
std::optional<fs::file_time_type> newest_write_time(const fs::path& folder) {
  std::error_code error;
  fs::file_time_type newest = fs::last_write_time(folder, error);
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    newest = std::max(newest, it->last_write_time(error));
  return error ? std::nullopt : std::optional(newest);
}

// Returns why a checkpoint cannot be published: it is not complete yet, or has another format.
std::string why_not_publishable(const fs::path& checkpoint, const std::string& opening_error) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(checkpoint, error), end; !error && it != end; it.increment(error)) {
    const std::string extension = it->path().extension().string();
    if (extension == ".distcp")
      return fmt::format(
          "{} is a distributed checkpoint of PyTorch: `python3 -m echoline.distcp {} FOLDER` makes a folder that can "
          "be published (clients/python), or let the trainer call publish_shards()",
          it->path().parent_path().string(), it->path().parent_path().string());
    if (extension == ".bin" || extension == ".pt" || extension == ".pth")
      return fmt::format("{} is not of the safetensors format: save with safe_serialization=True", it->path().string());
  }
  return fmt::format("{} is not complete yet: {}", checkpoint.string(), opening_error);
}

// Returns a message for the user: the version that the learner waits for, and the versions in the folder.
std::string why_waiting(const json& wanted_version, const std::map<std::uint64_t, fs::path>& checkpoints,
                        const std::string& folder) {
  if (!wanted_version.is_number()) return "the learner wants no policy now: it waits for its trainer's next step";
  if (checkpoints.empty())
    return fmt::format("waiting for version {}: {} has no subfolder whose name ends in a number",
                       wanted_version.get<std::uint64_t>(), folder);
  return fmt::format("waiting for version {}: {} has {}", wanted_version.get<std::uint64_t>(), folder,
                     checkpoints.size() == 1 ? fmt::format("version {}", checkpoints.begin()->first)
                                             : fmt::format("{} versions, {} to {}", checkpoints.size(),
                                                           checkpoints.begin()->first, checkpoints.rbegin()->first));
}

// Waits for the learner, which may start after this program.
std::optional<RunClient> wait_for_learner(const Arguments& args, const std::atomic<bool>& stop) {
  for (bool wait_was_reported = false; !stop; std::this_thread::sleep_for(kPollInterval)) {
    const auto folder = find_run(args.run);
    auto client = folder ? RunClient::open(*folder) : Result<RunClient>(folder.error());
    if (client && client->status()) return *std::move(client);
    if (!std::exchange(wait_was_reported, true))
      print_stderr("waiting for a learner of {} with `learner.trainer: external`\n", args.run);
  }
  return std::nullopt;
}

// Publishes a checkpoint. Returns a message for the user: that it is published, or why not.
std::string publish_checkpoint(RunClient& client, std::uint64_t version, const fs::path& checkpoint,
                               const std::string& strip_prefix) {
  const fs::path weights = weights_folder(checkpoint);
  if (const auto opened = delta::Checkpoint::open(weights); !opened)
    return fmt::format("version {}: {}", version, why_not_publishable(checkpoint, opened.error().detail));
  const auto published = client.publish(version, weights, strip_prefix);
  if (!published) return fmt::format("version {} from {}: {}", version, weights.string(), published.error().message());
  return fmt::format("version {} is published from {}", version, weights.string());
}

// Publishes each version that the learner wants as soon as its folder is complete, until the learner ends.
int watch_folder(const Arguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  std::optional<RunClient> client = wait_for_learner(args, stop);
  if (!client) return 0;
  std::map<std::uint64_t, std::string> reported_messages;  // by version: the last message about it
  std::string reported_wait;
  for (bool first_round = true; !stop; first_round = false) {
    const auto status = client->status();
    if (!status) {
      print_stderr("the learner has ended: done\n");
      return 0;
    }
    const json wanted_version = (*status)["version_wanted"];
    std::error_code error;
    std::map<std::uint64_t, fs::path> checkpoints;
    for (fs::directory_iterator it(args.watch, error), end; !error && it != end; it.increment(error))
      if (const auto number = number_in_name(it->path().filename().string());
          number && *number >= args.version_offset && it->is_directory(error))
        checkpoints.emplace(*number - args.version_offset, it->path());
    if (error && first_round)
      return report_error("publish", fail(Code::kNotFound, "watch", "{}: {}", args.watch, error.message()));
    const auto wanted =
        wanted_version.is_number() ? checkpoints.find(wanted_version.get<std::uint64_t>()) : checkpoints.end();
    if (wanted == checkpoints.end()) {
      if (std::string wait = why_waiting(wanted_version, checkpoints, args.watch); wait != reported_wait) {
        print_stderr("{}\n", wait);
        reported_wait = std::move(wait);
      }
    } else if (const auto written_at = newest_write_time(wanted->second);
               written_at && fs::file_time_type::clock::now() - *written_at >= kQuietTime) {
      std::string message = publish_checkpoint(*client, wanted->first, wanted->second, args.strip_prefix);
      std::string& reported_message = reported_messages[wanted->first];
      if (message != reported_message) {
        print_stderr("{}\n", message);
        reported_message = std::move(message);
      }
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  return 0;
}

int publish(const Arguments& args) {
  const bool is_watching = !args.watch.empty(), has_policy = !args.policy.empty();
  if (is_watching == has_policy || (has_policy && args.version == 0))
    return report_error("publish",
                        fail(Code::kInvalid, "publish", "expected a policy and its --version, or --watch FOLDER"));
  if (is_watching) return watch_folder(args);
  const auto folder = find_run(args.run);
  if (!folder) return report_error("publish", folder.error());
  auto client = RunClient::open(*folder);
  if (!client) return report_error("publish", client.error());
  const auto published = client->publish(args.version, args.policy, args.strip_prefix);
  if (!published) return report_error("publish", published.error());
  fmt::print("version {} of {}: accepted; it is published when its learner step is done\n", args.version,
             folder->filename().string());
  return 0;
}

}  // namespace

void add_publish(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("publish", "Give a policy that another trainer has saved to its run");
  auto args = std::make_shared<Arguments>();
  verb->add_option("run", args->run, "the run's name or folder")->required();
  verb->add_option("policy", args->policy,
                   "a Hugging Face folder or a .safetensors file of the run's model; with learner.adapter also PEFT's "
                   "folder of an adapter");
  verb->add_option("--version", args->version, "number of learner steps that made this policy");
  verb->add_option("--watch", args->watch,
                   "a folder into which a trainer saves: each subfolder whose name ends in a number is that version, "
                   "and published when it is complete and the learner waits for it");
  verb->add_option("--version-offset", args->version_offset,
                   "with --watch: by how much the folders' numbers are ahead of the run's versions, such as 1");
  verb->add_option("--strip-prefix", args->strip_prefix,
                   "text to remove from the beginning of the tensors' names, such as module.");
  verb->footer("The run's learner has `learner.trainer: external` (docs/trainers.md).");
  verb->callback([args, &exit_code] { exit_code = publish(*args); });
}

}  // namespace echoline::cli
