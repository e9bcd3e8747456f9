// Reading offers: what is stated, what is not, and every mistake at once.
#include "provisioner/offers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::provisioner {
namespace {

using testing::HasSubstr;

Result<std::vector<Offer>> parse_own(std::string_view text, std::string_view name) {
  auto list = parse_offers(text, name);
  if (!list) return std::move(list).error();
  EXPECT_EQ(list->format, "own");
  return std::move(list->offers);
}

constexpr std::string_view kFull = R"({"schema_version": 1, "offers": [
  {"id": "a", "provider": "local", "host": "h1", "gpu": "RTX 4090", "gpu_count": 2, "vram_gb": 24, "place": "SE",
   "up_mbit_per_s": 50, "down_mbit_per_s": 500.5, "reliability": 0.99, "duration_days_max": 2,
   "rollouts_per_s": 61.5, "rollouts_source": "measured", "gpu_usd_per_hour": 0.3, "storage_usd_per_hour": 0.01,
   "upload_usd_per_gb": 0.02, "download_usd_per_gb": 0, "cloud": "aws", "region": "eu-north-1", "zone": "eun1-az1",
   "machine_type": "g6.xlarge"}
]})";

std::string offer(const std::string& id, const std::string& more) {
  return R"({"id": ")" + id + R"(", "provider": "local", "gpu": "RTX 3060", "up_mbit_per_s": 9, "down_mbit_per_s": 9,
    "rollouts_per_s": 5, "rollouts_source": "profile")" +
         more + "}";
}
std::string file(const std::string& offers) { return R"({"schema_version": 1, "offers": [)" + offers + "]}"; }
std::string problems(const std::string& text) {
  const auto offers = parse_own(text, "offers.json");
  if (offers) return "";
  EXPECT_EQ(offers.error().code, Code::kInvalid);
  return offers.error().message();
}

// A large file is read in parts: with the same result, and the same messages.
TEST(ParseOffers, ALargeFileIsReadLikeASmallOne) {
  const auto large = [](const std::string& replaced, const std::string& by) {
    std::string offers;
    for (int i = 0; i < 2500; ++i) {
      std::string text = offer(fmt::format("o{}", i), R"(, "place": "]},{\" \\", "gpu_ids": [0, 1])");
      if (const auto at = text.find(replaced); i == 1999 && !replaced.empty()) text.replace(at, replaced.size(), by);
      offers += (i > 0 ? " ,\n" : "\n") + text;
    }
    EXPECT_GT(offers.size(), 300'000u);
    return file(offers);
  };
  const auto offers = parse_own(large("", ""), "offers.json");
  ASSERT_TRUE(offers) << offers.error().message();
  ASSERT_EQ(offers->size(), 2500u);
  EXPECT_EQ((*offers)[2499].id, "o2499");
  EXPECT_EQ((*offers)[1000].place, R"(]},{" \)");
  EXPECT_EQ((*offers)[1000].gpu_ids, (std::vector<int>{0, 1}));
  EXPECT_THAT(problems(large("\"up_mbit_per_s\": 9", "\"up_mbit_per_s\": -9")), HasSubstr("offers[1999]"));
  EXPECT_THAT(problems(large("\"o1999\"", "\"o3\"")), HasSubstr("the id 'o3' is also that of offers[3]"));
  EXPECT_THAT(problems(large("\"up_mbit_per_s\"", "\"upp\"")), HasSubstr("unknown key"));
  EXPECT_NE(problems(large("[0, 1]}", "[0, 1]} {}")), "") << "a comma is missing";
  EXPECT_NE(problems(large("[0, 1]}", "[0, 1]")), "");
  EXPECT_NE(problems(large("", "") + "x"), "");
}

