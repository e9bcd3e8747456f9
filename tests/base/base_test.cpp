// Quantities and their text forms, results, the token bucket, random streams, ids, clocks and whole-file I/O.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <thread>
#include <unordered_set>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/ids.hpp"
#include "base/log.hpp"
#include "base/priority.hpp"
#include "base/random.hpp"
#include "base/result.hpp"
#include "base/text.hpp"
#include "base/units.hpp"

namespace echoline {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// ---- units ----

TEST(Units, ParseDurations) {
  EXPECT_EQ(*parse_duration("30 s"), 30s);
  EXPECT_EQ(*parse_duration("30s"), 30s);
  EXPECT_EQ(*parse_duration("1.5 ms"), 1500us);
  EXPECT_EQ(*parse_duration("0 ns"), 0ns);
  EXPECT_EQ(*parse_duration("7 us"), 7us);
  EXPECT_EQ(*parse_duration("2 min"), 120s);
  EXPECT_EQ(*parse_duration("1e-3 h"), 3600ms);
}

TEST(Units, ParseSizesAndRates) {
  EXPECT_EQ(parse_bytes("1 kB")->count, 1000u);
  EXPECT_EQ(parse_bytes("1 KiB")->count, 1024u);
  EXPECT_EQ(parse_bytes("1.5 MiB")->count, 1572864u);
  EXPECT_EQ(parse_bytes("2 MB")->count, 2'000'000u);
  EXPECT_EQ(parse_bytes("3GB")->count, 3'000'000'000u);
  EXPECT_EQ(parse_bytes("1 GiB")->count, 1u << 30);
  EXPECT_EQ(parse_bytes("0 B")->count, 0u);
  EXPECT_EQ(parse_bytes("16000000000 GB")->count, 16'000'000'000'000'000'000u) << "above 2^63";
  EXPECT_DOUBLE_EQ(parse_bit_rate("24 Mbit/s")->bits_per_s, 24e6);
  EXPECT_DOUBLE_EQ(parse_bit_rate("24 Mbit/s")->bytes_per_s(), 3e6);
  EXPECT_DOUBLE_EQ(parse_bit_rate("1 Gbit/s")->mbit_per_s(), 1000);
  EXPECT_DOUBLE_EQ(parse_bit_rate("5 kbit/s")->bits_per_s, 5000);
  EXPECT_DOUBLE_EQ(BitRate::from_bytes_per_s(3e6).bits_per_s, BitRate::from_mbit_per_s(24).bits_per_s);
}

TEST(Units, RefuseEverythingElse) {
  for (const char* bad :
       {"",      " ",     "s",     "30",    "30 ",     "-1 s",   "30 S", "30 sec", "s 30",   "30 s ",
        " 30 s", "3 0 s", "nan s", "inf s", "1e999 s", "0x10 s", "+1 s", "30 MB",  "30 s s", "30\ts"}) {
    const auto parsed = parse_duration(bad);
    ASSERT_FALSE(parsed) << "'" << bad << "'";
    EXPECT_EQ(parsed.error().code, Code::kInvalid);
    EXPECT_THAT(parsed.error().detail, AllOf(HasSubstr(fmt::format("'{}'", bad)), HasSubstr("ns us ms s min h")));
  }
  for (const char* bad : {"1 K", "1 mb", "1 Mb", "1 MiBs", "1 TB", "-1 B", "2e19 B"})
    EXPECT_FALSE(parse_bytes(bad)) << bad;
  for (const char* bad : {"24 Mb/s", "24 MB/s", "24 Mbit", "24", "-24 Mbit/s"})
    EXPECT_FALSE(parse_bit_rate(bad)) << bad;
}

TEST(Units, SecondsRoundAndSaturate) {
  EXPECT_EQ(from_seconds(1.25), 1250ms);
  EXPECT_EQ(from_seconds(0.4e-9), 0ns);
  EXPECT_EQ(from_seconds(0.6e-9), 1ns);
  EXPECT_EQ(from_seconds(-2), -2s);
  EXPECT_EQ(from_seconds(1e30), Duration::max());
  EXPECT_EQ(from_seconds(-1e30), Duration::min());
  EXPECT_EQ(from_seconds(std::numeric_limits<double>::infinity()), Duration::max());
  EXPECT_DOUBLE_EQ(seconds(1500ms), 1.5);
}

TEST(Units, TextForPeople) {
  EXPECT_EQ(to_text(Duration(1250ms)), "1.25 s");
  EXPECT_EQ(to_text(Duration(90s)), "1.5 min");
  EXPECT_EQ(to_text(Duration(2h)), "2 h");
  EXPECT_EQ(to_text(Duration(3ms)), "3 ms");
  EXPECT_EQ(to_text(Duration(5us)), "5 us");
  EXPECT_EQ(to_text(Duration(12ns)), "12 ns");
  EXPECT_EQ(to_text(Bytes{999}), "999 B");
  EXPECT_EQ(to_text(Bytes{3'400'000}), "3.4 MB");
  EXPECT_EQ(to_text(BitRate::from_mbit_per_s(24)), "24 Mbit/s");
  // Short texts of round values parse back to the same value.
  for (const Duration d : {Duration(250ms), Duration(30s), Duration(2h), Duration(7us)})
    EXPECT_EQ(*parse_duration(to_text(d)), d);
}

// ---- results ----

Result<int> half(int x) {
  if (x % 2) return fail(Code::kInvalid, "halve", "{} is odd", x);
  return x / 2;
}
Result<int> quarter(int x) {
  ECHO_ASSIGN(const int once, half(x));
  ECHO_ASSIGN(const int twice, half(once));
  return twice;
}
Status both_even(int a, int b) {
  ECHO_TRY(half(a));
  ECHO_TRY(half(b));
  return ok();
}

TEST(Result, CarriesAValueOrAnError) {
  EXPECT_EQ(*quarter(8), 2);
  const auto failed = quarter(6);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::kInvalid);
  EXPECT_EQ(failed.error().message(), "halve: 3 is odd");
  EXPECT_TRUE(both_even(2, 4));
  EXPECT_EQ(both_even(2, 5).error().detail, "5 is odd");
  EXPECT_EQ((Error{Code::kIo, "", "plain"}).message(), "plain");
}

TEST(Result, HoldsMoveOnlyValues) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(5));
  ASSERT_TRUE(result);
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 5);
}

