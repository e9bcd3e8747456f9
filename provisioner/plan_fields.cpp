// Reads the fields of a plan's JSON and describes the first wrong one.
#include "provisioner/plan_fields.hpp"

#include "provisioner/offer_formats.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

constexpr std::size_t kTextBytesMax = 4096;
constexpr std::size_t kListMax = 100'000;  // values
constexpr double kSecondsMax = 1e10;       // also the bound of a number of days

bool is_text(const json& j) { return j.is_string() && j.get_ref<const std::string&>().size() <= kTextBytesMax; }

}  // namespace

PlanReader::PlanReader(const json& object, std::string path, std::string& problem)
    : object_(object), path_(std::move(path)), problem_(problem) {
  if (!object_.is_object()) record_problem("", "an object", object_);
}

const json* PlanReader::find_number(const char* key, double least, double most, bool is_whole) const {
  const json* j = find(key);
  if (!j) return nullptr;
  if (!j->is_number()) {
    record_problem(key, "a number", *j);
    return nullptr;
  }
  const double value = j->get<double>();
  const bool has_wrong_fraction = is_whole && value != std::floor(value);
  const bool is_in_range = value >= least && value <= most;
  if (is_in_range && !has_wrong_fraction) return j;
  record_problem(key, fmt::format("a {}number of {} to {}", has_wrong_fraction ? "whole " : "", least, most), *j);
  return nullptr;
}

void PlanReader::rate(const char* key, std::optional<BitRate>& value) const {
  std::optional<double> mbit_per_s;
  constexpr double kMbitLeast = 1e-6, kMbitMost = 1e9;
  optional(key, mbit_per_s, kMbitLeast, kMbitMost);
  if (mbit_per_s) value = BitRate::from_mbit_per_s(*mbit_per_s);
}
void PlanReader::rate(const char* key, BitRate& value) const {
  std::optional<BitRate> value_if_present;
  rate(key, value_if_present);
  value = value_if_present.value_or(BitRate{});
}
void PlanReader::duration(const char* key, Duration& value) const {
  double value_s = 0;
  number(key, value_s, 0, kSecondsMax);
  value = from_seconds(value_s);
}
void PlanReader::duration(const char* key, std::optional<Duration>& value) const {
  if (!is_absent(key)) duration(key, value.emplace());
}
void PlanReader::days(const char* key, std::optional<Duration>& value) const {
  std::optional<double> value_days;
  optional(key, value_days, 0, kSecondsMax);
  if (value_days) value = from_seconds(*value_days * kSecondsPerDay);
}

void PlanReader::text(const char* key, std::string& value) const {
  const json* j = find(key);
  if (!j) return;
  if (!is_text(*j)) return record_problem(key, fmt::format("a text of at most {} bytes", kTextBytesMax), *j);
  value = j->get<std::string>();
}
void PlanReader::boolean(const char* key, bool& value) const {
  const json* j = find(key);
  if (!j) return;
  if (!j->is_boolean()) return record_problem(key, "true or false", *j);
  value = j->get<bool>();
}
void PlanReader::texts(const char* key, std::vector<std::string>& value) const {
  const json* j = find_list(key);
  if (!j) return;
  for (const json& item : *j) {
    if (!is_text(item)) return record_problem(key, "texts", item);
    value.push_back(item.get<std::string>());
  }
}
void PlanReader::gpus(const char* key, std::vector<int>& value) const {
  const json* j = find_list(key);
  if (!j) return;
  for (const json& id : *j) {
    if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() > kGpusMax)
      return record_problem(key, "numbers of GPUs", id);
    value.push_back(id.get<int>());
  }
}

PlanReader PlanReader::section(const char* key) const {
  static const json kEmpty = json::object();
  const json* j = find(key);
  return PlanReader(j ? *j : kEmpty, path_of(key), problem_);
}

const json* PlanReader::find_list(const char* key) const {
  const json* j = find(key);
  if (!j) return nullptr;
  if (j->is_array() && j->size() <= kListMax) return j;
  record_problem(key, fmt::format("a list of at most {} values", kListMax), *j);
  return nullptr;
}

bool PlanReader::is_absent(const char* key) const {
  return !object_.is_object() || !object_.contains(key) || object_.at(key).is_null();
}

void PlanReader::record_problem(const char* key, const std::string& expected, const json& found) const {
  if (!problem_.empty()) return;
  const std::string text = found.is_structured()
                               ? found.type_name()
                               : found.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  problem_ = fmt::format("{}: expected {}, found {}", path_of(key), expected, excerpt(text));
}

const json* PlanReader::find(const char* key) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(key);
  if (it != object_.end()) return &*it;
  if (problem_.empty()) problem_ = fmt::format("{}: it is missing", path_of(key));
  return nullptr;
}

std::string PlanReader::path_of(std::string_view key) const {
  if (key.empty()) return path_.empty() ? "the file" : path_;
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

}  // namespace echoline::provisioner
