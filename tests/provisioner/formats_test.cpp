// Offers in other formats: replies of vast.ai, catalogues of SkyPilot, YAML; and their rates, by profile and ledger.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/files.hpp"
#include "base/random.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/throughput.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::provisioner {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::string_view kReply = R"({"success": true, "offers": [
  {"id": 4711, "ask_contract_id": 4711, "machine_id": 12, "host_id": 99, "gpu_name": "RTX 4090", "num_gpus": 2,
   "gpu_ids": [0, 3],
   "gpu_ram": 24564, "gpu_total_ram": 49128, "dlperf": 190.5, "dph_base": 0.50, "dph_total": 0.502074, "min_bid": 0.31,
   "storage_cost": 0.149333, "inet_up": 812.4, "inet_down": 1020, "inet_up_cost": 0.003, "inet_down_cost": null,
   "internet_down_cost_per_tb": 2.0, "reliability2": 0.9987, "reliability": 0.9, "duration": 864000,
   "geolocation": "Sweden, SE", "rentable": true, "rented": false, "webpage": null,
   "hostname": {"a": [1, {"gpu_name": 3}]}, "verification": "verified"},
  {"id": "x1", "gpu_name": "H100 SXM", "num_gpus": 1, "machine_id": null, "dph_base": null, "inet_up": 0,
   "rented": true}
]})";

