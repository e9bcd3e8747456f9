// The graph check finds every way in which a topology can fail to deliver.
#include "chains/fleet_graph.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::chains {
namespace {

using testing::HasSubstr;

WorkerId id(std::uint64_t v) { return WorkerId{v}; }
Edge edge(std::uint64_t from, std::uint64_t to) { return {id(from), id(to)}; }

std::string defect(const std::vector<Edge>& edges, std::vector<WorkerId> workers) {
  const Status status = validate_tree(edges, workers);
  return status ? "" : status.error().detail;
}

TEST(ValidateTree, AcceptsTreesAndTheEmptyFleet) {
  EXPECT_EQ(defect({}, {}), "");
  EXPECT_EQ(defect({edge(0, 1), edge(1, 2), edge(0, 3)}, {id(1), id(2), id(3)}), "");
  EXPECT_EQ(defect({edge(1, 2), edge(0, 1), edge(1, 3)}, {id(3), id(2), id(1)}), "");  // two children are a tree too
}

TEST(ValidateTree, NamesEveryDefect) {
  EXPECT_THAT(defect({edge(0, 1)}, {id(1), id(2)}), HasSubstr("worker 2 has no parent"));
  EXPECT_THAT(defect({edge(0, 1), edge(0, 2), edge(1, 2)}, {id(1), id(2)}), HasSubstr("worker 2 has 2 parents"));
  EXPECT_THAT(defect({edge(0, 1), edge(2, 3), edge(3, 2)}, {id(1), id(2), id(3)}),
              HasSubstr("worker 2 is on or behind a cycle"));
  EXPECT_THAT(defect({edge(0, 1), edge(2, 2)}, {id(1), id(2)}), HasSubstr("worker 2 is on or behind a cycle"));
  EXPECT_THAT(defect({edge(0, 1), edge(1, 0)}, {id(1)}), HasSubstr("the learner must not receive"));
  EXPECT_THAT(defect({edge(0, 1), edge(1, 9)}, {id(1)}), HasSubstr("worker 9 is not a worker"));
  EXPECT_THAT(defect({edge(0, 1)}, {id(1), id(1)}), HasSubstr("listed twice"));
}

TEST(Validate, ChecksChainsLeavesAndMembers) {
  Topology t;
  t.chains = {{id(1), id(2)}, {id(3)}};
  const std::vector<WorkerId> all{id(1), id(2), id(3)};
  EXPECT_TRUE(validate(t, all));
  t.leaves_only = {id(2)};
  EXPECT_TRUE(validate(t, all));
  t.leaves_only = {id(1)};
  EXPECT_THAT(validate(t, all).error().detail, HasSubstr("may not forward"));
  t.leaves_only = {};
  t.chains.push_back({});
  EXPECT_THAT(validate(t, all).error().detail, HasSubstr("empty"));
  t.chains = {{id(1), id(2)}, {id(2)}};
  EXPECT_THAT(validate(t, std::vector{id(1), id(2)}).error().detail, HasSubstr("2 parents"));
}

TEST(ToDot, DrawsWhoSendsToWhom) {
  Topology t;
  t.policy = TopologyPolicy::kTrees;
  t.chains = {{id(1), id(2)}, {id(3)}};
  t.further = {{{id(1), id(2), id(3)}}};
  t.leaves_only = {id(3)};
  t.grafts.resize(2);
  const std::string dot = to_dot(t, [](WorkerId w) { return w == id(1) ? std::string("a \"fast\" one") : ""; });
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
