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
