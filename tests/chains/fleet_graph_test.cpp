// The graph check finds every way in which a topology can fail to deliver.
#include "chains/fleet_graph.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::chains {
namespace {

using testing::HasSubstr;

WorkerId id(std::uint64_t v) { return WorkerId{v}; }

std::string defect(const Topology& topology, std::vector<WorkerId> workers) {
  const Status status = validate(topology, workers);
  return status ? "" : status.error().detail;
}

TEST(Validate, AcceptsTreesAndTheEmptyFleet) {
  EXPECT_EQ(defect({}, {}), "");
  Topology topology;
  topology.chains = {{id(1), id(2)}, {id(3)}};
  EXPECT_EQ(defect(topology, {id(3), id(2), id(1)}), "");
  topology.policy = TopologyPolicy::kTrees;
  topology.grafts = {{{id(3), id(1)}}};  // two children are a tree too
  EXPECT_EQ(defect(topology, {id(1), id(2), id(3)}), "");
}

TEST(Validate, NamesEveryDefect) {
  Topology topology;
  topology.chains = {{id(1), id(2)}, {id(3)}};
  const std::vector<WorkerId> all{id(1), id(2), id(3)};
  EXPECT_THAT(defect(topology, {id(1), id(2), id(3), id(4)}), HasSubstr("worker 4 has no parent"));
  EXPECT_THAT(defect(topology, {id(1), id(2)}), HasSubstr("worker 3 is not a worker"));
  EXPECT_THAT(defect(topology, {id(1), id(2), id(3), id(3)}), HasSubstr("listed twice"));
  topology.leaves_only = {id(2)};
  EXPECT_EQ(defect(topology, all), "");
  topology.leaves_only = {id(1)};
  EXPECT_THAT(defect(topology, all), HasSubstr("may not forward but feeds worker 2"));
  topology.leaves_only = {};
  topology.grafts = {{{id(3), id(1)}}};
  EXPECT_THAT(defect(topology, all), HasSubstr("worker 1 has two children"));
  topology.grafts = {{{id(1), id(3)}, {id(3), id(2)}}};  // a cycle
  EXPECT_THAT(defect(topology, all),
              HasSubstr("the chain of worker 1 is attached to worker 3, which does not come before it"));
  topology.grafts = {{{id(1), id(9)}}};
  EXPECT_THAT(defect(topology, all), HasSubstr("is attached to worker 9"));
  topology.grafts = {};
  topology.chains = {{id(1), id(0)}};
  EXPECT_THAT(defect(topology, {id(1)}), HasSubstr("the learner is not a worker"));
  topology.chains = {{id(1)}, {}};
  EXPECT_THAT(defect(topology, {id(1)}), HasSubstr("empty"));
  topology.chains = {{id(1), id(2)}, {id(2)}};
  EXPECT_THAT(defect(topology, {id(1), id(2)}), HasSubstr("worker 2 has 2 parents"));
  topology.chains = {{id(1), id(1)}};
  EXPECT_THAT(defect(topology, {id(1)}), HasSubstr("worker 1 has 2 parents"));
}

TEST(ToDot, DrawsSendersAndReceivers) {
  Topology topology;
  topology.policy = TopologyPolicy::kTrees;
  topology.chains = {{id(1), id(2)}, {id(3)}};
  topology.further_stripes = {{{id(1), id(2), id(3)}}};
  topology.leaves_only = {id(3)};
  topology.grafts.resize(2);
  const std::string dot = to_dot(topology, [](WorkerId w) { return w == id(1) ? std::string("a \"fast\" one") : ""; });
  EXPECT_THAT(dot, HasSubstr("digraph"));
  EXPECT_THAT(dot, HasSubstr(R"(0[label=learner, shape=doubleoctagon])"));
  EXPECT_THAT(dot, HasSubstr(R"(1[label="1\na \"fast\" one"])"));
  EXPECT_THAT(dot, HasSubstr(R"(3[label=3, style=dashed])"));
  EXPECT_THAT(dot, HasSubstr(R"(0->1 [label="2/2"])"));
  EXPECT_THAT(dot, HasSubstr(R"(1->2 [label="2/2"])"));
  EXPECT_THAT(dot, HasSubstr(R"(0->3 [label="1/2"])"));
  EXPECT_THAT(dot, HasSubstr(R"(2->3 [label="1/2"])"));
}

}  // namespace
}  // namespace echoline::chains
