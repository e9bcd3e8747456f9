// A live search of a market, against a server on loopback.
#include "provisioner/providers/vast_search.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <nlohmann/json.hpp>
#include <thread>

namespace echoline::provisioner {
namespace {

using testing::HasSubstr;

class Market {
 public:
  Market() {
    server_.Post("/api/v0/bundles/", [this](const httplib::Request& request, httplib::Response& answer) {
      bodies.push_back(request.body);
      authorised = authorised || request.has_header("Authorization");
      if (busy-- > 0) {
        answer.status = 429;
        answer.set_content("Too many requests", "text/plain");
        return;
      }
      answer.status = status;
      answer.set_content(reply, "application/json");
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  ~Market() {
    server_.stop();
    thread_.join();
  }
  VastSearch search() const {
    VastSearch s;
    s.url = fmt::format("http://127.0.0.1:{}/", port_);
    s.disk = Bytes{40'000'000'000};
    s.timeout = std::chrono::seconds(10);
    s.pause = std::chrono::milliseconds(1);
    return s;
  }
  std::vector<std::string> bodies;
  bool authorised = false;
  int busy = 0, status = 200;
  std::string reply = R"({"offers": [{"id": 5, "gpu_name": "RTX 4090", "dph_base": 0.3, "storage_cost": 0.18}]})";

 private:
  httplib::Server server_;
  std::thread thread_;
  int port_ = 0;
};

TEST(VastSearch, AsksForRentableOffersAndWaitsAsTheServiceAsks) {
  Market market;
  market.busy = 2;
  PlanRequest request;
  request.fleet.provider = "none";  // of any
  request.fleet.pricing = Pricing::kBid;
  request.fleet.reliability_min = 0.98;
  request.gpu_memory_min = Bytes{20'000'000'000};
  const auto reply = search_vast(market.search(), request);
  ASSERT_TRUE(reply) << reply.error().message();
  const auto list = parse_offers(*reply, "vast.ai", {.disk = Bytes{40'000'000'000}});
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_NEAR(*list->offers.front().storage_usd_per_hour, 40 * 0.18 / 720, 1e-12);
  ASSERT_EQ(market.bodies.size(), 3u);
  EXPECT_FALSE(market.authorised);
  const auto asked = nlohmann::json::parse(market.bodies.back());
  EXPECT_EQ(asked["type"], "bid");
  EXPECT_EQ(asked["reliability"]["gte"], 0.98);
  EXPECT_EQ(asked["gpu_ram"]["gte"], 20'000);
  EXPECT_EQ(asked["allocated_storage"], 40);
  EXPECT_EQ(asked["rentable"]["eq"], true);
  EXPECT_EQ(asked["order"][0][0], "dlperf_per_dphtotal");
}

TEST(VastSearch, ConditionsHaveTheServicesNamesAndUnits) {
  PlanRequest request;
  OfferConditions& where = request.fleet.where;
  where.gpus = {"RTX 4090", "RTX 5090"};
  where.gpu_count_min = 1;
  where.gpu_count_max = 2;
  where.verified = where.datacenter = true;
  where.open_ports_min = 2;
  where.compute_capability_min = 8.9;
  where.down_min = BitRate::from_mbit_per_s(500);
  where.upload_usd_per_gb_max = 0.005;
  where.download_usd_per_gb_max = 0.002;
  request.cuda_min = 12.8;
  request.fleet.disk = Bytes{40'000'000'000};
  const auto body = nlohmann::json::parse(vast_search_body({.disk = request.fleet.disk}, request));
  EXPECT_EQ(body["gpu_name"], nlohmann::json::parse(R"({"in": ["RTX 4090", "RTX 5090"]})"));
  EXPECT_EQ(body["num_gpus"], nlohmann::json::parse(R"({"gte": 1, "lte": 2})"));
  EXPECT_EQ(body["verified"]["eq"], true);
  EXPECT_EQ(body["datacenter"]["eq"], true);
  EXPECT_EQ(body["direct_port_count"]["gte"], 2);
  EXPECT_EQ(body["cuda_max_good"]["gte"], 12.8);
  EXPECT_EQ(body["compute_cap"]["gte"], 890);
  EXPECT_EQ(body["inet_down"]["gte"], 500);
  EXPECT_EQ(body["inet_up_cost"]["lte"], 0.005);
  EXPECT_EQ(body["inet_down_cost"]["lte"], 0.002);
  EXPECT_EQ(body["disk_space"]["gte"], 40);
  EXPECT_FALSE(body.contains("geolocation"));
}

TEST(VastSearch, OnlyCodesOfCountriesAreSearched) {
  PlanRequest request;
  request.fleet.places = {"SE", "US"};
  EXPECT_EQ(nlohmann::json::parse(vast_search_body({}, request))["geolocation"],
            nlohmann::json::parse(R"({"in": ["SE", "US"]})"));
  request.fleet.places = {"SE", "Ohio"};  // the plan finds Ohio among all offers
  EXPECT_FALSE(nlohmann::json::parse(vast_search_body({}, request)).contains("geolocation"));
}

// An offer of a quarter of a machine with 128 GB of memory, as the service describes it.
TEST(VastSearch, TheReplysFieldsMeetOrMissTheConditions) {
  const std::string reply = R"({"offers": [{"id": 5, "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_frac": 0.25,
    "gpu_ram": 24564, "cpu_ram": 128840, "disk_space": 300.5, "cuda_max_good": 12.4, "compute_cap": 890,
    "direct_port_count": 98, "hosting_type": 0, "verification": "verified", "inet_up": 400, "inet_down": 900,
    "inet_up_cost": 0.005, "inet_down_cost": null, "internet_down_cost_per_tb": 2, "dph_base": 0.3,
    "storage_cost": 0.18, "dlperf": 80, "duration": 2e6}]})";
  const auto list = parse_offers(reply, "vast.ai", {.disk = Bytes{40'000'000'000}});
  ASSERT_TRUE(list) << list.error().message();
  Offer offer = list->offers.front();
  offer.rollouts_per_s = 3;
  EXPECT_NEAR(*offer.memory_gb, 32.21, 0.01);
  EXPECT_EQ(offer.disk_gb, 300.5);
  EXPECT_EQ(offer.cuda_max, 12.4);
  EXPECT_EQ(offer.compute_capability, 8.9);
  EXPECT_EQ(offer.open_ports, 98);
  EXPECT_EQ(offer.verified, true);
  EXPECT_EQ(offer.datacenter, false);
  PlanRequest fits;
  fits.fleet.provider = "vast";
  fits.pace = {100, 1, std::chrono::seconds(10)};
  OfferConditions& where = fits.fleet.where;
  where.gpus = {"NVIDIA GeForce RTX 4090"};
  where.gpu_count_max = 1;
  where.verified = true;
  where.open_ports_min = 98;
  where.compute_capability_min = 8.9;
  where.memory_min = Bytes{32'000'000'000};
  fits.cuda_min = 12.4;
  fits.host_memory_min = Bytes{32'000'000'000};
  EXPECT_EQ(ineligibility_reason(fits, offer), std::nullopt);
  const auto reason_with = [&](const std::function<void(PlanRequest&)>& change) {
    PlanRequest request = fits;
    change(request);
    return ineligibility_reason(request, offer).value_or("none");
  };
  EXPECT_EQ(reason_with([](PlanRequest& r) { r.cuda_min = 12.8; }), "its driver supports CUDA 12.4, 12.8 needed");
  EXPECT_EQ(reason_with([](PlanRequest& r) { r.fleet.where.datacenter = true; }), "not in a data centre");
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.gpus = {"RTX 5090"}; }), HasSubstr("fleet.where.gpus"));
  EXPECT_THAT(reason_with([](PlanRequest& r) {
                r.fleet.where.gpu_count_min = 2;
                r.fleet.where.gpu_count_max = 4;
              }),
              HasSubstr("1 GPUs"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.open_ports_min = 99; }), HasSubstr("98 open ports"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.compute_capability_min = 9; }),
              HasSubstr("compute capability 8.9"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.memory_min = Bytes{33'000'000'000}; }),
              HasSubstr("32.2 GB of host memory"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.host_memory_min = Bytes{33'000'000'000}; }),
              HasSubstr("needed for the policy"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.disk = Bytes{301'000'000'000}; }), HasSubstr("fleet.disk"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.down_min = BitRate{1e9}; }), HasSubstr("downlink 900"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.upload_usd_per_gb_max = 0.004; }),
              HasSubstr("outgoing traffic"));
  EXPECT_THAT(reason_with([](PlanRequest& r) { r.fleet.where.download_usd_per_gb_max = 0.001; }),
              HasSubstr("incoming traffic"));
  // An unstated value meets no condition. The version in an image's name is no condition: it leaves out only machines
  // that state an older one.
  offer.open_ports.reset();
  offer.cuda_max.reset();
  EXPECT_THAT(reason_with([](PlanRequest&) {}), HasSubstr("open ports not stated"));
  EXPECT_EQ(reason_with([](PlanRequest& r) { r.fleet.where.open_ports_min.reset(); }), "none");
  EXPECT_THAT(reason_with([](PlanRequest& r) {
                r.fleet.where.open_ports_min.reset();
                r.fleet.where.cuda_min = 12.4;
              }),
              HasSubstr("CUDA version not stated"));
}

TEST(VastSearch, AnImagesNameStatesItsCudaVersion) {
  const auto needed = [](const char* image) {
    FleetSettings fleet;
    fleet.image = image;
    return fleet.cuda_needed().value_or(0);
  };
  EXPECT_EQ(needed("nvidia/cuda:12.8.1-cudnn-devel-ubuntu22.04"), 12.8);
  EXPECT_EQ(needed("lmsysorg/sglang:v0.5.3-cu129"), 12.9);
  EXPECT_EQ(needed("pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime"), 13.0);
  EXPECT_EQ(needed("vllm/vllm-openai:v0.32.0"), 0);
  EXPECT_EQ(needed("cuckoo/curl:8"), 0);
  FleetSettings fleet;
  fleet.image = "nvidia/cuda:12.8.1";
  fleet.where.cuda_min = 13.0;  // of a program in the image
  EXPECT_EQ(fleet.cuda_needed(), 13.0);
}

TEST(VastSearch, SaysWhyThereIsNoAnswer) {
  Market market;
  market.busy = 9;
  EXPECT_THAT(search_vast(market.search(), {}).error().detail, HasSubstr("HTTP 429: Too many requests"));
  EXPECT_EQ(market.bodies.size(), 3u);
  market.busy = 0;
  market.status = 400;
  market.reply = "{\"error\": \"invalid_args\"}";
  EXPECT_THAT(search_vast(market.search(), {}).error().detail, HasSubstr("invalid_args"));
  EXPECT_EQ(market.bodies.size(), 4u);  // it would be no other
  VastSearch nobody = market.search();
  nobody.url = "http://127.0.0.1:1";
  const auto none = search_vast(nobody, {});
  EXPECT_EQ(none.error().code, Code::kUnavailable);
  EXPECT_THAT(none.error().detail, HasSubstr("recorded reply"));
}

}  // namespace
}  // namespace echoline::provisioner
