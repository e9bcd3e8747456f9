// Implements the inference server of engine_server.hpp: its routes, its faults, and a model that hashes.
#include "engine_server.hpp"

#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <fstream>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/random.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "delta/safetensors.hpp"
#include "tests/base/thread_each.hpp"

namespace echoline::worker {

using httplib::Request;
using httplib::Response;
using nlohmann::json;

// As vLLM 0.32 reports an error of its worker process.
std::string worker_error(const std::string& error) {
  return fmt::format(
      "Call to collective_rpc method failed: Worker failed with error '{}', please check the stack trace "
      "above for the root cause",
      error);
}
constexpr const char* kNotConfigured =
    "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.";

struct EngineServer::Impl {
  Speaks speaks;
  std::unique_ptr<ServedModel> model;
  httplib::Server server;
  std::thread listener, scheduler;
  int port = 0;

  std::function<void(const std::string&, int)> seen;
  std::atomic<int> waiting_requests = 0;  // that want the mutex; run() lets them go first
  mutable std::mutex mutex;               // everything below, and the model
  std::condition_variable_any changed, no_request_waits;
  std::vector<Fault> faults;
  std::map<std::string, int> counts;
  std::map<std::string, std::string> bodies;
  struct Drawing {
    std::condition_variable_any has_ended;
    std::optional<ServedResponse> response;
    bool aborted = false;
  };
  std::map<std::uint64_t, Drawing*> running;
  std::uint64_t next_id = 1;
  bool paused = false, stopping = false, ready = false;
  bool keeps_responses = false;  // in a pause; otherwise the pause aborts them
  std::filesystem::path folder;
  // State of the plug-in: the loaded version, and the digests of the loaded tensors by name.
  bool receiver_ready = false, updating = false;
  struct Adapters {
    std::size_t at_once = 1;
    int rank_max = 0;
    std::optional<std::vector<std::string>> modules;
  };
  std::optional<Adapters> adapters;
  std::map<std::string, std::filesystem::path> adapter_folders;  // by the names that requests may use
  std::string last_adapter;
  std::map<std::uint64_t, std::string> running_adapters;  // by id of the response
  std::optional<std::string> received;
  std::map<std::string, std::string> tensors;
  std::string version = "default";
  std::vector<std::string> versions{version};  // by number of the span

