// The driver's part in serving the bundle: HTTP requests of new machines on the learner's port.
#include "base/log.hpp"
#include "overlay/uv/driver.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kStalledMax = std::chrono::seconds(60);  // longest time without the peer taking a block

}  // namespace

// A block of the file that is being read.
struct Driver::BundleRead {
  uv_fs_t request{};
  Driver* driver = nullptr;
  ConnId conn;
  std::shared_ptr<const Descriptor> file;
  std::vector<char> block;
};

// `first`: the first bytes of the request. All known clients send a request's head in one piece.
void Driver::begin_request(Connection& c, std::string first) {
  core_->on_closed(c.id, "it asks for the bundle", now());
  c.move(Stage::kFetching);
  std::byte more[BundleGate::kRequestBytesMax];
  while (first.size() <= BundleGate::kRequestBytesMax) {
    const auto n = c.tls->read(more);
    if (!n || *n == 0) break;
    first.append(reinterpret_cast<const char*>(more), *n);
  }
  const BundleGate::Answer answer = downloads_->begin(c.id, first, core_->run_unix_s(now()));
  if (!write(c, std::as_bytes(std::span(answer.text)))) return lost(c, "its session has failed");
  if (!answer.serve) return leave(c);
  log::info("{} fetches the bundle", c.host);
  take_bundle_turns();
}

bool Driver::write(Connection& c, std::span<const std::byte> plain) {
  if (!c.tls->write(plain, c.socket.block())) return false;
  connections_.mark_dirty(c);
  return true;
}

void Driver::take_bundle_turns() {
  for (const ConnId id : downloads_->take_turns())
    if (Connection* c = connections_.find(id)) read_bundle(*c);
}

// Reads the next block once the previous one has left and the uplink's share has room.
void Driver::read_bundle(Connection& c) {
  if (c.leaving() || c.socket.is_writing()) return;
  const Downloads::Step step = downloads_->next(c.id, now());
  if (step.kind == Downloads::Step::Kind::kDone) return leave(c);
  if (step.kind == Downloads::Step::Kind::kNone) return arm_timer();
  connections_.set_deadline(c, now() + kStalledMax);
  auto read = std::make_unique<BundleRead>();
  read->driver = this;
  read->conn = c.id;
  read->file = bundle_->file;
  read->block.resize(step.bytes);
  read->request.data = read.get();
  uv_buf_t buffer = uv_buf_init(read->block.data(), static_cast<unsigned>(read->block.size()));
  const int e = uv_fs_read(&loop_.loop(), &read->request, read->file->get(), &buffer, 1,
                           static_cast<std::int64_t>(step.at), [](uv_fs_t* request) {
                             const std::unique_ptr<BundleRead> r(static_cast<BundleRead*>(request->data));
                             const auto n = request->result;
                             uv_fs_req_cleanup(request);
                             Driver& driver = *r->driver;
                             if (Connection* connection = driver.connections_.find(r->conn))
                               driver.send_bundle(*connection, std::as_bytes(std::span(r->block)), n);
                             driver.drain();
                             driver.end_if_stopped();
                           });
  if (e != 0) return lost_later(c.id, uv_strerror(e));
  (void)read.release();
}

void Driver::send_bundle(Connection& c, std::span<const std::byte> block, std::int64_t n) {
  downloads_->on_read(c.id, n > 0 ? static_cast<std::size_t>(n) : 0, now());
  if (n <= 0) {
    log::error("the bundle cannot be read any more: {}",
               n < 0 ? uv_strerror(static_cast<int>(n)) : "it is shorter than it was");
    return lost(c, "the bundle cannot be read");
  }
  if (!write(c, block.first(static_cast<std::size_t>(n)))) return lost(c, "its session has failed");
  later_.push_back([this, id = c.id] {  // after the flush of dirty connections
    if (Connection* still = connections_.find(id)) read_bundle(*still);
  });
}

}  // namespace echoline::overlay
