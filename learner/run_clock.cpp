// A run's working time and cost across its processes, for the report and the status.
#include "learner/run_clock.hpp"

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::chrono::seconds kSaveInterval(5);  // a killed process loses at most this much of its time
constexpr double kSecondsPerHour = 3600;
constexpr std::size_t kUsageBytesMax = 1 << 20;

}  // namespace

RunClock::RunClock(std::filesystem::path file, std::optional<double> usd_per_hour, const Clock& clock)
    : file_(std::move(file)), usd_per_hour_(usd_per_hour), clock_(clock), started_(clock.now()) {}

Result<std::unique_ptr<RunClock>> RunClock::open(const std::filesystem::path& folder,
                                                 std::optional<double> usd_per_hour, bool resume, const Clock& clock) {
  std::unique_ptr<RunClock> run_clock(new RunClock(folder / "usage.json", usd_per_hour, clock));
  if (resume && std::filesystem::exists(run_clock->file_)) {
    ECHO_ASSIGN(const std::string text, read_file(run_clock->file_, kUsageBytesMax));
    const auto usage = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto has_number = [&](const char* key) { return usage.contains(key) && usage.at(key).is_number(); };
    const bool is_valid = usage.is_object() && has_number("wall_seconds") && usage.contains("learner_usd") &&
                          (has_number("learner_usd") || usage.at("learner_usd").is_null());
    if (!is_valid)
      return fail(Code::kCorrupt, "resume", "{}: expected wall_seconds and learner_usd; remove it to count from 0",
                  run_clock->file_.string());
    run_clock->seconds_before_ = usage.at("wall_seconds");
    run_clock->usd_before_.reset();  // the file has null if a price was unknown
    if (has_number("learner_usd")) run_clock->usd_before_ = usage.at("learner_usd").get<double>();
  }
  ECHO_TRY(run_clock->save());
  run_clock->thread_ = std::thread([self = run_clock.get()] { self->save_until_stopped(); });
  return run_clock;
}

RunClock::~RunClock() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (const Status saved = save(); !saved) log::warn("{}", saved.error().message());
}

void RunClock::save_until_stopped() {
  std::unique_lock lock(mutex_);
  bool is_failing = false;
  while (!wake_.wait_for(lock, kSaveInterval, [this] { return stopping_; })) {
    lock.unlock();
    const Status saved = save();
    if (!saved && !is_failing) log::warn("{}", saved.error().message());  // logged once, until it succeeds
    is_failing = !saved;
    lock.lock();
  }
}

double RunClock::wall_seconds() const { return seconds_before_ + seconds_of_process(); }

std::optional<double> RunClock::learner_usd() const {
  if (!usd_before_ || !usd_per_hour_) return std::nullopt;
  return *usd_before_ + *usd_per_hour_ * seconds_of_process() / kSecondsPerHour;
}

Status RunClock::save() const {
  const std::lock_guard lock(save_mutex_);
  nlohmann::json usage = {{"schema_version", 1}, {"wall_seconds", wall_seconds()}, {"learner_usd", nullptr}};
  if (const auto usd = learner_usd()) usage["learner_usd"] = *usd;
  return write_file_atomic(file_, usage.dump() + "\n");
}

}  // namespace echoline::learner
