// Answers a Tinker client's HTTP calls.
#include "learner/external/tinker_server.hpp"

#include <charconv>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/random_bits.hpp"
#include "base/text.hpp"
#include "base/utc.hpp"
#include "learner/external/http_server.hpp"
#include "learner/run_record.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::learner::tinker {
namespace {

using httplib::Request;
using httplib::Response;
using nlohmann::json;

// httplib compresses "application/json" and then sends no Content-Length, without which the client takes an error of
// status 400 for a broken connection.
constexpr const char* kJsonType = "application/json; charset=utf-8";
constexpr const char* kProtobufType = "application/x-protobuf";
constexpr std::size_t kConnectionsMax = 1024;  // a client waits for each of its samples on one
constexpr std::uint32_t kSamplesAtOnce = 512;  // told to the client
constexpr std::size_t kBodyBytesMax = 256 << 20;
constexpr std::uint64_t kReceivingBytesMax = 1 << 30;
constexpr int kKeyWords = 8;  // length of the key, in words of 32 random bits
// The client's own limit for this call is 45 s.
constexpr Duration kFutureWait = std::chrono::seconds(20);

int http_status(Code code) {
  switch (code) {
    case Code::kInvalid:
    case Code::kStale:
      return 400;
    case Code::kNotFound:
      return 404;
    case Code::kExhausted:
      return 429;  // the client sends it again later
    case Code::kUnavailable:
      return 503;
    default:
      return 500;
  }
}

void answer(Response& response, const json& value) { response.set_content(json_text(value) + "\n", kJsonType); }

void answer(Response& response, int status, const std::string& message) {
  response.status = status;
  answer(response, json{{"error", message}});
}

}  // namespace

struct Server::State {
  ServerOptions options;
  TinkerLink& link;
  SampleDesk& samples;
  HttpServer server;
  std::thread thread;
  json address;
  overlay::trust::Secret key;

  State(ServerOptions server_options, TinkerLink& tinker_link, SampleDesk& sample_desk)
      : options(std::move(server_options)),
        link(tinker_link),
        samples(sample_desk),
        server({.connections_max = kConnectionsMax, .receiving_max = Bytes{kReceivingBytesMax}}) {}

