// Reads files of offers in our own format, and recognises the other formats.
#include "provisioner/offers.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <unordered_map>

#include "base/config.hpp"
#include "base/files.hpp"
#include "base/text.hpp"
#include "provisioner/offer_formats.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kHeadBytes = 64 * 1024;  // the start of a file, by which its format is recognised

Offer read_offer(ConfigSection& section) {
  Offer offer;
  std::optional<double> up_mbit_per_s, down_mbit_per_s, duration_days, rollouts_per_s;
  std::vector<std::int64_t> gpu_ids;
  section.require("id", offer.id);
  section.require("provider", offer.provider);
  section.read("host", offer.host);
  section.read("owner", offer.owner);
  section.require("gpu", offer.gpu);
  section.read("gpu_count", offer.gpu_count, {.min = 1, .max = kGpusMax});
  section.read("gpu_ids", gpu_ids);
  section.read("vram_gb", offer.vram_gb, {.min = 0.0, .max = 1e5});
  section.read("place", offer.place);
  section.read("cloud", offer.cloud);
  section.read("region", offer.region);
  section.read("zone", offer.zone);
  section.read("machine_type", offer.machine_type);
  section.read("up_mbit_per_s", up_mbit_per_s, {.min = 1e-3, .max = kMbitMax});
  section.read("down_mbit_per_s", down_mbit_per_s, {.min = 1e-3, .max = kMbitMax});
  section.read("memory_gb", offer.memory_gb, {.min = 0.0, .max = 1e6});
  section.read("disk_gb", offer.disk_gb, {.min = 0.0, .max = 1e7});
  section.read("cuda_max", offer.cuda_max, {.min = 0.0, .max = 99.0});
  section.read("compute_capability", offer.compute_capability, {.min = 0.0, .max = 99.0});
  section.read("open_ports", offer.open_ports, {.min = 0, .max = 65535});
  section.read("verified", offer.verified);
  section.read("datacenter", offer.datacenter);
  section.read("reliability", offer.reliability, {.min = 0.0, .max = 1.0});
  section.read("duration_days_max", duration_days, {.min = 0.0, .max = 1e5});
  section.read("rentable", offer.rentable);
  section.read("rollouts_per_s", rollouts_per_s, {.min = 1e-6, .max = 1e9});
  section.read_choice("rollouts_source", offer.rollouts_source,
                      {{"unknown", RateSource::kUnknown},
                       {"measured", RateSource::kMeasured},
                       {"profile", RateSource::kProfile},
                       {"dlperf", RateSource::kDlperf}});
  section.read("dlperf", offer.dlperf, {.min = 0.0, .max = 1e7});
  section.read("gpu_usd_per_hour", offer.gpu_usd_per_hour, {.min = 0.0, .max = kUsdMax});
  section.read("bid_usd_per_hour_min", offer.bid_usd_per_hour_min, {.min = 0.0, .max = kUsdMax});
  section.read("storage_usd_per_hour", offer.storage_usd_per_hour, {.min = 0.0, .max = kUsdMax});
  section.read("upload_usd_per_gb", offer.upload_usd_per_gb, {.min = 0.0, .max = kUsdMax});
  section.read("download_usd_per_gb", offer.download_usd_per_gb, {.min = 0.0, .max = kUsdMax});
  for (const std::int64_t gpu : gpu_ids) {
    if (gpu < 0 || gpu >= kGpusMax)
      section.error("gpu_ids", fmt::format("expected numbers of 0 to {}, found {}", kGpusMax - 1, gpu));
    offer.gpu_ids.push_back(static_cast<int>(gpu));
  }
  if (rollouts_per_s && offer.rollouts_source == RateSource::kUnknown)
    section.error("rollouts_source", "a throughput needs its source: measured, profile or dlperf");
  if (!rollouts_per_s && offer.rollouts_source != RateSource::kUnknown)
    section.error("rollouts_per_s",
                  fmt::format("expected a throughput, as its source is {}", to_string(offer.rollouts_source)));
  offer.rollouts_per_s = rollouts_per_s.value_or(0);
  if (up_mbit_per_s) offer.up = BitRate::from_mbit_per_s(*up_mbit_per_s);
  if (down_mbit_per_s) offer.down = BitRate::from_mbit_per_s(*down_mbit_per_s);
  if (duration_days) offer.duration_max = from_seconds(*duration_days * kSecondsPerDay);
  return offer;
}

