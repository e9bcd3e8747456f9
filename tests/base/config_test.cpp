// The run-file reader: positions, messages, limits, overrides, the resolved form, and the reference.
#include "base/config.hpp"

#include <gtest/gtest.h>

#include <fstream>

#include "base/config_reference.hpp"
#include "base/random.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline {
namespace {

ConfigFile parse_valid(std::string_view text) {
  auto file = ConfigFile::parse(text, "run.yaml");
  EXPECT_TRUE(file.has_value()) << (file ? "" : file.error().message());
  return std::move(file).value();
}

std::string problems(ConfigFile& file) {
  const Status status = file.finish();
  if (status) return "";
  EXPECT_EQ(status.error().code, Code::kInvalid);
  return status.error().message();
}

std::string parse_problem(std::string_view text) {
  const auto file = ConfigFile::parse(text, "run.yaml");
  return file ? "" : file.error().message();
}

TEST(Config, ReadsEveryType) {
  ConfigFile file = parse_valid(R"(
flag: true
small: -3
wide: 9_000_000_000
unsigned32: 4294967295
unsigned64: 18446744073709551615
decimal: 2.5e-3
whole_as_decimal: 7
name: hello world
quoted: "true"
wait: 1500 ms
size: 64 KiB
rate: 24 Mbit/s
path: runs/one
tags: [a, "b c", 3]
counts: [1, 2]
weights: [0.5, 1]
)");
  ConfigSection root = file.root();
  bool flag = false;
  int small = 0;
  std::int64_t wide = 0;
  std::uint32_t unsigned32 = 0;
  std::uint64_t unsigned64 = 0;
  double decimal = 0, whole_as_decimal = 0;
  std::string name, quoted;
  Duration wait{};
  Bytes size;
  BitRate rate;
  std::filesystem::path path;
  std::vector<std::string> tags;
  std::vector<std::int64_t> counts;
  std::vector<double> weights;
  root.read("flag", flag);
  root.read("small", small);
  root.read("wide", wide);
  root.read("unsigned32", unsigned32);
  root.read("unsigned64", unsigned64);
  root.read("decimal", decimal);
  root.read("whole_as_decimal", whole_as_decimal);
  root.require("name", name);
  root.read("quoted", quoted);
  root.read("wait", wait);
  root.read("size", size);
  root.read("rate", rate);
  root.read("path", path);
  root.read("tags", tags);
  root.read("counts", counts);
  root.read("weights", weights);
  EXPECT_EQ(problems(file), "");
  EXPECT_TRUE(flag);
  EXPECT_EQ(small, -3);
  EXPECT_EQ(wide, 9'000'000'000);
  EXPECT_EQ(unsigned32, 4294967295u);
  EXPECT_EQ(unsigned64, 18446744073709551615ull);
  EXPECT_EQ(decimal, 2.5e-3);
  EXPECT_EQ(whole_as_decimal, 7);
  EXPECT_EQ(name, "hello world");
  EXPECT_EQ(quoted, "true");
  EXPECT_EQ(wait, std::chrono::milliseconds(1500));
  EXPECT_EQ(size, Bytes{65536});
  EXPECT_EQ(rate.mbit_per_s(), 24);
  EXPECT_EQ(path, std::filesystem::current_path() / "runs/one");
  EXPECT_EQ(tags, (std::vector<std::string>{"a", "b c", "3"}));
  EXPECT_EQ(counts, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(weights, (std::vector<double>{0.5, 1}));
}

TEST(Config, ARateWithoutAUnitIsRefused) {
  ConfigFile file = parse_valid("learner:\n  uplink:   24\n");
  BitRate uplink{1};
  file.root().section("learner").read("uplink", uplink);
  EXPECT_EQ(problems(file),
            "run.yaml:2:13: learner.uplink: expected a rate such as '24 Mbit/s' "
            "(units: bit/s kbit/s Mbit/s Gbit/s), found '24': the unit is missing");
  EXPECT_EQ(uplink.bits_per_s, 1) << "a wrong value leaves the default";
}

TEST(Config, ReportsEveryProblemAtOnceInFileOrder) {
  ConfigFile file = parse_valid(
      "steps: many\n"
      "stalness: 4\n"
      "learner: 5\n"
      "fleet:\n"
      "  workers: 0\n"
      "  workers: 6\n"
      "  on: yes\n"
      "  planer: chains\n"
      "offers:\n"
      "  - price: 1.5\n"
      "  - price: cheap\n"
      "    extra: 1\n");
  ConfigSection root = file.root();
  double price = 0;
  for (ConfigSection offer : root.sections("offers")) offer.require("price", price);
  ConfigSection fleet = root.section("fleet");
  int workers = 4, steps = 0, staleness = 0;
  bool on = false;
  std::string planner, run;
  fleet.read("workers", workers, {.min = 1, .max = 64});
  fleet.read("on", on);
  fleet.read("planner", planner);
  root.section("learner").require("steps", steps);
  root.read("staleness", staleness);
  root.read("steps", steps);
  root.require("run", run);
  EXPECT_EQ(problems(file),
            "run.yaml:1:1: missing required key 'learner.steps'\n"
            "run.yaml:1:1: missing required key 'run'\n"
            "run.yaml:1:8: steps: expected a whole number from -2147483648 to 2147483647, found 'many'\n"
            "run.yaml:2:1: unknown key 'stalness'; did you mean 'staleness'?\n"
            "run.yaml:3:10: learner: expected a mapping, found '5'\n"
            "run.yaml:5:12: fleet.workers: expected 1 to 64, found '0'\n"
            "run.yaml:6:3: duplicate key 'workers'; it is already set in line 5\n"
            "run.yaml:7:7: fleet.on: expected true or false, found 'yes'\n"
            "run.yaml:8:3: unknown key 'fleet.planer'; did you mean 'planner'?\n"
            "run.yaml:11:12: offers[1].price: expected a number, found 'cheap'\n"
            "run.yaml:12:5: unknown key 'offers[1].extra'");
  EXPECT_EQ(workers, 4);
}

TEST(Config, WrongKindsOfValue) {
  ConfigFile file =
      parse_valid("a: [1]\nb: {c: 1}\nd: 1\ne: 1.5\nf: \"5\"\ng: 3000000000\nh: -1\ni: [x, [y]]\nj: .nan\nk: ''\n");
  ConfigSection root = file.root();
  std::string a;
  Duration b{};
  std::vector<std::string> d, i;
  int e = 0, f = 0, g = 0;
  std::uint64_t h = 0;
  double j = 0;
  std::string k;
  root.read("a", a);
  root.read("b", b);
  root.read("d", d);
  root.read("e", e);
  root.read("f", f);
  root.read("g", g);
  root.read("h", h);
  root.read("i", i);
  root.read("j", j);
  root.require("k", k);
  const std::string text = problems(file);
  for (const char* part : {"1:4: a: expected text, found a list", "2:4: b: expected a duration such as '30 s'",
                           "3:4: d: expected a list, found '1'", "4:4: e: expected a whole number",
                           "5:4: f: expected a whole number", "found the text '5'", "6:4: g: expected a whole number",
                           "7:4: h: expected a whole number from 0 to", "8:8: i: expected text, found a list",
                           "9:4: j: expected a number, found '.nan'", "10:4: k: expected text, found it empty"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin\n" << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 9);
}

TEST(Config, LimitsIncludeTheirBoundsAndCarryUnits) {
  ConfigFile file = parse_valid("low: 1\nhigh: 9\nwait: 50 ms\nrate: 2 Gbit/s\nsize: 1 MiB\n");
  ConfigSection root = file.root();
  int low = 0, high = 0;
  Duration wait{};
  BitRate rate;
  Bytes size;
  root.read("low", low, {.min = 1});
  root.read("high", high, {.max = 9});
  root.read("wait", wait, {.min = std::chrono::milliseconds(100)});
  root.read("rate", rate, {.max = BitRate{1e9}});
  root.read("size", size, {.min = Bytes{1 << 21}, .max = Bytes{1 << 22}});
  EXPECT_EQ(low, 1);
  EXPECT_EQ(high, 9);
  EXPECT_EQ(problems(file),
            "run.yaml:3:7: wait: expected at least 100 ms, found '50 ms'\n"
            "run.yaml:4:7: rate: expected at most 1 Gbit/s, found '2 Gbit/s'\n"
            "run.yaml:5:7: size: expected 2 MiB to 4 MiB, found '1 MiB'");
}

TEST(Config, AbsentAndNullKeepDefaults) {
  ConfigFile file = parse_valid("a:\nb: ~\nsection:\n");
  ConfigSection root = file.root();
  int a = 1, b = 2, c = 3, d = 4;
  std::optional<int> e, f = 6;
  root.read("a", a);
  root.read("b", b);
  root.read("c", c);
  root.section("section").read("d", d);
  root.section("nowhere").read("d", d);
  root.read("e", e);
  root.read("f", f);
  EXPECT_FALSE(root.has("a"));
  EXPECT_EQ(problems(file), "");
  EXPECT_EQ(a + b + c + d, 10);
  EXPECT_FALSE(e.has_value());
  EXPECT_EQ(f, 6);
}

TEST(Config, OptionalsTakePresentValuesAndTheirLimits) {
  ConfigFile file = parse_valid("a: 5\nb: 100\n");
  std::optional<int> a, b;
  file.root().read("a", a, {.max = 10});
  file.root().read("b", b, {.max = 10});
  EXPECT_EQ(a, 5);
  EXPECT_FALSE(b.has_value()) << "a wrong value leaves the default";
  EXPECT_EQ(problems(file), "run.yaml:2:4: b: expected at most 10, found '100'");
}

TEST(Config, ANumberMayBeAuto) {
  const auto read = [](std::string_view text, std::string& problem, std::string* resolved = nullptr) {
    ConfigFile file = parse_valid(text);
    std::optional<std::uint32_t> value;
    file.root().read_or_auto("ahead", value, {.max = 10}, "batches");
    problem = problems(file);
    if (resolved) *resolved = file.resolved();
    return value;
  };
  std::string problem, resolved;
  for (const char* automatic : {"a: 1", "ahead: auto", "ahead: ~"}) {
    EXPECT_FALSE(read(automatic, problem, &resolved)) << automatic;
    EXPECT_NE(resolved.find("ahead: auto"), std::string::npos) << resolved;
  }
  EXPECT_EQ(read("ahead: 3", problem, &resolved), 3u);
  EXPECT_EQ(problem, "");
  EXPECT_NE(resolved.find("ahead: 3"), std::string::npos) << resolved;
  EXPECT_FALSE(read("ahead: 11", problem));
  EXPECT_EQ(problem, "run.yaml:1:8: ahead: expected at most 10, found '11'; `auto` is allowed as well");
  EXPECT_FALSE(read("ahead: atuo", problem));
  EXPECT_EQ(problem,
            "run.yaml:1:8: ahead: expected a whole number from 0 to 10, found 'atuo'; `auto` is allowed as well");
  ConfigFile blank = ConfigFile::blank();
  std::optional<std::uint32_t> ignored;
  blank.root().read_or_auto("ahead", ignored, {.max = 10}, "batches");
  EXPECT_EQ(blank.keys().at(0).type, "whole number or auto");
  EXPECT_EQ(blank.keys().at(0).default_text, "auto");
  EXPECT_EQ(blank.keys().at(0).range, "0 to 10");
}

enum class Planner { kStar, kChains };

TEST(Config, ChoicesSuggest) {
  const auto read = [](std::string_view text, std::string& problem) {
    ConfigFile file = parse_valid(text);
    Planner planner = Planner::kStar;
    file.root().read_choice("planner", planner, {{"star", Planner::kStar}, {"chains", Planner::kChains}});
    problem = problems(file);
    return planner;
  };
  std::string problem;
  EXPECT_EQ(read("planner: chains", problem), Planner::kChains);
  EXPECT_EQ(problem, "");
  EXPECT_EQ(read("", problem), Planner::kStar);
  EXPECT_EQ(problem, "");
  EXPECT_EQ(read("planner: chain", problem), Planner::kStar);
  EXPECT_EQ(problem, "run.yaml:1:10: planner: expected one of star, chains, found 'chain'; did you mean 'chains'?");
  EXPECT_EQ(read("planner: [chains]", problem), Planner::kStar);
  EXPECT_EQ(problem, "run.yaml:1:10: planner: expected one of star, chains, found a list");
}

TEST(Config, CallersAttachProblemsToKeys) {
  ConfigFile file = parse_valid("learner:\n  staleness: 1\n  publish_every: 4\n");
  ConfigSection learner = file.root().section("learner");
  int staleness = 0, publish_every = 0;
  learner.read("staleness", staleness);
  learner.read("publish_every", publish_every);
  learner.error("staleness", "expected at least publish_every (4), found 1");
  learner.error("", "expected exactly one of 'a' and 'b'");
  learner.error("absent", "is needed when staleness is set");
  EXPECT_EQ(problems(file),
            "run.yaml:2:3: learner: expected exactly one of 'a' and 'b'\n"
            "run.yaml:2:3: learner.absent: is needed when staleness is set\n"
            "run.yaml:2:14: learner.staleness: expected at least publish_every (4), found 1");
}

TEST(Config, OverridesReplaceAddAndReport) {
  ConfigFile file = parse_valid("learner:\n  steps: 5\n");
  ASSERT_TRUE(file.set("learner.steps", "50"));
  ASSERT_TRUE(file.set("fleet.uplink", "24"));
  ASSERT_TRUE(file.set("learner.stalness", "1"));
  ASSERT_TRUE(file.set("fleet.tags", "[a, b]"));
  ConfigSection learner = file.root().section("learner");
  int steps = 0, staleness = 0;
  BitRate uplink;
  std::vector<std::string> tags;
  learner.read("steps", steps);
  learner.read("staleness", staleness);
  file.root().section("fleet").read("uplink", uplink);
  file.root().section("fleet").read("tags", tags);
  EXPECT_EQ(steps, 50);
  EXPECT_EQ(tags.size(), 2u);
  EXPECT_EQ(problems(file),
            "--set fleet.uplink: expected a rate such as '24 Mbit/s' (units: bit/s kbit/s Mbit/s Gbit/s), found '24': "
            "the unit is missing\n"
            "--set learner.stalness: unknown key 'learner.stalness'; did you mean 'staleness'?");
}

TEST(Config, AnOverrideMayEndInAColon) {
  ConfigFile file = parse_valid("network:\n  port: 5\n");
  ASSERT_TRUE(file.set("network.bind", "::"));
  ASSERT_TRUE(file.set("network.peer", "fe80::"));
  ConfigSection network = file.root().section("network");
  int port = 0;
  std::string bind, peer;
  network.read("port", port);
  network.read("bind", bind);
  network.read("peer", peer);
  EXPECT_EQ(problems(file), "");
  EXPECT_EQ(bind, "::");
  EXPECT_EQ(peer, "fe80::");
  ConfigFile again = parse_valid(file.resolved());
  std::string same;
  again.root().section("network").read("bind", same);
  EXPECT_EQ(same, "::");
}

TEST(Config, OverridesThatCannotApply) {
  ConfigFile file = parse_valid("steps: 5\nlist: [1]\n");
  const auto problem = [&](const char* key, const char* value) {
    const Status status = file.set(key, value);
    return status ? std::string() : status.error().message();
  };
  EXPECT_EQ(problem("steps.more", "1"), "--set steps.more: there is no mapping to put 'more' in, but '5'");
  EXPECT_EQ(problem("list.0", "1"), "--set list.0: there is no mapping to put '0' in, but a list");
  EXPECT_NE(problem("", "1").find("expected keys joined by dots"), std::string::npos);
  EXPECT_NE(problem("a..b", "1").find("expected keys joined by dots"), std::string::npos);
  EXPECT_NE(problem("a", "[1").find("--set a: not valid YAML"), std::string::npos);
  EXPECT_NE(problem("a", "{b: *x}").find("--set a: "), std::string::npos);
  EXPECT_NE(problem("a", "\xff").find("--set a: expected UTF-8 text"), std::string::npos);
}

TEST(Config, OverridesAreTakenLiterally) {
  for (const char* text : {"::", "::1", ":", "a: b", "- a", "%x", "*x", "C:\\x", "# no comment"}) {
    ConfigFile file = parse_valid("");
    ASSERT_TRUE(file.set("network.bind", text)) << text;
    std::string bind;
    file.root().section("network").require("bind", bind);
    EXPECT_EQ(problems(file), "") << text;
    EXPECT_EQ(bind, text);
    ConfigFile again = parse_valid(file.resolved());
    again.root().section("network").require("bind", bind);
    EXPECT_EQ(problems(again), "") << file.resolved();
    EXPECT_EQ(bind, text);
  }
  ConfigFile file = parse_valid("steps: 5\n");
  ASSERT_TRUE(file.set("steps", " 7 "));
  ASSERT_TRUE(file.set("name", "'5 '"));
  ASSERT_TRUE(file.set("none", "~"));
  int steps = 0, none = 3;
  std::string name;
  file.root().read("steps", steps);
  file.root().read("name", name);
  file.root().read("none", none);
  EXPECT_EQ(problems(file), "");
  EXPECT_EQ(steps, 7);
  EXPECT_EQ(name, "5 ");
  EXPECT_EQ(none, 3);
}

TEST(Config, UnusableFiles) {
  EXPECT_EQ(parse_problem("- a\n"), "run.yaml:1:1: expected a mapping (key: value), found a list");
  EXPECT_EQ(parse_problem("just words"), "run.yaml:1:1: expected a mapping (key: value), found 'just words'");
  EXPECT_TRUE(parse_problem("a: [1\nb: 2").starts_with("run.yaml:")) << "broken YAML";
  EXPECT_EQ(parse_problem("a: &x 1\nb: *x\n"),
            "run.yaml:1:4: anchors ('&name') are not supported; write the value out");
  EXPECT_EQ(parse_problem("a: !!int 1\n"), "run.yaml:1:4: tags are not supported, found 'tag:yaml.org,2002:int'");
  EXPECT_EQ(parse_problem("[a]: 1\n"), "run.yaml:1:1: expected a word as the key of a mapping");
  EXPECT_NE(parse_problem("a: 1\n---\nb: 1\n").find("expected one YAML document"), std::string::npos);
  EXPECT_EQ(parse_problem("a: 1\nb: \"\xff\"\n"), "run.yaml:2:5: expected UTF-8 text, found the byte 0xff");
  EXPECT_EQ(parse_problem("\xc3\xa9: \x01\n"), "run.yaml:1:4: expected UTF-8 text, found the byte 0x01");
  EXPECT_EQ(parse_problem("a: \xed\xa0\x80"), "run.yaml:1:4: expected UTF-8 text, found the byte 0xed")
      << "a surrogate";
  EXPECT_EQ(parse_problem("a: 1\nb: \"\xc2\x80\"\n"), "run.yaml:2:5: expected UTF-8 text, found a control character");
  EXPECT_EQ(parse_problem(""), "") << "an empty file sets nothing";
  EXPECT_EQ(parse_problem("\xef\xbb\xbf# with a byte order mark\n"), "");
}

TEST(Config, BrokenYamlIsReportedWithPlaceAndReason) {
  EXPECT_EQ(parse_problem("a: 1\nb: [1,\n  2\nc: 3\n"),
            "run.yaml:4:2: not valid YAML: did not find expected ',' or ']' while parsing a flow sequence");
  EXPECT_EQ(parse_problem("a: 1\n b: 2\n"),
            "run.yaml:2:3: not valid YAML: mapping values are not allowed in this context");
  EXPECT_EQ(
      parse_problem("a:\n\t- 1\n"),
      "run.yaml:2:1: not valid YAML: found character that cannot start any token while scanning for the next token");
  EXPECT_EQ(parse_problem("a: \"no end\n"),
            "run.yaml:2:1: not valid YAML: found unexpected end of stream while scanning a quoted scalar");
}

// Any text, however odd, survives being written and read again.
TEST(Config, ResolvedTextIsTheTextThatWasRead) {
  for (const std::string text : {"",
                                 "~",
                                 "null",
                                 "- a",
                                 "a: b",
                                 "#",
                                 "1\n2",
                                 "tab\there",
                                 "\r",
                                 " led",
                                 "trailed ",
                                 "'",
                                 "\"",
                                 "\xc2\x85",
                                 "\xe2\x80\xa8",
                                 "\xef\xbb\xbf",
                                 "\x01",
                                 "\xc3\xa9",
                                 "%",
                                 "@x",
                                 "true",
                                 "[",
                                 "{",
                                 "&a",
                                 "*a",
                                 "!b",
                                 "|",
                                 "0x1f",
                                 "---",
                                 "...",
                                 "? x"}) {
    ConfigFile none = *ConfigFile::parse("", "none");
    std::string value = text;
    none.root().read("value", value);
    ConfigFile again = parse_valid(none.resolved());
    std::string read = "nothing";
    again.root().read("value", read);
    EXPECT_EQ(problems(again), "") << none.resolved();
    EXPECT_EQ(read, text) << none.resolved();
  }
}

TEST(Config, Bounds) {
  EXPECT_NE(parse_problem("a: " + std::string(1 << 20, 'x')).find("expected at most 1048576 bytes, found 1048579"),
            std::string::npos);
  const auto nested = [](int depth) { return "a: " + std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(parse_problem(nested(63)), "");
  EXPECT_NE(parse_problem(nested(64)).find("nested deeper than 64 levels"), std::string::npos);
  EXPECT_NE(parse_problem(nested(5000)).find("nested deeper than 64 levels"), std::string::npos);
  std::string many = "a: [";
  for (int i = 0; i < 100'000; ++i) many += "1,";
  EXPECT_NE(parse_problem(many + "1]").find("more than 100000 values"), std::string::npos);
}

TEST(Config, SubtreesBecomeJson) {
  ConfigFile file = parse_valid(
      "adapter:\n  whole: 12\n  big: 18446744073709551615\n  decimal: 1.5\n  on: true\n  none: ~\n  text: \"12\"\n"
      "  word: yes\n  list: [1, {a: b}]\n  empty: {}\n");
  EXPECT_EQ(file.root().json("adapter"),
            R"({"whole":12,"big":18446744073709551615,"decimal":1.5,"on":true,"none":null,"text":"12",)"
            R"("word":"yes","list":[1,{"a":"b"}],"empty":{}})");
  EXPECT_EQ(file.root().json("absent"), "{}");
  EXPECT_EQ(problems(file), "") << "an opaque subtree has no unknown keys";
}

TEST(Config, ResolvedFormHoldsDefaultsAndReadsBack) {
  struct Values {
    int steps = 7;
    double rate = 0.1;
    Duration wait = std::chrono::seconds(90);
    Bytes size{1536};
    BitRate uplink{24e6};
    std::string name = "null";
    std::string empty;
    std::vector<std::string> tags{"a: b", "true"};
    std::optional<int> absent;
    Planner planner = Planner::kChains;
    std::string json;
    bool operator==(const Values&) const = default;
  };
  const auto read = [](ConfigFile& file) {
    Values v;
    ConfigSection root = file.root();
    root.read("steps", v.steps);
    root.read("rate", v.rate);
    ConfigSection net = root.section("net");
    net.read("wait", v.wait);
    net.read("size", v.size);
    net.read("uplink", v.uplink);
    root.read("name", v.name);
    root.read("empty", v.empty);
    root.read("tags", v.tags);
    root.read("absent", v.absent);
    root.read_choice("planner", v.planner, {{"star", Planner::kStar}, {"chains", Planner::kChains}});
    v.json = root.json("adapter");
    EXPECT_EQ(problems(file), "");
    return v;
  };
  ConfigFile file = parse_valid("steps: 9\nadapter: {max: \"3\", min: 1}\n");
  const Values values = read(file);
  const std::string resolved = file.resolved();
  EXPECT_EQ(
      resolved,
      "steps: 9\nrate: 0.1\nnet:\n  wait: 90 s\n  size: 1536 B\n  uplink: 24 Mbit/s\nname: \"null\"\nempty: \"\"\n"
      "tags:\n- 'a: b'\n- true\nplanner: chains\nadapter:\n  max: \"3\"\n  min: 1\n");
  ConfigFile again = parse_valid(resolved);
  EXPECT_EQ(read(again), values);
  EXPECT_EQ(again.resolved(), resolved);
}

TEST(Config, ResolvedFormLeavesOutAbsentSectionsThatMeanOff) {
  ConfigFile file = parse_valid("a: {on: true}\n");
  ConfigSection root = file.root();
  for (const char* key : {"a", "b"}) {
    const bool enabled = root.has(key);
    bool on = false;
    root.section(key).read("on", on);
    EXPECT_EQ(on, enabled);
  }
  bool on = false;
  root.section("c").read("on", on);
  EXPECT_EQ(problems(file), "");
  EXPECT_EQ(file.resolved(), "a:\n  on: true\nc:\n  on: false\n");
}

TEST(Config, RelativePathsReferToWhereTheyAreNamed) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "echoline_config_test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "run.yaml") << "named: data/../a.json\nabsolute: /b\noptional: c\n";
  auto file = ConfigFile::load(folder / "run.yaml");
  ASSERT_TRUE(file.has_value());
  ASSERT_TRUE(file->set("given", "d"));
  std::filesystem::path named, absolute, given, fallback = "runs", none;
  std::optional<std::filesystem::path> optional, absent;
  ConfigSection root = file->root();
  root.read("named", named);
  root.require("absolute", absolute);
  root.read("optional", optional);
  root.read("absent", absent);
  root.read("given", given);
  root.read("fallback", fallback);
  root.read("none", none);
  EXPECT_EQ(problems(*file), "");
  EXPECT_EQ(named, folder / "a.json");
  EXPECT_EQ(absolute, "/b");
  EXPECT_EQ(optional, folder / "c");
  EXPECT_EQ(absent, std::nullopt);
  EXPECT_EQ(given, std::filesystem::current_path() / "d");
  EXPECT_EQ(fallback, std::filesystem::current_path() / "runs");
  EXPECT_EQ(none, "");
  EXPECT_NE(file->resolved().find("named: " + (folder / "a.json").string() + "\n"), std::string::npos);
  const auto missing = ConfigFile::load(folder / "none.yaml");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  std::filesystem::remove_all(folder);
}

TEST(Config, NumbersOutOfRangeAreReportedWithTheRangeInEveryForm) {
  const auto problem = [](const std::string& value, auto number, auto limits) {
    ConfigFile file = parse_valid("a: " + value + "\n");
    file.root().read("a", number, limits);
    return problems(file);
  };
  const Limits<std::uint64_t> steps{.min = 1, .max = 100};
  EXPECT_EQ(problem("0", std::uint64_t{}, steps), "run.yaml:1:4: a: expected 1 to 100, found '0'");
  EXPECT_EQ(problem("-5", std::uint64_t{}, steps),
            "run.yaml:1:4: a: expected a whole number from 1 to 100, found '-5'");
  EXPECT_EQ(problem("1.5", std::uint64_t{}, steps),
            "run.yaml:1:4: a: expected a whole number from 1 to 100, found '1.5'");
  EXPECT_EQ(problem("x", 1.0, Limits<double>{.min = 0.5}),
            "run.yaml:1:4: a: expected a number, at least 0.5, found 'x'");
  EXPECT_EQ(problem("0 bit/s", BitRate{}, Limits<BitRate>{.min = BitRate{1000}}),
            "run.yaml:1:4: a: expected at least 1 kbit/s, found '0 bit/s'");
  EXPECT_EQ(
      problem("-5 s", Duration{}, Limits<Duration>{.min = Duration(0), .max = std::chrono::seconds(60)}),
      "run.yaml:1:4: a: expected a duration such as '30 s' (units: ns us ms s min h), found '-5 s': it is negative; "
      "expected 0 s to 1 min");
  EXPECT_EQ(problem("0 s", Duration{}, Limits<Duration>{.min = std::chrono::seconds(1)}),
            "run.yaml:1:4: a: expected at least 1 s, found '0 s'");
}

TEST(Config, AReaderOverABlankFileIsItsReference) {
  ConfigFile file = ConfigFile::blank();
  ConfigSection root = file.root();
  int steps = 5;
  std::optional<BitRate> uplink;
  std::vector<std::string> tags{"a b"};
  Planner planner = Planner::kChains;
  std::string name;
  root.require("name", name, "names it");
  root.read("steps", steps, {.min = 1, .max = 9}, "how many");
  ConfigSection net = root.section("net", "The network.");
  net.read("uplink", uplink, {.min = BitRate{1000}}, {"what it sends", "unlimited"});
  net.read("tags", tags, "a | b");
  net.read_choice("planner", planner, {{"star", Planner::kStar}, {"chains", Planner::kChains}}, "who plans");
  double price = 1;
  for (ConfigSection offer : root.sections("offers", "What is offered.")) offer.read("price", price, "in dollars");
  const bool warm = root.has("warm");
  root.section("warm", "A start.").read("steps", steps, "of it");
  EXPECT_FALSE(warm);
  root.read("late", steps, "asked for after the sections");
  const std::vector<ConfigKey> keys = file.keys();
  EXPECT_EQ(reference_markdown(keys),
            "\n| key | type | default | range | meaning |\n|---|---|---|---|---|\n"
            "| `name` | text | required |  | names it |\n"
            "| `steps` | whole number | `5` | 1 to 9 | how many |\n"
            "| `late` | whole number | `5` |  | asked for after the sections |\n"
            "\n## net\n\nThe network.\n"
            "\n| key | type | default | range | meaning |\n|---|---|---|---|---|\n"
            "| `uplink` | rate | unlimited | at least 1 kbit/s | what it sends |\n"
            "| `tags` | list: text | `[\"a b\"]` |  | a \\| b |\n"
            "| `planner` | choice | `chains` | star, chains | who plans |\n"
            "\n## offers\n\nWhat is offered.\n"
            "\n| key | type | default | range | meaning |\n|---|---|---|---|---|\n"
            "| `price` | number | `1` |  | in dollars |\n"
            "\n## warm\n\nA start.\n"
            "\n| key | type | default | range | meaning |\n|---|---|---|---|---|\n"
            "| `steps` | whole number | `5` |  | of it |\n");
  const std::string yaml = reference_yaml(keys);
  EXPECT_NE(yaml.find("# names it [text; required]\nname:\n# how many [whole number, 1 to 9]\n#steps: 5\n"),
            std::string::npos)
      << yaml;
  EXPECT_NE(yaml.find("  # what it sends [rate, at least 1 kbit/s; default: unlimited]\n  #uplink:\n"),
            std::string::npos)
      << yaml;
  EXPECT_NE(yaml.find("# A start.\n#warm:\n"), std::string::npos) << yaml;
  EXPECT_TRUE(ConfigFile::parse(yaml, "reference").has_value());
}

TEST(Config, TextStaysTextInResolvedJson) {
  ConfigFile file = parse_valid("adapter: {name: 007, yes: true, list: [1e3]}\n");
  ConfigSection adapter = file.root().section("adapter");
  std::string name;
  bool yes = false;
  std::vector<std::string> list;
  int count = 3;
  adapter.read("name", name);
  adapter.read("yes", yes);
  adapter.read("list", list);
  adapter.read("count", count);
  EXPECT_EQ(adapter.resolved_json(), R"({"name":"007","yes":true,"list":["1e3"],"count":3})");
}

TEST(Config, AKeyOfTheRootCanBeReadApart) {
  ConfigFile file = parse_valid("a: 1\nextra:\n  b: x\n  wrong: 2\nc: 3\n");
  ASSERT_TRUE(file.set("c", "4"));
  ConfigFile extra = file.split("extra");
  EXPECT_EQ(file.text(), "a: 1\nc: 4\n");
  int a = 0, c = 0;
  file.root().read("a", a);
  file.root().read("c", c);
  EXPECT_EQ(problems(file), "");
  EXPECT_EQ(c, 4);
  int b = 0;
  extra.root().section("extra").read("b", b);
  EXPECT_EQ(problems(extra),
            "run.yaml:3:6: extra.b: expected a whole number from -2147483648 to 2147483647, found 'x'\n"
            "run.yaml:4:3: unknown key 'extra.wrong'");
  ConfigFile none = parse_valid("a: 1\n").split("extra");
  EXPECT_FALSE(none.root().has("extra"));
  EXPECT_EQ(problems(none), "");
}

TEST(Suggest, FindsTypingMistakesOnly) {
  const std::vector<std::string> words{"staleness", "steps", "publish_every", "seed"};
  EXPECT_EQ(suggest("stalness", words), "staleness");
  EXPECT_EQ(suggest("stpes", words), "steps") << "a swap is one edit";
  EXPECT_EQ(suggest("SEED", words), "seed");
  EXPECT_EQ(suggest("publish-every", words), "publish_every");
  EXPECT_EQ(suggest("zzz", words), std::nullopt);
  EXPECT_EQ(suggest("", words), std::nullopt);
  EXPECT_EQ(suggest(std::string(500, 's'), words), std::nullopt);
  EXPECT_EQ(suggest("x", std::vector<std::string>{"y"}), std::nullopt) << "nothing in common";
  EXPECT_EQ(did_you_mean("stalness", words), "; did you mean 'staleness'?");
  EXPECT_EQ(did_you_mean("zzz", words), "");
}

// Thousands of damaged run files: none may crash, hang or break the promises in config_fuzz.cpp.
TEST(Config, SurvivesMutatedFiles) {
  const std::string seeds[] = {
      "steps: 5\nrate: 0.25\non: false\nname: \"x\"\nwait: 10 ms\nsize: 1 MiB\nuplink: 24 Mbit/s\ntags: [a, b]\n",
      "extra: {a: [1, 2, {b: ~}], c: 'd'}\nitems:\n  - id: 1\n  - {id: 2}\nusers:\n  ann: {steps: 1}\n  bob:\n    "
      "name: |\n"
      "      two\n      lines\n",
      "{\"steps\": 3, \"tags\": [\"a\", \"\\u00e9\"], \"extra\": {\"x\": 1.5e3}}",
  };
  const std::string alphabet = "\n\t :-[]{},#&*!|>'\"%@`~?0ax.\\\x01\x80\xff";
  Random random(20240607);
  for (int round = 0; round < 6000; ++round) {
    std::string text = seeds[random.below(std::size(seeds))];
    const auto edits = 1 + random.below(6);
    for (std::uint64_t i = 0; i < edits && !text.empty(); ++i) {
      const std::size_t at = random.below(text.size());
      const char c = alphabet[random.below(alphabet.size())];
      switch (random.below(4)) {
        case 0:
          text[at] = c;
          break;
        case 1:
          text.insert(at, 1, c);
          break;
        case 2:
          text.erase(at, 1 + random.below(8));
          break;
        default:
          text.insert(at, text.substr(random.below(text.size()), random.below(20)));
          break;
      }
    }
    test::fuzz_input(text);
  }
}

}  // namespace
}  // namespace echoline
