// Reads and writes fields of a plan's JSON. PlanWriter and PlanReader have the same methods, so that plan_json.cpp
// lists each field once. Private to provisioner/.
#pragma once
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/units.hpp"
#include "chains/topology.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/regions.hpp"

namespace echoline::provisioner {

// Rounds to 12 digits. So a number of at most 12 digits is the same after a change of unit, writing and reading.
inline double rounded(double value) { return std::stod(fmt::format("{:.12g}", value)); }

template <class T>
nlohmann::json or_null(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

// Writes fields into an object; absent values become null. Ignores the bounds, which only PlanReader needs.
class PlanWriter {
 public:
  explicit PlanWriter(nlohmann::json& object) : object_(object) { object_ = nlohmann::json::object(); }

  template <class T>
  void number(const char* key, const T& value, double /*least*/, double /*most*/) {
    object_[key] = value;
  }
  template <class T>
  void number_or_null(const char* key, const T& value, double /*least*/, double /*most*/) {
    object_[key] = value > 0 ? nlohmann::json(value) : nlohmann::json();
  }
  template <class T>
  void optional(const char* key, const std::optional<T>& value, double /*least*/ = 0, double /*most*/ = 0) {
    object_[key] = or_null(value);
  }
  void worker(const char* key, const std::optional<WorkerId>& id) {
    object_[key] = id ? nlohmann::json(id->value) : nlohmann::json();
  }
  void rate(const char* key, const std::optional<BitRate>& value) {
    object_[key] = value ? nlohmann::json(rounded(value->mbit_per_s())) : nlohmann::json();
  }
  void rate(const char* key, const BitRate& value) { rate(key, std::optional(value)); }
  void duration(const char* key, const std::optional<Duration>& value) {
    object_[key] = value ? nlohmann::json(seconds(*value)) : nlohmann::json();
  }
  void days(const char* key, const std::optional<Duration>& value) {
    object_[key] = value ? nlohmann::json(rounded(seconds(*value) / kSecondsPerDay)) : nlohmann::json();
  }
  void bytes(const char* key, const Bytes& value) { object_[key] = value.count; }
  void bytes(const char* key, const std::optional<Bytes>& value) {
    object_[key] = value ? nlohmann::json(value->count) : nlohmann::json();
  }
  void text(const char* key, const std::string& value) { object_[key] = value; }
  void text_or_empty(const char* key, const std::string& value) { text(key, value); }
  void boolean(const char* key, bool value) { object_[key] = value; }
  void flag(const char* key, const std::optional<bool>& value) { object_[key] = or_null(value); }
  void texts(const char* key, const std::vector<std::string>& value) { object_[key] = value; }
  void gpus(const char* key, const std::vector<int>& value) { object_[key] = value; }
  template <class E>
  void choice(const char* key, const E& value, std::initializer_list<E>) {
    object_[key] = to_string(value);
  }
  bool has(const char*) const { return true; }  // writes every field
  PlanWriter section(const char* key) { return PlanWriter(object_[key]); }

 private:
  nlohmann::json& object_;
};

// Reads fields of an object. Sets `problem` to the first problem; a value with a problem stays unchanged.
class PlanReader {
 public:
  PlanReader(const nlohmann::json& object, std::string path, std::string& problem);

  template <class T>
  void number(const char* key, T& value, double least, double most) const {
    const nlohmann::json* number_json = find_number(key, least, most, std::is_integral_v<T>);
    if (number_json) value = number_json->get<T>();
  }
  // null stands for 0.
  template <class T>
  void number_or_null(const char* key, T& value, double least, double most) const {
    if (!is_absent(key)) number(key, value, least, most);
  }
  template <class T>
  void optional(const char* key, std::optional<T>& value, double least = 0, double most = 1e12) const {
    if (!is_absent(key)) number(key, value.emplace(), least, most);
  }
  void worker(const char* key, std::optional<WorkerId>& id) const {
    if (!is_absent(key)) number(key, id.emplace().value, 1, 1e6);
  }
  void rate(const char* key, std::optional<BitRate>& value) const;
  void rate(const char* key, BitRate& value) const;
  void duration(const char* key, Duration& value) const;
  void duration(const char* key, std::optional<Duration>& value) const;
  void days(const char* key, std::optional<Duration>& value) const;
  void bytes(const char* key, Bytes& value) const { number(key, value.count, 0, 1e15); }
  void bytes(const char* key, std::optional<Bytes>& value) const {
    if (!is_absent(key)) bytes(key, value.emplace());
  }
  void text(const char* key, std::string& value) const;
  // Plans of earlier versions lack the key.
  void text_or_empty(const char* key, std::string& value) const {
    if (!is_absent(key)) text(key, value);
  }
  void boolean(const char* key, bool& value) const;
  void flag(const char* key, std::optional<bool>& value) const {
    if (!is_absent(key)) boolean(key, value.emplace());
  }
  void texts(const char* key, std::vector<std::string>& value) const;
  void gpus(const char* key, std::vector<int>& value) const;
  // An enumerator by its name.
  template <class E>
  void choice(const char* key, E& value, std::initializer_list<E> all) const {
    std::string name;
    text(key, name);
    for (const E each : all)
      if (to_string(each) == name) {
        value = each;
        return;
      }
    record_problem(key, "one of its names", nlohmann::json(name));
  }
  bool has(const char* key) const { return !is_absent(key); }  // plans of earlier versions lack some
  PlanReader section(const char* key) const;

  // Null, with a problem, if the value is missing or no list.
  const nlohmann::json* find_list(const char* key) const;
  // Whether the key is missing or null.
  bool is_absent(const char* key) const;
  // Records a problem with the key's value, unless there is an earlier one.
  void record_problem(const char* key, const std::string& expected, const nlohmann::json& found) const;

 private:
  // Null if the value is missing or invalid.
  const nlohmann::json* find_number(const char* key, double least, double most, bool is_whole) const;
  const nlohmann::json* find(const char* key) const;
  std::string path_of(std::string_view key) const;

  const nlohmann::json& object_;
  std::string path_;  // of the object in the file, such as "header.assume"; "": the file
  std::string& problem_;
};

// In plan_topology_json.cpp: the topology, and the keys `region`, `regions` and `ways` of the header.
nlohmann::json topology_json(const chains::Topology& topology);
void read_topology(const PlanReader& reader, std::size_t worker_count, chains::Topology& topology);
void write_regions(nlohmann::json& header, const RegionMap& map);
void read_regions(const PlanReader& reader, RegionMap& map);

}  // namespace echoline::provisioner