  void run() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      if (running.empty() || keeps_responses) {
        changed.wait(lock);
        continue;
      }
      for (auto& [id, response] : model->step()) finish(id, std::move(response), false);
      no_request_waits.wait(lock, [this] { return waiting_requests == 0; });
    }
  }
  void finish(std::uint64_t id, ServedResponse response, bool aborted) {
    Drawing* const drawing = running.at(id);
    running.erase(id);
    if (running_adapters.erase(id) > 0) changed.notify_all();
    drawing->response = std::move(response);
    drawing->aborted = aborted;
    drawing->has_ended.notify_one();
  }
  void abort_all() {
    for (auto& [id, response] : model->interrupt()) finish(id, std::move(response), true);
  }

  // Locks the mutex before run(), which may hold it all the time otherwise.
  std::unique_lock<std::mutex> enter() {
    ++waiting_requests;
    std::unique_lock lock(mutex);
    if (--waiting_requests == 0) no_request_waits.notify_one();
    return lock;
  }

  std::optional<Fault> take_fault(const std::string& at) {
    for (std::size_t i = 0; i < faults.size(); ++i) {
      if (faults[i].at != at) continue;
      const Fault fault = faults[i];
      if (--faults[i].times == 0) faults.erase(faults.begin() + static_cast<std::ptrdiff_t>(i));
      return fault;
    }
    return std::nullopt;
  }

  static void put(Response& response, const json& body, int status = 200) {
    response.status = status;
    response.set_content(body.dump(), "application/json");
  }

  // Applies a fault that does not depend on the request. Returns true if that has made the answer.
  bool apply_fault(const std::optional<Fault>& fault, Response& response, std::unique_lock<std::mutex>& lock) {
    if (!fault) return false;
    if (fault->what == "status") {
      put(response, {{"error", {{"message", "it is not so well"}, {"code", fault->status}}}}, fault->status);
      return true;
    }
    if (fault->what == "html") {
      response.set_content("<html>proxy</html>", "text/html");
      return true;
    }
    if (fault->what == "disconnect") {
      response.set_content_provider(1000, "application/json", [](std::size_t, std::size_t, httplib::DataSink& sink) {
        sink.write("{\"", 2);
        return false;
      });
      return true;
    }
    if (fault->what == "hang") {
      const auto until = std::chrono::steady_clock::now() + fault->hangs;
      changed.wait_until(lock, until, [&] { return stopping; });
    }
    return false;
  }

  void name_version(const std::string& name) {
    version = name;
    versions.push_back(name);
    model->begin_span(versions.size() - 1);
  }

  void load(const std::filesystem::path& new_folder) {
    model->load(new_folder);
    folder = new_folder;
    name_version(version);  // no later prompt shares keys and values with earlier ones
  }

  // Loads the folder as the plug-in does. Throws if another tensor than those named has changed.
  void receive(const json& info) {
    const auto checkpoint = delta::Checkpoint::open(folder);
    if (!checkpoint) throw std::runtime_error(checkpoint.error().message());
    for (const delta::TensorView& tensor : checkpoint->view()) {
      std::string& loaded_digest = tensors[tensor.name];
      const std::string digest = delta::digest_state({tensor})->hex();
      if (info.contains("tensors") && loaded_digest != digest &&
          std::ranges::find(info.at("tensors"), json(tensor.name)) == info.at("tensors").end())
        throw std::runtime_error(tensor.name + " has changed as well");
      loaded_digest = digest;
    }
    load(folder);
  }

  static void refuse(Response& response, const std::string& message) {
    put(response,
        {{"error",
          {{"message", worker_error(message)}, {"type", "InternalServerError"}, {"param", nullptr}, {"code", 500}}}},
        500);
  }

  // vLLM and SGLang compute requests of a limited number of adapters at once; others wait.
  void await_adapter(const std::string& adapter, std::unique_lock<std::mutex>& lock) {
    if (adapter.empty()) return;
    changed.wait(lock, [&] {
      std::set<std::string> names{adapter};
      for (const auto& [id, name] : running_adapters) names.insert(name);
      return names.size() <= adapters->at_once || stopping;
    });
    // A server reads an adapter again that it has evicted. vLLM's engine ends if the files are gone.
    if (!std::filesystem::exists(adapter_folders.at(adapter))) throw std::runtime_error("the engine has died");
  }
  // Whether requests may name it; otherwise that is the answer.
  bool know_adapter(const std::string& name, Response& response) const {
    if (name.empty() || adapter_folders.contains(name)) return true;
    if (speaks == Speaks::kSglang) {
      put(response, {{"error", {{"message", fmt::format("Got LoRA adapter that has never been loaded: {}", name)}}}},
          400);
      return false;
    }
    put(response,
        {{"error",
          {{"message", fmt::format("The model `{}` does not exist.", name)},
           {"type", "NotFoundError"},
           {"param", "model"},
           {"code", 404}}}},
        404);
    return false;
  }
  std::string adapter_of(const json& body) const {
    const std::string name = body.value(speaks == Speaks::kSglang ? "lora_path" : "model", "");
    return name == folder.string() ? "" : name;
  }
  void load_adapter(const json& body, Response& r, std::unique_lock<std::mutex>& lock) {
    const bool is_sglang = speaks == Speaks::kSglang;
    const auto refuse_adapter = [&](const std::string& message, int status) {
      put(r,
          is_sglang ? json{{"success", false}, {"error_message", message}, {"loaded_adapters", json::object()}}
                    : json{{"error", {{"message", message}, {"type", "x"}, {"param", nullptr}, {"code", status}}}},
          status);
    };
    const auto fault = take_fault("load");
    if (apply_fault(fault, r, lock)) return;
    const std::string name = body.at("lora_name");
    const std::filesystem::path path = body.at("lora_path").get<std::string>();
    if (!adapters) return refuse_adapter("LoRA is not enabled", is_sglang ? 400 : 500);
    if (adapter_folders.contains(name))
      return refuse_adapter(fmt::format("The lora adapter '{}' has already been loaded.", name), 400);
    if (fault && fault->what == "fails") return refuse_adapter("CUDA error", is_sglang ? 400 : 500);
    std::ifstream file(path / "adapter_config.json");
    const json config = json::parse(file, nullptr, false);
    if (!config.is_object()) return refuse_adapter(fmt::format("No adapter found for {}", path.string()), 404);
    if (config.at("r") > adapters->rank_max)
      return refuse_adapter(
          fmt::format("LoRA rank {} is greater than max_lora_rank {}.", config.at("r").get<int>(), adapters->rank_max),
          is_sglang ? 400 : 500);
    if (fault && fault->what == "ignored")
      model->load_adapter(name, {});
    else if (fault && fault->what == "stale")
      model->load_adapter(name, adapter_folders.at(last_adapter));
    else
      model->load_adapter(name, path);
    adapter_folders[name] = path;
    last_adapter = name;
    if (!is_sglang)
      return r.set_content(fmt::format("Success: LoRA adapter '{}' added successfully.", name), "text/plain");
    put(r, {{"success", true}, {"error_message", ""}, {"loaded_adapters", {{name, path.string()}}}});
  }
  void unload_adapter(const json& body, Response& r) {
    const std::string name = body.at("lora_name");
    const bool known = adapter_folders.erase(name) > 0;
    if (speaks == Speaks::kSglang)
      return put(r, {{"success", known}, {"error_message", ""}, {"loaded_adapters", json::object()}},
                 known ? 200 : 400);
    if (known)
      return r.set_content(fmt::format("Success: LoRA adapter '{}' removed successfully.", name), "text/plain");
    put(r, {{"error", {{"message", fmt::format("The lora adapter '{}' cannot be found.", name)}, {"code", 404}}}}, 404);
  }

  void routes() {
    const auto add_route = [this](const char* method, const char* path, auto act) {
      const auto handler = [this, path, act](const Request& request, Response& response) {
        std::unique_lock lock = enter();
        const int count = ++counts[path];
        if (seen) seen(path, count);
        bodies[path] = request.body;
        try {
          act(request, response, lock);
        } catch (const std::exception& e) {
          put(response, {{"error", {{"message", e.what()}}}}, 400);
        }
      };
      if (std::string(method) == "GET")
        server.Get(path, handler);
      else
        server.Post(path, handler);
    };
    add_route("GET", "/health", [this](const Request&, Response& response, std::unique_lock<std::mutex>& lock) {
      if (apply_fault(take_fault("health"), response, lock)) return;
      if (!ready) put(response, json::object(), 503);
    });
    add_route("POST", speaks == Speaks::kSglang ? "/load_lora_adapter" : "/v1/load_lora_adapter",
              [this](const Request& q, Response& r, auto& lock) { load_adapter(json::parse(q.body), r, lock); });
    add_route("POST", speaks == Speaks::kSglang ? "/unload_lora_adapter" : "/v1/unload_lora_adapter",
              [this](const Request& q, Response& r, auto&) { unload_adapter(json::parse(q.body), r); });
    if (speaks == Speaks::kSglang) {
      add_route("GET", "/get_server_info", [this](const Request&, Response& r, auto&) {
        json info = {{"model_path", folder.string()}, {"enable_lora", adapters.has_value()}};
        if (adapters) info["max_loras_per_batch"] = adapters->at_once, info["max_lora_rank"] = adapters->rank_max;
        put(r, info);
      });
      add_route("POST", "/generate",
                [this](const Request& q, Response& r, auto& lock) { sglang(json::parse(q.body), r, lock); });
      add_route("POST", "/pause_generation", [this](const Request& q, Response& r, auto& lock) {
        if (apply_fault(take_fault("pause"), r, lock)) return;
        if (json::parse(q.body).at("mode") != "abort") throw std::runtime_error("mode");
        paused = true;
        abort_all();
        put(r, {{"status", "ok"}});
      });
      add_route("POST", "/continue_generation", [this](const Request&, Response& r, auto&) {
        paused = false;
        changed.notify_all();
        put(r, {{"status", "ok"}});
      });
      add_route("POST", "/update_weight_version", [this](const Request& q, Response& r, auto&) {
        const json body = json::parse(q.body);
        if (body.value("abort_all_requests", true)) abort_all();
        name_version(body.at("new_version"));
        put(r, {{"success", true}, {"new_version", version}});
      });
      add_route("POST", "/update_weights_from_disk", [this](const Request& q, Response& r, auto& lock) {
        const auto fault = take_fault("load");
        if (apply_fault(fault, r, lock)) return;
        const json body = json::parse(q.body);
        if (fault && fault->what == "fails")
          return put(r, {{"success", false}, {"message", "Failed to get weights iterator"}, {"num_paused_requests", 0}},
                     400);
        if (!running.empty())
          return put(r, {{"success", false}, {"message", "requests are running"}, {"num_paused_requests", 0}}, 400);
        if (!fault || fault->what != "stale") load(body.at("model_path").get<std::string>());
        if (fault && fault->what == "damaged") model->damage();
        if (!fault || fault->what != "unnamed") version = body.at("weight_version");
        put(r, {{"success", true}, {"message", "Succeeded to update model weights."}, {"num_paused_requests", 0}});
      });
    } else {
      add_route("GET", "/server_info", [this](const Request&, Response& r, auto&) {
        json config;
        if (adapters)
          config = {{"max_loras", adapters->at_once},
                    {"max_lora_rank", adapters->rank_max},
                    {"target_modules", adapters->modules ? json(*adapters->modules) : json()}};
        put(r, {{"vllm_config", {{"lora_config", config}, {"device_config", {{"device", "cpu"}}}}}});
      });
      add_route("POST", "/v1/completions",
                [this](const Request& q, Response& r, auto& lock) { vllm(json::parse(q.body), r, lock); });
      add_route("POST", "/pause", [this](const Request& q, Response& r, auto& lock) {
        if (apply_fault(take_fault("pause"), r, lock)) return;
        const std::string mode = q.get_param_value("mode");
        if (mode != "abort" && mode != "keep") throw std::runtime_error("mode");
        paused = true;
        keeps_responses = mode == "keep";
        if (!keeps_responses) abort_all();
        put(r, {{"status", "paused"}});
      });
      add_route("POST", "/resume", [this](const Request&, Response& r, auto&) {
        paused = keeps_responses = false;
        changed.notify_all();
        put(r, {{"status", "resumed"}});
      });
      add_route("POST", "/collective_rpc", [this](const Request& q, Response& r, auto& lock) {
        const auto fault = take_fault("load");
        if (apply_fault(fault, r, lock)) return;
        if (json::parse(q.body).at("method") != "reload_weights") throw std::runtime_error("method");
        if (fault && fault->what == "fails") return put(r, {{"error", {{"message", "CUDA error"}}}}, 500);
        if (!fault || fault->what != "stale") load(folder);
        if (fault && fault->what == "damaged") model->damage();
        put(r, {{"results", {nullptr}}});
      });
      add_route("POST", "/reset_prefix_cache", [](const Request&, Response&, auto&) {});
      add_route("POST", "/inference/v1/generate", [this](const Request& q, Response& r, auto& lock) {
        if (speaks == Speaks::kVllmCompletions)
          return put(r,
                     {{"error",
                       {{"message", "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out."},
                        {"type", "PermissionDeniedError"},
                        {"param", nullptr},
                        {"code", 403}}}},
                     403);
        generate(json::parse(q.body), r, lock);
      });
      add_route("POST", "/init_weight_transfer_engine", [this](const Request& q, Response& r, auto&) {
        const json info = json::parse(q.body).at("init_info");
        if (speaks != Speaks::kVllmReceiver) return refuse(r, kNotConfigured);
        if (info.at("interface") != 1) return refuse(r, "expected interface 1");
        if (info.at("folder") != folder.string()) return refuse(r, "expected the folder that this vLLM serves");
        receiver_ready = true;
        received.reset();
        put(r, {{"message", "Weight transfer initialized"}});
      });
      add_route("POST", "/start_weight_update", [this](const Request&, Response& r, auto& lock) {
        if (apply_fault(take_fault("start"), r, lock)) return;
        if (!receiver_ready) return refuse(r, kNotConfigured);
        if (updating) return refuse(r, "start_weight_update called while a weight update is already active.");
        updating = true;
        put(r, {{"message", "Weight update started"}});
      });
      add_route("POST", "/update_weights", [this](const Request& q, Response& r, auto& lock) {
        const auto fault = take_fault("load");
        if (apply_fault(fault, r, lock)) return;
        if (!std::exchange(updating, false)) return refuse(r, "start_weight_update must be called first");
        const json info = json::parse(q.body).at("update_info");
        const auto before = std::exchange(received, std::nullopt);
        if (!paused) return refuse(r, "the test expects a pause");
        if (fault && fault->what == "fails") return refuse(r, "CPU error");
        if (info.contains("base") && info.at("base") != before.value_or("none"))
          return refuse(r, "expected an update of another version");
        if (!fault || fault->what != "stale") receive(info);
        if (fault && fault->what == "damaged") model->damage();
        received = info.at("version");
        updating = true;
        put(r, {{"message", "Weights updated"}});
      });
      add_route("POST", "/finish_weight_update", [this](const Request& q, Response& r, auto& lock) {
        if (apply_fault(take_fault("finish"), r, lock)) return;
        if (!std::exchange(updating, false))
          return refuse(r, "finish_weight_update called without a matching start_weight_update.");
        const json body = json::parse(q.body);
        if (body.contains("weight_version") && !take_fault("version")) name_version(body.at("weight_version"));
        put(r, {{"message", "Weight update finished"}});
      });
      add_route("POST", "/update_weight_version", [this](const Request& q, Response& r, auto&) {
        const json next = json::parse(q.body).at("new_version");
        if (!take_fault("version")) name_version(next);
        put(r, {{"success", true}, {"new_version", next}});
      });
      add_route("GET", "/v1/models", [this](const Request&, Response& r, auto&) {
        put(r, {{"object", "list"},
                {"data", {{{"id", folder.string()}, {"object", "model"}, {"root", folder.string()}}}}});
      });
    }
  }

  // Draws tokens, and applies the faults of responses.
  std::pair<ServedResponse, bool> draw(ServedRequest request, std::unique_lock<std::mutex>& lock, const Fault* fault) {
    changed.wait(lock, [&] { return !paused || stopping; });
    await_adapter(request.adapter, lock);
    if (stopping) throw std::runtime_error("it ends");
    const std::uint64_t id = next_id++;
    if (!request.adapter.empty()) running_adapters[id] = request.adapter;
    const double temperature = request.temperature;
    const std::int64_t tokens_max = request.tokens_max;
    model->add(id, std::move(request));
    Drawing drawing;
    running[id] = &drawing;
    if (running.size() == 1) changed.notify_all();
    drawing.has_ended.wait(lock, [&] { return drawing.response.has_value(); });
    ServedResponse response = std::move(*drawing.response);
    const bool aborted = drawing.aborted;
    if (!fault) return {response, aborted};
    if (fault->what == "few_logprobs" && !response.logprobs.empty()) response.logprobs.pop_back();
    if (fault->what == "positive" && !response.logprobs.empty()) response.logprobs[0] = 0.5;
    if (fault->what == "token" && !response.tokens.empty()) response.tokens[0] = 1 << 20;
    if (fault->what == "raw")
      for (double& logprob : response.logprobs) logprob *= temperature;
    if (fault->what == "short" && response.tokens.size() > 1) {
      response.tokens.resize(1);
      response.logprobs.resize(1);
    }
    if (fault->what == "long")
      while (std::ssize(response.tokens) <= tokens_max) response.tokens.push_back(5), response.logprobs.push_back(-1);
    return {response, aborted};
  }

  static json number(double value) { return std::isfinite(value) ? json(value) : json(); }

  void sglang(const json& body, Response& r, std::unique_lock<std::mutex>& lock) {
    const json& params = body.at("sampling_params");
    ServedRequest request{body.at("input_ids"),
                          params.at("max_new_tokens"),
                          params.at("temperature"),
                          params.value("sampling_seed", 0u),
                          params.value("stop_token_ids", std::vector<std::int32_t>{}),
                          adapter_of(body)};
    if (!know_adapter(request.adapter, r)) return;
    if (!body.at("return_logprob").get<bool>()) throw std::runtime_error("no log-probabilities were asked for");
    const auto scored = [](const std::vector<std::int32_t>& tokens, const std::vector<double>& logprobs) {
      json list = json::array();
      for (std::size_t i = 0; i < tokens.size(); ++i)
        list.push_back({i < logprobs.size() ? number(logprobs[i]) : json(), tokens[i], nullptr});
      return list;
    };
    json meta = {{"id", "x"},
                 {"finish_reason", {{"type", "length"}, {"length", 1}}},
                 {"prompt_tokens", request.prompt.size()},
                 {"weight_version", version}};
    const auto prompt = request.prompt;
    if (body.value("logprob_start_len", -1) == 0) {
      if (apply_fault(take_fault("probe"), r, lock)) return;
      changed.wait(lock, [&] { return !paused || stopping; });
      await_adapter(request.adapter, lock);
      std::vector<double> logprobs = model->score(prompt, request.adapter);
      logprobs.insert(logprobs.begin(), std::nan(""));
      meta["input_token_logprobs"] = scored(prompt, logprobs);
      meta["output_token_logprobs"] = json::array({{-1.0, 1, nullptr}});
      return put(r, {{"text", ""}, {"output_ids", {1}}, {"meta_info", meta}});
    }
    if (body.value("top_logprobs_num", 0) == 5) {
      const std::vector<double> top = model->top5(prompt, raw ? 1.0 : request.temperature);
      meta["output_top_logprobs"] = {scored({1, 2, 3, 4, 5}, top)};
      return put(r, {{"text", ""}, {"output_ids", {1}}, {"meta_info", meta}});
    }
    const auto fault = take_fault("draw");
    if (apply_fault(fault, r, lock)) return;
    const auto [response, aborted] = draw(request, lock, fault ? &*fault : nullptr);
    meta["weight_version"] = version;
    meta["completion_tokens"] = response.tokens.size();
    if (aborted)
      meta["finish_reason"] = {{"type", "abort"}, {"message", "Abort in waiting queue"}};
    else if (response.ended)
      meta["finish_reason"] = {{"type", "stop"}, {"matched", response.tokens.back()}};
    json list = scored(response.tokens, response.logprobs);
    if (response.logprobs.size() < response.tokens.size()) list.erase(list.size() - 1);
    if (fault && fault->what == "nan") list[0][0] = nullptr;
    if (fault && fault->what == "reordered") std::swap(list[0], list[list.size() - 1]);
    if (!fault || fault->what != "no_logprobs") meta["output_token_logprobs"] = list;
    put(r, {{"text", ""}, {"output_ids", response.tokens}, {"meta_info", meta}});
  }

  // As vLLM 0.32 answered.
  void generate(const json& body, Response& r, std::unique_lock<std::mutex>& lock) {
    const json& params = body.at("sampling_params");
    ServedRequest request{body.at("token_ids"),
                          params.at("max_tokens"),
                          params.at("temperature"),
                          params.value("seed", 0u),
                          params.value("stop_token_ids", std::vector<std::int32_t>{}),
                          adapter_of(body)};
    if (!know_adapter(request.adapter, r)) return;
    json answer = {{"request_id", "generate-tokens-1"},
                   {"model", request.adapter.empty() ? folder.string() : request.adapter},
                   {"prompt_token_ids", body.value("return_token_ids", false) ? json(request.prompt) : json()},
                   {"output_mode", "tokens"}};
    json choice = {{"index", 0}, {"finish_reason", "length"}, {"stop_reason", nullptr}, {"logprobs", nullptr}};
    if (!params.contains("logprobs")) {  // asked to see that the interface is there
      choice["token_ids"] = {1};
      choice["weight_versions"] = json::array({{{"version", version}, {"start", 0}, {"end", 1}}});
      answer["choices"] = json::array({choice});
      return put(r, answer);
    }
    const auto fault = take_fault("draw");
    if (apply_fault(fault, r, lock)) return;
    const auto [response, aborted] = draw(request, lock, fault ? &*fault : nullptr);
    json spans = json::array();
    for (std::size_t start = 0; const auto& [number, end] : response.spans) {
      const std::size_t span_end = std::min(end, response.tokens.size());
      if (span_end > start) spans.push_back({{"version", versions.at(number)}, {"start", start}, {"end", span_end}});
      start = span_end;
    }
    choice["finish_reason"] = aborted ? "abort" : response.ended ? "stop" : "length";
    choice["token_ids"] = response.tokens;
    json content = json::array();
    for (std::size_t i = 0; i < response.logprobs.size(); ++i)
      content.push_back({{"token_id", response.tokens[i]}, {"logprob", number(response.logprobs[i])}, {"rank", 1}});
    if (fault && fault->what == "nan") content[0]["logprob"] = nullptr;
    if (fault && fault->what == "foreign") answer["prompt_token_ids"] = {1, 2};
    if (fault && fault->what == "long") spans.back()["end"] = response.tokens.size();
    if (fault && fault->what == "renamed") spans.back()["version"] = "other";
    if (!fault || fault->what != "no_logprobs") choice["logprobs"] = {{"content", content}};
    choice["weight_versions"] = spans;
    json choices = json::array({choice});
    if (fault && fault->what == "reordered") {
      choices.insert(choices.begin(), choice);
      choices[0]["index"] = 1;
    }
    answer["choices"] = choices;
    put(r, answer);
  }

  void vllm(const json& body, Response& r, std::unique_lock<std::mutex>& lock) {
    ServedRequest request{body.at("prompt"),
                          body.at("max_tokens"),
                          body.at("temperature"),
                          body.value("seed", 0u),
                          body.value("stop_token_ids", std::vector<std::int32_t>{}),
                          adapter_of(body)};
    if (!know_adapter(request.adapter, r)) return;
    const std::string answering = request.adapter.empty() ? folder.string() : request.adapter;
    if (!body.at("return_token_ids").get<bool>()) throw std::runtime_error("no token ids were asked for");
    const auto prompt = request.prompt;
    json choice = {{"index", 0},
                   {"text", ""},
                   {"finish_reason", "length"},
                   {"stop_reason", nullptr},
                   {"logprobs", nullptr},
                   {"prompt_token_ids", prompt},
                   {"token_ids", {1}},
                   {"prompt_logprobs", nullptr}};
    const auto answer = [&](const json& choices) {
      put(r, {{"id", "cmpl-1"},
              {"object", "text_completion"},
              {"model", answering},
              {"choices", choices},
              {"usage", json::object()}});
    };
    if (body.contains("prompt_logprobs")) {
      if (apply_fault(take_fault("probe"), r, lock)) return;
      changed.wait(lock, [&] { return !paused || stopping; });
      json list = json::array({nullptr});
      await_adapter(request.adapter, lock);
      const std::vector<double> logprobs = model->score(prompt, request.adapter);
      for (std::size_t i = 1; i < prompt.size(); ++i)
        list.push_back(
            {{std::to_string(prompt[i]), {{"logprob", logprobs[i - 1]}, {"rank", 1}, {"decoded_token", ""}}}});
      choice["prompt_logprobs"] = list;
      return answer(json::array({choice}));
    }
    if (body.at("logprobs") == 5) {
      json top = json::object();
      int token = 0;
      for (const double logprob : model->top5(prompt, raw ? 1.0 : request.temperature))
        top[fmt::format("token_id:{}", ++token)] = logprob;
      choice["logprobs"] = {{"token_logprobs", {-1.0}}, {"top_logprobs", json::array({top})}};
      return answer(json::array({choice}));
    }
    const auto fault = take_fault("draw");
    if (apply_fault(fault, r, lock)) return;
    const auto [response, aborted] = draw(request, lock, fault ? &*fault : nullptr);
    choice["finish_reason"] = aborted ? "abort" : response.ended ? "stop" : "length";
    choice["token_ids"] = response.tokens;
    json logprobs = json::array();
    for (const double logprob : response.logprobs) logprobs.push_back(number(logprob));
    if (fault && fault->what == "nan") logprobs[0] = nullptr;
    if (fault && fault->what == "foreign") choice["prompt_token_ids"] = {1, 2};
    if (!fault || fault->what != "no_logprobs")
      choice["logprobs"] = {{"token_logprobs", logprobs}, {"tokens", json::array()}};
    if (!fault || fault->what != "reordered") return answer(json::array({choice}));
    json other = choice;
    other["index"] = 1;
    answer(json::array({other, choice}));
  }

  bool raw = false;  // log-probabilities ignore the temperature
};

