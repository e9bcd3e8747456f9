// Stores the versions of a run, called by the learner's publisher.
#include "store/outbox.hpp"

#include <sys/random.h>

#include <algorithm>
#include <charconv>

#include "base/files.hpp"
#include "base/log.hpp"
#include "delta/mapped_file.hpp"
#include "delta/pending_file.hpp"

namespace echoline::store {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "store policies";
constexpr std::size_t kHolderDigits = 32;
constexpr Duration kFirstPause = std::chrono::seconds(1), kPauseMax = std::chrono::seconds(30);
constexpr double kWarnEverySeconds = 60;
constexpr int kRenewalsPerLease = 3;
constexpr std::string_view kSuffix = ".patch", kNoBase = "none";

// "000000000007-000000000042-000000000041.patch": a running number, the version, and its base or "none".
struct FileName {
  std::uint64_t number = 0;
  Version version;
  std::optional<Version> base;
};

std::string to_text(const FileName& name) {
  return fmt::format("{:012}-{:012}-{}{}", name.number, name.version,
                     name.base ? fmt::format("{:012}", *name.base) : std::string(kNoBase), kSuffix);
}

std::optional<std::uint64_t> digits(std::string_view text) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return number;
}

std::optional<FileName> parse_file_name(std::string_view text) {
  if (!text.ends_with(kSuffix)) return std::nullopt;
  text.remove_suffix(kSuffix.size());
  const auto first = text.find('-'), second = text.rfind('-');
  if (first == text.npos || first == second) return std::nullopt;
  const auto number = digits(text.substr(0, first)), version = digits(text.substr(first + 1, second - first - 1));
  if (!number || !version) return std::nullopt;
  FileName name{.number = *number, .version = Version{*version}, .base = std::nullopt};
  if (text.substr(second + 1) == kNoBase) return name;
  const auto base = digits(text.substr(second + 1));
  if (!base) return std::nullopt;
  name.base = Version{*base};
  return name;
}

}  // namespace

OutgoingPatch::OutgoingPatch(Outbox& outbox, Version version, std::optional<Version> base, const fs::path& path)
    : outbox_(outbox),
      version_(version),
      base_(base),
      path_(path),
      file_(std::make_unique<delta::PendingFile>(path, kOperation)) {}

OutgoingPatch::~OutgoingPatch() {
  if (file_) outbox_.leave_out(version_, error_ ? error_->message() : "its publication was not completed");
}

void OutgoingPatch::write(std::span<const std::byte> bytes) {
  if (error_) return;
  bytes_ += bytes.size();
  if (bytes_ > outbox_.options_.settings.backlog_max.count)
    error_ = fail(Code::kExhausted, kOperation, "it is larger than store.backlog_max");
  else if (const Status written = file_->write(bytes); !written)
    error_ = written.error();
}

void OutgoingPatch::finish() {
  if (!error_)
    if (const Status committed = file_->commit(); !committed) error_ = committed.error();
  if (error_) return;
  file_.reset();
  outbox_.queue({.path = path_, .version = version_, .base = base_, .bytes = bytes_, .queued_at = {}});
}

Result<std::unique_ptr<Outbox>> Outbox::open(const overlay::trust::SigningKey& key, OutboxOptions options) {
  ECHO_TRY(make_folders(options.folder));
  std::unique_ptr<Outbox> outbox(new Outbox(key, std::move(options)));
  ECHO_ASSIGN(outbox->store_, open_object_store(outbox->options_.settings.address, &outbox->stopping_));
  ECHO_ASSIGN(outbox->holder_, outbox->read_holder());
  ECHO_TRY(outbox->read_folder());
  outbox->uploader_ = std::thread([&box = *outbox] { box.upload_until_stopped(); });
  outbox->renewer_ = std::thread([&box = *outbox] { box.renew_until_stopped(); });
  return outbox;
}

Outbox::~Outbox() { stop(); }

