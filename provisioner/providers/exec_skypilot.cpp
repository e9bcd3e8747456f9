// Reads SkyPilot's catalogues (CLOUD/vms.csv): kinds of machines with prices by region. They state neither links nor
// the prices of disk and traffic. Each cloud's file has its own mistakes, so a row that cannot be used is left out and
// named in a note, and the other rows are used.
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "provisioner/gpu_memory.hpp"
#include "provisioner/offer_formats.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kFieldMax = 64 * 1024;  // bytes
constexpr std::size_t kColumnsMax = 256;

// A reader of RFC 4180: quoted fields may hold commas, line breaks and doubled quotes.
class Csv {
 public:
  explicit Csv(std::string_view text) : text_(text) {}

  // The next record; absent at the end. `problem` is set if the record is malformed.
  std::optional<std::vector<std::string>> next(std::string& problem) {
    if (position_ >= text_.size()) return std::nullopt;
    line_ = next_line_;
    std::vector<std::string> fields;
    while (true) {
      std::string& field = fields.emplace_back();
      if (position_ < text_.size() && text_[position_] == '"') {
        if (!read_quoted(field)) problem = "a quoted field does not end";
      } else {
        while (position_ < text_.size() && text_[position_] != ',' && text_[position_] != '\n')
          field += text_[position_++];
        while (!field.empty() && field.back() == '\r') field.pop_back();
      }
      if (field.size() > kFieldMax)
        problem = fmt::format("a field of {} bytes, at most {} are allowed", field.size(), kFieldMax);
      if (fields.size() > kColumnsMax) problem = fmt::format("more than {} columns", kColumnsMax);
      if (!problem.empty()) return fields;
      if (position_ >= text_.size()) return fields;
      const char c = text_[position_++];
      if (c == '\n') {
        ++next_line_;
        return fields;
      }
      if (c == ',') continue;
      if (c == '\r') {  // a line break CR LF after a quoted field
        while (position_ < text_.size() && text_[position_] == '\r') ++position_;
        if (position_ >= text_.size()) return fields;
        if (text_[position_] == '\n') {
          ++position_;
          ++next_line_;
          return fields;
        }
      }
      problem = "expected a comma after a quoted field";
      return fields;
    }
  }
  std::size_t line() const { return line_; }  // of the last record's start

 private:
  // Reads a field from its opening quote. Returns false if it does not end.
  bool read_quoted(std::string& field) {
    for (++position_; position_ < text_.size(); ++position_) {
      if (text_[position_] == '\n') ++next_line_;
      if (text_[position_] != '"') {
        field += text_[position_];
      } else if (position_ + 1 < text_.size() && text_[position_ + 1] == '"') {
        field += '"';
        ++position_;
      } else {
        ++position_;
        return true;
      }
    }
    return false;
  }

  std::string_view text_;
  std::size_t position_ = 0, line_ = 1, next_line_ = 1;
};

