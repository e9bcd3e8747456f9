// Control messages: each survives the wire, and the reader checks every limit.
#include "overlay/wire/control.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "overlay/trust/authority.hpp"
#include "overlay/wire/control.pb.h"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;

Result<ControlMessage> over_the_wire(const ControlMessage& message) {
  const auto frame = encode_control(message);
  return decode_control(std::span(frame).subspan(kFrameHeaderBytes));
}

template <class T>
T round_trip(const T& message) {
  const auto decoded = over_the_wire(message);
  EXPECT_TRUE(decoded.has_value()) << (decoded ? "" : decoded.error().message());
  return decoded ? std::get<T>(*decoded) : T{};
}

// The error for a message that no node writes, or "accepted".
std::string refusal(const wire::ControlMessage& message) {
  std::string bytes;
  EXPECT_TRUE(message.SerializeToString(&bytes));
  const auto decoded = decode_control(std::as_bytes(std::span(bytes)));
  if (decoded) return "accepted";
  EXPECT_EQ(decoded.error().code, Code::kCorrupt);
  return decoded.error().detail;
}
std::string refusal(const ControlMessage& message) {
  const auto frame = encode_control(message);
  wire::ControlMessage wire;
  EXPECT_TRUE(
      wire.ParseFromArray(frame.data() + kFrameHeaderBytes, static_cast<int>(frame.size() - kFrameHeaderBytes)));
  return refusal(wire);
}

// A valid message in its wire form, which a test makes invalid.
wire::ControlMessage wire_of(const ControlMessage& message) {
  const auto frame = encode_control(message);
  wire::ControlMessage wire;
  EXPECT_TRUE(
      wire.ParseFromArray(frame.data() + kFrameHeaderBytes, static_cast<int>(frame.size() - kFrameHeaderBytes)));
  return wire;
}

PublicationId id(int n) {
  PublicationId id{};
  id[3] = static_cast<std::byte>(n);
  return id;
}

trust::Signature signature(int n) {
  trust::Signature s;
  s.bytes[63] = static_cast<std::byte>(n);
  return s;
}

TEST(Control, EnrolmentSurvivesTheWire) {
  Enrol enrol{"echo1.token", "vast-7", made_key("w").public_key(), signature(9)};
  const Enrol e = round_trip(enrol);
  EXPECT_EQ(std::tie(e.token, e.instance, e.key, e.proof),
            std::tie(enrol.token, enrol.instance, enrol.key, enrol.proof));
  const Enrolled enrolled = round_trip(Enrolled{WorkerId{3}, random_bytes(1, 400), random_bytes(2, 300)});
  EXPECT_EQ(enrolled.worker, WorkerId{3});
  EXPECT_EQ(enrolled.certificate, random_bytes(1, 400));
  EXPECT_EQ(enrolled.authority, random_bytes(2, 300));
  EXPECT_EQ(round_trip(Renew{enrol.key}).key, enrol.key);
  EXPECT_EQ(round_trip(Renewed{random_bytes(3, 5)}).certificate, random_bytes(3, 5));
}