Result<std::string> Outbox::read_holder() const {
  const fs::path file = options_.folder / "holder";
  if (const auto text = read_file(file, kHolderDigits + 1); text && is_hex(*text, kHolderDigits)) return *text;
  std::array<unsigned char, kHolderDigits / 2> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
    return os_error(kOperation, file);
  std::string holder;
  for (const unsigned char byte : random) holder += fmt::format("{:02x}", byte);
  ECHO_TRY(write_file_atomic(file, holder));
  return holder;
}

// Queues what an earlier process of the run has left.
Status Outbox::read_folder() {
  std::error_code error;
  std::vector<std::pair<FileName, fs::path>> found;
  for (fs::directory_iterator file(options_.folder, error), end; !error && file != end; file.increment(error)) {
    const auto name = parse_file_name(file->path().filename().string());
    const bool is_void = name && name->version > options_.resumed_at;
    if (name && !is_void)
      found.emplace_back(*name, file->path());
    else if (file->path().filename() != "holder")
      fs::remove(file->path(), error);
  }
  if (error) return fail(Code::kIo, kOperation, "{}: {}", options_.folder.string(), error.message());
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first.number < b.first.number; });
  for (const auto& [name, path] : found) {
    last_number_ = name.number;
    queue({.path = path,
           .version = name.version,
           .base = name.base,
           .bytes = fs::file_size(path, error),
           .queued_at = {}});
  }
  last_.reset();  // a learner begins with a snapshot
  return ok();
}

std::unique_ptr<OutgoingPatch> Outbox::begin(Version version, std::optional<Version> base) {
  const std::lock_guard lock(mutex_);
  if (is_lost_ || (base && base != last_)) return nullptr;
  if (bytes_ >= options_.settings.backlog_max.count) {
    if (last_)
      log::warn(
          "{} of policies wait for the store {}: versions from {} on are left out of it until there is room "
          "(store.backlog_max)",
          echoline::to_text(Bytes{bytes_}), options_.settings.address.url, version);
    last_.reset();
    return nullptr;
  }
  const FileName name{.number = ++last_number_, .version = version, .base = base};
  return std::make_unique<OutgoingPatch>(*this, version, base, options_.folder / to_text(name));
}

bool Outbox::wants_anchor(Version version) const {
  const std::lock_guard lock(mutex_);
  if (is_lost_) return false;
  return last_ != version || deltas_since_anchor_ >= options_.settings.anchor_every;
}

void Outbox::queue(Item item) {
  const std::lock_guard lock(mutex_);
  item.queued_at = clock_.now();
  bytes_ += item.bytes;
  last_ = item.version;
  deltas_since_anchor_ = item.base ? deltas_since_anchor_ + 1 : 0;
  items_.push_back(std::move(item));
  wake_.notify_all();
}

void Outbox::leave_out(Version version, std::string_view why) {
  const std::lock_guard lock(mutex_);
  if (last_ == version) {  // its delta is queued, so the chain goes on; wants_anchor() stays true
    log::info("no anchor of version {} is stored: {}", version, why);
    return;
  }
  last_.reset();
  if (!stopping_) log::warn("version {} is left out of the store: {}", version, why);
}

std::size_t Outbox::waiting() const {
  const std::lock_guard lock(mutex_);
  return items_.size();
}

bool Outbox::wait_until_stored(Duration patience) {
  std::unique_lock lock(mutex_);
  return stored_.wait_for(lock, patience, [this] { return items_.empty() || is_lost_ || stopping_; });
}

void Outbox::pause(std::unique_lock<std::mutex>& lock, Duration pause) {
  wake_.wait_for(lock, pause, [this] { return stopping_.load(); });
}

Status Outbox::open_writer() {
  const auto wait = [this](Duration length) -> Status {
    std::unique_lock lock(mutex_);
    pause(lock, length);
    return stopping_ ? Status(fail(Code::kCancelled, kOperation, "stopped")) : ok();
  };
  ECHO_ASSIGN(std::unique_ptr<PolicyWriter> writer, PolicyWriter::open(*store_, key_,
                                                                       {.run_id = options_.run_id,
                                                                        .holder = holder_,
                                                                        .settings = options_.settings,
                                                                        .resumed_at = options_.resumed_at},
                                                                       clock_, wait));
  ECHO_TRY(writer->publish_files(options_.model_files));
  log::info("policies are stored at {} (epoch {}, lease {})", options_.settings.address.url, writer->epoch(),
            writer->lease().term());
  const std::lock_guard lock(mutex_);
  writer_ = std::move(writer);
  return ok();
}