Result<std::vector<Offer>> read_offers(ConfigFile file) {
  ConfigSection root = file.root();
  int schema_version = 0;
  root.require("schema_version", schema_version, {.min = 1, .max = 1});
  std::vector<ConfigSection> sections = root.sections("offers");
  if (!root.has("offers")) root.error("offers", "expected a list of offers, found none");
  if (sections.size() > kOffersMax) {
    return fail(Code::kInvalid, "read offers", "expected at most {} offers, found {}", kOffersMax, sections.size());
  }
  std::vector<Offer> offers;
  std::unordered_map<std::string, std::string> path_by_id;  // of the offer's section in the file
  for (ConfigSection& section : sections) {
    offers.push_back(read_offer(section));
    const std::string& id = offers.back().id;
    if (id.empty()) continue;  // it is missing, which read_offer() has recorded
    const auto [it, is_new] = path_by_id.emplace(id, section.path());
    if (!is_new) section.error("id", fmt::format("the id '{}' is also that of {}", id, it->second));
  }
  ECHO_TRY(file.finish());
  return offers;
}

constexpr std::size_t kSplitBytesMin = 256 * 1024;  // a smaller file is read at once
constexpr std::size_t kOffersPerPart = 1000;

// A JSON file of offers, split into parts that are parsed one by one, so that a large file's tree is never in memory.
struct SplitFile {
  std::string frame;                    // the file with an empty list of offers
  std::vector<std::string_view> parts;  // kOffersPerPart offers each (the last part has the rest), with their commas
  std::size_t offer_count = 0;
};

// The position after the string whose opening quote is at `begin`.
std::size_t end_of_string(std::string_view text, std::size_t begin) {
  for (std::size_t i = begin + 1; i < text.size(); ++i) {
    if (text[i] == '\\')
      ++i;  // skips the escaped character
    else if (text[i] == '"')
      return i + 1;
  }
  return text.size();
}

// The position of the first character from `at` on that is not space.
std::size_t after_space(std::string_view text, std::size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

// By how much a character outside of strings changes the depth of nesting.
int depth_change(char c) { return c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0; }

// The position of the '[' that begins the list of offers. Absent if there is none.
std::optional<std::size_t> find_list(std::string_view text) {
  int depth = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] == '"') {
      const std::size_t end = end_of_string(text, i);
      const bool is_offers_key = depth == 1 && text.substr(i, end - i) == "\"offers\"";
      i = after_space(text, end);
      if (!is_offers_key || i == text.size() || text[i] != ':') continue;
      i = after_space(text, i + 1);
      return i < text.size() && text[i] == '[' ? std::optional(i) : std::nullopt;
    }
    depth += depth_change(text[i]);
    ++i;
  }
  return std::nullopt;
}

// Splits the text. Absent if it does not have the form of a SplitFile; read_offers() then says what is wrong with it.
std::optional<SplitFile> split(std::string_view text) {
  const auto list = find_list(text);
  if (!list) return std::nullopt;
  SplitFile file;
  std::size_t part_begin = 0, i = after_space(text, *list + 1);
  while (i < text.size() && text[i] == '{') {
    if (file.offer_count % kOffersPerPart == 0) part_begin = i;
    int depth = 0;
    do {
      if (text[i] == '"') {
        i = end_of_string(text, i);
        continue;
      }
      depth += depth_change(text[i]);
      ++i;
    } while (i < text.size() && depth > 0);
    ++file.offer_count;
    const std::size_t offer_end = i;
    i = after_space(text, i);
    const bool is_last = i == text.size() || text[i] != ',';
    if (is_last || file.offer_count % kOffersPerPart == 0)
      file.parts.push_back(text.substr(part_begin, offer_end - part_begin));
    if (is_last) break;
    i = after_space(text, i + 1);
    if (i == text.size() || text[i] != '{') return std::nullopt;
  }
  if (i == text.size() || text[i] != ']') return std::nullopt;
  file.frame = fmt::format("{}{}", text.substr(0, *list + 1), text.substr(i));
  return file;
}