EngineServer::EngineServer(Speaks speaks, std::unique_ptr<ServedModel> model, int port,
                           const std::filesystem::path& folder, std::function<void(const std::string&, int)> seen)
    : impl_(std::make_unique<Impl>()) {
  impl_->speaks = speaks;
  impl_->model = std::move(model);
  impl_->seen = std::move(seen);
  impl_->routes();
  impl_->server.new_task_queue = [] { return new ThreadEach(); };
  impl_->server.set_tcp_nodelay(true);
  impl_->server.set_keep_alive_max_count(1'000'000);
  int listening = -1;
  impl_->server.set_socket_options([&](int socket) { listening = socket; });
  impl_->port = port == 0                                       ? impl_->server.bind_to_any_port("127.0.0.1")
                : impl_->server.bind_to_port("127.0.0.1", port) ? port
                                                                : -1;
  if (impl_->port <= 0) throw std::runtime_error("the port is taken");
  ::listen(listening, 1024);  // as these servers do; the library's 5 lose connections
  impl_->listener = std::thread([this] { impl_->server.listen_after_bind(); });
  impl_->scheduler = std::thread([this] { impl_->run(); });
  const std::lock_guard lock(impl_->mutex);
  if (!folder.empty()) impl_->load(folder);
  impl_->ready = true;
}

