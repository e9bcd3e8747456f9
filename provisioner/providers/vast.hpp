// The provider "vast": offers of vast.ai, over its REST interface.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

inline constexpr const char* kVastName = "vast";
inline constexpr const char* kVastUrl = "https://console.vast.ai";
// The most creates that are useful at a time. The service allows one every 4.5 s, and an answer takes up to half a
// minute.
inline constexpr std::size_t kVastStartsAtOnce = 8;
inline constexpr double kComputeCapabilityScale = 100;  // the service writes a compute capability of 8.9 as 890
inline constexpr const char* kVastKeyVariable = "VAST_API_KEY";
// The environment variable that tells a container the service's URL, if it is not the default one.
inline constexpr const char* kVastUrlVariable = "ECHOLINE_VAST_URL";

struct VastOptions {
  std::string url = kVastUrl;
  std::string key;                                  // read_vast_key()
  Duration timeout = std::chrono::seconds(30);      // per request
  Duration watch_every = std::chrono::seconds(10);  // interval of listings, for prices and ended instances
  double bid_raise_max = 0;                         // as in ServiceSettings
};

// Reads the key from VAST_API_KEY, or from the first line of a file that only its owner can read. kInvalid says what is
// wrong.
Result<std::string> read_vast_key(const std::filesystem::path& file);

// Called inside an instance: destroys it, with a key that can do nothing else. `url` "": the default service. Blocks.
Status end_own_vast_instance(const std::string& url, const std::string& key, const std::string& id);

// The format of offers: the service's reply to a search, or only the list of offers in the reply. For an OfferFormat.
bool is_vast_reply(std::string_view head);
Result<std::vector<Offer>> read_vast(std::string_view text, std::string_view name, const OfferReadOptions& reading);

// Requests of each kind keep the interval that the service allows. Rate-limited and repeatable requests are retried
// with growing pauses.
// - Create: if the result is unclear (answer lost, broken or a server error), a listing decides. The instance with the
//   label is used, and a second one is destroyed. An instance that exists although its create failed is destroyed
//   before the failure is reported.
// - List: an instance that a listing lacks is queried by itself before it counts as gone. A listing with a failed page
//   is incomplete.
// - Bids: if another bid is higher, ours is raised up to its limit. The instance counts as outbid only if it does not
//   run again soon after that.
class VastProvider final : public Provider {
 public:
  explicit VastProvider(VastOptions options);
  ~VastProvider() override;
  // The offer's id is the number of an ask (the service's word for an offer), optionally after "vast:" or "vast-".
  void start(Ticket ticket, const LaunchSpec& spec) override;
  bool cancel(Ticket ticket) override;
  void watch(const InstanceId& instance, const std::string& label) override;
  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override;  // destroys at once
  void list(Ticket ticket, const std::string& label_prefix) override;
  std::vector<ProviderEvent> poll(TimePoint now) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner
