// The addresses where nodes listen and can be reached.
#include "overlay/uv/hosts.hpp"

#include <gtest/gtest.h>

namespace echoline::overlay {
namespace {

TEST(Hosts, AWorkerListensAtAReachableAddressAndReportsIfItHasNone) {
  const auto listening = [](const std::string& given_host, bool advertised, const std::string& learner) {
    const Listening result = listening_for(given_host, advertised, learner);
    return result.host + (result.leaf ? ", a leaf" : "");
  };
  EXPECT_EQ(listening("", false, "127.0.0.1"), "127.0.0.1") << "the learner's other workers are on this host, too";
  EXPECT_EQ(listening("", false, "localhost"), "127.0.0.1");
  EXPECT_EQ(listening("", false, "::1"), "127.0.0.1");
  EXPECT_EQ(listening("", false, "192.0.2.7"), "127.0.0.1, a leaf");
  EXPECT_EQ(listening("", false, "learner.example"), "127.0.0.1, a leaf");
  EXPECT_EQ(listening("", true, "192.0.2.7"), "::") << "its reachable address is given";
  EXPECT_EQ(listening("", true, "2001:db8::7"), "::");
  EXPECT_EQ(listening("::1", true, "192.0.2.7"), "::1, a leaf");
  EXPECT_EQ(listening("localhost", false, "192.0.2.7"), "localhost, a leaf");
  EXPECT_EQ(listening("10.0.0.5", false, "192.0.2.7"), "10.0.0.5");
}

TEST(Hosts, NamesAndAddressesOfBothKinds) {
  EXPECT_EQ(*resolve("192.0.2.7"), "192.0.2.7");
  EXPECT_EQ(*resolve("2001:db8::7"), "2001:db8::7");
  const auto local = resolve("localhost");
  ASSERT_TRUE(local.has_value()) << local.error().message();
  EXPECT_TRUE(*local == "127.0.0.1" || *local == "::1") << *local;
  EXPECT_EQ(network_of("2001:db8::7"), "2001:db8::");
  EXPECT_EQ(network_of("192.0.2.7"), "192.0.2.7");
  EXPECT_EQ(local_endpoint_of({"::", 7}), (Endpoint{"127.0.0.1", 7}));
  EXPECT_EQ(remote_endpoints_of({"192.0.2.7", 7}), (std::vector{Endpoint{"192.0.2.7", 7}}));
  EXPECT_EQ(to_text(Endpoint{"2001:db8::7", 7}), "[2001:db8::7]:7");
}

}  // namespace
}  // namespace echoline::overlay