  Status listen() {
    const std::size_t colon = options.listen.rfind(':');
    int port = -1;
    if (colon != std::string::npos) {
      const std::string text = options.listen.substr(colon + 1);
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
      if (error != std::errc{} || end != text.data() + text.size() || port > 65'535) port = -1;
    }
    if (port < 0 || colon == 0)
      return fail(Code::kInvalid, "learner.api", "expected HOST:PORT, found '{}'", options.listen);
    const std::string host = options.listen.substr(0, colon);
    const std::optional<int> bound_port = server.bind(host, port);
    if (!bound_port)
      return fail(Code::kInvalid, "learner.api", "cannot listen on {}: is the port in use?", options.listen);
    std::string text = options.key;
    if (text.empty()) text = "tml-" + random_hex(kKeyWords);  // the client accepts no key without "tml-"
    address = json{{"url", fmt::format("http://{}:{}", host, *bound_port)}, {"key", text}};
    key = overlay::trust::Secret(std::move(text));
    server.set_payload_max_length(kBodyBytesMax);
    register_calls();
    thread = server.start();
    return ok();
  }

  void register_calls() {
    server.set_error_handler([](const Request&, Response& response) {
      if (const auto failure = HttpServer::request_failure())
        answer(response, failure->status, failure->message);
      else if (response.body.empty())
        answer(response, response.status == 0 ? 404 : response.status,
               response.status == 413 ? fmt::format("a request has at most {} bytes", kBodyBytesMax)
                                      : "this call is not supported (docs/how-to/train-with-tinker.md)");
    });
    get("/api/v1/healthz", [](const Request&, Response& response) -> Status {
      answer(response, json{{"status", "ok"}});
      return ok();
    });
    post("/api/v1/client/config", [](const Request&, Response& response) -> Status {
      answer(response, json{{"pjwt_auth_enabled", false},
                            {"credential_default_source", "api_key"},
                            {"proto_compress_fwdbwd", false},
                            {"sample_use_retrieve_futures", false},
                            {"custom_loss_server_side", false},
                            {"sample_max_concurrent_requests", kSamplesAtOnce}});
      return ok();
    });
    post("/api/v1/client/dynamic_config", [](const Request&, Response& response) -> Status {
      answer(response, json{{"refresh_interval_sec", 3600}, {"sample_cancel_enabled", true}});
      return ok();
    });
    get("/api/v1/get_server_capabilities", [this](const Request&, Response& response) -> Status {
      answer(response, json{{"supported_models", json::array({{{"model_name", options.base_model},
                                                               {"max_context_length", options.limits.positions_max},
                                                               {"trainable", true},
                                                               {"sampleable", true}}})}});
      return ok();
    });
    post("/api/v1/create_session", [this](const Request&, Response& response) -> Status {
      ECHO_ASSIGN(const std::string session, link.create_session());
      json body{{"type", "create_session"}, {"session_id", session}};
      if (options.workers() == 0) body["warning_message"] = "the run has no worker yet; samples wait for one";
      answer(response, body);
      return ok();
    });
    post("/api/v1/session_heartbeat", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(const std::string session, parse_text(request.body, "session_id"));
      if (!link.renew_session(session)) {
        answer(response, 410, "the session has ended");
        return ok();
      }
      answer(response, json{{"type", "session_heartbeat"}});
      return ok();
    });
    // The client reports its exceptions here; only the end of its session matters.
    post("/api/v1/telemetry", [this](const Request& request, Response& response) -> Status {
      const json body = json::parse(request.body, nullptr, /*allow_exceptions=*/false);
      if (body.is_object() && body.contains("events") && body["events"].is_array() && body.contains("session_id") &&
          body["session_id"].is_string())
        for (const json& event : body["events"])
          if (event.is_object() && event.value("event", json()) == "SESSION_END")
            link.end_session(body["session_id"].get<std::string>());
      answer(response, json{{"status", "accepted"}});
      return ok();
    });
    register_training();
    register_sampling();
    register_futures();
    register_questions();
  }

  void register_training() {
    const auto post_operation = [this](const char* path, Result<Numbered> (*parse)(std::string_view)) {
      post(path, [this, parse](const Request& request, Response& response) -> Status {
        ECHO_ASSIGN(Numbered operation, parse(request.body));
        ECHO_TRY(check(operation.operation));
        ECHO_ASSIGN(const std::string id, link.submit(std::move(operation)));
        answer(response, json{{"request_id", id}, {"model_id", id.substr(0, id.rfind(':'))}});
        return ok();
      });
    };
    post_operation("/api/v1/create_model", parse_create_model);
    post_operation("/api/v1/forward_backward", parse_forward_backward);
    post_operation("/api/v1/forward", parse_forward_backward);
    post_operation("/api/v1/optim_step", parse_optim_step);
    post_operation("/api/v1/save_weights", parse_save_weights);
    post_operation("/api/v1/load_weights", parse_load_weights);
    post_operation("/api/v1/save_weights_for_sampler", parse_save_for_sampler);
  }

  // A model's name is its folder's, or has it as its last part, as in Qwen/Qwen3-8B.
  bool is_base_model(const std::string& name) const {
    return name == options.base_model || name == options.tokenizer ||
           name.substr(name.rfind('/') + 1) == options.base_model;
  }