TEST(ParseOffers, EveryField) {
  const auto offers = parse_own(kFull, "offers.json");
  ASSERT_TRUE(offers) << offers.error().message();
  ASSERT_EQ(offers->size(), 1u);
  const Offer& o = offers->front();
  EXPECT_EQ(o.id, "a");
  EXPECT_EQ(o.host, "h1");
  EXPECT_EQ(o.gpu, "RTX 4090");
  EXPECT_EQ(o.gpu_count, 2);
  EXPECT_EQ(o.vram_gb, 24);
  EXPECT_EQ(o.place, "SE");
  EXPECT_EQ(o.cloud + o.region + o.zone + o.machine_type, "awseu-north-1eun1-az1g6.xlarge");
  EXPECT_DOUBLE_EQ(o.up->mbit_per_s(), 50);
  EXPECT_DOUBLE_EQ(o.down->mbit_per_s(), 500.5);
  EXPECT_EQ(o.reliability, 0.99);
  EXPECT_EQ(o.duration_max, std::chrono::hours(48));
  EXPECT_EQ(o.rollouts_per_s, 61.5);
  EXPECT_EQ(o.rollouts_source, RateSource::kMeasured);
  EXPECT_EQ(o.gpu_usd_per_hour, 0.3);
  EXPECT_EQ(o.storage_usd_per_hour, 0.01);
  EXPECT_EQ(o.upload_usd_per_gb, 0.02);
  EXPECT_EQ(o.download_usd_per_gb, 0.0);
}

TEST(ParseOffers, UnknownStaysUnknownAndZeroIsZero) {
  const auto offers = parse_own(
      file(offer("a", R"(, "gpu_usd_per_hour": 0, "storage_usd_per_hour": null, "reliability": null)")), "offers.json");
  ASSERT_TRUE(offers) << offers.error().message();
  const Offer& o = offers->front();
  EXPECT_EQ(o.gpu_usd_per_hour, 0.0);
  EXPECT_FALSE(o.storage_usd_per_hour);
  EXPECT_FALSE(o.upload_usd_per_gb);
  EXPECT_FALSE(o.reliability);
  EXPECT_FALSE(o.duration_max);
  EXPECT_FALSE(o.vram_gb);
  EXPECT_EQ(o.gpu_count, 1);
}

TEST(ParseOffers, ReportsEveryProblemAtOnceWithItsPlace) {
  const std::string text =
      file(offer("a", R"(, "vram_gb": -5)") + "," + offer("b", R"(, "gpu_usd_per_hour": 0.1, "reliabilty": 0.9)") +
           "," + offer("a", R"(, "gpu_usd_per_hour": -1)") + "," +
           offer("d", R"(, "gpu_usd_per_hour": "cheap", "reliability": 1.5)"));
  const std::string all = problems(text);
  EXPECT_THAT(all, HasSubstr("offers.json:2:67: offers[0].vram_gb"));
  EXPECT_THAT(all, HasSubstr("gpu_usd_per_hour"));
  EXPECT_THAT(all, HasSubstr("did you mean 'reliability'"));
  EXPECT_THAT(all, HasSubstr("the id 'a' is also that of offers[0]"));
  EXPECT_THAT(all, HasSubstr("-1"));
  EXPECT_THAT(all, HasSubstr("cheap"));
  EXPECT_THAT(all, HasSubstr("1.5"));
  EXPECT_GE(std::count(all.begin(), all.end(), '\n'), 5);
}

TEST(ParseOffers, EachNumberHasItsRange) {
  const std::pair<std::string, std::string> wrong[] = {{R"("up_mbit_per_s": 9)", R"("up_mbit_per_s": -9)"},
                                                       {R"("down_mbit_per_s": 9)", R"("down_mbit_per_s": 0)"},
                                                       {R"("rollouts_per_s": 5)", R"("rollouts_per_s": 0)"},
                                                       {R"("rollouts_per_s": 5)", R"("rollouts_per_s": ".nan")"},
                                                       {R"("profile")", R"("guess")"},
                                                       {R"("id": "a")", R"("id": "")"},
                                                       {R"("gpu": "RTX 3060")", R"("gpu": "")"}};
  const std::string good = file(offer("a", R"(, "gpu_usd_per_hour": 1)"));
  EXPECT_EQ(problems(good), "");
  for (const auto& [from, to] : wrong) {
    std::string bad = good;
    const auto at = bad.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bad.replace(at, from.size(), to);
    EXPECT_NE(problems(bad), "") << to;
  }
}