TEST(Result, ExitCodesFollowTheKindOfError) {
  EXPECT_EQ(exit_code(Code::kInvalid), 2);
  EXPECT_EQ(exit_code(Code::kInfeasible), 3);
  for (const Code code : {Code::kNotFound, Code::kCorrupt, Code::kIo, Code::kUnavailable, Code::kExhausted,
                          Code::kStale, Code::kCancelled, Code::kInternal}) {
    EXPECT_EQ(exit_code(code), 1) << to_string(code);
    EXPECT_NE(to_string(code), "unknown");
  }
}

TEST(ResultDeathTest, ReadingTheValueOfAnErrorIsABug) {
  EXPECT_DEATH((void)half(3).value(), "3 is odd");
  EXPECT_DEATH([] { ECHO_CHECK(1 + 1 == 3, "sum was {}", 2); }(), "1 \\+ 1 == 3.*sum was 2");
}

// ---- ids and clocks ----

TEST(Text, ForeignTextIsShownAsOneHarmlessLine) {
  for (const char* plain : {"", "offer-7", "worker 3 -> 4 'x' \\", "größer, 漢字 🙂"}) {
    EXPECT_EQ(printable(plain), plain);
    EXPECT_TRUE(is_printable(plain)) << plain;
  }
  const std::pair<std::string_view, std::string_view> escaped[] = {
      {"a\nb\tc\r", "a\\nb\\tc\\r"},
      {"\x1b[2J\x7f", "\\x1b[2J\\x7f"},
      {std::string_view("\0", 1), "\\x00"},
      {"\xc2\x9b", "\\u{9b}"},  // one character that begins a terminal's command
      {"\xe2\x80\xae"
       "fdp",
       "\\u{202e}fdp"},  // turns the direction of writing
      {"\xff\xfe", "\\xff\\xfe"},
      {"\xc0\xaf", "\\xc0\\xaf"},                    // longer than needed
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // half of a pair
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // beyond the last character
      {"ab\xe6\xbc", "ab\\xe6\\xbc"},                // cut
  };
  for (const auto& [said, shown] : escaped) {
    EXPECT_EQ(printable(said), shown);
    EXPECT_FALSE(is_printable(said)) << shown;
  }
  EXPECT_EQ(printable(std::string(5000, 'x')).size(), kPrintableBytesMax + 3);
  EXPECT_EQ(printable("ab\ncd", 3), "ab...");
  EXPECT_EQ(printable("äöü", 5), "äö...");
  Random random(5);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(random.below(40), ' ');
    for (char& c : bytes) c = static_cast<char>(random.below(256));
    EXPECT_TRUE(is_printable(printable(bytes, 30)));
  }
}

