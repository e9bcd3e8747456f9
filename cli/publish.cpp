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
// A checkpoint is complete when none of its files has changed for this long.
constexpr Duration kQuietTime = std::chrono::seconds(2);

struct Arguments {
  std::string run, policy, watch;
  std::size_t version = 0;  // 0: the policy the run starts with
};

// Calls the trainer API of a run's learner.
class RunClient {
 public:
  static Result<RunClient> open(const fs::path& folder) {
    const fs::path file = folder / learner::kTrainerAddressFile;
    auto text = read_file(file, 1 << 16);
    if (!text)
      return fail(Code::kUnavailable, "publish", "{}: no learner with `learner.trainer: external` runs there ({})",
                  folder.string(), text.error().detail);
    const json address = json::parse(*text, nullptr, false);
    const auto text_field = [&](const char* key) {
      return address.is_object() && address.contains(key) && address[key].is_string() ? address[key].get<std::string>()
                                                                                      : std::string();
    };
    RunClient run;
    if (const std::string socket = text_field("socket"); !socket.empty()) {
      run.client_ = std::make_unique<httplib::Client>(socket, 1);
      run.client_->set_address_family(AF_UNIX);
    } else if (const std::string url = text_field("url"); !url.empty()) {
      run.client_ = std::make_unique<httplib::Client>(url);
      run.client_->set_bearer_token_auth(text_field("token"));
    } else {
      return fail(Code::kCorrupt, "publish", "{}: expected `socket` or `url`, found neither", file.string());
    }
    run.client_->set_read_timeout(std::chrono::minutes(10));
    run.client_->set_default_headers({{"Host", "localhost"}});
    return run;
  }

  Result<json> status() { return parse_response(client_->Get("/v1/status")); }

  Result<json> publish(std::uint64_t version, const fs::path& policy) {
    return parse_response(client_->Post(fmt::format("/v1/policy/{}", version),
                                        json{{"path", fs::absolute(policy).string()}}.dump(), "application/json"));
  }

 private:
  static Result<json> parse_response(const httplib::Result& result) {
    if (!result)
      return fail(Code::kUnavailable, "publish", "the learner does not answer: {}", httplib::to_string(result.error()));
    json body = json::parse(result->body, nullptr, false);
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

// The number at the end of a name, such as step_12, checkpoint-12, global_step12.
std::optional<std::uint64_t> version_of_name(const std::string& name) {
  const std::size_t digits = name.size() - std::min(name.size(), name.find_last_not_of("0123456789") + 1);
  if (digits == 0 || digits > 12) return std::nullopt;
  return std::stoull(name.substr(name.size() - digits));
}

// The Hugging Face folder in a checkpoint, or the checkpoint itself.
fs::path weights_of(const fs::path& checkpoint) {
  for (const char* subfolder : {"", "hf", "huggingface", "model", "weights"})
    for (const char* file : {"model.safetensors", delta::kCheckpointIndexName})
      if (std::error_code error; fs::exists(checkpoint / subfolder / file, error)) return checkpoint / subfolder;
  return checkpoint;
}

// The time of the last write to the folder or anything in it; absent while files come and go.
std::optional<fs::file_time_type> last_write(const fs::path& folder) {
  std::error_code error;
  fs::file_time_type newest = fs::last_write_time(folder, error);
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    newest = std::max(newest, it->last_write_time(error));
  return error ? std::nullopt : std::optional(newest);
}

// Waits for the learner, which may start after this program.
std::optional<RunClient> wait_for_learner(const Arguments& a, const std::atomic<bool>& stop) {
  for (bool reported = false; !stop; std::this_thread::sleep_for(kPollInterval)) {
    const auto folder = find_run(a.run);
    auto run = folder ? RunClient::open(*folder) : Result<RunClient>(folder.error());
    if (run && run->status()) return *std::move(run);
    if (!std::exchange(reported, true))
      print_stderr("waiting for a learner of {} with `learner.trainer: external`\n", a.run);
  }
  return std::nullopt;
}

int watch(const Arguments& a) {
  const std::atomic<bool>& stop = stop_on_signals();
  std::optional<RunClient> run = wait_for_learner(a, stop);
  if (!run) return 0;
  std::map<std::uint64_t, std::string> reported;  // the last message about each version
  for (bool first_round = true; !stop; first_round = false) {
    const auto status = run->status();
    if (!status) {
      print_stderr("the learner has ended: done\n");
      return 0;
    }
    const json wanted_version = (*status)["version_wanted"];
    std::error_code error;
    std::map<std::uint64_t, fs::path> checkpoints;
    for (fs::directory_iterator it(a.watch, error), end; !error && it != end; it.increment(error))
      if (const auto version = version_of_name(it->path().filename().string()); version && it->is_directory(error))
        checkpoints.emplace(*version, it->path());
    if (error && first_round)
      return report_error("publish", fail(Code::kNotFound, "watch", "{}: {}", a.watch, error.message()));
    for (const auto& [version, path] : checkpoints) {
      if (!wanted_version.is_number() || version != wanted_version.get<std::uint64_t>()) continue;
      const auto written = last_write(path);
      if (!written || fs::file_time_type::clock::now() - *written < kQuietTime) continue;
      const fs::path weights = weights_of(path);
      const auto published =
          delta::Checkpoint::open(weights)
              ? run->publish(version, weights)
              : Result<json>(fail(Code::kUnavailable, "publish", "{} is not complete yet", weights.string()));
      const std::string message = published ? fmt::format("version {} is published from {}", version, weights.string())
                                            : published.error().message();
      if (std::exchange(reported[version], message) != message) print_stderr("{}\n", message);
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  return 0;
}

int publish(const Arguments& a) {
  if (a.watch.empty() == a.policy.empty() || (a.watch.empty() && a.version == 0))
    return report_error("publish",
                        fail(Code::kInvalid, "publish", "expected a policy and its --version, or --watch FOLDER"));
  if (!a.watch.empty()) return watch(a);
  const auto folder = find_run(a.run);
  if (!folder) return report_error("publish", folder.error());
  auto run = RunClient::open(*folder);
  if (!run) return report_error("publish", run.error());
  const auto published = run->publish(a.version, a.policy);
  if (!published) return report_error("publish", published.error());
  fmt::print("version {} of {}: accepted; it is published when its learner step is done\n", a.version,
             folder->filename().string());
  return 0;
}

}  // namespace

void add_publish(Verb& app, int& exit_code) {
  auto* verb = app.add_verb("publish", "Give a policy that another trainer has saved to its run");
  auto a = std::make_shared<Arguments>();
  verb->add_option("run", a->run, "the run's name or folder")->required();
  verb->add_option("policy", a->policy,
                   "a Hugging Face folder or a .safetensors file of the run's model, bf16 or fp32");
  verb->add_option("--version", a->version, "number of learner steps that made this policy");
  verb->add_option("--watch", a->watch,
                   "a folder into which a trainer saves: each subfolder whose name ends in a number is that version, "
                   "and published when it is complete and the learner waits for it");
  verb->footer(
      "The run's learner has `learner.trainer: external` (docs/trainers.md).\n"
      "  echoline publish quickstart saved/step_7 --version 7\n"
      "  echoline publish quickstart --watch saved");
  verb->callback([a, &exit_code] { exit_code = publish(*a); });
}

}  // namespace echoline::cli
