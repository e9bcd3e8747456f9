// A node's HTTP server for the ranks of its machine, and its membership in the overlay.
#include "learner/external/trainer_node.hpp"

#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/random_bits.hpp"
#include "base/text.hpp"
#include "learner/external/api_socket.hpp"
#include "learner/external/http_server.hpp"
#include "learner/external/node_calls.hpp"
#include "learner/external/source.hpp"

namespace echoline::learner {
namespace {

using httplib::Request;
using httplib::Response;

constexpr Duration kPoll = std::chrono::milliseconds(100);  // how often the stop request is checked
constexpr Duration kLeaveMax = std::chrono::seconds(10);    // to hand the children over to other parents
constexpr Duration kTermsMax = std::chrono::minutes(10);    // a learner loads its model before it sends its terms
constexpr int kIdWords = 4;                                 // of a request id, in words of 32 random bits

class TrainerNode {
 public:
  TrainerNode(const TrainerNodeOptions& options, const std::atomic<bool>& stop)
      : options_(options),
        stop_(stop),
        calls_(
            clock_, [this](std::string message) { send(std::move(message)); }, options.patience) {}

  ~TrainerNode() {
    calls_.end("the node has ended");
    if (server_) {
      server_->end_connections();
      server_->stop();
    }
    if (thread_.joinable()) thread_.join();
    if (node_) node_->stop();
    std::error_code ignored;
    std::filesystem::remove(address_file(), ignored);
    if (!socket_.empty()) std::filesystem::remove(socket_, ignored);
  }

  Result<TrainerNodeReport> run() {
    ECHO_TRY(join());
    ECHO_ASSIGN(const std::optional<Bytes> body_max, wait_for_terms());
    if (body_max) {
      ECHO_TRY(serve(*body_max));
      while (!stop_ && !has_ended() && !calls_.refusal()) wait(kPoll);
    }
    if (const auto refusal = calls_.refusal()) return fail(Code::kInvalid, "node", "{}", *refusal);
    if (stop_ && !has_ended()) leave();
    const overlay::WorkerStats stats = node_->stats();
    const std::lock_guard lock(mutex_);
    return TrainerNodeReport{.calls = calls_served_,
                             .publications = publications_,
                             .received = {stats.chunk_bytes_in},
                             .forwarded = {stats.chunk_bytes_forwarded},
                             .reason = ended_.value_or("asked to stop"),
                             .ended_cleanly = ended_cleanly_};
  }

 private:
  Status join() {
    overlay::WorkerEvents events;
    events.joined = [this](WorkerId id, const std::string&) {
      log::info("joined as node {} ({})", id, options_.overlay.name);
      calls_.on_joined();
    };
    events.away = [this](const std::string& reason) {
      log::warn("the learner is out of reach: {}", reason);
      calls_.on_away();
    };
    events.message = [this](const std::string& bytes) { calls_.on_message(bytes); };
    // The node keeps and forwards a publication. It decodes nothing, so a whole, proven publication is all it needs.
    events.publication = [this](const overlay::Publication& publication) {
      if (publication.activate) node()->installed(publication.version, publication.policy_digest);
      const std::lock_guard lock(mutex_);
      ++publications_;
    };
    events.disconnected = [this](const std::string& reason, bool in_order) {
      calls_.end("the node is not in the run any more: " + reason);
      const std::lock_guard lock(mutex_);
      ended_ = reason;
      ended_cleanly_ = in_order;
      changed_.notify_all();
    };
    ECHO_ASSIGN(auto started, overlay::WorkerNode::start(options_.overlay, std::move(events)));
    const std::lock_guard lock(mutex_);
    node_ = std::move(started);
    changed_.notify_all();
    return ok();
  }