  // Checks an operation against the run's settings.
  Status check(const Operation& operation) const {
    const auto* create = std::get_if<CreateModel>(&operation);
    if (create == nullptr) return ok();
    if (!is_base_model(create->base_model))
      return fail(Code::kInvalid, "create_model", "base_model '{}' is not the run's model, which is '{}'",
                  printable(create->base_model), options.base_model);
    if (!create->rank)
      return fail(Code::kInvalid, "create_model", "expected a lora_config: the run trains an adapter of rank {}",
                  options.adapter_rank);
    if (*create->rank != options.adapter_rank)
      return fail(Code::kInvalid, "create_model",
                  "rank is {}, and the run trains an adapter of rank {}: pass rank={}, or set learner.adapter.rank",
                  *create->rank, options.adapter_rank, options.adapter_rank);
    const auto check_part = [](const char* name, bool wanted, bool adapted) -> Status {
      if (wanted || !adapted) return ok();
      return fail(Code::kInvalid, "create_model",
                  "{} is False, and the run's adapter has these layers: change learner.adapter.targets", name);
    };
    ECHO_TRY(check_part("train_mlp", create->train_mlp, options.adapts_mlp));
    ECHO_TRY(check_part("train_attn", create->train_attention, options.adapts_attention));
    return check_part("train_unembed", create->train_unembedding, options.adapts_unembedding);
  }

  // Calls need the key, and their errors become answers.
  template <class Work>
  void post(const char* path, Work work) {
    server.Post(path, guarded(std::move(work)));
  }
  template <class Work>
  void get(const char* path, Work work) {
    server.Get(path, guarded(std::move(work)));
  }
  template <class Work>
  httplib::Server::Handler guarded(Work work) {
    return [this, work = std::move(work)](const Request& request, Response& response) {
      if (overlay::trust::Secret(request.get_header_value("X-API-Key")) != key)
        return answer(response, 401,
                      "wrong key: set TINKER_API_KEY to the key in trainer-api.json of the run's folder");
      if (const std::string encoding = request.get_header_value("Content-Encoding"); !encoding.empty())
        return answer(response, 400, "Content-Encoding '" + printable(encoding) + "' is not supported");
      Status done = ok();
      try {
        done = work(request, response);
      } catch (const std::exception& error) {
        done = fail(Code::kInternal, "request", "{}", error.what());
      }
      if (!done) answer(response, http_status(done.error().code), done.error().message());
    };
  }

