// Strong types for quantities, and their text forms ("24 Mbit/s", "1 MiB", "30 s"). MB is 10^6 bytes, MiB 2^20.
#pragma once
#include <chrono>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace echoline {

using Duration = std::chrono::nanoseconds;

inline double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }
// Rounds to the nearest nanosecond; saturates at about 292 years.
Duration from_seconds(double s);

struct Bytes {
  std::uint64_t count = 0;
  friend auto operator<=>(const Bytes&, const Bytes&) = default;
  friend Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
  Bytes& operator+=(Bytes b) {
    count += b.count;
    return *this;
  }
};

// A link or sending rate, in bits per second as networks are sold.
struct BitRate {
  double bits_per_s = 0;
  static BitRate from_bytes_per_s(double bytes_per_s) { return {bytes_per_s * 8}; }
  static BitRate from_mbit_per_s(double mbit) { return {mbit * 1e6}; }
  double bytes_per_s() const { return bits_per_s / 8; }
  double mbit_per_s() const { return bits_per_s / 1e6; }
  friend auto operator<=>(const BitRate&, const BitRate&) = default;
};

// Parsers accept exactly "<number> <unit>" (the space is optional) and say what they expected otherwise.
//   duration: ns us ms s min h;  size: B kB MB GB KiB MiB GiB;  rate: bit/s kbit/s Mbit/s Gbit/s
Result<Duration> parse_duration(std::string_view text);
Result<Bytes> parse_bytes(std::string_view text);
Result<BitRate> parse_bit_rate(std::string_view text);

// Short text for people: "1.25 s", "3.4 MB", "24 Mbit/s".
std::string to_text(Duration d);
std::string to_text(Bytes b);
std::string to_text(BitRate r);

}  // namespace echoline