Status Outbox::upload(const Item& item) {
  ECHO_ASSIGN(const auto patch, delta::MappedFile::open(item.path, kOperation));
  return writer_->publish(item.version, item.base, patch.bytes());
}

void Outbox::upload_until_stopped() {
  Duration pause_now = kFirstPause;
  double warned_at_s = -kWarnEverySeconds;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || (!items_.empty() && !is_lost_); });
    if (stopping_) return;
    const Item item = items_.front();
    lock.unlock();
    Status stored = writer_ ? ok() : open_writer();
    const bool is_open = stored.has_value();
    if (is_open) stored = upload(item);
    const std::uint64_t requests = store_->traffic().requests;
    if (stored && options_.stored)
      options_.stored({.version = item.version,
                       .snapshot = !item.base,
                       .patch_bytes = item.bytes,
                       .requests = requests - requests_before_,
                       .seconds = seconds(clock_.now() - item.queued_at)});
    if (stored) requests_before_ = requests;
    lock.lock();
    // The file is useless: its base is not in the store, or it is damaged.
    const bool is_refused = is_open && !stored && stored.error().operation == kPublishOperation &&
                            (stored.error().code == Code::kNotFound || stored.error().code == Code::kInvalid);
    const bool is_damaged = !stored && stored.error().code == Code::kCorrupt && is_open;
    if (stored || is_refused || is_damaged) {
      if (!stored) {
        log::warn("version {} is left out of the store: {}", item.version, stored.error().message());
        last_.reset();
      }
      std::error_code ignored;
      std::filesystem::remove(item.path, ignored);
      bytes_ -= item.bytes;
      items_.pop_front();
      pause_now = kFirstPause;
      if (items_.empty()) stored_.notify_all();
      continue;
    }
    if (stopping_) return;
    if (stored.error().code == Code::kStale) {
      log::error("no further version is stored: {}", stored.error().message());
      is_lost_ = true;
      stored_.notify_all();
      continue;
    }
    if (const double now_s = seconds(clock_.now().time_since_epoch()); now_s - warned_at_s >= kWarnEverySeconds) {
      warned_at_s = now_s;
      log::warn("{} versions wait for the store: {}. The run goes on; the store is tried again", items_.size(),
                stored.error().message());
    }
    pause(lock, pause_now);
    pause_now = std::min(2 * pause_now, kPauseMax);
  }
}

void Outbox::renew_until_stopped() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    pause(lock, options_.settings.lease / kRenewalsPerLease);
    if (stopping_ || !writer_ || is_lost_) continue;
    PrefixLease& lease = writer_->lease();
    lock.unlock();
    const Status renewed = lease.renew();
    lock.lock();
    if (renewed || renewed.error().code != Code::kStale) continue;  // the uploading thread reports other errors
    log::error("no further version is stored: {}", renewed.error().message());
    is_lost_ = true;
    stored_.notify_all();
  }
}

void Outbox::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  stored_.notify_all();
  if (renewer_.joinable()) renewer_.join();
  if (!uploader_.joinable()) return;
  uploader_.join();
  if (!items_.empty())
    log::warn("{} versions are not in the store yet; they wait in {} for `--resume`", items_.size(),
              options_.folder.string());
  if (!writer_ || is_lost_ || !items_.empty()) return;
  stopping_ = false;  // or it would end this request
  if (const Status ended = writer_->lease().end(); !ended)
    log::warn("{}; another run can use the prefix after {}", ended.error().message(),
              echoline::to_text(options_.settings.lease));
  stopping_ = true;
}

}  // namespace echoline::store