TEST(Log, ControlCharactersAreEscapedIntoOneLine) {
  ::testing::internal::CaptureStderr();
  log::error("worker 3: {}", "\x1b]0;owned\a\n12:00:00 info learner  all is well \xff");
  const std::string shown = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), 1);
  EXPECT_THAT(shown, ::testing::HasSubstr("\\x1b]0;owned\\x07\\n12:00:00 info learner  all is well \\xff"));
}

TEST(Ids, CompareHashAndFormat) {
  EXPECT_LT(Version{1}, Version{2});
  EXPECT_EQ(fmt::format("{}", WorkerId{7}), "7");
  const std::unordered_set<Version> seen{Version{1}, Version{1}, Version{2}};
  EXPECT_EQ(seen.size(), 2u);
  static_assert(!std::is_convertible_v<Version, WorkerId> && !std::is_convertible_v<std::uint64_t, Version>);
}

// ---- random ----

TEST(Random, StreamsRepeatAndDiffer) {
  Random a(42), b(42), other_seed(43), other_stream(42, 1);
  int equal_seed = 0, equal_stream = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t x = a.next();
    EXPECT_EQ(x, b.next());
    equal_seed += x == other_seed.next();
    equal_stream += x == other_stream.next();
  }
  EXPECT_EQ(equal_seed, 0);
  EXPECT_EQ(equal_stream, 0);
}

// SplitMix64's published first outputs for the seed 1234567; streams must be the same on every machine.
TEST(Random, MixesAsSplitMix64) {
  std::uint64_t state = 1234567;
  std::vector<std::uint64_t> found;
  for (int i = 0; i < 3; ++i, state += 0x9e3779b97f4a7c15ull) found.push_back(mix64(state));
  EXPECT_EQ(found,
            (std::vector<std::uint64_t>{6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull}));
}

TEST(Random, StaysInRangeAndIsUniform) {
  Random random(7);
  std::vector<int> count(10);
  double sum = 0;
  for (int i = 0; i < 100000; ++i) {
    ++count[random.below(10)];
    const double u = random.uniform();
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    const std::int64_t between = random.between(-3, 3);
    ASSERT_GE(between, -3);
    ASSERT_LE(between, 3);
  }
  for (const int c : count) EXPECT_NEAR(c, 10000, 500);  // five standard deviations
  EXPECT_NEAR(sum / 100000, 0.5, 0.005);
  EXPECT_EQ(random.below(1), 0u);
  EXPECT_EQ(random.between(5, 5), 5);
}

// ---- files ----

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "echoline-base-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(Files, WriteReadReplace) {
  const fs::path path = folder_ / "f";
  const std::string binary("a\0b\n\xff", 5);
  ASSERT_TRUE(write_file_atomic(path, binary));
  EXPECT_EQ(*read_file(path), binary);
  ASSERT_TRUE(write_file_atomic(path, ""));
  EXPECT_EQ(*read_file(path), "");
  const std::string large(3'000'000, 'x');
  ASSERT_TRUE(write_file_atomic(path, large));
  EXPECT_EQ(*read_file(path), large);
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0644u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);  // no temporary left
}

