// The driver's part in serving the bundle: HTTP requests of new machines on the learner's port.
#include "base/log.hpp"
#include "overlay/uv/driver.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kStalledMax = std::chrono::seconds(60);  // longest time without the peer taking a block

}  // namespace

// One read of a block of the file, until its callback.
struct Driver::BundleRead {
  uv_fs_t request{};
  Driver* driver = nullptr;
  ConnId conn;
  std::shared_ptr<const Descriptor> file;
  std::vector<char> block;
};

// `request`: its first bytes. All known clients send a request's head in one piece.
void Driver::begin_request(Connection& c, std::string request) {
  core_->on_closed(c.id, "it asks for the bundle", now());
  c.move_to(Stage::kFetching);
  std::byte buffer[BundleGate::kRequestBytesMax];
  while (request.size() <= BundleGate::kRequestBytesMax) {
    const auto bytes_read = c.tls->read(buffer);
    if (!bytes_read || *bytes_read == 0) break;
    request.append(reinterpret_cast<const char*>(buffer), *bytes_read);
  }
  const BundleGate::Answer answer = downloads_->begin(c.id, request, core_->run_unix_s(now()));
  if (!write(c, std::as_bytes(std::span(answer.text)))) return on_lost(c, "its session has failed");
  if (!answer.is_admitted) return close_after_flush(c);
  log::info("{} fetches the bundle", c.host);
  take_bundle_turns();
}

bool Driver::write(Connection& c, std::span<const std::byte> plain) {
  if (!c.tls->write(plain, c.socket.block())) return false;
  connections_.mark_for_flush(c);
  return true;
}

void Driver::take_bundle_turns() {
  for (const ConnId id : downloads_->take_turns())
    if (Connection* c = connections_.find(id)) read_bundle(*c);
}

// Reads the next block once the previous one has left and the uplink's share has room.
void Driver::read_bundle(Connection& c) {
  if (c.is_leaving() || c.socket.is_writing()) return;
  const Downloads::Step step = downloads_->next(c.id, now());
  if (step.kind == Downloads::Step::Kind::kDone) return close_after_flush(c);
  if (step.kind == Downloads::Step::Kind::kNone) return arm_timer();
  connections_.set_deadline(c, now() + kStalledMax);
  auto read = std::make_unique<BundleRead>();
  read->driver = this;
  read->conn = c.id;
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
                                 if (Connection* connection = driver.connections_.find(done->conn))
                                   driver.send_bundle(*connection, std::as_bytes(std::span(done->block)), result);
                                 driver.perform_actions();
                                 driver.end_if_stopped();
                               });
  if (error != 0) return report_lost_later(c.id, uv_strerror(error));
  (void)read.release();
}

void Driver::send_bundle(Connection& c, std::span<const std::byte> block, std::int64_t result) {
  downloads_->on_read(c.id, result > 0 ? static_cast<std::size_t>(result) : 0, now());
  if (result <= 0) {
    log::error("the bundle cannot be read any more: {}",
               result < 0 ? uv_strerror(static_cast<int>(result)) : "it is shorter than it was");
    return on_lost(c, "the bundle cannot be read");
  }
  if (!write(c, block.first(static_cast<std::size_t>(result)))) return on_lost(c, "its session has failed");
  later_.push_back([this, id = c.id] {  // after the flush of marked connections
    if (Connection* remaining = connections_.find(id)) read_bundle(*remaining);
  });
}

}  // namespace echoline::overlay
