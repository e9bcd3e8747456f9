// Parses replies to searches of vast.ai. An offer has about eighty fields, each possibly null; the parser keeps only
// the needed ones as they stream by.
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "provisioner/offer_formats.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kHoursPerMonth = 720;
constexpr double kBytesPerGb = 1e9;

enum class Field {
  kGpus,
  kGpuMemoryMb,
  kUp,
  kDown,
  kReliability,
  kReliability2,
  kDuration,
  kDlperf,
  kBase,
  kMinBid,
  kStorageMonth,
  kUpCost,
  kDownCost,
  kUpCostTb,
  kDownCostTb,
  kCount
};

struct Number {
  const char* name;
  double least, most;
};
// In the order of Field.
constexpr std::array<Number, static_cast<std::size_t>(Field::kCount)> kNumbers{
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
     {"internet_down_cost_per_tb", 0, kUsdMax}}};

struct Raw {
  std::array<std::optional<double>, static_cast<std::size_t>(Field::kCount)> numbers;
  std::string id, machine, owner, gpu, place;
  std::vector<int> gpu_ids;
  std::optional<bool> rentable, rented;
  const std::optional<double>& operator[](Field f) const { return numbers[static_cast<std::size_t>(f)]; }
};

Offer offer_of(const Raw& raw, const OfferReadOptions& reading) {
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
  // A link of 0 was never measured.
  if (const auto up = raw[Field::kUp]; up && *up > 0) o.up = BitRate::from_mbit_per_s(*up);
  if (const auto down = raw[Field::kDown]; down && *down > 0) o.down = BitRate::from_mbit_per_s(*down);
  o.reliability = raw[Field::kReliability2] ? raw[Field::kReliability2] : raw[Field::kReliability];
  if (raw[Field::kDuration]) o.duration_max = from_seconds(*raw[Field::kDuration]);
  o.rentable = raw.rentable.value_or(true) && !raw.rented.value_or(false);
  o.dlperf = raw[Field::kDlperf];
  o.gpu_usd_per_hour = raw[Field::kBase];
  o.bid_usd_per_hour_min = raw[Field::kMinBid];
  if (raw[Field::kStorageMonth])
    o.storage_usd_per_hour =
        static_cast<double>(reading.disk.count) / kBytesPerGb * *raw[Field::kStorageMonth] / kHoursPerMonth;
  const auto per_gb = [&](Field gb, Field tb) {
    if (raw[gb]) return raw[gb];
    return raw[tb] ? std::optional(*raw[tb] / 1000) : std::nullopt;
  };
  o.upload_usd_per_gb = per_gb(Field::kUpCost, Field::kUpCostTb);
  o.download_usd_per_gb = per_gb(Field::kDownCost, Field::kDownCostTb);
  return o;
}

// Nesting depths: 1 is the root. The offers are its elements, or those of its "offers", which are one level deeper.
class Handler : public nlohmann::json_sax<nlohmann::json> {
 public:
  Handler(std::string_view name, const OfferReadOptions& reading) : problems_(name), reading_(reading) {}

