// The driver's part in serving the bundle: HTTP requests of new machines on the learner's port.
#include "base/log.hpp"
#include "overlay/uv/driver.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kStalledMax = std::chrono::seconds(60);  // a peer that takes no block for this long is closed

}  // namespace

// One read of a block of the file, until its callback.
struct Driver::BundleRead {
  uv_fs_t request{};
  Driver* driver = nullptr;
  ConnId conn;
  std::shared_ptr<const Descriptor> file;
  std::vector<char> block;
};

// `request`: the first bytes of the HTTP request. Reads the rest that has arrived; all known clients send a request's
// head in one piece.
void Driver::begin_request(Connection& connection, std::string request) {
  core_->on_closed(connection.id, "it asks for the bundle", now());
  connection.move_to(Stage::kFetching);
  std::byte buffer[BundleGate::kRequestBytesMax];
  while (request.size() <= BundleGate::kRequestBytesMax) {
    const auto bytes_read = connection.tls->read(buffer);
    if (!bytes_read || *bytes_read == 0) break;
    request.append(reinterpret_cast<const char*>(buffer), *bytes_read);
  }
  const BundleGate::Answer answer = downloads_->begin(connection.id, request, core_->run_unix_s(now()));
  if (!write(connection, std::as_bytes(std::span(answer.text)))) return on_lost(connection, "its session has failed");
  if (!answer.is_admitted) return close_after_flush(connection);
  log::info("{} fetches the bundle", connection.host);
  take_bundle_turns();
}

bool Driver::write(Connection& connection, std::span<const std::byte> plain) {
  if (!connection.tls->write(plain, connection.socket.block())) return false;
  connections_.mark_for_flush(connection);
  return true;
}

void Driver::take_bundle_turns() {
  for (const ConnId id : downloads_->take_turns())
    if (Connection* connection = connections_.find(id)) read_bundle(*connection);
}

// Reads the next block once the previous one has left and the uplink's share has room.
void Driver::read_bundle(Connection& connection) {
  if (connection.is_leaving() || connection.socket.is_writing()) return;
  const Downloads::Step step = downloads_->next(connection.id, now());
  if (step.kind == Downloads::Step::Kind::kDone) return close_after_flush(connection);
  if (step.kind == Downloads::Step::Kind::kNone) return arm_timer();
  connections_.set_deadline(connection, now() + kStalledMax);
  auto read = std::make_unique<BundleRead>();
  read->driver = this;
  read->conn = connection.id;
  read->file = bundle_->file;
  read->block.resize(step.bytes);
  read->request.data = read.get();
  uv_buf_t buffer = uv_buf_init(read->block.data(), static_cast<unsigned>(read->block.size()));
  const int error = uv_fs_read(&loop_.loop(), &read->request, read->file->get(), &buffer, 1,
                               static_cast<std::int64_t>(step.offset), [](uv_fs_t* request) {
                                 const std::unique_ptr<BundleRead> done(static_cast<BundleRead*>(request->data));
                                 const auto result = request->result;  // bytes read, or an error
                                 uv_fs_req_cleanup(request);
                                 Driver& driver = *done->driver;
                                 if (Connection* receiver = driver.connections_.find(done->conn))
                                   driver.send_bundle(*receiver, std::as_bytes(std::span(done->block)), result);
                                 driver.perform_actions();
                                 driver.end_if_stopped();
                               });
  if (error != 0) return report_lost_later(connection.id, uv_strerror(error));
  (void)read.release();
}

void Driver::send_bundle(Connection& connection, std::span<const std::byte> block, std::int64_t result) {
  downloads_->on_read(connection.id, result > 0 ? static_cast<std::size_t>(result) : 0, now());
  if (result <= 0) {
    log::error("the bundle cannot be read any more: {}",
               result < 0 ? uv_strerror(static_cast<int>(result)) : "it is shorter than it was");
    return on_lost(connection, "the bundle cannot be read");
  }
  if (!write(connection, block.first(static_cast<std::size_t>(result))))
    return on_lost(connection, "its session has failed");
  deferred_events_.push_back([this, id = connection.id] {  // after the flush of marked connections
    if (Connection* remaining = connections_.find(id)) read_bundle(*remaining);
  });
}

}  // namespace echoline::overlay
