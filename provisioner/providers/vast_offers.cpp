// Parses replies to searches of vast.ai. An offer has about eighty fields, each possibly null. The parser streams, and
// keeps only the needed fields.
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "provisioner/offer_formats.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kHoursPerMonth = 720;  // as the service counts
constexpr double kBytesPerGb = 1e9;

// The used fields of an offer that are numbers; kNumberFields has their names.
enum class Field {
  kGpus,
  kGpuMemoryMb,
  kUpMbit,
  kDownMbit,
  kReliability,
  kReliability2,
  kDurationSeconds,
  kDlperf,
  kUsdPerHour,
  kBidUsdPerHourMin,
  kStorageUsdPerGbMonth,
  kUpUsdPerGb,
  kDownUsdPerGb,
  kUpUsdPerTb,
  kDownUsdPerTb,
  kMemoryMb,
  kShareOfGpus,
  kDiskGb,
  kCudaMax,
  kComputeCapability,
  kOpenPorts,
  kHostingType,
  kCount
};

struct NumberField {
  const char* name;
  double least, most;
};
// In the order of Field.
constexpr std::array<NumberField, static_cast<std::size_t>(Field::kCount)> kNumberFields{
    {{"num_gpus", 1, kGpusMax},
     {"gpu_ram", 0, 1e8},
     {"inet_up", 0, kMbitMax},
     {"inet_down", 0, kMbitMax},
     {"reliability", 0, 1},
     {"reliability2", 0, 1},
     {"duration", 0, 1e10},
     {"dlperf", 0, 1e7},
     {"dph_base", 0, kUsdMax},
     {"min_bid", 0, kUsdMax},
     {"storage_cost", 0, kUsdMax},
     {"inet_up_cost", 0, kUsdMax},
     {"inet_down_cost", 0, kUsdMax},
     {"internet_up_cost_per_tb", 0, kUsdMax},
     {"internet_down_cost_per_tb", 0, kUsdMax},
     {"cpu_ram", 0, 1e9},
     {"gpu_frac", 0, 1},
     {"disk_space", 0, 1e7},
     {"cuda_max_good", 0, 99},
     {"compute_cap", 0, 9900},
     {"direct_port_count", -1, 65535},
     {"hosting_type", -1e6, 1e6}}};

// An offer as the service states it; an absent field was null or missing.
struct RawOffer {
  std::array<std::optional<double>, static_cast<std::size_t>(Field::kCount)> numbers;
  std::string id, machine, owner, gpu, place, verification;
  std::vector<int> gpu_ids;
  std::optional<bool> rentable, rented;
  const std::optional<double>& operator[](Field f) const { return numbers[static_cast<std::size_t>(f)]; }
};

Offer offer_of(const RawOffer& raw, const OfferReadOptions& reading) {
  Offer o;
  o.id = raw.id;
  o.provider = kVastName;
  o.host = raw.machine;
  o.owner = raw.owner;
  o.gpu = raw.gpu;
  o.gpu_count = static_cast<int>(raw[Field::kGpus].value_or(1));
  o.gpu_ids = raw.gpu_ids;
  if (raw[Field::kGpuMemoryMb]) o.vram_gb = *raw[Field::kGpuMemoryMb] / 1000;
  o.place = raw.place;
  // 0 stands for a link that was never measured.
  if (const auto up = raw[Field::kUpMbit]; up && *up > 0) o.up = BitRate::from_mbit_per_s(*up);
  if (const auto down = raw[Field::kDownMbit]; down && *down > 0) o.down = BitRate::from_mbit_per_s(*down);
  // An offer may state the figure under either name, or both.
  o.reliability = raw[Field::kReliability2] ? raw[Field::kReliability2] : raw[Field::kReliability];
  // The stated memory is the whole machine's. An offer has the same share of it as of the GPUs.
  if (raw[Field::kMemoryMb]) o.memory_gb = *raw[Field::kMemoryMb] / 1000 * raw[Field::kShareOfGpus].value_or(1);
  o.disk_gb = raw[Field::kDiskGb];
  o.cuda_max = raw[Field::kCudaMax];
  if (raw[Field::kComputeCapability]) o.compute_capability = *raw[Field::kComputeCapability] / kComputeCapabilityScale;
  if (const auto ports = raw[Field::kOpenPorts]) o.open_ports = static_cast<int>(std::max(0.0, *ports));
  if (!raw.verification.empty()) o.verified = raw.verification == "verified";
  constexpr double kDatacenter = 1;  // of hosting_type
  if (raw[Field::kHostingType]) o.datacenter = *raw[Field::kHostingType] == kDatacenter;
  if (raw[Field::kDurationSeconds]) o.duration_max = from_seconds(*raw[Field::kDurationSeconds]);
  o.rentable = raw.rentable.value_or(true) && !raw.rented.value_or(false);
  o.dlperf = raw[Field::kDlperf];
  o.gpu_usd_per_hour = raw[Field::kUsdPerHour];
  o.bid_usd_per_hour_min = raw[Field::kBidUsdPerHourMin];
  if (raw[Field::kStorageUsdPerGbMonth])
    o.storage_usd_per_hour =
        static_cast<double>(reading.disk.count) / kBytesPerGb * *raw[Field::kStorageUsdPerGbMonth] / kHoursPerMonth;
  const auto usd_per_gb = [&](Field per_gb, Field per_tb) {
    if (raw[per_gb]) return raw[per_gb];
    return raw[per_tb] ? std::optional(*raw[per_tb] / 1000) : std::nullopt;
  };
  o.upload_usd_per_gb = usd_per_gb(Field::kUpUsdPerGb, Field::kUpUsdPerTb);
  o.download_usd_per_gb = usd_per_gb(Field::kDownUsdPerGb, Field::kDownUsdPerTb);
  return o;
}