Result<OfferList> parsed(std::string_view text, OfferReadOptions reading = {}) {
  return parse_offers(text, "market", reading);
}
std::string problems(std::string_view text, OfferReadOptions reading = {}) {
  const auto list = parsed(text, reading);
  if (list) return "";
  EXPECT_EQ(list.error().code, Code::kInvalid);
  EXPECT_LT(list.error().detail.size(), 10'000u);
  return list.error().detail;
}

TEST(VastReply, EveryFieldInItsUnit) {
  const auto list = parsed(kReply, {.disk = Bytes{10'000'000'000}});
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_EQ(list->format, "vast");
  ASSERT_EQ(list->offers.size(), 2u);
  const Offer& o = list->offers[0];
  EXPECT_EQ(o.id, "4711");
  EXPECT_EQ(o.provider, "vast");
  EXPECT_EQ(o.host, "12");
  EXPECT_EQ(o.owner, "99");
  EXPECT_EQ(o.gpu, "RTX 4090");
  EXPECT_EQ(o.gpu_count, 2);
  EXPECT_THAT(o.gpu_ids, ElementsAre(0, 3));
  EXPECT_NEAR(*o.vram_gb, 24.564, 1e-9);
  EXPECT_NEAR(o.up->mbit_per_s(), 812.4, 1e-9);
  EXPECT_NEAR(o.down->mbit_per_s(), 1020, 1e-9);
  EXPECT_EQ(o.reliability, 0.9987);
  EXPECT_EQ(o.duration_max, std::chrono::hours(240));
  EXPECT_EQ(o.place, "Sweden, SE");
  EXPECT_TRUE(o.rentable);
  EXPECT_EQ(o.dlperf, 190.5);
  EXPECT_EQ(o.gpu_usd_per_hour, 0.50);
  EXPECT_EQ(o.bid_usd_per_hour_min, 0.31);
  EXPECT_NEAR(*o.storage_usd_per_hour, 0.002074, 1e-6);  // dph_total - dph_base for 10 GB
  EXPECT_EQ(o.upload_usd_per_gb, 0.003);
  EXPECT_EQ(o.download_usd_per_gb, 0.002);  // from the price of a TB
  const Offer& bare = list->offers[1];
  EXPECT_EQ(bare.id, "x1");
  EXPECT_FALSE(bare.gpu_usd_per_hour);
  EXPECT_FALSE(bare.up);  // never measured
  EXPECT_FALSE(bare.storage_usd_per_hour);
  EXPECT_FALSE(bare.upload_usd_per_gb);
  EXPECT_FALSE(bare.rentable);
  EXPECT_TRUE(bare.gpu_ids.empty());
  EXPECT_EQ(bare.rollouts_source, RateSource::kUnknown);
}

TEST(VastReply, AListAloneIsOneAsWell) {
  const auto list = parsed(R"([{"id": 1, "gpu_name": "L4", "dph_base": 0.2}])");
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_EQ(list->format, "vast");
  EXPECT_EQ(list->offers.size(), 1u);
}

TEST(VastReply, EveryFaultyOfferIsNamed) {
  const std::string all = problems(R"({"offers": [
    {"id": 1, "gpu_name": "L4", "dph_base": -0.2}, {"id": 2, "gpu_name": "L4", "dph_base": "cheap"},
    {"id": 3, "gpu_name": "L4", "inet_up": 1e12, "machine_id": 1}, {"id": 3, "gpu_name": "L4"},
    {"id": 3, "gpu_name": "L4"}, {"gpu_name": "L4"}, {"id": 7}, {"id": 8, "gpu_name": "L4", "gpu_ids": [-1]},
    {"id": 9, "gpu_name": "L4", "num_gpus": 1.5},
    {"id": 10, "gpu_name": 7, "rentable": "yes"}]})");
  for (const char* text :
       {"offers[0] (id 1): dph_base: expected 0 to", "found -0.2",
        "offers[1] (id 2): dph_base: expected a number, found 'cheap'",
        "inet_up: expected 0 to 1000000, found 1000000000000", "offers[4] (id 3): id: another offer has the same id",
        "offers[5]: id: it is missing", "gpu_name: it is missing", "gpu_ids: expected numbers",
        "num_gpus: expected a whole number", "gpu_name: expected a text", "rentable: expected true or false"})
    EXPECT_THAT(all, HasSubstr(text));
}

TEST(VastReply, NumbersThatAreNoneLongTextsAndErrorsAreRefused) {
  EXPECT_THAT(problems(R"({"offers": [{"id": 1, "machine_id": 1, "gpu_name": "L4", "dph_base": NaN}]})"),
              HasSubstr("invalid JSON"));
  EXPECT_THAT(problems(R"({"offers": [{"id": 1, "machine_id": 1, "gpu_name": "L4", "dph_base": 1e999}]})"),
              HasSubstr("out of range"));
  const std::string long_name(10'000'000, 'x');
  EXPECT_THAT(problems(R"({"offers": [{"id": 1, "machine_id": 1, "gpu_name": ")" + long_name + R"("}]})"),
              HasSubstr("at most 512 bytes, found 10000000"));
  EXPECT_THAT(problems(R"({"offers": [{"machine_id": 1, "id": ")" + long_name + R"("}]})"), HasSubstr("at most 512"));
  EXPECT_THAT(problems(R"({"success": false, "error": "invalid_args", "msg": "no such\nfield"})"),
              HasSubstr("invalid_args: no such\\nfield"));
  EXPECT_THAT(problems(R"({"success": true})"), HasSubstr("found none"));
  EXPECT_THAT(problems(R"({"machine_id": 3, "offers": [)"), HasSubstr("invalid JSON"));
  EXPECT_THAT(problems(R"({"machine_id": 3, "offers": )" + std::string(100'000, '[')), HasSubstr("byte"));
  EXPECT_THAT(problems("not json", {.format = "vast"}), HasSubstr("invalid JSON"));
  std::string many = R"({"machine_id":1,"offers":[)";
  for (int i = 0; i < 5000; ++i) many += fmt::format("{}{{\"id\":{},\"dph_base\":-1}}", i ? "," : "", i);
  EXPECT_THAT(problems(many + "]}"), HasSubstr("and 9980 more"));
}

constexpr std::string_view kCatalogue =
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\r\n"
    "p3.2xlarge,V100,1.0,8.0,61.0,\"{'Gpus': [{'Name': 'V100', 'MemoryInfo': {'SizeInMiB': 16384}}], 'T\"\"x': "
    "1}\",3.06,0.918,us-east-1,us-east-1a\r\n"
    "m5.large,,,2.0,8.0,,0.096,,us-east-1,us-east-1a\n"
    "g5.xlarge,A10G,1.0,4.0,16.0,,,0.4,eu-north-1,\n"
    "part,A10,0.25,4.0,16.0,,1,,eu-north-1,\n";

TEST(SkyPilotCatalogue, StatesPricesByRegionAndNeitherLinksNorTraffic) {
  const auto list = parsed(kCatalogue, {.copies = 2});
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_EQ(list->format, "skypilot");
  ASSERT_EQ(list->offers.size(), 4u);  // of two kinds; a machine without GPUs and a share of one are none
  const Offer& o = list->offers[0];
  EXPECT_EQ(o.id, "p3.2xlarge@us-east-1a#1");
  EXPECT_EQ(list->offers[1].id, "p3.2xlarge@us-east-1a#2");
  EXPECT_EQ(o.gpu, "V100");
  EXPECT_NEAR(*o.vram_gb, 17.18, 0.01);
  EXPECT_EQ(o.place, "us-east-1a");
  EXPECT_EQ(o.gpu_usd_per_hour, 3.06);
  EXPECT_EQ(o.bid_usd_per_hour_min, 0.918);
  EXPECT_FALSE(o.up);
  EXPECT_FALSE(o.storage_usd_per_hour);
  EXPECT_FALSE(o.upload_usd_per_gb);
  EXPECT_FALSE(o.reliability);
  EXPECT_EQ(list->offers[2].place, "eu-north-1");
  EXPECT_FALSE(list->offers[2].gpu_usd_per_hour);
  EXPECT_NEAR(*list->offers[2].vram_gb, 25.77, 0.01) << "that of any A10G";
  EXPECT_EQ(o.cloud, "");
}

TEST(SkyPilotCatalogue, MistakesHaveTheirLine) {
  const std::string head = "InstanceType,AcceleratorName,AcceleratorCount,Price,Region\n";
  EXPECT_THAT(problems(head + "a,L4,1,-3,x\nb,L4,nan,1,x\nc,L4,1,1\n"),
              testing::AllOf(HasSubstr("line 2: price"), HasSubstr("line 3: acceleratorcount"),
                             HasSubstr("line 4: expected 5 fields, found 4")));
  EXPECT_THAT(problems(head + "a,L4,1,inf,x\n"), HasSubstr("price: expected a number"));
  EXPECT_THAT(problems(head + "a,\"L4,1,1,x\n"), HasSubstr("does not end"));
  EXPECT_THAT(problems(head + "a,\"L4\"x,1,1,x\n"), HasSubstr("comma after a quoted field"));
  EXPECT_THAT(problems(head + std::string(10'000'000, 'a') + ",L4,1,1,x\n"), HasSubstr("at most 65536"));
  EXPECT_THAT(problems("InstanceType,AcceleratorName\n"), HasSubstr("'acceleratorcount' is missing"));
  EXPECT_THAT(problems(head + std::string(300, ',') + "\n"), HasSubstr("columns"));
}

TEST(SkyPilotCatalogue, ARowThatCannotBeUsedIsNamedAndTheOthersAreUsed) {
  const auto list = parsed(
      "InstanceType,AcceleratorName,AcceleratorCount,Price,Region\n"
      "a,L4,1,0.5,x\nb,L4,1,-3,x\nc,L4,1\nd,L4,2,1,x\ne,Abacus,2,1,x\nf,\"L4\n");
  ASSERT_TRUE(list) << list.error().message();
  ASSERT_EQ(list->offers.size(), 3u);
  EXPECT_EQ(list->offers[1].id, "d@x#1");
  EXPECT_THAT(list->notes,
              ElementsAre(HasSubstr("line 3: price: expected a number of 0 to 1000000000000, found '-3'"),
                          HasSubstr("line 4: expected 5 fields, found 3"), HasSubstr("line 7: a quoted field"),
                          AllOf(HasSubstr("memory of these GPUs is unknown"), HasSubstr(": Abacus"))));
}

// Excerpts of what SkyPilot publishes; tests/provisioner/catalogues/README.md has their versions.
class RealCatalogue : public testing::Test {
 protected:
  static OfferList load(const std::string& cloud) {
    auto list = load_offers("tests/provisioner/catalogues/" + cloud + "/vms.csv");
    EXPECT_TRUE(list) << list.error().message();
    if (!list) return {};
    EXPECT_EQ(list->format, "skypilot");
    for (const Offer& offer : list->offers) EXPECT_EQ(offer.cloud, cloud);
    return std::move(*list);
  }
  // GiB of each offer's GPU, rounded.
  static std::vector<int> gib(const OfferList& list) {
    std::vector<int> sizes;
    for (const Offer& offer : list.offers)
      sizes.push_back(static_cast<int>(std::lround(offer.vram_gb.value_or(0) / 1.073741824)));
    return sizes;
  }
};

TEST_F(RealCatalogue, MemoryIsThatOfOneGpuInEveryFile) {
  EXPECT_THAT(gib(load("aws")), ElementsAre(80, 80, 80, 80));
  EXPECT_THAT(gib(load("lambda")), ElementsAre(16, 48, 48));
  EXPECT_THAT(gib(load("nebius")), ElementsAre(80, 80, 48, 180));
  EXPECT_THAT(gib(load("primeintellect")), ElementsAre(80, 80, 80, 180));
  EXPECT_THAT(gib(load("runpod")), ElementsAre(80, 80));
  EXPECT_THAT(gib(load("vast")), ElementsAre(140, 140, 94, 32, 48, 16, 40, 6));
}

TEST_F(RealCatalogue, APriceThatStandsForNoneIsNoBid) {
  for (const char* cloud : {"vast", "primeintellect"}) {
    const OfferList list = load(cloud);
    EXPECT_THAT(list.notes, testing::IsEmpty()) << cloud;
    for (const Offer& offer : list.offers) {
      EXPECT_FALSE(offer.bid_usd_per_hour_min) << offer.id;
      EXPECT_GT(offer.gpu_usd_per_hour.value_or(0), 0) << offer.id;
    }
  }
  const OfferList nebius = load("nebius");
  ASSERT_EQ(nebius.offers.size(), 4u);
  EXPECT_EQ(nebius.offers[1].bid_usd_per_hour_min, 10.0);
  EXPECT_FALSE(nebius.offers[2].bid_usd_per_hour_min);
}

TEST_F(RealCatalogue, NamesWhatIsRented) {
  const OfferList aws = load("aws");
  ASSERT_EQ(aws.offers.size(), 4u);
  EXPECT_EQ(aws.offers[1].machine_type, "p5.48xlarge");
  EXPECT_EQ(aws.offers[1].region, "us-east-1");
  EXPECT_EQ(aws.offers[1].zone, "use1-az2");
  EXPECT_EQ(aws.offers[1].place, "use1-az2");
  const OfferList vast = load("vast");
  EXPECT_EQ(vast.offers.at(0).region, "France, FR, EU");
  EXPECT_EQ(vast.offers.at(0).zone, "");
  EXPECT_EQ(vast.offers.at(0).place, "France, FR, EU");
}

// A machine of Google Cloud costs its own price and that of its GPUs.
TEST_F(RealCatalogue, GpusWithoutTheirMachineHaveNoPrice) {
  const OfferList gcp = load("gcp");
  EXPECT_TRUE(gcp.offers.empty());
  EXPECT_THAT(gcp.notes, ElementsAre(HasSubstr("the price of their machine is not stated: T4, tpu-v6e-16")));
  auto text = *read_file("tests/provisioner/catalogues/gcp/vms.csv");
  text += ",,,A100,1,,us-central1,us-central1-a,2,1\n,,,H100,1,,us-central1,us-central1-b,2,1\n";
  const auto list = parse_offers(text, "gcp/vms.csv");
  ASSERT_TRUE(list) << list.error().message();
  ASSERT_EQ(list->offers.size(), 1u) << "the machine of the H100 is not sold in its zone";
  EXPECT_EQ(list->offers[0].machine_type, "a2-highgpu-1g");
  EXPECT_NEAR(*list->offers[0].gpu_usd_per_hour, 2.73948, 1e-9);
  EXPECT_NEAR(*list->offers[0].bid_usd_per_hour_min, 1.36975, 1e-9);
  EXPECT_NEAR(*list->offers[0].vram_gb, 42.95, 0.01);
}

TEST(Formats, OurOwnIsYamlOrJsonOfAnySizeAndAnOptionOverrides) {
  std::string yaml = "schema_version: 1\noffers:\n";
  for (int i = 0; i < 6000; ++i)  // 1.3 MB and 108,000 values: more than a run file may have
    yaml += fmt::format(
        "  - {{id: o{}, provider: local, host: h{}, gpu: L4, gpu_count: 1, vram_gb: 24, place: SE, up_mbit_per_s: 9, "
        "down_mbit_per_s: 9, reliability: 0.9, duration_days_max: 3, rollouts_per_s: 1.5, rollouts_source: measured, "
        "gpu_usd_per_hour: 0.2, storage_usd_per_hour: 0}}\n",
        i, i);
  const auto list = parsed(yaml);
  ASSERT_TRUE(list) << list.error().message().substr(0, 300);
  EXPECT_EQ(list->format, "own");
  EXPECT_EQ(list->offers.size(), 6000u);
  EXPECT_EQ(list->offers.back().rollouts_per_s, 1.5);
  EXPECT_THAT(problems(yaml + "  - {id: bad, provider: local, gpu: L4, gpu_usd_per_hour: .nan}\n"),
              HasSubstr("market:6003:"));
  EXPECT_THAT(problems(kReply, {.format = "own"}), HasSubstr("market:1:"));
  EXPECT_THAT(problems(kReply, {.format = "skypilot"}), HasSubstr("column"));
}

TEST(Formats, MutatedFilesAreReadOrRefused) {
  Random random(77);
  const std::string own = *read_file("configs/offers/quickstart.json");
  const std::string profile = *read_file("configs/profiles/gpus.yaml");
  const std::string gcp = *read_file("tests/provisioner/catalogues/gcp/vms.csv");
  for (const std::string& original : {std::string(kReply), std::string(kCatalogue), gcp, own, profile}) {
    for (int round = 0; round < 150; ++round) {
      std::string text = original.substr(0, 4000);
      for (std::uint64_t k = random.below(6); k > 0; --k) {
        const std::size_t at = random.below(text.size());
        switch (random.below(4)) {
          case 0:
            text[at] = static_cast<char>(random.below(256));
            break;
          case 1:
            text.erase(at, random.below(40));
            break;
          case 2:
            text.insert(at, text.substr(random.below(text.size()), random.below(60)));
            break;
          default:
            text.insert(at, std::array{"-", "1e999", "null", "\"", "[", "{", "}", "\n", ","}[random.below(9)]);
        }
        if (text.empty()) text = "x";
      }
      test::fuzz_input(text);
    }
  }
}

// --- throughput ---

constexpr const char* kSmallProfile = R"(schema_version: 2
uncertainty: {measured: 0.3, beyond: 0.6}
sources: {here: a laboratory, there: another}
dlperf: {gpu: A, dlperf: 10, uncertainty: 0.5, source: an offer}
gpus:
  - names: [A, RTX 4090]
    measured: [{billions: 1, tokens_per_s: 4000, source: here}, {billions: 4, tokens_per_s: 1000, source: there}]
  - names: [B]
    measured: [{billions: 1, tokens_per_s: 800, source: here}, {billions: 4, tokens_per_s: 200, source: here}]
)";

ThroughputProfile small_profile() {
  auto profile = ThroughputProfile::parse(kSmallProfile, "profile");
  EXPECT_TRUE(profile) << profile.error().message();
  return std::move(*profile);
}

// Every figure has a source and an uncertainty, which is larger for a model of a size that was not measured.
TEST(Throughput, AProfileIsReadBetweenItsSizesAndCarefullyBeyond) {
  const ThroughputProfile p = small_profile();
  const auto expect = [](const std::optional<TokenRate>& rate, double tokens, double uncertainty,
                         const std::string& from) {
    ASSERT_TRUE(rate);
    EXPECT_NEAR(rate->tokens_per_s, tokens, 1e-6);
    EXPECT_EQ(rate->uncertainty, uncertainty);
    EXPECT_EQ(rate->from, from);
  };
  expect(p.engine_rate("NVIDIA GeForce RTX_4090", {1e9, 100}), 4000, 0.3, "a laboratory");
  expect(p.engine_rate("a", {2e9, 100}), 2000, 0.3, "another");
  expect(p.engine_rate("a", {4.8e9, 100}), 1000 / 1.2, 0.3, "another");
  expect(p.engine_rate("a", {8e9, 100}), 500, 0.6, "another");
  expect(p.engine_rate("a", {1e6, 100}), 4000, 0.6, "a laboratory");
  EXPECT_FALSE(p.engine_rate("C", {1e9, 100}));
  expect(p.engine_rate_at_dlperf(5, {1e9, 100}), 2000, 0.5, "A x 5/10 by dlperf (a laboratory)");
  expect(p.engine_rate_at_dlperf(5, {1e6, 100}), 2000, 0.6, "A x 5/10 by dlperf (a laboratory)");
  const auto broken = [](const std::string& from, const std::string& to) {
    std::string text = kSmallProfile;
    text.replace(text.find(from), from.size(), to);
    const auto profile = ThroughputProfile::parse(text, "profile");
    EXPECT_FALSE(profile) << text;
    return profile ? "" : profile.error().detail;
  };
  EXPECT_THAT(broken("source: there", "source: nowhere"), HasSubstr("expected one of `sources`"));
  EXPECT_THAT(broken("tokens_per_s: 1000, source: there", "tokens_per_s: 1000"), HasSubstr("missing required key"));
  EXPECT_THAT(broken("billions: 4", "billions: 1"), HasSubstr("expected figures for rising sizes"));
  EXPECT_THAT(broken("tokens_per_s: 800", "tokens_per_s: 0"), HasSubstr("found '0'"));
  EXPECT_THAT(broken("[A, RTX 4090]", "[A, a]"), HasSubstr("'a' is already described"));
  EXPECT_THAT(broken("gpu: A", "gpu: Z"), HasSubstr("expected a GPU that the profile describes"));
  EXPECT_THAT(broken("beyond: 0.6", "beyond: 1"), HasSubstr("found '1'"));
}

TEST(Throughput, MeasuredBeforeProfileBeforeDlperfAndOtherwiseUnknown) {
  const ThroughputProfile p = small_profile();
  const Workload work{1e9, 100};
  std::vector<Offer> offers(6);
  for (Offer& o : offers) o.provider = "vast";
  offers[0].gpu = "A";  // 4000 / 100, by measurement 20 % less
  offers[0].host = "liar";
  offers[1].gpu = "A";
  offers[1].gpu_count = 2;
  offers[2].gpu = "C";
  offers[2].dlperf = 20;
  offers[3].gpu = "C";
  offers[4].gpu = "B";  // three hosts with one have done half of what was said
  offers[4].dlperf = 1000;
  offers[5].gpu = "A";
  offers[5].rollouts_per_s = 7;
  offers[5].rollouts_source = RateSource::kProfile;
  std::vector<MeasuredRate> measured{{"r2", "vast", "liar", "A", 1, 10, 8},
                                     {"r1", "vast", "liar", "A", 1, 10, 2},
                                     {"r1", "vast", "m", "A", 1, 1, 1e6}};
  for (const char* host : {"1", "2", "3"}) measured.push_back({"r1", "vast", host, "b", 1, 10, 5});
  predict_throughput(offers, work, &p, measured);
  const auto expect = [&](std::size_t i, double rate, RateSource source) {
    EXPECT_NEAR(offers[i].rollouts_per_s, rate, 1e-9) << i;
    EXPECT_EQ(offers[i].rollouts_source, source) << i;
  };
  expect(0, 32, RateSource::kMeasured);  // the newest counts
  expect(1, 80, RateSource::kProfile);
  expect(2, 80, RateSource::kDlperf);
  expect(3, 0, RateSource::kUnknown);
  expect(4, 4, RateSource::kMeasured);
  expect(5, 7, RateSource::kProfile);
  EXPECT_EQ(offers[0].uncertainty(), 0.10);
  EXPECT_EQ(offers[0].rollouts_from, "the result of this host in the run r2");
  EXPECT_EQ(offers[1].uncertainty(), 0.3);
  EXPECT_EQ(offers[1].rollouts_from, "a laboratory");
  EXPECT_EQ(offers[2].uncertainty(), 0.5);
  EXPECT_EQ(offers[4].uncertainty(), 0.10);  // all three did the same
  EXPECT_EQ(offers[4].rollouts_from, "the results of 3 hosts with this GPU in earlier runs");
  EXPECT_EQ(offers[5].uncertainty(), usual_uncertainty(RateSource::kProfile));
  std::vector<Offer> local(1, offers[0]);
  local[0].provider = "local";
  local[0].rollouts_per_s = 7;
  measured.push_back({"r1", "local", "liar", "A", 1, 10, 5});
  predict_throughput(local, work, nullptr, measured);
  EXPECT_EQ(local[0].rollouts_per_s, 7);
}

// The plan pays for the engines that a worker starts.
TEST(Throughput, CountsTheGpusThatEnginesUse) {
  const ThroughputProfile p = small_profile();
  const auto predict = [&](const WorkerEngines& engines, int gpu_count, double dlperf = 0) {
    std::vector<Offer> offers(1);
    offers[0].provider = "vast";
    offers[0].gpu = dlperf > 0 ? "C" : "A";
    offers[0].gpu_count = gpu_count;
    if (dlperf > 0) offers[0].dlperf = dlperf;
    predict_throughput(offers, {.parameters = 1e9, .tokens_per_rollout = 100, .engines = engines}, &p, {});
    return offers[0];
  };
  EXPECT_EQ(predict({}, 8).rollouts_per_s, 8 * 40);
  EXPECT_EQ(predict({}, 8).engines_note, "");
  const Offer floor = predict({.gpus_per_engine = 2}, 7);
  EXPECT_EQ(floor.rollouts_per_s, 6 * 40);
  EXPECT_EQ(floor.engines_note, "6 of its 7 GPUs compute: 3 engines of 2 (worker.engines, worker.gpus_per_engine)");
  EXPECT_EQ(predict({.gpus_per_engine = 4}, 8).rollouts_per_s, 8 * 40);
  EXPECT_EQ(predict({.gpus_per_engine = 2, .count = 1}, 8).rollouts_per_s, 2 * 40);
  EXPECT_EQ(predict({.gpus_per_engine = 2}, 8, 80).rollouts_per_s, 320) << "the benchmark is of all GPUs";
  EXPECT_EQ(predict({.count = 1}, 8, 80).rollouts_per_s, 40);
  for (const WorkerEngines& engines : {WorkerEngines{.gpus_per_engine = 4}, WorkerEngines{.count = 3}}) {
    const Offer unfit = predict(engines, 2);
    EXPECT_EQ(unfit.rollouts_per_s, 0);
    EXPECT_THAT(unfit.unfit, HasSubstr("2 GPUs, and the run wants "));
    PlanRequest request;
    request.fleet.provider = "vast";
    request.fleet.assume.up = request.fleet.assume.down = BitRate{1e9};
    EXPECT_EQ(ineligibility_reason(request, unfit), unfit.unfit);
  }
  const WorkerEngines built_in{.name = "builtin", .count = 1};
  const Offer one = predict(built_in, 8);
  EXPECT_EQ(one.rollouts_per_s, 40);
  EXPECT_EQ(one.engines_note, "1 of its 8 GPUs computes: the built-in engine uses one");
  EXPECT_EQ(one.uncertainty(), 0.6) << "the figure is of another engine";
  EXPECT_EQ(one.rollouts_from, "a laboratory; of vllm, as the profile has no figure of builtin");
}

TEST(Throughput, MeasurementsOfOtherEnginesCorrectNothing) {
  const ThroughputProfile p = small_profile();
  const auto rate_after = [&](const std::string& measured_engine, int gpu_count, const WorkerEngines& engines) {
    std::vector<Offer> offers(1);
    offers[0].provider = "vast";
    offers[0].gpu = "A";
    offers[0].host = "h";
    const std::vector<MeasuredRate> measured{{"r1", "vast", "h", "A", gpu_count, 10, 5, measured_engine}};
    predict_throughput(offers, {1e9, 100, engines}, &p, measured);
    EXPECT_EQ(offers[0].engine, engines.text());
    return offers[0].rollouts_per_s;
  };
  const WorkerEngines built_in{.name = "builtin", .count = 1};
  EXPECT_EQ(rate_after("vllm", 1, {}), 20);
  EXPECT_EQ(rate_after("vllm", 8, {}), 20);
  EXPECT_EQ(rate_after("builtin on a CPU", 1, {}), 40);
  EXPECT_EQ(rate_after("vllm", 1, built_in), 40);
  EXPECT_EQ(rate_after("builtin", 1, built_in), 20);
  EXPECT_EQ(rate_after("", 1, {}), 20) << "of an earlier version";
  EXPECT_EQ(rate_after("", 8, {}), 40) << "which promised eight GPUs, and used one";
}

// The figures of GPUs say nothing about a CPU.
TEST(Throughput, AnEngineOnACpuIsNotPricedAsOneOnAGpu) {
  const WorkerEngines on_cpu{.name = "builtin", .on_cpu = true, .count = 1};
  std::vector<Offer> offers(2);
  for (Offer& o : offers) o.provider = "vast", o.gpu = "A", o.gpu_count = 4, o.dlperf = 9;
  offers[1].rollouts_per_s = 3;
  offers[1].rollouts_source = RateSource::kMeasured;
  const ThroughputProfile without_cpu = small_profile();
  predict_throughput(offers, {1e9, 100, on_cpu}, &without_cpu, {});
  EXPECT_EQ(offers[0].rollouts_per_s, 0);
  EXPECT_EQ(offers[0].engines_note, "the built-in engine computes on its CPU (worker.device)");
  EXPECT_EQ(offers[1].rollouts_per_s, 3) << "its own figure";
  const auto with_cpu = ThroughputProfile::parse(std::string(kSmallProfile) + R"(
  - names: [CPU]
    engine: builtin
    measured: [{billions: 0.001, tokens_per_s: 1000, source: here}, {billions: 1, tokens_per_s: 10, source: here}]
)",
                                                 "profile");
  ASSERT_TRUE(with_cpu) << with_cpu.error().message();
  predict_throughput(offers, {1e9, 100, on_cpu}, &*with_cpu, {});
  EXPECT_DOUBLE_EQ(offers[0].rollouts_per_s, 0.1) << "whatever its GPUs are";
  const auto shipped = ThroughputProfile::load("configs/profiles/gpus.yaml");
  ASSERT_TRUE(shipped) << shipped.error().message();
  EXPECT_LT(shipped->engine_rate(ThroughputProfile::kCpu, {8.2e9, 300, on_cpu})->tokens_per_s, 20);
  EXPECT_GT(shipped->engine_rate("H100", {8.2e9, 300})->tokens_per_s, 2000);
  EXPECT_FALSE(shipped->engine_rate(ThroughputProfile::kCpu, {8.2e9, 300})) << "vLLM has no such figure";
}

ThroughputProfile shipped_profile() {
  auto profile = ThroughputProfile::load("configs/profiles/gpus.yaml");
  EXPECT_TRUE(profile) << profile.error().message();
  return std::move(*profile);
}

TEST(Throughput, TheBuiltInProfileDescribesTheGpusOfMarkets) {
  const ThroughputProfile profile = shipped_profile();
  for (const char* gpu : {"RTX 3090", "RTX 4090", "RTX 5090", "A40", "RTX A6000", "A100 SXM4", "H100 PCIE", "H100 SXM",
                          "H200", "L4", "L40S", "RTX 6000Ada", "RTX PRO 6000 WS", "B200"}) {
    double last = 1e9;
    for (const double billions : {0.6, 1.7, 8.0, 14.0, 32.0}) {
      const auto rate = profile.engine_rate(gpu, {billions * 1e9, 300});
      ASSERT_TRUE(rate) << gpu;
      EXPECT_LT(rate->tokens_per_s, last) << gpu;
      EXPECT_GE(rate->uncertainty, 0.4);
      EXPECT_THAT(rate->from, HasSubstr("data sheet"));
      last = rate->tokens_per_s;
    }
  }
  EXPECT_FALSE(profile.engine_rate("Tesla T4", {8e9, 300})) << "has no bf16";
  EXPECT_EQ(profile.engine_rate_at_dlperf(30, {8e9, 300})->uncertainty, 0.5);
  const auto rate = [&](const char* gpu) { return profile.engine_rate(gpu, {8e9, 500})->tokens_per_s; };
  EXPECT_GT(rate("RTX PRO 6000 WS"), rate("RTX A6000"));
  EXPECT_GT(rate("L40S"), 2 * rate("L4"));
  EXPECT_GT(rate("B200"), rate("H200"));
}

// The differences that configs/profiles/gpus.yaml and docs/explanation/throughput.md state.
TEST(Throughput, ComputedRatesDifferFromPublishedOnesAsStated) {
  const ThroughputProfile profile = shipped_profile();
  std::vector<double> differences;
  for (const auto& [name, gpu] : profile.gpus()) {
    if (!gpu.data || name.second != ThroughputProfile::kVllm || name.first == "a6000" || name.first == "rtxpro6000s" ||
        name.first == "h100" || name.first == "a10080gb" || name.first == "h200sxm")
      continue;  // a second name of a GPU
    for (const ThroughputProfile::Figure& figure : gpu.figures) {
      const double computed = engine_tokens_per_s(*gpu.data, figure.load, profile.shares().at(name.second));
      differences.push_back(std::expm1(std::abs(std::log(figure.tokens_per_s / computed))));
    }
  }
  ASSERT_EQ(differences.size(), 26u);
  std::sort(differences.begin(), differences.end());
  EXPECT_NEAR(differences[13], 0.175, 0.005);
  EXPECT_NEAR(differences[20], 0.37, 0.005);
  EXPECT_NEAR(differences[25], 0.645, 0.005);
}

// By hand: 2 GB of weights take 2 ms at 1 TB/s, and 100 sequences of 0.5 MB 0.05 ms. Their 200e9 operations take 1 ms,
// and the step has 1 ms more.
TEST(Throughput, AStepReadsWeightsAndCacheAndMultipliesThem) {
  const GpuData gpu{.memory_bytes = 40e9, .bytes_per_s = 1e12, .flops = 200e12};
  const EngineShares shares{.bandwidth = 1, .compute = 1, .step_overhead = std::chrono::milliseconds(1)};
  EngineLoad load{.parameters = 1e9, .kv_bytes_per_token = 1e4, .response_tokens = 100, .sequences_max = 100};
  EXPECT_NEAR(engine_tokens_per_s(gpu, load, shares), 100 / 0.00405, 1e-3);
  EXPECT_NEAR(engine_tokens_per_s(gpu.times(2), load, shares), 100 / 0.002525, 1e-3);
  load.prompt_tokens = 100;  // as many operations again, and 0.1 ms more of reading
  EXPECT_NEAR(engine_tokens_per_s(gpu, load, shares), 100 / 0.00515, 1e-3);
  load.kv_bytes_per_token = 1e7;  // 1.5 GB a sequence, of 32 GB
  EXPECT_NEAR(sequences_in_memory(gpu, load), 32 / 1.5, 1e-9);
  load.parameters = 30e9;
  EXPECT_EQ(sequences_in_memory(gpu, load), 1) << "the plan leaves such machines out, by their memory";
}

TEST(Throughput, PublishedFiguresCorrectTheComputedRate) {
  const std::string text = R"(schema_version: 2
uncertainty: {measured: 0.3, beyond: 0.6}
engine_shares: {vllm: {bandwidth: 1, compute: 1, step_overhead: 0 s},
                builtin: {bandwidth: 0.5, compute: 0.5, step_overhead: 0 s}}
sources: {here: a laboratory}
gpus:
  - {names: [A], memory_gb: 20, bandwidth_gb_per_s: 1000, tflops: 100}
  - names: [B]
    memory_gb: 20
    bandwidth_gb_per_s: 1000
    tflops: 100
    measured: [{billions: 1, kv_kib_per_token: 1, at_once: 100, prompt_tokens: 0, response_tokens: 100,
                tokens_per_s: 12500, source: here}]
)";
  const auto profile = ThroughputProfile::parse(text, "profile");
  ASSERT_TRUE(profile) << profile.error().message();
  Workload work{.parameters = 1e9, .tokens_per_rollout = 100, .kv_bytes_per_token = 1024, .sequences_at_once_max = 100};
  const auto computed = profile->engine_rate("A", work), corrected = profile->engine_rate("B", work);
  ASSERT_TRUE(computed && corrected);
  EXPECT_EQ(computed->uncertainty, 0.6);
  EXPECT_EQ(corrected->uncertainty, 0.3);
  // About half of the computed rate was measured. The computed one counts as much as one measurement.
  EXPECT_NEAR(corrected->tokens_per_s, std::sqrt(12500 * computed->tokens_per_s), 1);
  work.engines.gpus_per_engine = 2;
  EXPECT_GT(profile->engine_rate("A", work)->tokens_per_s, 1.9 * computed->tokens_per_s);
  const auto builtin = profile->engine_rate("B", {1e9, 100, {.name = "builtin"}, 1024, 100});
  ASSERT_TRUE(builtin);
  EXPECT_NEAR(builtin->tokens_per_s, computed->tokens_per_s / 2, 1) << "by its own shares; the figure is of vLLM";
  EXPECT_EQ(builtin->uncertainty, 0.6);
  const auto without = [&](const std::string& part) {
    std::string broken = text;
    broken.erase(broken.find(part), part.size());
    const auto read = ThroughputProfile::parse(broken, "profile");
    EXPECT_FALSE(read) << part;
    return read ? "" : read.error().detail;
  };
  EXPECT_THAT(without("vllm: {bandwidth: 1, compute: 1, step_overhead: 0 s},"),
              HasSubstr("expected this engine in the file's engine_shares"));
  EXPECT_THAT(without("at_once: 100, "), HasSubstr("at_once"));
  EXPECT_THAT(without("memory_gb: 20, "), HasSubstr("memory_gb"));
}

}  // namespace
}  // namespace echoline::provisioner