EngineServer::~EngineServer() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    impl_->paused = impl_->keeps_responses = false;
    impl_->abort_all();
  }
  impl_->changed.notify_all();
  impl_->server.stop();
  impl_->listener.join();
  impl_->scheduler.join();
}

std::string EngineServer::url() const { return fmt::format("http://127.0.0.1:{}", impl_->port); }

void EngineServer::fault(Fault fault) {
  const auto lock = impl_->enter();
  if (fault.what == "raw")
    impl_->raw = true;
  else
    impl_->faults.push_back(std::move(fault));
}

void EngineServer::enable_adapters(std::size_t at_once, int rank_max, std::optional<std::vector<std::string>> modules) {
  const auto lock = impl_->enter();
  impl_->adapters = {at_once, rank_max, std::move(modules)};
}

std::vector<std::string> EngineServer::adapters() const {
  const auto lock = impl_->enter();
  std::vector<std::string> names;
  for (const auto& [name, folder] : impl_->adapter_folders) names.push_back(name);
  return names;
}

void EngineServer::forget_adapters() {
  const auto lock = impl_->enter();
  impl_->adapter_folders.clear();
}

int EngineServer::count(const std::string& path) const {
  const auto lock = impl_->enter();
  const auto it = impl_->counts.find(path);
  return it == impl_->counts.end() ? 0 : it->second;
}