  // Callbacks may run before WorkerNode::start() has returned; these wait for it.
  overlay::WorkerNode* node() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return node_ != nullptr; });
    return node_.get();
  }

  void send(std::string message) {
    if (const Status sent = node()->send(std::move(message)); !sent) log::warn("{}", sent.error().message());
  }

  bool has_ended() const {
    const std::lock_guard lock(mutex_);
    return ended_.has_value();
  }

  void wait(Duration at_most) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, at_most, [this] { return ended_.has_value(); });
  }

  // The size of the largest call; absent if the run or this process ends first.
  Result<std::optional<Bytes>> wait_for_terms() {
    const TimePoint give_up_at = clock_.now() + kTermsMax;
    while (!stop_ && !has_ended()) {
      if (const auto refusal = calls_.refusal()) return fail(Code::kInvalid, "node", "{}", *refusal);
      if (const auto body_max = calls_.body_max()) return body_max;
      if (clock_.now() >= give_up_at)
        return fail(Code::kUnavailable, "node", "the learner has not taken calls for {}: see its log",
                    to_text(kTermsMax));
      wait(kPoll);
    }
    return std::optional<Bytes>();
  }

  Status serve(Bytes body_max) {
    server_.emplace(HttpLimits{.receiving_max = {2 * body_max.count}});
    server_->set_payload_max_length(body_max.count);
    ECHO_ASSIGN(socket_, listen_on_socket(*server_, options_.folder, "give --folder a shorter one"));
    server_->Get("/v1/status", [this](const Request& request, Response& response) {
      pass_on({.method = "GET", .path = request.path, .request_id = {}, .body = {}}, response);
    });
    server_->Post(R"(/v1/policy/([0-9]+)/shards)", [this, body_max](const Request& request, Response& response,
                                                                    const httplib::ContentReader& read) {
      std::optional<overlay::Slice> body = HttpServer::read_body(request, response, read, body_max, options_.folder);
      if (!body) return;
      std::string id = request.get_header_value("Idempotency-Key");
      if (id.empty()) id = random_hex(kIdWords);  // the learner may get the call twice
      pass_on({.method = "POST", .path = request.path, .request_id = std::move(id), .body = std::move(*body)},
              response);
    });
    server_->set_error_handler([](const Request& request, Response& response) {
      if (!response.body.empty()) return;
      HttpServer::close_after_answer(response);
      if (const auto failure = HttpServer::request_failure()) {
        response.status = failure->status;
        response.set_content(error_answer(failure->status, failure->code(), failure->message).body, "application/json");
        return;
      }
      const std::string message = fmt::format(
          "{} {} is for the learner's machine (HTTP {}): a node takes GET /v1/status and POST "
          "/v1/policy/VERSION/shards",
          request.method, printable(request.path), response.status);
      response.set_content(error_answer(response.status, "http", message).body, "application/json");
    });
    server_->set_exception_handler([](const Request&, Response& response, std::exception_ptr) {
      HttpServer::close_after_answer(response);
      response.status = 507;
      response.set_content(error_answer(507, "exhausted", "a call failed for lack of memory on this node").body,
                           "application/json");
    });
    thread_ = server_->start();
    ECHO_TRY(write_private_file_atomic(address_file(), nlohmann::json{{"socket", socket_.string()}}.dump(2) + "\n"));
    log::info("serving the ranks of this machine: echoline.Client(\"{}\")", options_.folder.string());
    return ok();
  }

  void pass_on(TrainerCall call, Response& response) {
    {
      const std::lock_guard lock(mutex_);
      ++calls_served_;
    }
    TrainerAnswer answer = calls_.execute(std::move(call));
    response.status = answer.status;
    response.set_content(std::move(answer.body), "application/json");
  }

  void leave() {
    node_->drain();
    const TimePoint give_up_at = clock_.now() + kLeaveMax;
    while (!has_ended() && clock_.now() < give_up_at) wait(kPoll);
  }

  std::filesystem::path address_file() const { return options_.folder / kTrainerAddressFile; }

  const TrainerNodeOptions& options_;
  const std::atomic<bool>& stop_;
  const SystemClock clock_;
  LearnerCalls calls_;
  std::optional<HttpServer> server_;
  std::thread thread_;
  std::filesystem::path socket_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_; node_ is set once:
  std::unique_ptr<overlay::WorkerNode> node_;
  std::uint64_t calls_served_ = 0, publications_ = 0;
  std::optional<std::string> ended_;  // the reason
  bool ended_cleanly_ = true;
};

}  // namespace

Result<TrainerNodeReport> run_trainer_node(const TrainerNodeOptions& options, const std::atomic<bool>& stop) {
  ECHO_TRY(make_folders(options.folder));
  TrainerNode node(options, stop);
  return node.run();
}

}  // namespace echoline::learner