// Reads a large JSON file part by part. Absent if the file has a mistake; the caller then reads it as a whole for the
// message.
std::optional<std::vector<Offer>> read_in_parts(std::string_view text) {
  const auto file = split(text);
  if (!file || file->offer_count > kOffersMax) return std::nullopt;
  auto frame = ConfigFile::parse_json(file->frame, "");
  if (!frame || !read_offers(std::move(*frame))) return std::nullopt;  // a mistake outside of the list
  std::vector<Offer> offers;
  offers.reserve(file->offer_count);
  for (const std::string_view part : file->parts) {
    auto parsed = ConfigFile::parse_json(fmt::format(R"({{"schema_version":1,"offers":[{}]}})", part), "");
    if (!parsed) return std::nullopt;
    auto read = read_offers(std::move(*parsed));
    if (!read) return std::nullopt;
    std::move(read->begin(), read->end(), std::back_inserter(offers));
  }
  std::vector<std::string_view> ids;
  for (const Offer& offer : offers) ids.push_back(offer.id);
  std::sort(ids.begin(), ids.end());
  if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) return std::nullopt;
  return offers;
}

// Whether the text is JSON rather than YAML.
bool is_json(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t\r\n");
  return start != std::string_view::npos && (text[start] == '{' || text[start] == '[');
}

// Returns the format of this name. kAutoFormat: recognises it by the start of the text. Null for our own format.
Result<const OfferFormat*> format_of(std::string_view text, const std::string& name) {
  const std::string_view head = text.substr(0, kHeadBytes);
  const bool is_own_json = is_json(text) && head.find("\"schema_version\"") != std::string_view::npos;
  if (name == kOwnFormat || (name == kAutoFormat && is_own_json)) return nullptr;
  const auto is_chosen = [&](const OfferFormat& format) {
    return name == kAutoFormat ? format.recognises(head) : format.name == name;
  };
  for (const ProviderKind* kind : provider_kinds())
    if (kind->offer_format && is_chosen(*kind->offer_format)) return &*kind->offer_format;
  if (name == kAutoFormat) return nullptr;  // our own format as YAML, or text that is no file of offers
  return fail(Code::kInvalid, "read offers", "expected {}, found '{}'", join_with_or(offer_format_names()), name);
}

}  // namespace

std::string_view to_string(RateSource source) {
  switch (source) {
    case RateSource::kUnknown:
      return "unknown";
    case RateSource::kMeasured:
      return "measured";
    case RateSource::kProfile:
      return "profile";
    case RateSource::kDlperf:
      return "dlperf";
  }
  return "?";
}

double usual_uncertainty(RateSource source) {
  switch (source) {
    case RateSource::kMeasured:
      return 0.05;
    case RateSource::kProfile:
      return 0.40;
    case RateSource::kUnknown:
    case RateSource::kDlperf:
      break;
  }
  return 0.50;
}

std::string excerpt(std::string_view value) { return printable(value, 60); }

void OfferProblems::add(std::string_view where, std::string_view what) {
  constexpr std::size_t kProblemsShown = 20;
  if (++count_ <= kProblemsShown) text_ += fmt::format("{}{}: {}: {}", text_.empty() ? "" : "\n", name_, where, what);
}

std::vector<std::string> OfferProblems::lines() const {
  std::vector<std::string> lines;
  std::istringstream text(text_);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  if (count_ > lines.size()) lines.push_back(fmt::format("{}: and {} more", name_, count_ - lines.size()));
  return lines;
}

Error OfferProblems::error() const {
  const auto problems_shown = static_cast<std::size_t>(std::count(text_.begin(), text_.end(), '\n')) + 1;
  std::string text = text_;
  if (count_ > problems_shown) text += fmt::format("\nand {} more", count_ - problems_shown);
  return Error{Code::kInvalid, "read offers", std::move(text)};
}

Result<OfferList> load_offers(const std::filesystem::path& path, const OfferReadOptions& reading) {
  ECHO_ASSIGN(const std::string text, read_file(path, kOffersBytesMax));
  return parse_offers(text, path.string(), reading);
}

Result<OfferList> parse_offers(std::string_view text, std::string_view name, const OfferReadOptions& reading) {
  OfferList list;
  ECHO_ASSIGN(const OfferFormat* const format, format_of(text, reading.format));
  if (format) {
    ECHO_ASSIGN(list, format->read(text, name, reading));
    list.format = format->name;
    return list;
  }
  list.format = kOwnFormat;
  if (is_json(text) && text.size() >= kSplitBytesMin)
    if (auto offers = read_in_parts(text)) {
      list.offers = std::move(*offers);
      return list;
    }
  auto file = is_json(text) ? ConfigFile::parse_json(text, std::string(name))
                            : ConfigFile::parse_yaml_data(text, std::string(name));
  if (!file) return std::move(file).error();
  ECHO_ASSIGN(list.offers, read_offers(std::move(*file)));
  return list;
}

}  // namespace echoline::provisioner