TEST(Control, MembershipSurvivesTheWire) {
  const Installed installed{Version{4}, digest_of(4), 2};
  const Hello hello =
      round_trip(Hello{"run", std::string("\xff\0n", 3), {"10.0.0.1", 7070}, BitRate{8e6}, {}, installed});
  EXPECT_EQ(hello.run_id, "run");
  EXPECT_EQ(hello.name, "\\xff\\x00n");  // printable text for any bytes
  EXPECT_EQ(hello.data, (Endpoint{"10.0.0.1", 7070}));
  EXPECT_EQ(hello.up, BitRate{8e6});
  EXPECT_EQ(hello.down, std::nullopt);
  EXPECT_EQ(hello.installed, installed);
  const Welcome welcome = round_trip(Welcome{WorkerId{3}, std::chrono::seconds(1), std::chrono::seconds(9),
                                             1'700'000'000'123, "app", std::chrono::minutes(5), Bytes{16'000'000'000}});
  EXPECT_EQ(welcome.worker, WorkerId{3});
  EXPECT_EQ(welcome.heartbeat, std::chrono::seconds(1));
  EXPECT_EQ(welcome.patience, std::chrono::seconds(9));
  EXPECT_EQ(welcome.unix_ms, 1'700'000'000'123u);
  EXPECT_EQ(welcome.application, "app");
  const Assign assign{4, {{WorkerId{5}, {"h", 1}, 0b0101, false}, {kLearnerId, {"::1", 65535}, 0b1010, true}}};
  EXPECT_EQ(round_trip(assign), assign);
  const DialChild child = round_trip(DialChild{WorkerId{6}, {"h", 2}});
  EXPECT_EQ(child.worker, WorkerId{6});
  EXPECT_EQ(child.endpoint, (Endpoint{"h", 2}));
  const NeedHelp need = round_trip(NeedHelp{Version{9}, true, Version{7}, true});
  EXPECT_EQ(need.target, Version{9});
  EXPECT_TRUE(need.full_only);
  EXPECT_EQ(need.position, Version{7});
  EXPECT_EQ(round_trip(NeedHelp{Version{9}, false, {}}).position, std::nullopt);
  const Help help = round_trip(Help{{WorkerId{2}, {"h", 3}, 1, false}, Version{9}, true});
  EXPECT_EQ(help.from, (Parent{WorkerId{2}, {"h", 3}, 1, false}));
  EXPECT_EQ(help.target, Version{9});
  EXPECT_TRUE(help.full_only);
  EXPECT_EQ(round_trip(installed), installed);
  EXPECT_EQ(round_trip(Goodbye{"why"}).reason, "why");
  EXPECT_FALSE(round_trip(Goodbye{"why"}).run_ended);
  EXPECT_TRUE(round_trip(Goodbye{"why", true}).run_ended);
  EXPECT_EQ(round_trip(Trouble{"no room"}).text, "no room");
  EXPECT_TRUE(std::holds_alternative<Draining>(*over_the_wire(Draining{})));
}

TEST(Control, EdgesSurviveTheWire) {
  ChunkSet some;
  some.insert(0);
  some.insert(69);
  const PeerHello hello{"run",
                        3,
                        Version{9},
                        true,
                        {Version{7},
                         {4, 0b0110},
                         {{delta(8, 7), {id(8), some, false}},
                          {full(9), {id(9), ChunkSet::all(3), true}},
                          {delta(10, 9), {id(10), {}, false}}}}};
  const PeerHello got = round_trip(hello);
  EXPECT_EQ(got.stream, 3u);
  EXPECT_EQ(got.catch_up_to, Version{9});
  EXPECT_TRUE(got.full_only);
  const Have have = round_trip(got.have);
  EXPECT_EQ(have.position, Version{7});
  EXPECT_EQ(have.wanted, (StripeMask{4, 0b0110}));
  ASSERT_EQ(have.items.size(), 3u);
  const Have::Item& partial = have.items.at(delta(8, 7));
  EXPECT_EQ(partial.publication, id(8));
  EXPECT_EQ(partial.chunks.count(), 2u);
  EXPECT_TRUE(partial.chunks.contains(0) && partial.chunks.contains(69));
  EXPECT_FALSE(partial.complete);
  EXPECT_TRUE(have.items.at(full(9)).complete);
  EXPECT_EQ(have.items.at(full(9)).chunks.count(), 3u);
  EXPECT_FALSE(have.items.at(delta(10, 9)).complete);
  EXPECT_EQ(have.items.at(delta(10, 9)).chunks.count(), 0u);

  EXPECT_EQ(round_trip(MoreStreams{4}).streams, 4u);
  EXPECT_EQ(round_trip(ChunkRequest{id(1), 5}).index, 5u);
  EXPECT_EQ(round_trip(ChunkRequest{id(1), 5}).publication, id(1));
  EXPECT_TRUE(round_trip(CannotServe{Version{1}, true}).snapshot_is_cheaper);
  const EdgeStatus status = round_trip(EdgeStatus{Signed{"body", signature(1)}, {{id(1), {1, 2, 3, 4}}, {id(2), {0}}}});
  EXPECT_EQ(status.beacon, (Signed{"body", signature(1)}));
  ASSERT_EQ(status.progress.size(), 2u);
  EXPECT_EQ(status.progress[0].publication, id(1));
  EXPECT_EQ(status.progress[0].chunks, (std::vector<std::uint32_t>{1, 2, 3, 4}));
  EXPECT_EQ(round_trip(EdgeStatus{}).beacon, std::nullopt);
  const EdgeFailed failed =
      round_trip(EdgeFailed{WorkerId{1}, EdgeTroubleKind::kSilent, std::string(kTextBytesMax + 500, 'r')});
  EXPECT_EQ(failed.kind, EdgeTroubleKind::kSilent);
  EXPECT_EQ(failed.reason.size(), kTextBytesMax);  // shortened, not refused
  EXPECT_THAT(failed.reason, testing::EndsWith("r..."));
  const Poisoned poisoned = round_trip(Poisoned{WorkerId{4}, id(3), 77});
  EXPECT_EQ(poisoned.parent, WorkerId{4});
  EXPECT_EQ(poisoned.publication, id(3));
  EXPECT_EQ(poisoned.index, 77u);
}

// A machine may send any bytes. The decoder returns printable text on one line, so that logs, files and JSON need no
// checks.
TEST(Control, TextsOfMachinesArePrintable) {
  const std::string evil("\xff\xc3(\n\x1b[2J\0\xe2\x80\xae\xc2\x85", 14);
  const std::string safe = "\\xff\\xc3(\\n\\x1b[2J\\x00\\u{202e}\\u{85}";
  const auto heard = [&](wire::ControlMessage w) {
    std::string bytes;
    EXPECT_TRUE(w.SerializeToString(&bytes));
    auto decoded = decode_control(std::as_bytes(std::span(bytes)));
    EXPECT_TRUE(decoded.has_value());
    return *std::move(decoded);
  };
  wire::ControlMessage w;
  w.mutable_goodbye()->set_reason(evil);
  EXPECT_EQ(std::get<Goodbye>(heard(w)).reason, safe);
  w.mutable_trouble()->set_text(evil);
  EXPECT_EQ(std::get<Trouble>(heard(w)).text, safe);
  w.mutable_edge_failed()->set_reason(evil);
  EXPECT_EQ(std::get<EdgeFailed>(heard(w)).reason, safe);
  w = wire_of(Hello{"run", "w", {"10.0.0.1", 9}, {}, {}, {}});
  w.mutable_hello()->set_run_id(evil);
  w.mutable_hello()->set_name(evil);
  w.mutable_hello()->mutable_data()->set_host(evil);
  const Hello hello = std::get<Hello>(heard(w));
  EXPECT_EQ(std::tie(hello.run_id, hello.name, hello.data.host), std::tie(safe, safe, safe));
  w = wire_of(Enrol{"echo1.token", "vast-7", {}, {}});
  w.mutable_enrol()->set_instance(evil);
  EXPECT_EQ(std::get<Enrol>(heard(w)).instance, safe);
  // The limit counts the escaped text, which is longer than the received one.
  w.mutable_goodbye()->set_reason(std::string(kTextBytesMax, '\n'));
  EXPECT_LE(std::get<Goodbye>(heard(w)).reason.size(), kTextBytesMax);
}

TEST(Control, SignedMessagesAndHeartbeatsSurviveTheWire) {
  const Made made = make(delta(2, 1), 10);
  EXPECT_EQ(round_trip(made.opening), made.opening);
  EXPECT_EQ(round_trip(made.closing), made.closing);
  EXPECT_EQ(round_trip(SignedBeacon{{"b", signature(2)}}), (SignedBeacon{{"b", signature(2)}}));
  Heartbeat beat;
  beat.installed = Installed{Version{0}, digest_of(0), 1};
  beat.chunk_bytes_in = 1;
  beat.chunk_bytes_forwarded = 2;
  beat.chunks_duplicate = 3;
  beat.chunks_corrupt = 4;
  beat.forwarding_rate = BitRate{5};
  beat.progress = {{id(1), {7, 8}}};
  beat.edges = {{WorkerId{9}, 1000, BitRate{1e6}, EdgeLimit::kOwnLimit, 4}};
  beat.holdings = {{full(3), 1 << 20}, {delta(4, 3), 0}};
  beat.application = std::string(kHeartbeatApplicationBytesMax, 'a');
  const Heartbeat got = round_trip(beat);
  EXPECT_EQ(got.installed, beat.installed);
  EXPECT_EQ(std::tie(got.chunk_bytes_in, got.chunk_bytes_forwarded, got.chunks_duplicate, got.chunks_corrupt),
            std::tie(beat.chunk_bytes_in, beat.chunk_bytes_forwarded, beat.chunks_duplicate, beat.chunks_corrupt));
  EXPECT_EQ(got.forwarding_rate, beat.forwarding_rate);
  ASSERT_EQ(got.progress.size(), 1u);
  EXPECT_EQ(got.progress[0].chunks, beat.progress[0].chunks);
  ASSERT_EQ(got.edges.size(), 1u);
  EXPECT_EQ(got.edges[0].child, WorkerId{9});
  EXPECT_EQ(got.edges[0].bytes, 1000u);
  EXPECT_EQ(got.edges[0].rate, BitRate{1e6});
  EXPECT_EQ(got.edges[0].limit, EdgeLimit::kOwnLimit);
  EXPECT_EQ(got.edges[0].streams, 4u);
  ASSERT_EQ(got.holdings.size(), 2u);
  EXPECT_EQ(got.holdings[1].key, delta(4, 3));
  EXPECT_EQ(got.holdings[0].payload_bytes, std::uint64_t{1 << 20});
  EXPECT_EQ(got.application, beat.application);
  EXPECT_EQ(round_trip(Heartbeat{}).installed, std::nullopt);
}

TEST(Control, GarbageIsRefused) {
  EXPECT_THAT(decode_control(random_bytes(1, 50)).error().detail, HasSubstr("50 bytes are not a valid message"));
  EXPECT_THAT(decode_control({}).error().detail, HasSubstr("unknown kind"));
}

TEST(Control, EnrolmentsAreChecked) {
  Enrol enrol{"t", "i", {}, {}};
  enrol.token = std::string(kTokenBytesMax + 1, 't');
  EXPECT_THAT(refusal(enrol), HasSubstr("token of 1025 bytes"));
  auto w = wire_of(Enrol{"t", "i", {}, {}});
  w.mutable_enrol()->set_instance(std::string(kTextBytesMax + 1, 'i'));
  EXPECT_THAT(refusal(w), HasSubstr("instance of 1025 bytes, the limit is 1024"));
  w = wire_of(Enrol{"t", "i", {}, {}});
  w.mutable_enrol()->set_public_key("short");
  EXPECT_THAT(refusal(w), HasSubstr("public key: expected 32 bytes, found 5"));
  w = wire_of(Enrol{"t", "i", {}, {}});
  w.mutable_enrol()->clear_proof();
  EXPECT_THAT(refusal(w), HasSubstr("proof: expected 64 bytes, found 0"));
  EXPECT_THAT(refusal(Enrolled{WorkerId{0}, random_bytes(1, 1), random_bytes(1, 1)}), HasSubstr("without a worker id"));
  EXPECT_THAT(refusal(Enrolled{WorkerId{1}, {}, random_bytes(1, 1)}), HasSubstr("certificate: expected 1 to 2048"));
  EXPECT_THAT(refusal(Enrolled{WorkerId{1}, random_bytes(1, 1), random_bytes(1, trust::kCertificateBytesMax + 1)}),
              HasSubstr("authority: expected 1 to 2048 bytes, found 2049"));
  w = wire_of(Renew{});
  w.mutable_renew()->set_public_key(std::string(33, 'k'));
  EXPECT_THAT(refusal(w), HasSubstr("found 33"));
  EXPECT_THAT(refusal(Renewed{}), HasSubstr("certificate"));
}

TEST(Control, MembershipIsChecked) {
  const Hello good{"run", "n", {"h", 1}, {}, {}, Installed{}};
  EXPECT_EQ(refusal(good), "accepted");
  const auto hello_refusal = [&](auto&& change) {
    auto w = wire_of(good);
    change(*w.mutable_hello());
    return refusal(w);
  };
  EXPECT_THAT(hello_refusal([](auto& h) { h.set_protocol(1); }),
              HasSubstr("expected protocol 4, found 1: use the same"));
  EXPECT_THAT(hello_refusal([](auto& h) { h.clear_protocol(); }), HasSubstr("found 0"));
  EXPECT_THAT(hello_refusal([](auto& h) { h.set_run_id(std::string(1025, 'r')); }), HasSubstr("run id of 1025"));
  EXPECT_THAT(hello_refusal([](auto& h) { h.set_name(std::string(1025, 'r')); }), HasSubstr("name of 1025"));
  EXPECT_THAT(hello_refusal([](auto& h) { h.mutable_data()->set_host(std::string(1025, 'r')); }),
              HasSubstr("host of 1025"));
  EXPECT_THAT(hello_refusal([](auto& h) { h.clear_data(); }), HasSubstr("port from 1 to 65535, found 0"));
  EXPECT_THAT(hello_refusal([](auto& h) { h.mutable_data()->set_port(65536); }), HasSubstr("found 65536"));
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    EXPECT_THAT(hello_refusal([&](auto& h) { h.set_up_bits_per_s(rate); }), HasSubstr("up: expected a positive rate"));
    EXPECT_THAT(hello_refusal([&](auto& h) { h.set_down_bits_per_s(rate); }),
                HasSubstr("down: expected a positive rate"));
  }
  EXPECT_THAT(hello_refusal([](auto& h) { h.mutable_installed()->set_policy_digest("x"); }),
              HasSubstr("expected 16 bytes"));

  const Welcome welcome{WorkerId{1}, std::chrono::seconds(1), std::chrono::seconds(3), 0, ""};
  auto w = welcome;
  w.worker = WorkerId{0};
  EXPECT_THAT(refusal(w), HasSubstr("without a worker id"));
  for (const Duration bad : {Duration(0), Duration(999'999), Duration(std::chrono::hours(25)), Duration(-1)}) {
    w = welcome;
    w.heartbeat = bad;
    EXPECT_THAT(refusal(w), HasSubstr("from 1 ms to a day"));
    w = welcome;
    w.patience = bad;
    EXPECT_THAT(refusal(w), HasSubstr("from 1 ms to a day"));
  }
  EXPECT_THAT(refusal(DialChild{kLearnerId, {"h", 1}}), HasSubstr("which has no parent"));
  EXPECT_THAT(refusal(DialChild{WorkerId{1}, {"h", 0}}), HasSubstr("port"));
  EXPECT_THAT(refusal(Help{{WorkerId{1}, {"h", 0}, 1, false}, Version{1}, false}), HasSubstr("port"));
}

TEST(Control, EveryStripeHasOneParent) {
  const auto assign = [](std::uint32_t stripes, std::vector<std::uint64_t> masks) {
    Assign a{stripes, {}};
    for (std::size_t i = 0; i < masks.size(); ++i) a.parents.push_back({WorkerId{i}, {"h", 1}, masks[i], false});
    return refusal(a);
  };
  EXPECT_EQ(assign(1, {1}), "accepted");
  EXPECT_EQ(assign(64, {~std::uint64_t{1}, 1}), "accepted");
  EXPECT_THAT(assign(1, {}), HasSubstr("a parent for each of 1 stripes"));
  EXPECT_THAT(assign(2, {1}), HasSubstr("a parent for each of 2 stripes, found the mask 0x1"));
  EXPECT_THAT(assign(2, {1, 1}), HasSubstr("do not fit"));
  EXPECT_THAT(assign(2, {3, 0}), HasSubstr("do not fit"));
  EXPECT_THAT(assign(2, {1, 6}), HasSubstr("stripes 0x6 of parent 1 do not fit 2 stripes"));
  EXPECT_THAT(assign(3, {1, 2, 4}), HasSubstr("do not fit 3 stripes"));
  EXPECT_THAT(assign(0, {}), HasSubstr("0 stripes"));
  EXPECT_THAT(assign(128, {1}), HasSubstr("128 stripes"));
  auto none = wire_of(Assign{1, {{WorkerId{1}, {"h", 1}, 1, false}}});
  none.mutable_assign()->mutable_parents(0)->mutable_endpoint()->set_port(0);
  EXPECT_THAT(refusal(none), HasSubstr("port"));
}

TEST(Control, AHaveMessageIsChecked) {
  EXPECT_THAT(refusal(Have{{}, {3, 1}, {}}), HasSubstr("expected a power of two of at most 64 stripes, found 3"));
  EXPECT_THAT(refusal(Have{{}, {128, 1}, {}}), HasSubstr("found 128"));
  EXPECT_THAT(refusal(Have{{}, {0, 0}, {}}), HasSubstr("found 0"));
  EXPECT_THAT(refusal(Have{{}, {2, 4}, {}}), HasSubstr("mask 0x4"));
  EXPECT_EQ(refusal(Have{{}, StripeMask::none(), {}}), "accepted");
  const auto with = [](auto&& change) {
    auto w = wire_of(Have{{}, {}, {{full(9), {id(9), ChunkSet::all(9), false}}}});
    change(*w.mutable_have()->mutable_items(0));
    return refusal(w);
  };
  EXPECT_THAT(with([](auto& i) { i.set_bitmap("x"); }), HasSubstr("a bitmap of 1 bytes does not fit 9 chunks"));
  EXPECT_THAT(with([](auto& i) { i.set_bitmap(std::string("\xff\x03", 2)); }), HasSubstr("does not fit"));
  EXPECT_THAT(with([](auto& i) { i.set_publication("x"); }), HasSubstr("publication: expected 16 bytes"));
  EXPECT_THAT(with([](auto& i) { i.set_base(9); }), HasSubstr("expected a base below version 9, found 9"));
  // All chunks of a number beyond the limit: the decoder allocates no memory for it.
  EXPECT_THAT(with([](auto& i) { i.clear_bitmap(), i.set_chunks(0xFFFFFFFF); }),
              HasSubstr("4294967295 chunks listed, the limit is 2097152"));
  wire::ControlMessage many;
  for (std::size_t i = 0; i <= kHaveItemsMax; ++i) {
    auto& item = *many.mutable_have()->add_items();
    item.set_version(i);
    item.set_publication(std::string(16, 'p'));
  }
  many.mutable_have()->set_stripes(1);
  EXPECT_THAT(refusal(many), HasSubstr("257 publications listed, the limit is 256"));
  many.mutable_have()->mutable_items()->RemoveLast();
  EXPECT_EQ(refusal(many), "accepted");
  auto hello = wire_of(PeerHello{"run", 0, {}, false, {}});
  hello.mutable_peer_hello()->set_protocol(1);
  EXPECT_THAT(refusal(hello), HasSubstr("expected protocol 4, found 1"));
  hello = wire_of(PeerHello{"run", 0, {}, false, {}});
  hello.mutable_peer_hello()->set_run_id(std::string(1025, 'r'));
  EXPECT_THAT(refusal(hello), HasSubstr("run id"));
  hello = wire_of(PeerHello{"run", 0, {}, false, {}});
  hello.mutable_peer_hello()->clear_have();
  EXPECT_THAT(refusal(hello), HasSubstr("stripes"));
}

TEST(Control, ReportsAreChecked) {
  const auto beat = [](auto&& change) {
    wire::ControlMessage w;
    change(*w.mutable_heartbeat());
    return refusal(w);
  };
  EXPECT_EQ(beat([](auto&) {}), "accepted");
  EXPECT_THAT(beat([](auto& b) { b.set_forwarding_bits_per_s(0); }), HasSubstr("forwarding rate"));
  EXPECT_THAT(beat([](auto& b) { b.set_application(std::string(kHeartbeatApplicationBytesMax + 1, 'a')); }),
              HasSubstr("application part of 65537 bytes"));
  EXPECT_THAT(beat([](auto& b) { b.mutable_installed(); }), HasSubstr("policy digest"));
  EXPECT_THAT(beat([](auto& b) { b.add_edges()->set_limit(4); }), HasSubstr("edge limit from 0 to 3, found 4"));
  EXPECT_THAT(beat([](auto& b) { b.add_edges()->set_bits_per_s(-1); }), HasSubstr("edge's rate"));
  EXPECT_THAT(beat([](auto& b) { b.add_edges()->set_bits_per_s(std::nan("")); }), HasSubstr("edge's rate"));
  EXPECT_THAT(beat([](auto& b) { b.add_holdings()->set_base(0); }), HasSubstr("base below version 0"));
  EXPECT_THAT(beat([](auto& b) {
                for (int i = 0; i < 257; ++i) b.add_edges();
              }),
              HasSubstr("257 edges listed"));
  EXPECT_THAT(beat([](auto& b) {
                for (int i = 0; i < 257; ++i) b.add_holdings();
              }),
              HasSubstr("257 holdings"));
  EXPECT_THAT(beat([](auto& b) {
                for (int i = 0; i < 257; ++i) b.add_progress();
              }),
              HasSubstr("257 progress items"));
  EXPECT_THAT(beat([](auto& b) { b.add_progress()->set_publication("x"); }), HasSubstr("publication: expected 16"));
  EXPECT_THAT(beat([](auto& b) {
                auto& p = *b.add_progress();
                p.set_publication(std::string(16, 'p'));
                for (std::uint32_t i = 0; i <= kStripesMax; ++i) p.add_chunks(i);
              }),
              HasSubstr("65 stripes listed, the limit is 64"));
  wire::ControlMessage w;
  w.mutable_edge_failed()->set_kind(4);
  EXPECT_THAT(refusal(w), HasSubstr("kind of failure from 0 to 3, found 4"));
  w.mutable_edge_failed()->set_kind(0);
  w.mutable_edge_failed()->set_reason(std::string(1025, 'r'));
  EXPECT_THAT(refusal(w), HasSubstr("reason of 1025"));
  w.mutable_poisoned()->set_publication("x");
  EXPECT_THAT(refusal(w), HasSubstr("publication"));
  w.mutable_chunk_request()->set_publication("x");
  EXPECT_THAT(refusal(w), HasSubstr("publication"));
  w.mutable_ack()->set_policy_digest("x");
  EXPECT_THAT(refusal(w), HasSubstr("policy digest"));
  w.mutable_goodbye()->set_reason(std::string(1025, 'r'));
  EXPECT_THAT(refusal(w), HasSubstr("reason of 1025"));
}

TEST(Control, SignedBodiesAreBounded) {
  const std::string large(kSignedBytesMax + 1, 'b');
  EXPECT_THAT(refusal(SignedAnnouncement{{large, {}}}), HasSubstr("signed body of 65537 bytes, the limit is 65536"));
  EXPECT_THAT(refusal(SignedManifest{{large, {}}}), HasSubstr("signed body"));
  EXPECT_THAT(refusal(SignedBeacon{{large, {}}}), HasSubstr("signed body"));
  EXPECT_THAT(refusal(EdgeStatus{Signed{large, {}}, {}}), HasSubstr("signed body"));
  wire::ControlMessage w;
  w.mutable_announcement()->set_signature(std::string(63, 's'));
  EXPECT_THAT(refusal(w), HasSubstr("signature: expected 64 bytes, found 63"));
  w.mutable_edge_status()->mutable_beacon();
  EXPECT_THAT(refusal(w), HasSubstr("signature"));
}

TEST(ChunkSet, BitmapsAreChecked) {
  EXPECT_FALSE(ChunkSet::from_bytes(9, "x").has_value());
  EXPECT_FALSE(ChunkSet::from_bytes(9, std::string("\x00\x02", 2)).has_value());  // bit 9 of 9
  const auto set = ChunkSet::from_bytes(9, std::string("\x00\x01", 2));
  ASSERT_TRUE(set.has_value());
  EXPECT_TRUE(set->contains(8));
  EXPECT_EQ(set->count(), 1u);
  EXPECT_EQ(set->end(), 9u);
  EXPECT_EQ(set->to_bytes(9), std::string("\x00\x01", 2));
  EXPECT_TRUE(ChunkSet::from_bytes(0, "").has_value());
}

TEST(ChunkSet, KeepsCount) {
  ChunkSet set;
  EXPECT_EQ(set.end(), 0u);
  for (const std::uint32_t i : {5u, 64u, 5u, 1000u}) set.insert(i);
  EXPECT_EQ(set.count(), 3u);
  EXPECT_EQ(set.end(), 1001u);
  set.erase(1000);
  set.erase(1000);
  set.erase(9999);
  EXPECT_EQ(set.count(), 2u);
  EXPECT_EQ(set.end(), 65u);
  set.insert_all(ChunkSet::all(6));
  EXPECT_EQ(set.count(), 7u);  // 0 to 5, and 64
  ChunkSet all = ChunkSet::all(128);
  EXPECT_EQ(all.count(), 128u);
  EXPECT_EQ(all.first_not_in(set, StripeMask::all()), 6u);
  EXPECT_EQ(set.first_not_in(all, StripeMask::all()), std::nullopt);
  all.erase(127);
  EXPECT_EQ(ChunkSet::all(128).first_not_in(all, StripeMask::all()), 127u);
}

TEST(StripeMask, DividesChunksAmongStripes) {
  EXPECT_FALSE(StripeMask::is_valid(0, 0));
  EXPECT_FALSE(StripeMask::is_valid(6, 1));
  EXPECT_FALSE(StripeMask::is_valid(128, 1));
  EXPECT_FALSE(StripeMask::is_valid(4, 0b10000));
  EXPECT_TRUE(StripeMask::is_valid(64, ~std::uint64_t{0}));
  const ChunkSet set = ChunkSet::all(1000);
  for (const std::uint32_t stripes : {1u, 2u, 4u, 8u, 16u, 32u, 64u}) {
    std::uint32_t sum = 0;
    for (std::uint32_t s = 0; s < stripes; ++s) {
      const StripeMask mask{stripes, std::uint64_t{1} << s};
      sum += set.count_of(mask);
      EXPECT_EQ(set.first_not_in({}, mask), s);
      for (std::uint32_t i = 0; i < 200; ++i) {
        EXPECT_EQ(mask.contains(i), i % stripes == s);
        EXPECT_EQ((mask.pattern() >> (i % 64) & 1) != 0, mask.contains(i % 64));
      }
    }
    EXPECT_EQ(sum, 1000u);
  }
  EXPECT_EQ(set.first_not_in({}, StripeMask::none()), std::nullopt);
  EXPECT_EQ(set.count_of({4, 0b1010}), 500u);
}

}  // namespace
}  // namespace echoline::overlay
