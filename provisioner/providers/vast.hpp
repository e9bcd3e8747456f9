// Offers of vast.ai, over its REST interface.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

inline constexpr const char* kVastName = "vast";
inline constexpr const char* kVastUrl = "https://console.vast.ai";
inline constexpr const char* kVastKeyVariable = "VAST_API_KEY";
// Tells a container which service it is of, where that is not the usual one.
inline constexpr const char* kVastUrlVariable = "ECHOLINE_VAST_URL";

struct VastOptions {
  std::string url = kVastUrl;
  std::string key;                                  // read_vast_key()
  Duration timeout = std::chrono::seconds(30);      // of one request
  Duration watch_every = std::chrono::seconds(10);  // what is rented is looked at, for prices and what ended
  double bid_raise_max = 0;                         // as in ServiceSettings
};

// From VAST_API_KEY, or the first line of a file that only its owner can read. kInvalid says which of both is wrong.
Result<std::string> read_vast_key(const std::filesystem::path& file);

// From inside: destroys the instance that this runs on, with the key that can do only that. "": the service itself.
// Waits.
Status end_own_vast_instance(const std::string& url, const std::string& key, const std::string& id);

// The reply to a search, or its list of offers alone.
bool is_vast_reply(std::string_view head);
Result<std::vector<Offer>> read_vast(std::string_view text, std::string_view name, const OfferReading& reading);

// Requests of a kind follow each other at the interval that the service allows; what it refuses for haste waits, longer
// each time, and is asked again, as is what can be repeated without harm. A create that may have rented (an answer that
// is lost, broken or an error of the service) is settled by listing: what carries the label is the instance, a second
// one is destroyed. An error that comes with a contract is destroyed before it is reported. What a listing lacks is
// asked for by itself before it counts as gone, and a listing of which a page failed is not complete. A bid that others
// top is raised as far as it may be; only what then does not go on counts as outbid.
class VastProvider final : public Provider {
 public:
  explicit VastProvider(VastOptions options);
  ~VastProvider() override;
  // The id of the offer is the number of an ask, perhaps after "vast:" or "vast-".
  void start(Ticket ticket, const LaunchSpec& spec) override;
  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override;  // destroys; there is no grace
  void list(Ticket ticket, const std::string& label_prefix) override;
  std::vector<ProviderEvent> poll(TimePoint now) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner
