// Answers the trainer's HTTP calls. Each call is one or two calls of TrainerLink.
#include "learner/external/api.hpp"

#include <charconv>
#include <cmath>
#include <regex>
#include <thread>
#include <utility>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/random_bits.hpp"
#include "base/text.hpp"
#include "learner/external/api_socket.hpp"
#include "learner/external/arriving_body.hpp"
#include "learner/external/http_server.hpp"
#include "learner/external/recent_calls.hpp"
#include "learner/external/row_pages.hpp"
#include "learner/external/shards.hpp"
#include "learner/run_record.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::learner {
namespace {

using httplib::Request;
using httplib::Response;
using nlohmann::json;

// Figures: a trainer's named numbers of a step, for the step's row of metrics.jsonl.
constexpr std::size_t kFiguresMax = 64, kFigureNameBytesMax = 64;
constexpr double kWaitSecondsMax = 60, kLeaseSecondsDefault = 600, kLeaseSecondsMax = 86'400;
constexpr std::size_t kCallsRemembered = 1024;
constexpr int kTokenWords = 8;  // length of the token, in words of 32 random bits
constexpr const char* kRequestIdHeader = "Idempotency-Key";
constexpr const char* kJsonType = "application/json";
constexpr const char* kBinaryType = "application/octet-stream";

int http_status(Code code) {
  switch (code) {
    case Code::kInvalid:
      return 400;
    case Code::kNotFound:
      return 404;
    case Code::kStale:
    case Code::kUnavailable:  // another trainer has the batch; HttpServer answers 503 when it is busy
      return 409;
    case Code::kExhausted:
      return 507;
    default:
      return 500;
  }
}

void answer(Response& response, const json& value) { response.set_content(json_text(value) + "\n", kJsonType); }

void answer(Response& response, const Error& error) {
  response.status = http_status(error.code);
  answer(response, json{{"error", {{"code", to_string(error.code)}, {"message", error.message()}}}});
}

// A number of seconds from the query string.
Result<double> seconds_in(const Request& request, const char* name, double default_value, double max) {
  if (!request.has_param(name)) return default_value;
  const std::string text = request.get_param_value(name);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value < 0 || value > max)
    return fail(Code::kInvalid, name, "expected seconds from 0 to {}, found '{}'", max, printable(text));
  return value;
}

Result<std::uint64_t> whole_number(const std::string& text, const char* what) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    return fail(Code::kInvalid, what, "expected a whole number, found '{}'", printable(text));
  return value;
}

Result<std::uint64_t> number_in(const Request& request, const char* name, std::uint64_t default_value) {
  return request.has_param(name) ? whole_number(request.get_param_value(name), name) : Result(default_value);
}

// Reads {"figures": {name: number}}; an empty body has no figures.
Result<json> figures_of(const std::string& body) {
  if (body.empty()) return json::object();
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  const auto wrong = [](std::string_view found) {
    return fail(Code::kInvalid, "consume",
                "expected {{\"figures\": {{name: number, ...}}}} with at most {} numbers, found {}", kFiguresMax,
                found);
  };
  if (!parsed.is_object()) return wrong("no JSON object");
  const json figures = parsed.value("figures", json::object());
  if (!figures.is_object()) return wrong("figures that are no JSON object");
  if (figures.size() > kFiguresMax) return wrong(fmt::format("{} numbers", figures.size()));
  for (const auto& [name, value] : figures.items())
    if (name.empty() || name.size() > kFigureNameBytesMax || !value.is_number() || !std::isfinite(value.get<double>()))
      return wrong("'" + printable(name.substr(0, kFigureNameBytesMax)) + "'");
  return figures;
}

}  // namespace

struct TrainerServer::State {
  TrainerServerOptions options;
  TrainerLink& trainer_link;
  HttpServer server;
  RecentCalls calls{kCallsRemembered};
  ShardCollector shards{options.body_max, options.folder};
  RowPages metrics{options.folder / "metrics.jsonl"};
  std::thread thread;
  json address;
  // Empty for a unix socket, because its folder admits only its owner.
  overlay::trust::Secret required_authorization;

  State(TrainerServerOptions server_options, TrainerLink& link)
      : options(std::move(server_options)),
        trainer_link(link),
        server({.idle_max = options.idle_max,
                .transfer_time_base = options.transfer_time_base,
                // Two policies of the greatest size may arrive at once.
                .receiving_max = {2 * options.body_max.count}}) {}