// Receives the tokens of the JSON text. The depth counts open objects and lists: 1 in the root. The list of offers is
// the root itself (depth 1) or the root's member "offers" (depth 2). An offer is one level deeper than its list. To
// return false would end the parsing.
class OfferHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  OfferHandler(std::string_view name, const OfferReadOptions& reading) : problems_(name), reading_(reading) {}

  bool null() override { return true; }
  bool boolean(bool value) override {
    if (is_in_offer()) {
      if (key_ == "rentable")
        current_.rentable = value;
      else if (key_ == "rented")
        current_.rented = value;
      else
        report_wrong_type(value ? "true" : "false");
    } else if (depth_ == 1 && key_ == "success" && !value) {
      is_refused_ = true;
    }
    return true;
  }
  bool number_integer(number_integer_t value) override { return number(static_cast<double>(value), value); }
  bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value), value); }
  bool number_float(number_float_t value, const string_t&) override { return number(value, value); }
  bool string(string_t& value) override {
    if (depth_ == 1 && (key_ == "error" || key_ == "msg"))
      error_text_ += (error_text_.empty() ? "" : ": ") + excerpt(value);
    if (!is_in_offer()) return true;
    std::string* text = key_ == "gpu_name"       ? &current_.gpu
                        : key_ == "geolocation"  ? &current_.place
                        : key_ == "id"           ? &current_.id
                        : key_ == "machine_id"   ? &current_.machine
                        : key_ == "host_id"      ? &current_.owner
                        : key_ == "verification" ? &current_.verification
                                                 : nullptr;
    if (!text) {
      report_wrong_type(excerpt(value));
    } else if (value.size() > kOfferTextMax) {
      add_problem(fmt::format("{}: expected a text of at most {} bytes, found {}", key_, kOfferTextMax, value.size()));
    } else {
      *text = value;
    }
    return true;
  }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    ++depth_;
    if (!is_in_offer()) return true;
    current_ = RawOffer{};
    problems_before_ = problem_count_;
    key_.clear();
    return true;
  }
  bool key(string_t& value) override {
    key_ = value.size() <= kOfferTextMax ? value : std::string();
    if (depth_ == 1) top_key_ = key_;
    return true;
  }
  bool end_object() override {
    if (is_in_offer()) finish_offer();
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    ++depth_;
    if (depth_ == 1 || (depth_ == 2 && top_key_ == "offers" && !offers_depth_)) offers_depth_ = depth_;
    return true;
  }
  bool end_array() override {
    if (offers_depth_ && depth_ == *offers_depth_) {
      offers_depth_.reset();
      has_list_ = true;
    }
    --depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    // The message names only position and kind, because some exceptions quote the text.
    const std::string_view what = e.what();
    problems_.add(fmt::format("byte {}", position), what.find("out_of_range") != std::string_view::npos
                                                        ? "a number out of range"
                                                        : "invalid JSON here, or the text ends too early");
    return false;
  }

  Result<std::vector<Offer>> result(std::string_view name) {
    if (!problems_.none()) return problems_.error();
    if (has_too_many_) return fail(Code::kInvalid, "read offers", "{}: expected at most {} offers", name, kOffersMax);
    if (is_refused_ || (!has_list_ && !error_text_.empty()))
      return fail(Code::kInvalid, "read offers", "{}: the market's answer is an error, not offers: {}", name,
                  error_text_.empty() ? "no reason is given" : error_text_);
    if (!has_list_) return fail(Code::kInvalid, "read offers", "{}: expected a list of offers, found none", name);
    return std::move(offers_);
  }

 private:
  bool is_in_offer() const { return offers_depth_ && depth_ == *offers_depth_ + 1; }

  // `exact_value`: the number as it was read, because a double cannot hold every id.
  template <class Exact>
  bool number(double value, Exact exact_value) {
    const bool is_in_list_of_offer = offers_depth_ && depth_ == *offers_depth_ + 2;
    if (is_in_list_of_offer && key_ == "gpu_ids") {
      if (value < 0 || value >= kGpusMax || value != std::floor(value))
        add_problem(fmt::format("gpu_ids: expected numbers of 0 to {}, found {}", kGpusMax - 1, value));
      else
        current_.gpu_ids.push_back(static_cast<int>(value));
      return true;
    }
    if (!is_in_offer()) return true;
    if (key_ == "id") current_.id = fmt::format("{}", exact_value);
    if (key_ == "machine_id") current_.machine = fmt::format("{}", exact_value);
    if (key_ == "host_id") current_.owner = fmt::format("{}", exact_value);
    if (key_ == "gpu_name" || key_ == "geolocation") report_wrong_type(fmt::format("{}", value));
    for (std::size_t i = 0; i < kNumberFields.size(); ++i) {
      const NumberField& field = kNumberFields[i];
      if (key_ != field.name) continue;
      if (!(value >= field.least && value <= field.most))
        add_problem(fmt::format("{}: expected {} to {}, found {}", key_, field.least, field.most, value));
      else
        current_.numbers[i] = value;
    }
    return true;
  }

  // Reports that the current key's value has a wrong type, if the field is used. Other fields may have any type.
  void report_wrong_type(const std::string& found) {
    for (const NumberField& field : kNumberFields)
      if (key_ == field.name) add_problem(fmt::format("{}: expected a number, found '{}'", key_, found));
    if (key_ == "rentable" || key_ == "rented")
      add_problem(fmt::format("{}: expected true or false, found '{}'", key_, found));
    if (key_ == "gpu_name" || key_ == "geolocation")
      add_problem(fmt::format("{}: expected a text, found '{}'", key_, found));
  }

  void add_problem(const std::string& what) {
    ++problem_count_;
    problems_.add(
        fmt::format("offers[{}]{}", index_, current_.id.empty() ? "" : fmt::format(" (id {})", excerpt(current_.id))),
        what);
  }

  // Ends the current offer, and keeps it if it has no problem.
  void finish_offer() {
    if (current_.id.empty()) add_problem("id: it is missing");
    if (current_.gpu.empty()) add_problem("gpu_name: it is missing");
    if (const auto gpus = current_[Field::kGpus]; gpus && *gpus != std::floor(*gpus))
      add_problem(fmt::format("num_gpus: expected a whole number, found {}", *gpus));
    if (problem_count_ == problems_before_) {
      if (!ids_.insert(current_.id).second) add_problem("id: another offer has the same id");
      if (offers_.size() < kOffersMax)
        offers_.push_back(offer_of(current_, reading_));
      else
        has_too_many_ = true;
    }
    ++index_;
  }

  OfferProblems problems_;
  const OfferReadOptions& reading_;
  std::vector<Offer> offers_;
  std::set<std::string, std::less<>> ids_;
  RawOffer current_;
  std::string key_;         // the key of the value that follows
  std::string top_key_;     // the last key of the root
  std::string error_text_;  // the service's words, if the reply is an error
  std::size_t depth_ = 0;
  std::size_t index_ = 0;                                // the current offer's place in the list
  std::size_t problem_count_ = 0, problems_before_ = 0;  // all problems so far; those before the current offer
  std::optional<std::size_t> offers_depth_;              // the depth of the list of offers, while inside it
  bool has_list_ = false, is_refused_ = false, has_too_many_ = false;
};

}  // namespace

bool is_vast_reply(std::string_view head) {
  const std::size_t start = head.find_first_not_of(" \t\r\n");
  if (start == std::string_view::npos) return false;
  if (head[start] != '{') return head[start] == '[';
  const auto has = [&](std::string_view word) { return head.find(word) != std::string_view::npos; };
  return has("\"gpu_name\"") || has("\"ask_contract_id\"") || has("\"machine_id\"") || has("\"dph_total\"") ||
         has("\"success\"");
}

Result<std::vector<Offer>> read_vast(std::string_view text, std::string_view name, const OfferReadOptions& reading) {
  OfferHandler handler(name, reading);
  nlohmann::json::sax_parse(text, &handler);
  return handler.result(name);
}

}  // namespace echoline::provisioner