  void register_sampling() {
    post("/api/v1/create_sampling_session", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(const SamplingSession session, parse_sampling_session(request.body));
      if (session.model_path.empty() && !is_base_model(session.base_model))
        return fail(Code::kInvalid, "create_sampling_session", "base_model '{}' is not the run's model, which is '{}'",
                    printable(session.base_model), options.base_model);
      ECHO_ASSIGN(const std::string id, link.create_sampler(session, options.base_model));
      answer(response, json{{"type", "create_sampling_session"}, {"sampling_session_id", id}});
      return ok();
    });
    get(R"(/api/v1/samplers/(.+))", [this](const Request& request, Response& response) -> Status {
      const std::string id = request.matches[1];
      const auto weights = link.sampler(id);
      if (!weights) return fail(Code::kNotFound, "sampler", "no sampling session '{}'", printable(id));
      json body{{"sampler_id", id}, {"base_model", options.base_model}};
      if (!weights->path.empty()) body["model_path"] = weights->path;
      answer(response, body);
      return ok();
    });
    post("/api/v1/asample", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(SessionSample sample, parse_sample(request.body, options.limits));
      const auto weights = link.sampler(sample.sampling_session);
      if (!weights)
        return fail(Code::kNotFound, "sampling_session_id", "no sampling session '{}'",
                    printable(sample.sampling_session));
      sample.request.id = fmt::format("{}:{}", sample.sampling_session, sample.number);
      sample.request.version = weights->version;
      sample.request.accepts_newer = weights->accepts_newer;
      if (sample.has_default_stop && sample.request.end_tokens.empty())
        sample.request.end_tokens = options.ending_tokens;
      if (!sample.has_seed) sample.request.seed = random_bits64();
      json sequence_ids = json::array();
      for (std::uint32_t i = 0; i < sample.request.samples; ++i)
        sequence_ids.push_back(fmt::format("{}:{}", sample.request.id, i));
      const std::string id = sample.request.id;
      ECHO_ASSIGN(const bool is_new, link.futures().begin(id));
      if (is_new) {
        if (Status submitted = samples.submit(std::move(sample.request)); !submitted) {
          link.futures().drop(id);
          return submitted;
        }
      }
      answer(response, json{{"request_id", id}, {"sample_sequence_ids", sequence_ids}});
      return ok();
    });
    post("/api/v1/cancel_future", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(const std::string id, parse_text(request.body, "request_id"));
      samples.cancel(id);
      answer(response, json::object());
      return ok();
    });
  }

  void register_futures() {
    post("/api/v1/retrieve_future", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(const std::string id, parse_text(request.body, "request_id"));
      Answer result;
      switch (link.futures().wait(id, kFutureWait, result)) {
        case Futures::State::kUnknown:
          // The client then sends a request for samples again.
          answer(response, 410, "no request '" + printable(id) + "': its answer is gone, or the learner was restarted");
          return ok();
        case Futures::State::kPending: {
          const std::string reason = samples.waiting_reason(id, options.workers());
          json body{{"type", "try_again"},
                    {"request_id", id},
                    {"queue_state", reason.empty() ? "active" : "paused_capacity"}};
          if (!reason.empty()) body["queue_state_reason"] = reason;
          answer(response, body);
          return ok();
        }
        case Futures::State::kAnswered:
          response.set_content(result.bytes, result.is_protobuf ? kProtobufType : kJsonType);
          return ok();
      }
      return ok();
    });
  }

  json training_run(const ClientModel& model) const {
    return {{"training_run_id", model.id},
            {"base_model", options.base_model},
            {"model_owner", "run"},
            {"is_lora", true},
            {"lora_rank", options.adapter_rank},
            {"corrupted", false},
            {"last_request_time", utc_text(model.last_request_unix_s, "%Y-%m-%dT%H:%M:%SZ")}};
  }

  void register_questions() {
    post("/api/v1/get_info", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(const std::string id, parse_text(request.body, "model_id"));
      const auto model = link.model();
      if (!model || model->id != id)
        return fail(Code::kNotFound, "model_id", "the run does not train model '{}'", printable(id));
      answer(response, json{{"type", "get_info"},
                            {"model_id", id},
                            {"model_name", options.base_model},
                            {"model_data", {{"model_name", options.base_model}, {"tokenizer_id", options.tokenizer}}},
                            {"is_lora", true},
                            {"lora_rank", options.adapter_rank}});
      return ok();
    });
    post("/api/v1/weights_info", [this](const Request& request, Response& response) -> Status {
      ECHO_ASSIGN(const std::string path, parse_text(request.body, "tinker_path"));
      if (!parse_path(path, "weights") && !parse_path(path, "sampler_weights"))
        return fail(Code::kInvalid, "tinker_path", "'{}': expected tinker://MODEL/weights/NAME", printable(path));
      answer(response, json{{"base_model", options.base_model},
                            {"is_lora", true},
                            {"lora_rank", options.adapter_rank},
                            {"train_unembed", options.adapts_unembedding},
                            {"train_mlp", options.adapts_mlp},
                            {"train_attn", options.adapts_attention}});
      return ok();
    });
    get("/api/v1/training_runs", [this](const Request&, Response& response) -> Status {
      json runs = json::array();
      if (const auto model = link.model()) runs.push_back(training_run(*model));
      const std::size_t count = runs.size();
      answer(response, json{{"training_runs", std::move(runs)},
                            {"cursor", {{"offset", 0}, {"limit", 20}, {"total_count", count}}}});
      return ok();
    });
    get(R"(/api/v1/training_runs/([^/]+))", [this](const Request& request, Response& response) -> Status {
      const auto model = link.model();
      const std::string id = request.matches[1];
      if (!model || model->id != id)
        return fail(Code::kNotFound, "training_run_id", "the run does not train model '{}'", printable(id));
      answer(response, training_run(*model));
      return ok();
    });
  }
};

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::unique_ptr<Server>> Server::start(ServerOptions options, TinkerLink& link, SampleDesk& samples) {
  auto state = std::make_unique<State>(std::move(options), link, samples);
  ECHO_TRY(state->listen());
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Server::~Server() {
  state_->link.futures().stop();
  state_->server.end_connections();
  state_->server.stop();
  if (state_->thread.joinable()) state_->thread.join();
}

const nlohmann::json& Server::address() const { return state_->address; }

}  // namespace echoline::learner::tinker