  Status listen() {
    server.set_payload_max_length(options.body_max.count);
    if (options.listen == "socket") {
      ECHO_ASSIGN(const std::filesystem::path path,
                  listen_on_socket(server, options.folder,
                                   "set `run.folder` to a shorter one, or `learner.api` to 127.0.0.1:PORT"));
      address = json{{"socket", path.string()}};
    } else {
      ECHO_TRY(listen_on_loopback());
    }
    register_calls();
    thread = server.start();
    return ok();
  }

  Status listen_on_loopback() {
    constexpr std::string_view kHost = "127.0.0.1:";
    Result<std::uint64_t> port = fail(Code::kInvalid, "learner.api", "no port of 127.0.0.1");  // until it is read
    if (options.listen.starts_with(kHost)) port = whole_number(options.listen.substr(kHost.size()), "learner.api");
    if (!port || *port > 65'535)
      return fail(Code::kInvalid, "learner.api",
                  "expected `socket` or 127.0.0.1:PORT, found '{}': the API is for this machine only", options.listen);
    const std::optional<int> bound_port = server.bind("127.0.0.1", static_cast<int>(*port));
    if (!bound_port)
      return fail(Code::kInvalid, "learner.api", "cannot listen on {}: is the port in use?", options.listen);
    const std::string token = random_hex(kTokenWords);
    required_authorization = overlay::trust::Secret("Bearer " + token);
    address = json{{"url", fmt::format("http://127.0.0.1:{}", *bound_port)}, {"token", token}};
    return ok();
  }

  Status publish(const Request& request, Response& response, const overlay::Slice& body) {
    ECHO_ASSIGN(const std::uint64_t version, whole_number(request.matches[1], "version"));
    delta::OwnedState policy;
    if (request.get_header_value("Content-Type").starts_with(kJsonType)) {
      const json parsed = json::parse(text_of(body), nullptr, /*allow_exceptions=*/false);
      if (!parsed.is_object() || !parsed.contains("path") || !parsed["path"].is_string())
        return fail(Code::kInvalid, "publish",
                    "expected {{\"path\": FOLDER or FILE}}, or the bytes of a safetensors file as {}", kBinaryType);
      if (parsed.contains("strip_prefix") && !parsed["strip_prefix"].is_string())
        return fail(Code::kInvalid, "publish", "'strip_prefix' is {}, expected a text", parsed["strip_prefix"].dump());
      ECHO_ASSIGN(policy, options.read_policy(Version{version}, parsed["path"].get<std::string>(),
                                              parsed.value("strip_prefix", std::string())));
    } else {
      ECHO_ASSIGN(policy, options.parse_policy(Version{version}, body));
    }
    ECHO_TRY(trainer_link.publish(Version{version}, std::move(policy)));
    answer(response, trainer_link.status());
    return ok();
  }

  // The answer says which ranks are missing. The last rank's shards publish the version.
  Status publish_shards(const Request& request, Response& response, overlay::Slice body) {
    ECHO_ASSIGN(const std::uint64_t version, whole_number(request.matches[1], "version"));
    ECHO_ASSIGN(std::optional<delta::OwnedState> joined, shards.add(Version{version}, std::move(body)));
    if (joined) {
      ECHO_ASSIGN(delta::OwnedState policy, options.check_policy(Version{version}, std::move(*joined)));
      ECHO_TRY(trainer_link.publish(Version{version}, std::move(policy)));
    }
    answer(response, status());
    return ok();
  }

  // A call of a rank on another machine, which came over its node.
  TrainerAnswer answer_node(TrainerCall call) {
    static const std::regex kShards(R"(/v1/policy/([0-9]+)/shards)");
    trainer_link.on_trainer_call();
    Request request;
    request.method = std::move(call.method);
    request.path = std::move(call.path);
    Response response;
    const auto execute = [&]() -> Status {
      if (request.method == "GET" && request.path == "/v1/status") {
        json fields = options.run_facts;
        fields.update(status());
        answer(response, fields);
        return ok();
      }
      if (request.method != "POST" || !std::regex_match(request.path, request.matches, kShards))
        return fail(Code::kInvalid, "node", "{} {} is not a call that a node passes on", printable(request.method),
                    printable(request.path));
      ECHO_ASSIGN(RecentCalls::Turn turn, calls.begin(call.request_id, request.path));
      if (turn.earlier_result()) {
        response.set_content(*turn.earlier_result(), kJsonType);
        return ok();
      }
      ECHO_TRY(publish_shards(request, response, std::move(call.body)));
      turn.finish(response.body);
      return ok();
    };
    response.status = 200;
    try {
      if (const Status outcome = execute(); !outcome) answer(response, outcome.error());
    } catch (const std::bad_alloc&) {
      answer(response, fail(Code::kExhausted, "trainer api", "a call failed for lack of memory"));
    }
    return {response.status, std::move(response.body)};
  }

  json status() const {
    json status = trainer_link.status();
    if (json collecting = shards.status(); !collecting.is_null()) status["shards"] = std::move(collecting);
    return status;
  }

  void register_calls() {
    server.set_pre_routing_handler([this](const Request& request, Response& response) {
      if (required_authorization.empty() ||
          required_authorization == overlay::trust::Secret(request.get_header_value("Authorization"))) {
        trainer_link.on_trainer_call();
        return httplib::Server::HandlerResponse::Unhandled;
      }
      response.status = 401;
      answer(
          response,
          json{{"error",
                {{"code", "unauthorized"},
                 {"message",
                  "expected the header 'Authorization: Bearer TOKEN' with the token of the run's trainer-api.json"}}}});
      // The request's body is not read, so the connection cannot carry another request.
      HttpServer::close_after_answer(response);
      return httplib::Server::HandlerResponse::Handled;
    });
    server.set_error_handler([](const Request& request, Response& response) {
      if (!response.body.empty()) return;
      HttpServer::close_after_answer(response);
      if (const auto failure = HttpServer::request_failure()) {
        response.status = failure->status;
        return answer(response, json{{"error", {{"code", failure->code()}, {"message", failure->message}}}});
      }
      answer(response, json{{"error",
                             {{"code", "http"},
                              {"message", fmt::format("{} {} is not understood (HTTP {}); docs/trainers.md "
                                                      "has the calls",
                                                      request.method, printable(request.path), response.status)}}}});
    });
    // Calls return errors as values; only an allocation throws.
    server.set_exception_handler([](const Request&, Response& response, std::exception_ptr) {
      HttpServer::close_after_answer(response);
      answer(response, fail(Code::kExhausted, "trainer api", "a call failed for lack of memory"));
    });
    // Makes a handler that runs `work` and answers with its error, if it returns one.
    const auto route = [](auto work) {
      return [work](const Request& request, Response& response) {
        if (const Status outcome = work(request, response); !outcome) answer(response, outcome.error());
      };
    };
    // A call that changes state. When repeated with the same id, it gets the first answer again.
    const auto idempotent = [this, route](auto work) {
      return route([this, work](const Request& request, Response& response) -> Status {
        ECHO_ASSIGN(RecentCalls::Turn turn, calls.begin(request.get_header_value(kRequestIdHeader), request.path));
        if (turn.earlier_result()) {
          response.set_content(*turn.earlier_result(), kJsonType);
          return ok();
        }
        ECHO_TRY(work(request, response));
        turn.finish(response.body);
        return ok();
      });
    };
    server.Get("/v1/status", route([this](const Request&, Response& response) -> Status {
                 json fields = options.run_facts;
                 fields.update(status());
                 answer(response, fields);
                 return ok();
               }));
    server.Get("/v1/metrics", route([this](const Request& request, Response& response) -> Status {
                 ECHO_ASSIGN(const std::uint64_t rows_before, number_in(request, "after", 0));
                 ECHO_ASSIGN(const std::uint64_t rows_max, number_in(request, "limit", kPageRowsMax));
                 ECHO_ASSIGN(const std::uint64_t newest_count, number_in(request, "last", 0));
                 auto page =
                     request.has_param("last") ? metrics.last(newest_count) : metrics.after(rows_before, rows_max);
                 if (!page) return std::move(page).error();
                 if (page->next) response.set_header("X-Echoline-Next", std::to_string(*page->next));
                 response.set_header("X-Echoline-More", page->more ? "1" : "0");
                 response.set_content(std::move(page->rows) + "\n", kJsonType);
                 return ok();
               }));
    // A repeated request with the same id gets the same lease again. `calls` keeps only the lease, because the batch is
    // too large to keep.
    server.Post(
        "/v1/batch", route([this](const Request& request, Response& response) -> Status {
          ECHO_ASSIGN(const double wait_seconds, seconds_in(request, "wait_s", 0, kWaitSecondsMax));
          ECHO_ASSIGN(const double lease_seconds,
                      seconds_in(request, "lease_s", kLeaseSecondsDefault, kLeaseSecondsMax));
          const bool takeover = request.get_param_value("takeover") == "1";
          ECHO_ASSIGN(RecentCalls::Turn turn, calls.begin(request.get_header_value(kRequestIdHeader), request.path));
          std::optional<LeasedBatch> batch;
          if (turn.earlier_result()) batch = trainer_link.find_batch(*turn.earlier_result());
          if (!batch) {
            ECHO_ASSIGN(batch, trainer_link.take(from_seconds(wait_seconds), from_seconds(lease_seconds), takeover));
          }
          response.status = batch ? 200 : 204;
          if (!batch) return ok();
          turn.finish(batch->lease);
          response.set_header("X-Echoline-Lease", batch->lease);
          response.set_header("X-Echoline-Step", std::to_string(batch->step));
          response.set_content_provider(
              batch->bytes->size(), kBinaryType,
              [bytes = batch->bytes](std::size_t offset, std::size_t size, httplib::DataSink& sink) {
                return sink.write(bytes->data() + offset, size);
              });
          return ok();
        }));
    server.Post(R"(/v1/batch/([0-9a-f]+)/(renew|consume|return))",
                idempotent([this](const Request& request, Response& response) -> Status {
                  const std::string lease = request.matches[1], action = request.matches[2];
                  if (action == "renew") {
                    ECHO_ASSIGN(const double lease_seconds,
                                seconds_in(request, "lease_s", kLeaseSecondsDefault, kLeaseSecondsMax));
                    ECHO_TRY(trainer_link.renew(lease, from_seconds(lease_seconds)));
                  } else if (action == "return") {
                    ECHO_TRY(trainer_link.return_batch(lease));
                  } else {
                    ECHO_ASSIGN(json figures, figures_of(request.body));
                    ECHO_TRY(trainer_link.consume(lease, std::move(figures)));
                  }
                  answer(response, trainer_link.status());
                  return ok();
                }));
    server.Post(R"(/v1/batch/([0-9a-f]+)/scores)",
                idempotent([this](const Request& request, Response& response) -> Status {
                  const std::string lease = request.matches[1];
                  ECHO_ASSIGN(const std::size_t tokens, trainer_link.response_tokens(lease));
                  ECHO_ASSIGN(TokenScores scores, parse_scores(request.body, tokens));
                  ECHO_TRY(trainer_link.submit_scores(lease, std::move(scores)));
                  answer(response, trainer_link.status());
                  return ok();
                }));
    server.Get("/v1/evaluation", route([this](const Request&, Response& response) -> Status {
                 trainer_link.on_evaluation_request();
                 answer(response, options.held_out());
                 return ok();
               }));
    server.Post(R"(/v1/evaluation/([0-9]+))", idempotent([this](const Request& request, Response& response) -> Status {
                  ECHO_ASSIGN(const std::uint64_t version, whole_number(request.matches[1], "version"));
                  ECHO_ASSIGN(PolicyEvaluation evaluation,
                              options.grade(json::parse(request.body, nullptr, /*allow_exceptions=*/false)));
                  evaluation.version = Version{version};
                  ECHO_TRY(trainer_link.submit_evaluation(evaluation));
                  json status = trainer_link.status();
                  status["accuracy"] = evaluation.accuracy;
                  answer(response, status);
                  return ok();
                }));
    const auto with_large_body = [this, idempotent](auto work) {
      return [this, idempotent, work](const Request& request, Response& response, const httplib::ContentReader& read) {
        std::optional<overlay::Slice> body =
            HttpServer::read_body(request, response, read, options.body_max, options.folder);
        if (!body) return;
        idempotent([&](const Request&, Response&) { return work(request, response, std::move(*body)); })(request,
                                                                                                         response);
      };
    };
    server.Post(R"(/v1/policy/([0-9]+))",
                with_large_body([this](const Request& request, Response& response, auto body) {
                  return publish(request, response, std::move(body));
                }));
    server.Post(R"(/v1/policy/([0-9]+)/shards)",
                with_large_body([this](const Request& request, Response& response, auto body) {
                  return publish_shards(request, response, std::move(body));
                }));
  }
};

TrainerServer::TrainerServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::unique_ptr<TrainerServer>> TrainerServer::start(TrainerServerOptions options, TrainerLink& trainer_link) {
  auto state = std::make_unique<State>(std::move(options), trainer_link);
  ECHO_TRY(state->listen());
  return std::unique_ptr<TrainerServer>(new TrainerServer(std::move(state)));
}

TrainerServer::~TrainerServer() {
  state_->trainer_link.stop();  // ends the calls that wait for a batch
  state_->server.end_connections();
  state_->server.stop();
  if (state_->thread.joinable()) state_->thread.join();
  std::error_code error;
  if (state_->address.contains("socket")) std::filesystem::remove(state_->address["socket"].get<std::string>(), error);
}

TrainerAnswer TrainerServer::answer_node(TrainerCall call) { return state_->answer_node(std::move(call)); }

const nlohmann::json& TrainerServer::address() const { return state_->address; }

}  // namespace echoline::learner