  bool null() override { return true; }
  bool boolean(bool value) override {
    if (at_field()) {
      if (key_ == "rentable")
        raw_.rentable = value;
      else if (key_ == "rented")
        raw_.rented = value;
      else
        wrong_type(value ? "true" : "false");
    } else if (depth_ == 1 && key_ == "success" && !value) {
      refused_ = true;
    }
    return true;
  }
  bool number_integer(number_integer_t value) override { return number(static_cast<double>(value), value); }
  bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value), value); }
  bool number_float(number_float_t value, const string_t&) override { return number(value, value); }
  bool string(string_t& value) override {
    if (depth_ == 1 && (key_ == "error" || key_ == "msg")) said_ += (said_.empty() ? "" : ": ") + excerpt(value);
    if (!at_field()) return true;
    std::string* text = key_ == "gpu_name"      ? &raw_.gpu
                        : key_ == "geolocation" ? &raw_.place
                        : key_ == "id"          ? &raw_.id
                        : key_ == "machine_id"  ? &raw_.machine
                        : key_ == "host_id"     ? &raw_.owner
                                                : nullptr;
    if (!text) {
      wrong_type(excerpt(value));
    } else if (value.size() > kOfferTextMax) {
      problem(fmt::format("{}: expected a text of at most {} bytes, found {}", key_, kOfferTextMax, value.size()));
    } else {
      *text = value;
    }
    return true;
  }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    ++depth_;
    if (!offers_depth_ || depth_ != *offers_depth_ + 1) return true;
    raw_ = Raw{};
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
    if (offers_depth_ && depth_ == *offers_depth_ + 1) finish();
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
      found_list_ = true;
    }
    --depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    // Some exceptions quote the text; position and kind suffice.
    const std::string_view what = e.what();
    problems_.add(fmt::format("byte {}", position), what.find("out_of_range") != std::string_view::npos
                                                        ? "a number out of range"
                                                        : "invalid JSON here, or the text ends too early");
    return false;
  }

  Result<std::vector<Offer>> result(std::string_view name) {
    if (!problems_.none()) return problems_.error();
    if (too_many_) return fail(Code::kInvalid, "read offers", "{}: expected at most {} offers", name, kOffersMax);
    if (refused_ || (!found_list_ && !said_.empty()))
      return fail(Code::kInvalid, "read offers", "{}: the market's answer is an error, not offers: {}", name,
                  said_.empty() ? "no reason is given" : said_);
    if (!found_list_) return fail(Code::kInvalid, "read offers", "{}: expected a list of offers, found none", name);
    return std::move(offers_);
  }

 private:
  bool at_field() const { return offers_depth_ && depth_ == *offers_depth_ + 1; }

  template <class Exact>
  bool number(double value, Exact exact) {
    if (offers_depth_ && depth_ == *offers_depth_ + 2 && key_ == "gpu_ids") {
      if (value < 0 || value >= kGpusMax || value != std::floor(value))
        problem(fmt::format("gpu_ids: expected numbers of 0 to {}, found {}", kGpusMax - 1, value));
      else
        raw_.gpu_ids.push_back(static_cast<int>(value));
      return true;
    }
    if (!at_field()) return true;
    if (key_ == "id") raw_.id = fmt::format("{}", exact);
    if (key_ == "machine_id") raw_.machine = fmt::format("{}", exact);
    if (key_ == "host_id") raw_.owner = fmt::format("{}", exact);
    if (key_ == "gpu_name" || key_ == "geolocation") wrong_type(fmt::format("{}", value));
    for (std::size_t f = 0; f < kNumbers.size(); ++f) {
      const Number& n = kNumbers[f];
      if (key_ != n.name) continue;
      if (!(value >= n.least && value <= n.most))
        problem(fmt::format("{}: expected {} to {}, found {}", key_, n.least, n.most, value));
      else
        raw_.numbers[f] = value;
    }
    return true;
  }

  // Reports a wrong type of a field that is used; other fields may have any type.
  void wrong_type(const std::string& found) {
    for (const Number& n : kNumbers)
      if (key_ == n.name) problem(fmt::format("{}: expected a number, found '{}'", key_, found));
    if (key_ == "rentable" || key_ == "rented")
      problem(fmt::format("{}: expected true or false, found '{}'", key_, found));
    if (key_ == "gpu_name" || key_ == "geolocation")
      problem(fmt::format("{}: expected a text, found '{}'", key_, found));
  }

  void problem(const std::string& what) {
    ++problem_count_;
    problems_.add(fmt::format("offers[{}]{}", index_, raw_.id.empty() ? "" : fmt::format(" (id {})", excerpt(raw_.id))),
                  what);
  }

  void finish() {
    if (raw_.id.empty()) problem("id: it is missing");
    if (raw_.gpu.empty()) problem("gpu_name: it is missing");
    if (const auto gpus = raw_[Field::kGpus]; gpus && *gpus != std::floor(*gpus))
      problem(fmt::format("num_gpus: expected a whole number, found {}", *gpus));
    if (problem_count_ == problems_before_) {
      if (!ids_.insert(raw_.id).second) problem("id: another offer has the same id");
      if (offers_.size() < kOffersMax)
        offers_.push_back(offer_of(raw_, reading_));
      else
        too_many_ = true;
    }
    ++index_;
  }

  OfferProblems problems_;
  const OfferReadOptions& reading_;
  std::vector<Offer> offers_;
  std::set<std::string, std::less<>> ids_;
  Raw raw_;
  std::string key_, top_key_, said_;
  std::size_t depth_ = 0, index_ = 0, problem_count_ = 0, problems_before_ = 0;
  std::optional<std::size_t> offers_depth_;
  bool found_list_ = false, refused_ = false, too_many_ = false;
};

}  // namespace

bool is_vast_reply(std::string_view head) {
  const std::size_t at = head.find_first_not_of(" \t\r\n");
  if (at == std::string_view::npos || head[at] != '{') return at != std::string_view::npos && head[at] == '[';
  const auto has = [&](std::string_view word) { return head.find(word) != std::string_view::npos; };
  return has("\"gpu_name\"") || has("\"ask_contract_id\"") || has("\"machine_id\"") || has("\"dph_total\"") ||
         has("\"success\"");
}

Result<std::vector<Offer>> read_vast(std::string_view text, std::string_view name, const OfferReadOptions& reading) {
  Handler handler(name, reading);
  nlohmann::json::sax_parse(text, &handler);
  return handler.result(name);
}

}  // namespace echoline::provisioner