TEST_F(Files, APrivateFileIsItsOwnersOnly) {
  const fs::path path = folder_ / "f";
  ASSERT_TRUE(write_file_atomic(path, "old"));
  ASSERT_TRUE(write_private_file_atomic(path, "key"));  // also where others could read the earlier file
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(*read_file(path, 100), "key");
}

TEST_F(Files, ReplacingLeavesReadersOfTheOldFileAlone) {
  const fs::path path = folder_ / "f";
  ASSERT_TRUE(write_file_atomic(path, "old content"));
  std::ifstream reader(path);
  ASSERT_TRUE(write_file_atomic(path, "new"));
  std::string seen;
  std::getline(reader, seen);
  EXPECT_EQ(seen, "old content");
}

TEST_F(Files, AFailedWriteKeepsTheOldFileAndLeavesNothing) {
  fs::create_directory(folder_ / "target");
  ASSERT_TRUE(write_file_atomic(folder_ / "target" / "inside", "x"));
  const Status status = write_file_atomic(folder_ / "target", "content");  // a folder stands in the way
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kIo);
  EXPECT_THAT(status.error().detail, HasSubstr((folder_ / "target").string()));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
  EXPECT_EQ(write_file_atomic(folder_ / "no" / "f", "x").error().code, Code::kNotFound);
}

TEST_F(Files, RelativePathsWithoutAFolder) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  EXPECT_TRUE(write_file_atomic("plain", "x"));
  EXPECT_EQ(*read_file("plain"), "x");
  fs::current_path(before);
}

TEST_F(Files, ReadRefusals) {
  EXPECT_EQ(read_file(folder_ / "absent").error().code, Code::kNotFound);
  EXPECT_EQ(read_file(folder_).error().code, Code::kIo);
  ASSERT_TRUE(write_file_atomic(folder_ / "f", "12345"));
  EXPECT_EQ(*read_file(folder_ / "f", 5), "12345");
  const auto too_large = read_file(folder_ / "f", 4);
  ASSERT_FALSE(too_large);
  EXPECT_EQ(too_large.error().code, Code::kExhausted);
  EXPECT_THAT(too_large.error().detail, AllOf(HasSubstr("4 bytes"), HasSubstr((folder_ / "f").string())));
}

TEST_F(Files, MakeFolders) {
  EXPECT_TRUE(make_folders(folder_ / "a" / "b"));
  EXPECT_TRUE(make_folders(folder_ / "a" / "b"));
  ASSERT_TRUE(write_file_atomic(folder_ / "f", ""));
  EXPECT_EQ(make_folders(folder_ / "f" / "g").error().code, Code::kIo);
}

// The calling thread's time slice by sched_getattr(2). [ns]
std::uint64_t turn() {
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime, deadline, period;
  } attributes{};
  EXPECT_EQ(::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0U), 0);
  return attributes.runtime;
}

TEST(Priority, ShortTimeSlicesKeepThePolicyAndAreInherited) {
  const int nice = ::getpriority(PRIO_PROCESS, 0), policy = ::sched_getscheduler(0);
  const std::uint64_t before = turn();
  std::uint64_t own = 0, started = 0;
  int nice_then = -100, policy_then = -1;
  std::thread([&] {
    request_short_time_slices();
    own = turn();
    nice_then = ::getpriority(PRIO_PROCESS, 0), policy_then = ::sched_getscheduler(0);
    std::thread([&] { started = turn(); }).join();
  }).join();
  EXPECT_EQ(nice_then, nice);
  EXPECT_EQ(policy_then, policy);
  EXPECT_EQ(turn(), before) << "of the calling thread alone";
  utsname system{};
  int major = 0, minor = 0;
  ASSERT_EQ(::uname(&system), 0);
  std::sscanf(system.release, "%d.%d", &major, &minor);
  if (policy != SCHED_OTHER || std::pair(major, minor) < std::pair(6, 12))
    GTEST_SKIP() << "this kernel does not report time slices";
  EXPECT_EQ(own, 100'000u);
  EXPECT_EQ(started, 100'000u);
}

}  // namespace
}  // namespace echoline