std::string lower(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

bool parse_number(std::string_view text, double& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(value);
}

// The number in "... 'MemoryInfo': {'SizeInMiB': 16384} ...".
std::optional<double> stated_memory_mib(std::string_view gpu_info) {
  constexpr std::string_view kKey = "SizeInMiB";
  constexpr std::size_t kSeparatorMax = 8;  // characters between the key and the number
  constexpr double kMibMax = 1e8;
  const std::size_t key = gpu_info.find(kKey);
  if (key == std::string_view::npos) return std::nullopt;
  const std::size_t begin = gpu_info.find_first_of("0123456789", key + kKey.size());
  if (begin == std::string_view::npos || begin > key + kKey.size() + kSeparatorMax) return std::nullopt;
  const std::size_t end = std::min(gpu_info.find_first_not_of("0123456789.", begin), gpu_info.size());
  double mib = 0;
  if (!parse_number(gpu_info.substr(begin, end - begin), mib) || mib <= 0 || mib > kMibMax) return std::nullopt;
  return mib;
}

// The machine that Google Cloud rents with these GPUs. Google's catalogue has GPUs and machines in separate rows, and a
// rental costs the sum of two prices. Null if several machines can have these GPUs, because then the sum is unknown.
const char* machine_of_gpus(std::string_view gpu, int count) {
  struct Machine {
    std::string_view gpu;
    int count;
    const char* type;
  };
  static constexpr std::array kMachines{
      Machine{"A100", 1, "a2-highgpu-1g"},       Machine{"A100", 2, "a2-highgpu-2g"},
      Machine{"A100", 4, "a2-highgpu-4g"},       Machine{"A100", 8, "a2-highgpu-8g"},
      Machine{"A100", 16, "a2-megagpu-16g"},     Machine{"A100-80GB", 1, "a2-ultragpu-1g"},
      Machine{"A100-80GB", 2, "a2-ultragpu-2g"}, Machine{"A100-80GB", 4, "a2-ultragpu-4g"},
      Machine{"A100-80GB", 8, "a2-ultragpu-8g"}, Machine{"L4", 1, "g2-standard-4"},
      Machine{"L4", 2, "g2-standard-24"},        Machine{"L4", 4, "g2-standard-48"},
      Machine{"L4", 8, "g2-standard-96"},        Machine{"H100", 1, "a3-highgpu-1g"},
      Machine{"H100", 2, "a3-highgpu-2g"},       Machine{"H100", 4, "a3-highgpu-4g"},
      Machine{"H100", 8, "a3-highgpu-8g"},       Machine{"H100-MEGA", 8, "a3-megagpu-8g"},
      Machine{"H200", 8, "a3-ultragpu-8g"},      Machine{"B200", 8, "a4-highgpu-8g"},
  };
  for (const Machine& machine : kMachines)
    if (machine.gpu == gpu && machine.count == count) return machine.type;
  return nullptr;
}

// "aws" for ".../aws/vms.csv", as SkyPilot stores its catalogues; "" for a file of another name.
std::string cloud_of(std::string_view name) {
  const std::filesystem::path path(name);
  return path.filename() == "vms.csv" ? path.parent_path().filename().string() : "";
}

class CatalogueReader {
 public:
  CatalogueReader(std::string_view text, std::string_view name, const OfferReadOptions& reading)
      : csv_(text), name_(name), cloud_(cloud_of(name)), problems_(name), reading_(reading) {}

  Result<OfferList> run() {
    std::string problem;
    const auto header = csv_.next(problem);
    if (!header || !problem.empty())
      return fail(Code::kInvalid, "read offers", "{}:1: expected the names of the columns{}", name_,
                  problem.empty() ? "" : ", found " + problem);
    for (std::size_t i = 0; i < header->size(); ++i) column_by_name_.emplace(lower((*header)[i]), i);
    for (const char* needed : {"instancetype", "acceleratorname", "acceleratorcount", "price", "region"})
      if (!column_by_name_.contains(needed))
        return fail(Code::kInvalid, "read offers", "{}:1: the column '{}' is missing", name_, needed);
    while (auto record = csv_.next(problem)) {
      if (!problem.empty()) {  // where the next record would start is unknown, so nothing after it is read
        problems_.add(fmt::format("line {}", csv_.line()), problem);
        break;
      }
      const bool is_empty_line = record->size() == 1 && record->front().empty();
      if (is_empty_line) continue;
      read(*record, header->size());
      if (has_too_many()) break;
    }
    for (const GpusAlone& gpus : gpus_alone_) add_with_machine(gpus);
    if (has_too_many()) return fail(Code::kInvalid, "read offers", "{}: expected at most {} offers", name_, kOffersMax);
    if (offers_.empty() && !problems_.none()) return problems_.error();
    return OfferList{.offers = std::move(offers_), .format = {}, .notes = notes()};
  }

 private:
  using MachineKey = std::pair<std::string, std::string>;  // its type, and its zone or else region
  struct Prices {
    std::optional<double> on_demand, spot;
  };
  // A row that prices GPUs without their machine.
  struct GpusAlone {
    Offer offer;
    Prices prices;
  };

  bool has_too_many() const { return std::max(offers_.size(), gpus_alone_.size()) > kOffersMax; }

  std::vector<std::string> notes() const {
    std::vector<std::string> notes;
    for (const std::string& line : problems_.lines()) notes.push_back("left out: " + line);
    if (!gpus_without_machine_.empty())
      notes.push_back(fmt::format("{}: left out, because the price of their machine is not stated: {}", name_,
                                  fmt::join(gpus_without_machine_, ", ")));
    if (!gpus_of_unknown_memory_.empty())
      notes.push_back(fmt::format("{}: the memory of these GPUs is unknown (fleet.assume.vram_gb sets it): {}", name_,
                                  fmt::join(gpus_of_unknown_memory_, ", ")));
    return notes;
  }

  // Adds the offers of GPUs and their machine, for the sum of the two prices.
  void add_with_machine(GpusAlone gpus) {
    Offer& o = gpus.offer;
    const char* const type = machine_of_gpus(o.gpu, o.gpu_count);
    const auto machine = machines_.find({type ? type : "", o.place});
    if (!type || machine == machines_.end()) {
      gpus_without_machine_.insert(o.gpu);
      return;
    }
    o.machine_type = type;
    const auto sum = [](const std::optional<double>& a, const std::optional<double>& b) {
      return a && b ? std::optional(*a + *b) : std::nullopt;
    };
    add(o, {.on_demand = sum(gpus.prices.on_demand, machine->second.on_demand),
            .spot = sum(gpus.prices.spot, machine->second.spot)});
  }

  void add(Offer o, const Prices& prices) {
    o.gpu_usd_per_hour = prices.on_demand;
    o.bid_usd_per_hour_min = prices.spot;
    if (!o.vram_gb) gpus_of_unknown_memory_.insert(o.gpu);
    const std::string kind = fmt::format("{}@{}", o.machine_type, o.place);
    for (std::size_t copy = 0; copy < reading_.copies; ++copy) {
      o.id = fmt::format("{}#{}", kind, ++copies_by_kind_[kind]);
      offers_.push_back(o);
    }
  }

  // Reads one record: an offer, or a part of one. Records with problems are left out.
  void read(const std::vector<std::string>& record, std::size_t columns) {
    const std::string where = fmt::format("line {}", csv_.line());
    if (record.size() != columns)
      return problems_.add(where, fmt::format("expected {} fields, found {}", columns, record.size()));
    const auto text = [&](const char* column) -> const std::string& {
      static const std::string kNone;
      const auto it = column_by_name_.find(column);
      return it == column_by_name_.end() ? kNone : record[it->second];
    };
    const std::string& gpu = text("acceleratorname");
    bool is_valid = true;
    const auto number = [&](const char* column, double most) -> std::optional<double> {
      const std::string& value = text(column);
      if (value.empty()) return std::nullopt;
      double parsed = 0;
      if (parse_number(value, parsed) && parsed >= 0 && parsed <= most) return parsed;
      is_valid = false;
      problems_.add(where, fmt::format("{}: expected a number of 0 to {}, found '{}'", column, most, excerpt(value)));
      return std::nullopt;
    };
    // A cloud that does not sell a machine this way states 0, or a number that is too high for a price.
    const auto price_of = [&](const char* column) {
      constexpr double kNumberMax = 1e12;
      const auto price = number(column, kNumberMax);
      return price && *price > 0 && *price <= kUsdMax ? price : std::nullopt;
    };
    const auto count = number("acceleratorcount", kGpusMax);
    const Prices prices{.on_demand = price_of("price"), .spot = price_of("spotprice")};
    for (const char* column : {"instancetype", "acceleratorname", "region", "availabilityzone"})
      if (text(column).size() > kOfferTextMax) {
        is_valid = false;
        problems_.add(
            where, fmt::format("{}: expected at most {} bytes, found {}", column, kOfferTextMax, text(column).size()));
      }
    if (!is_valid) return;
    Offer o;
    o.provider = "exec";
    o.cloud = cloud_;
    o.region = text("region");
    o.zone = text("availabilityzone");
    o.place = o.zone.empty() ? o.region : o.zone;
    o.machine_type = text("instancetype");
    if (gpu.empty()) {  // a machine without GPUs, or whose GPUs have rows of their own
      machines_.emplace(MachineKey{o.machine_type, o.place}, prices);  // for add_with_machine()
      return;
    }
    if (!count || *count < 1 || *count != std::floor(*count)) return;  // a fraction of a GPU cannot run a worker
    o.gpu = gpu;
    o.gpu_count = static_cast<int>(*count);
    o.vram_gb = gpu_memory_gb(gpu, o.gpu_count, stated_memory_mib(text("gpuinfo")));
    if (o.machine_type.empty())
      gpus_alone_.push_back({std::move(o), prices});
    else
      add(std::move(o), prices);
  }

  Csv csv_;
  std::string_view name_;
  const std::string cloud_;
  OfferProblems problems_;
  const OfferReadOptions& reading_;
  std::map<std::string, std::size_t> column_by_name_;
  std::map<std::string, std::size_t> copies_by_kind_;
  std::map<MachineKey, Prices> machines_;  // rows without GPUs
  std::vector<GpusAlone> gpus_alone_;
  std::set<std::string> gpus_without_machine_, gpus_of_unknown_memory_;
  std::vector<Offer> offers_;
};

bool is_catalogue(std::string_view head) {
  const std::string_view line = head.substr(0, head.find('\n'));
  const auto has = [&](const char* text) { return line.find(text) != std::string_view::npos; };
  const bool may_be_json = line.find_first_of("{[") != std::string_view::npos;
  return has("InstanceType") && has(",") && !may_be_json;
}

Result<OfferList> read_catalogue(std::string_view text, std::string_view name, const OfferReadOptions& reading) {
  return CatalogueReader(text, name, reading).run();
}

}  // namespace

OfferFormat skypilot_format() {
  return {.name = "skypilot",
          .meaning = "a catalogue of SkyPilot, vms.csv",
          .recognises = is_catalogue,
          .read = read_catalogue};
}

}  // namespace echoline::provisioner
