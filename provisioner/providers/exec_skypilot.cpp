// Reads SkyPilot's catalogues (vms.csv): kinds of machines with prices by region. They state neither links nor the
// prices of disk and traffic.
#include <charconv>
#include <cmath>
#include <map>

#include "provisioner/offer_formats.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kFieldMax = 64 * 1024;
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
      if (c != ',') {
        if (c == '\r') {  // a line break CR LF behind a quoted field
          --position_;
          while (position_ < text_.size() && text_[position_] == '\r') ++position_;
          if (position_ >= text_.size()) return fields;
          if (text_[position_] == '\n') {
            ++position_, ++next_line_;
            return fields;
          }
        }
        problem = "expected a comma after a quoted field";
        return fields;
      }
    }
  }
  std::size_t line() const { return line_; }

 private:
  // Reads a quoted field. Returns false if it does not end.
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

// "... 'MemoryInfo': {'SizeInMiB': 16384} ...", in GB of 10^9 bytes.
std::optional<double> memory_gb_of(std::string_view gpu_info) {
  constexpr std::string_view kKey = "SizeInMiB";
  constexpr std::size_t kSeparatorMax = 8;  // characters between the key and the number
  constexpr double kMibMax = 1e8, kBytesPerMib = 1 << 20;
  const std::size_t key = gpu_info.find(kKey);
  if (key == std::string_view::npos) return std::nullopt;
  const std::size_t begin = gpu_info.find_first_of("0123456789", key + kKey.size());
  if (begin == std::string_view::npos || begin > key + kKey.size() + kSeparatorMax) return std::nullopt;
  const std::size_t end = std::min(gpu_info.find_first_not_of("0123456789.", begin), gpu_info.size());
  double mib = 0;
  if (!parse_number(gpu_info.substr(begin, end - begin), mib) || mib <= 0 || mib > kMibMax) return std::nullopt;
  return mib * kBytesPerMib / 1e9;
}

class CatalogueReader {
 public:
  CatalogueReader(std::string_view text, std::string_view name, const OfferReadOptions& reading)
      : csv_(text), name_(name), problems_(name), reading_(reading) {}

  Result<std::vector<Offer>> run() {
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
      if (!problem.empty()) {  // nothing after it is read: the start of the next record is unknown
        problems_.add(fmt::format("line {}", csv_.line()), problem);
        break;
      }
      if (record->size() == 1 && record->front().empty()) continue;
      read(*record, header->size());
      if (offers_.size() > kOffersMax)
        return fail(Code::kInvalid, "read offers", "{}: expected at most {} offers", name_, kOffersMax);
    }
    if (!problems_.none()) return problems_.error();
    return std::move(offers_);
  }

 private:
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
    if (gpu.empty()) return;  // a machine without GPUs
    bool is_valid = true;
    const auto number = [&](const char* column, double least, double most) -> std::optional<double> {
      const std::string& value = text(column);
      if (value.empty()) return std::nullopt;
      double parsed = 0;
      if (parse_number(value, parsed) && parsed >= least && parsed <= most) return parsed;
      is_valid = false;
      problems_.add(where,
                    fmt::format("{}: expected a number of {} to {}, found '{}'", column, least, most, excerpt(value)));
      return std::nullopt;
    };
    const auto count = number("acceleratorcount", 0, kGpusMax);
    const auto price = number("price", 0, kUsdMax);
    const auto spot = number("spotprice", 0, kUsdMax);
    for (const char* column : {"instancetype", "acceleratorname", "region", "availabilityzone"})
      if (text(column).size() > kOfferTextMax) {
        is_valid = false;
        problems_.add(
            where, fmt::format("{}: expected at most {} bytes, found {}", column, kOfferTextMax, text(column).size()));
      }
    if (!is_valid) return;
    if (!count || *count < 1 || *count != std::floor(*count)) return;  // a fraction of a GPU cannot run a worker
    Offer o;
    o.provider = "exec";
    o.gpu = gpu;
    o.gpu_count = static_cast<int>(*count);
    o.vram_gb = memory_gb_of(text("gpuinfo"));
    const std::string& zone = text("availabilityzone");
    o.place = zone.empty() ? text("region") : zone;
    o.gpu_usd_per_hour = price;
    o.bid_usd_per_hour_min = spot;
    const std::string& type = text("instancetype");
    const std::string kind =
        fmt::format("{}@{}", type.empty() ? fmt::format("{}:{}", gpu, o.gpu_count) : type, o.place);
    for (std::size_t copy = 0; copy < reading_.copies; ++copy) {
      o.id = fmt::format("{}#{}", kind, ++copies_by_kind_[kind]);
      offers_.push_back(o);
    }
  }

  Csv csv_;
  std::string_view name_;
  OfferProblems problems_;
  const OfferReadOptions& reading_;
  std::map<std::string, std::size_t> column_by_name_;
  std::map<std::string, std::size_t> copies_by_kind_;
  std::vector<Offer> offers_;
};

bool is_catalogue(std::string_view head) {
  const std::string_view line = head.substr(0, head.find('\n'));
  const auto has = [&](const char* text) { return line.find(text) != std::string_view::npos; };
  return has("InstanceType") && has(",") && line.find_first_of("{[") == std::string_view::npos;
}

Result<std::vector<Offer>> read_catalogue(std::string_view text, std::string_view name,
                                          const OfferReadOptions& reading) {
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
