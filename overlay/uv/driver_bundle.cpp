// The driver's part in serving the bundle: HTTP requests of new machines on the learner's port.
#include "base/log.hpp"
#include "overlay/uv/driver.hpp"

namespace echoline::overlay {
namespace {

constexpr std::size_t kBlockBytes = 128 * 1024;
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
  c.download = Download{};
  std::byte more[BundleGate::kRequestBytesMax];
  while (first.size() <= BundleGate::kRequestBytesMax) {
    const auto n = c.tls->read(more);
    if (!n || *n == 0) break;
    first.append(reinterpret_cast<const char*>(more), *n);
  }
  const BundleGate::Answer answer = gate_->asked(c.id, first, core_->run_unix_s(now()));
  if (!write(c, std::as_bytes(std::span(answer.text)))) return lost(c, "its session has failed");
  if (!answer.serve) return leave(c);
  log::info("{} fetches the bundle", c.host);
  take_bundle_turns();
}

bool Driver::write(Connection& c, std::span<const std::byte> plain) {
  if (!c.tls->write(plain, c.block)) return false;
  if (!std::exchange(c.dirty, true)) dirty_.push_back(c.id);
  return true;
}

void Driver::take_bundle_turns() {
  for (const ConnId id : gate_->take_next())
    if (Connection* c = find(id)) {
      c->download->turn = true;
      read_bundle(*c);
    }
}

// Reads the next block once the previous one has left and the uplink's share has room.
void Driver::read_bundle(Connection& c) {
  Download& d = *c.download;
  if (!d.turn || d.reading || c.leaving() || c.writing > 0) return;
  if (d.at == options_.bundle->size.count) return leave(c);
  if (now() < d.not_before) {
    downloads_due_ = std::min(downloads_due_, d.not_before);
    return arm_timer();
  }
  set_deadline(c, now() + kStalledMax);
  auto read = std::make_unique<BundleRead>();
  read->driver = this;
  read->conn = c.id;
  read->file = options_.bundle->file;
  read->block.resize(
      static_cast<std::size_t>(std::min<std::uint64_t>(kBlockBytes, options_.bundle->size.count - d.at)));
  read->request.data = read.get();
  uv_buf_t buffer = uv_buf_init(read->block.data(), static_cast<unsigned>(read->block.size()));
  const int e = uv_fs_read(&loop_, &read->request, read->file->get(), &buffer, 1, static_cast<std::int64_t>(d.at),
                           [](uv_fs_t* request) {
                             const std::unique_ptr<BundleRead> r(static_cast<BundleRead*>(request->data));
                             const auto n = request->result;
                             uv_fs_req_cleanup(request);
                             Driver& driver = *r->driver;
                             if (Connection* connection = driver.find(r->conn))
                               driver.send_bundle(*connection, std::as_bytes(std::span(r->block)), n);
                             driver.drain();
                             driver.end_if_stopped();
                           });
  if (e != 0) return lost_later(c.id, uv_strerror(e));
  d.reading = true;
  (void)read.release();
}

void Driver::send_bundle(Connection& c, std::span<const std::byte> block, std::int64_t n) {
  Download& d = *c.download;
  d.reading = false;
  if (n <= 0) {
    log::error("the bundle cannot be read any more: {}",
               n < 0 ? uv_strerror(static_cast<int>(n)) : "it is shorter than it was");
    return lost(c, "the bundle cannot be read");
  }
  const auto plain = block.first(static_cast<std::size_t>(n));
  d.at += plain.size();
  d.not_before = gate_->sent(plain.size(), now());
  if (!write(c, plain)) return lost(c, "its session has failed");
  later_.push_back([this, id = c.id] {  // after the flush of dirty connections
    if (Connection* still = find(id)) read_bundle(*still);
  });
}

void Driver::resume_bundles(TimePoint t) {
  if (t < downloads_due_) return;
  downloads_due_ = kNever;
  std::vector<ConnId> waiting;
  for (const auto& [id, c] : connections_)
    if (c->download && c->download->turn) waiting.push_back(id);
  for (const ConnId id : waiting)
    if (Connection* c = find(id)) read_bundle(*c);
}

}  // namespace echoline::overlay
