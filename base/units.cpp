// Parses and formats quantities with units, for run files, the command line and messages.
#include "base/units.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <span>

namespace echoline {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr std::array<Unit, 6> kDurations{
    {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}}};
constexpr std::array<Unit, 7> kSizes{
    {{"B", 1}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}}};
constexpr std::array<Unit, 4> kRates{{{"bit/s", 1}, {"kbit/s", 1e3}, {"Mbit/s", 1e6}, {"Gbit/s", 1e9}}};

// Parses "<number> <unit>". Returns the quantity in the base unit (s, B or bit/s), whose factor is 1.
template <std::size_t N>
Result<double> parse_quantity(std::string_view text, const std::array<Unit, N>& units, std::string_view what,
                              std::string_view example) {
  const auto error_of = [&](std::string_view why) {
    std::string names;
    for (const Unit& u : units) names += (names.empty() ? "" : " ") + std::string(u.name);
    return fail(Code::kInvalid, "", "expected a {} such as '{}' (units: {}), found '{}'{}", what, example, names, text,
                why);
  };
  double number = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (ec != std::errc{} || !std::isfinite(number)) return error_of("");
  if (number < 0) return error_of(": it is negative");
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  if (unit.empty()) return error_of(": the unit is missing");
  for (const Unit& u : units)
    if (unit == u.name) return number * u.factor;
  return error_of(fmt::format(": unknown unit '{}'", unit));
}

// Formats a value with the largest unit that it reaches. Each unit is 1000 times the one before.
std::string format_with_unit(double value, std::span<const char* const> unit_names) {
  std::size_t unit = 0;
  for (; unit + 1 < unit_names.size() && value >= 1000; ++unit) value /= 1000;
  return fmt::format("{:.3g} {}", value, unit_names[unit]);
}

}  // namespace

Duration from_seconds(double s) {
  const double ns = s * 1e9;  // 9.2e18 is just below 2^63, the range of Duration
  if (ns >= 9.2e18) return Duration::max();
  if (ns <= -9.2e18) return Duration::min();
  return Duration(std::llround(ns));
}

Result<Duration> parse_duration(std::string_view text) {
  ECHO_ASSIGN(const double s, parse_quantity(text, kDurations, "duration", "30 s"));
  return from_seconds(s);
}

Result<Bytes> parse_bytes(std::string_view text) {
  ECHO_ASSIGN(const double b, parse_quantity(text, kSizes, "size", "64 KiB"));
  if (b >= 1.8e19)  // just below 2^64
    return fail(Code::kInvalid, "", "expected a size below 2^64 bytes, found '{}'", text);
  return Bytes{static_cast<std::uint64_t>(std::round(b))};  // std::llround() ends at 2^63
}

Result<BitRate> parse_bit_rate(std::string_view text) {
  ECHO_ASSIGN(const double r, parse_quantity(text, kRates, "rate", "24 Mbit/s"));
  return BitRate{r};
}

std::string to_text(Duration d) {
  const double s = seconds(d);
  const double magnitude_s = std::abs(s);
  if (magnitude_s >= 1000 * 3600)  // from 1000 h on `.3g` would print an exponent
    return fmt::format("{:.0f} h", s / 3600);
  if (magnitude_s >= 3600) return fmt::format("{:.3g} h", s / 3600);
  if (magnitude_s >= 60) return fmt::format("{:.3g} min", s / 60);
  if (magnitude_s >= 1) return fmt::format("{:.3g} s", s);
  if (magnitude_s >= 1e-3) return fmt::format("{:.3g} ms", s * 1e3);
  if (magnitude_s >= 1e-6) return fmt::format("{:.3g} us", s * 1e6);
  return fmt::format("{} ns", d.count());
}

std::string to_text(Bytes b) {
  static const char* const names[] = {"B", "kB", "MB", "GB", "TB"};
  return format_with_unit(static_cast<double>(b.count), names);
}

std::string to_text(BitRate r) {
  static const char* const names[] = {"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"};
  return format_with_unit(r.bits_per_s, names);
}

}  // namespace echoline