TEST(ParseOffers, BrokenTextIsReportedWithItsPosition) {
  EXPECT_THAT(problems("{\"schema_version\": 1,\n \"offers\": [{\"id\": \"a\"\n"), HasSubstr("offers.json:"));
  EXPECT_NE(problems(""), "");
  EXPECT_THAT(problems("{\"offers\": []}"), HasSubstr("schema_version"));
  EXPECT_THAT(problems("{\"schema_version\": 2, \"offers\": []}"), HasSubstr("schema_version"));
  EXPECT_THAT(problems("{\"schema_version\": 1}"), HasSubstr("offers"));
  EXPECT_THAT(problems("{\"schema_version\": 1, \"offers\": [3]}"), HasSubstr("offers"));
  EXPECT_NE(problems(file(R"({"id": "a", "id": "b"})")), "");
}

TEST(ParseOffers, AWholeMarketIsReadAndPlacesStayRight) {
  std::string text = "{\"schema_version\": 1,\n \"offers\": [\n";
  constexpr int kOffers = 12'000;  // more than a run file may be large
  for (int i = 0; i < kOffers; ++i)
    text += (i > 0 ? ",\n" : "") +
            offer("o" + std::to_string(i), R"(, "gpu_usd_per_hour": 0.1, "place": "K\u00f8benhavn")");
  const auto offers = parse_own(text + "]}", "offers.json");
  ASSERT_TRUE(offers) << offers.error().message().substr(0, 200);
  EXPECT_EQ(offers->size(), static_cast<std::size_t>(kOffers));
  EXPECT_EQ(offers->back().place,
            "K\xc3\xb8"
            "benhavn");
  const std::string bad = problems(text + ",\n  " + offer("last", R"(, "gpu_usd_per_hour": -2)") + "]}");
  EXPECT_THAT(bad, HasSubstr("offers[12000].gpu_usd_per_hour"));
  EXPECT_THAT(bad, HasSubstr(fmt::format("offers.json:{}:", 2 * kOffers + 4)));
}

TEST(ParseOffers, OnlyJsonIsJson) {
  for (const char* text : {"{\"schema_version\": 1, \"offers\": [],}", "{schema_version: 1}", "{\"a\": 1} 2",
                           "{\"a\": 01}", "{\"a\": \"\\ud800\"}", "{\"a\": \"\x01\"}", "{\"a\": \"\xff\"}", "{\"a\""})
    EXPECT_THAT(problems(text), HasSubstr("offers.json:1:")) << text;
  EXPECT_THAT(problems("{\"schema_version\": 1,\n  \"offers\": [tru]}"), HasSubstr("offers.json:2:"));
  EXPECT_THAT(problems(R"({"schema_version": 1, "offers": [{"id": "a", "gpu_usd_per_hour": 1e999}]})"),
              HasSubstr("number out of range"));
  EXPECT_LT(problems(R"({"schema_version": 1, "offers": [{"id": ")" + std::string(10'000'000, 'x')).size(), 1000u);
  EXPECT_THAT(problems("{\"a\": " + std::string(100, '[') + std::string(100, ']') + "}"), HasSubstr("nested deeper"));
}

TEST(LoadOffers, AMissingFileIsNotFound) {
  EXPECT_EQ(load_offers("/nonexistent/offers.json").error().code, Code::kNotFound);
}

TEST(LoadOffers, TheQuickstartFileIsRightAndVaried) {
  const auto offers = load_offers("configs/offers/quickstart.json");
  ASSERT_TRUE(offers) << offers.error().message();
  EXPECT_GE(offers->offers.size(), 14u);
  for (const Offer& o : offers->offers) {
    EXPECT_GE(o.up->mbit_per_s(), 8) << o.id;
    EXPECT_GE(o.rollouts_per_s, 250) << o.id;
    EXPECT_LE(o.rollouts_per_s, 1600) << o.id;
    EXPECT_GE(*o.gpu_usd_per_hour, 0.05) << o.id;
    EXPECT_LE(*o.gpu_usd_per_hour, 0.60) << o.id;
  }
}

}  // namespace
}  // namespace echoline::provisioner
