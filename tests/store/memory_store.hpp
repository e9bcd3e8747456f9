// Objects in memory, shared by several clients, each of which can be interrupted at any request.
#pragma once
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "store/object_store.hpp"

namespace echoline::store {

// The objects, as the service has them.
struct SharedObjects {
  std::map<std::string, std::string> objects;
  std::map<std::string, std::string> earlier;  // what an old list shows
};

// A client. After `requests_left` requests it is dead: the last one may have had its effect, and each later one fails.
class MemoryStore final : public ObjectStore {
 public:
  static constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

  explicit MemoryStore(SharedObjects& shared) : shared_(shared) {}
  std::uint64_t requests_left = kUnlimited;
  bool last_has_effect = true;      // of the request that is interrupted
  std::size_t torn_bytes = 0;       // an interrupted read gives this many bytes first
  bool lists_are_old = false;       // list() shows `earlier`
  bool ignores_conditions = false;  // put_if_absent() replaces, as some services do
  std::uint64_t requests = 0;
  std::function<void(const std::string& request)> observer = [](const std::string&) {};

  Status put(const std::string& key, std::span<const std::byte> bytes) override {
    return change("put " + key, [&] {
      shared_.objects[key] = std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return ok();
    });
  }
  Status put_if_absent(const std::string& key, std::span<const std::byte> bytes) override {
    return change("put_if_absent " + key, [&]() -> Status {
      if (shared_.objects.count(key) && !ignores_conditions) return fail(Code::kStale, "put", "{} exists", key);
      shared_.objects[key] = std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return ok();
    });
  }
  Result<std::uint64_t> get(const std::string& key, std::uint64_t first, const ByteSink& sink) override {
    const bool dies = begin("get " + key);
    const auto found = shared_.objects.find(key);
    if (found != shared_.objects.end() && first < found->second.size()) {
      std::string_view rest = std::string_view(found->second).substr(first);
      if (dies) rest = rest.substr(0, torn_bytes);
      if (!dies || torn_bytes > 0) ECHO_TRY(sink(as_bytes(rest)));
    }
    if (dies) return dead();
    if (found == shared_.objects.end()) return fail(Code::kNotFound, "get", "no {}", key);
    return found->second.size();
  }
  Result<std::vector<ObjectInfo>> list(const std::string& prefix) override {
    if (begin("list " + prefix)) return dead();
    std::vector<ObjectInfo> found;
    for (const auto& [key, content] : lists_are_old ? shared_.earlier : shared_.objects)
      if (key.starts_with(prefix)) found.push_back({.key = key, .bytes = content.size()});
    return found;
  }
  Status remove(const std::string& key) override {
    return change("remove " + key, [&] {
      shared_.objects.erase(key);
      return ok();
    });
  }
  Traffic traffic() const override { return {.requests = requests}; }

 private:
  Error dead() const { return fail(Code::kCancelled, "request", "the client was killed"); }
  // Counts a request. Whether it is the one, or after the one, at which the client dies.
  bool begin(const std::string& request) {
    observer(request);
    ++requests;
    if (requests_left == 0) return true;
    --requests_left;
    return requests_left == 0;
  }
  Status change(const std::string& request, const std::function<Status()>& effect) {
    const bool was_alive = requests_left > 0;
    const bool dies = begin(request);
    if (dies && (!was_alive || !last_has_effect)) return dead();
    const Status done = effect();
    return dies ? dead() : done;
  }
  SharedObjects& shared_;
};

}  // namespace echoline::store