std::string EngineServer::last(const std::string& path) const {
  const auto lock = impl_->enter();
  const auto it = impl_->bodies.find(path);
  return it == impl_->bodies.end() ? "" : it->second;
}

void EngineServer::leave_update_open() {
  const auto lock = impl_->enter();
  impl_->updating = true;
}

void EngineServer::replace(const std::filesystem::path& folder) {
  const auto lock = impl_->enter();
  impl_->abort_all();
  impl_->load(folder);
  impl_->name_version("default");
  impl_->receiver_ready = impl_->updating = false;
  impl_->received.reset();
}

void ServedModel::load_adapter(const std::string&, const std::filesystem::path&) {
  throw std::runtime_error("this model has no adapters");
}

// ---- without a model ----

namespace {

class Hashing final : public ServedModel {
 public:
  Hashing(std::int32_t vocabulary, std::shared_ptr<Hold> hold)
      : vocabulary_(vocabulary), hold_(hold ? std::move(hold) : std::make_shared<Hold>()) {}

  void load(const std::filesystem::path& folder) override {
    const auto checkpoint = delta::Checkpoint::open(folder);
    if (!checkpoint) throw std::runtime_error(checkpoint.error().message());
    const auto digest = delta::digest_state(checkpoint->view());
    if (!digest) throw std::runtime_error(digest.error().message());
    weights_ = mix64(std::hash<std::string>{}(digest->hex()));
  }
  void damage() override { weights_ = mix64(weights_); }
  // Without a folder, the adapter has no effect, as one whose lora_B are 0.
  void load_adapter(const std::string& name, const std::filesystem::path& folder) override {
    adapters_[name] = 0;
    if (folder.empty()) return;
    const auto file = delta::SafetensorsFile::open(folder / "adapter_model.safetensors");
    if (!file) throw std::runtime_error(file.error().message());
    delta::StateView outputs;
    for (const delta::TensorView& tensor : file->view())
      if (tensor.name.ends_with(".lora_B.weight") &&
          std::ranges::any_of(tensor.bytes, [](std::byte byte) { return byte != std::byte{0}; }))
        outputs.push_back(tensor);
    if (!outputs.empty()) adapters_[name] = mix64(std::hash<std::string>{}(delta::digest_state(file->view())->hex()));
  }
  void add(std::uint64_t id, ServedRequest request) override { running_[id] = {std::move(request), {}}; }
  std::map<std::uint64_t, ServedResponse> step() override {
    std::map<std::uint64_t, ServedResponse> ended;
    const std::int64_t drawn_before = hold_->drawn;
    for (auto it = running_.begin(); it != running_.end();) {
      auto& [request, response] = it->second;
      if (std::ssize(response.tokens) >= hold_->held_at) {
        ++it;
        continue;
      }
      ++hold_->drawn;
      const std::uint64_t position = request.prompt.size() + response.tokens.size();
      const std::uint64_t bits = mix64(request.seed ^ mix64(position));
      const auto token = static_cast<std::int32_t>(bits % static_cast<std::uint64_t>(vocabulary_));
      response.tokens.push_back(token);
      response.logprobs.push_back(logprob_of(token, position, request.adapter) / request.temperature);
      if (response.spans.empty() || response.spans.back().first != span_) response.spans.push_back({span_, 0});
      response.spans.back().second = response.tokens.size();
      response.ended = std::find(request.ends.begin(), request.ends.end(), token) != request.ends.end();
      const bool is_complete = response.ended || std::ssize(response.tokens) == request.tokens_max;
      if (is_complete) ended[it->first] = std::move(response);
      it = is_complete ? running_.erase(it) : std::next(it);
    }
    if (hold_->drawn == drawn_before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ended;
  }
  std::map<std::uint64_t, ServedResponse> interrupt() override {
    std::map<std::uint64_t, ServedResponse> ended;
    for (auto& [id, sequence] : running_) ended[id] = std::move(sequence.second);
    running_.clear();
    return ended;
  }
  void begin_span(std::uint64_t number) override { span_ = number; }
  std::vector<double> score(const std::vector<std::int32_t>& text, const std::string& adapter) override {
    std::vector<double> logprobs;
    for (std::size_t i = 1; i < text.size(); ++i) logprobs.push_back(logprob_of(text[i], i, adapter));
    return logprobs;
  }
  std::vector<double> top5(const std::vector<std::int32_t>&, double temperature) override {
    std::vector<double> logprobs;
    for (int i = 1; i <= 5; ++i) logprobs.push_back(-i / temperature);
    return logprobs;
  }

 private:
  double logprob_of(std::int32_t token, std::uint64_t position, const std::string& adapter) const {
    const std::uint64_t weights = adapter.empty() ? weights_ : weights_ ^ adapters_.at(adapter);
    return -0.1 -
           static_cast<double>(mix64(weights ^ mix64(position ^ (static_cast<std::uint64_t>(token) << 20))) >> 44) *
               1e-5;
  }
  std::int32_t vocabulary_;
  std::shared_ptr<Hold> hold_;
  std::uint64_t weights_ = 0, span_ = 0;
  std::map<std::string, std::uint64_t> adapters_;  // 0: no effect
  std::map<std::uint64_t, std::pair<ServedRequest, ServedResponse>> running_;
};

}  // namespace

std::unique_ptr<ServedModel> hashing_model(std::int32_t vocabulary, std::shared_ptr<Hold> hold) {
  return std::make_unique<Hashing>(vocabulary, std::move(hold));
}

}  // namespace echoline::worker
