// The learner's protocol, driven by hand: admission, trust, and the repair of its topology.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/desk.hpp"

namespace echoline::overlay {
namespace {

using Kind = trust::PeerIdentity::Kind;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
// ---- admission ----

TEST(Learner, AdmitsAWorkerByItsCertificate) {
  LearnerConfig c = Desk::config(16);
  c.welcome = [](const MemberInfo& m) { return "hello " + m.name; };
  c.state.emplace().known[WorkerId{3}].name = "vast-3";
  Desk desk(std::move(c));
  const ConnId conn = desk.accept_peer({Kind::kWorker, WorkerId{3}});
  desk.deliver_control(conn, Hello{"run", "pretender", {"0.0.0.0", 9}, kMegabytePerS, {}, {}});
  const auto joined = desk.all<act::ReportWorkerJoined>();
  ASSERT_EQ(joined.size(), 1u);
  EXPECT_EQ(joined[0].member.id, WorkerId{3});
  EXPECT_EQ(joined[0].member.name, "vast-3");         // the name in its token, not in its hello
  EXPECT_EQ(joined[0].member.data.host, "10.9.9.9");  // the source address of its connection
  const auto welcome = desk.sent<Welcome>(conn);
  ASSERT_EQ(welcome.size(), 1u);
  EXPECT_EQ(welcome[0].worker, WorkerId{3});
  EXPECT_EQ(welcome[0].application, "hello vast-3");
  EXPECT_EQ(welcome[0].unix_ms, static_cast<std::uint64_t>((kMadeUnix_s + 1) * 1e3));
  EXPECT_EQ(desk.sent<SignedBeacon>(conn).size(), 1u);
  EXPECT_THAT(desk.all<act::Admit>(), SizeIs(1));
  ASSERT_EQ(desk.all<act::Dial>().size(), 1u);  // tests whether it can be reached
  EXPECT_EQ(desk.all<act::Dial>()[0].expected, WorkerId{3});
  desk.join(3);  // it joins again, so its old connection is dead
  EXPECT_THAT(desk.away(3), HasSubstr("joined again"));
  EXPECT_TRUE(desk.closed(conn));
  EXPECT_EQ(desk.core.stats().workers.size(), 1u);
}

TEST(Learner, RefusesUnknownPeersWithAReason) {
  Desk desk;
  const auto refused = [&](const trust::PeerIdentity& identity, const ControlMessage& says) {
    const ConnId conn = desk.accept_peer(identity);
    desk.deliver_control(conn, says);
    EXPECT_TRUE(desk.closed(conn));
    return desk.goodbye(conn);
  };
  const Hello hello{"run", "w", {"10.0.0.1", 9}, {}, {}, {}};
  EXPECT_THAT(refused({}, hello), HasSubstr("may only enrol, with a join token"));
  EXPECT_THAT(refused({Kind::kLearner, kLearnerId}, hello), HasSubstr("learner's certificate"));
  EXPECT_THAT(refused({Kind::kWorker, WorkerId{1}}, Draining{}), HasSubstr("introduce itself"));
  EXPECT_THAT(refused({Kind::kWorker, WorkerId{1}}, PeerHello{"run", 0, {}, false, {}}), HasSubstr("has not joined"));
  EXPECT_THAT(refused({}, Enrol{"echo1.nonsense", "i", {}, {}}), HasSubstr("token"));
  const ConnId garbage = desk.accept_peer({Kind::kWorker, WorkerId{1}});
  desk.core.on_frame(garbage, {FrameType::kControl, Slice(random_bytes(1, 50)), {}, {}}, desk.now);
  desk.take();
  EXPECT_THAT(desk.goodbye(garbage), HasSubstr("not a valid message"));
  EXPECT_TRUE(desk.all<act::ReportWorkerJoined>().empty());
}

// Only a join token makes a machine a node of the trainer, also for a learner that has lost its state.
TEST(Learner, AWorkerCannotCallItselfANode) {
  Desk desk;
  const ConnId conn = desk.accept_peer({Kind::kWorker, WorkerId{1}});
  desk.deliver_control(conn, Hello{"run", "node:b", {"10.0.0.1", 9}, {}, {}, {}});
  EXPECT_TRUE(desk.closed(conn));
  EXPECT_THAT(desk.goodbye(conn), HasSubstr("'node:b': join with another token"));
  EXPECT_TRUE(desk.all<act::ReportWorkerJoined>().empty());
  EXPECT_TRUE(desk.core.state().known.empty());
}

TEST(Learner, AWorkerIsRefusedIfItsWelcomeExceedsAMessage) {
  LearnerConfig c = Desk::config(16);
  std::size_t bytes = LearnerCore::kWelcomeBytesMax;
  c.welcome = [&](const MemberInfo&) { return std::string(bytes, 'w'); };
  Desk desk(std::move(c));
  desk.join(1);
  EXPECT_EQ(desk.all<act::ReportWorkerJoined>().size(), 1u);
  ++bytes;
  const ConnId conn = desk.accept_peer({Kind::kWorker, WorkerId{2}});
  desk.deliver_control(conn, Hello{"run", "w", {"10.0.0.2", 9}, {}, {}, {}});
  EXPECT_TRUE(desk.closed(conn));
  EXPECT_THAT(desk.goodbye(conn), HasSubstr("no welcome"));
  EXPECT_EQ(desk.all<act::ReportWorkerJoined>().size(), 1u);
}

TEST(Learner, ClosesUnknownPeersThatSendNothing) {
  Desk desk;
  const ConnId silent = desk.accept_peer({Kind::kWorker, WorkerId{1}});
  desk.pass_time(Core::kHandshakeTimeout - milliseconds(1));
  EXPECT_FALSE(desk.closed(silent));
  desk.pass_time(milliseconds(1));
  EXPECT_TRUE(desk.closed(silent));
  const std::size_t most = ConnectionLimits::of(65536).pending_peers;
  std::vector<ConnId> all;
  for (std::size_t i = 0; i < most; ++i) all.push_back(desk.accept_peer({}));
  EXPECT_FALSE(desk.closed(all.front()));
  const ConnId next = desk.accept_peer({});  // it is accepted, and the first of the others is closed
  EXPECT_TRUE(desk.closed(all.front()));
  EXPECT_FALSE(desk.closed(all.back()));
  EXPECT_FALSE(desk.closed(next));
}

TEST(Learner, EnrolsWithATokenOnce) {
  Desk desk;
  const trust::Authority authority = made_authority();
  const trust::Secret token = *trust::issue_token(authority, "vast-7", trust::Nonce{}, kMadeUnix_s);
  const auto enrol = [&](const trust::SigningKey& key, std::string_view text, const std::string& instance,
                         const trust::SigningKey& prover) {
    Enrol e{std::string(text), instance, key.public_key(), prover.sign("enrol 2", std::as_bytes(std::span(text)))};
    const ConnId conn = desk.accept_peer({});
    desk.deliver_control(conn, e);
    EXPECT_TRUE(desk.closed(conn));
    return conn;
  };
  const trust::SigningKey key = made_key("seven"), other = made_key("eight");
  EXPECT_THAT(desk.goodbye(enrol(key, token.reveal(), "vast-7", other)), HasSubstr("does not hold the key"));
  EXPECT_THAT(desk.goodbye(enrol(key, token.reveal(), "vast-8", key)), HasSubstr("another instance"));
  const auto enrolled = desk.sent<Enrolled>(enrol(key, token.reveal(), "vast-7", key));
  ASSERT_EQ(enrolled.size(), 1u);
  EXPECT_EQ(enrolled[0].worker, WorkerId{1});
  EXPECT_EQ(enrolled[0].authority, authority.certificate());
  const auto identity =
      trust::check_certificate(enrolled[0].certificate, authority.public_key(), "run", kMadeUnix_s + 2);
  ASSERT_TRUE(identity.has_value());
  EXPECT_EQ(identity->worker, WorkerId{1});
  EXPECT_EQ(identity->key, key.public_key());
  EXPECT_EQ(desk.core.state().known.at(WorkerId{1}).name, "vast-7");
  // The answer may have been lost: the same machine gets it again, and no other machine does.
  EXPECT_EQ(desk.sent<Enrolled>(enrol(key, token.reveal(), "vast-7", key)).at(0).certificate, enrolled[0].certificate);
  EXPECT_THAT(desk.goodbye(enrol(other, token.reveal(), "vast-7", other)), HasSubstr("used before"));
  const trust::Secret old = *trust::issue_token(authority, "vast-7", trust::Nonce{std::byte{1}}, kMadeUnix_s - 1000);
  EXPECT_THAT(desk.goodbye(enrol(other, old.reveal(), "vast-7", other)), HasSubstr("expired"));
  const trust::Secret foreign =
      *trust::issue_token(made_authority("run", "mallory"), "vast-7", trust::Nonce{}, kMadeUnix_s);
  EXPECT_NE(desk.goodbye(enrol(other, foreign.reveal(), "vast-7", other)), "");
}

TEST(Learner, RenewsAndRevokes) {
  Desk desk;
  const ConnId conn = desk.join(1);
  const trust::PublicKey key = made_key("worker 1").public_key();
  desk.deliver_control(conn, Renew{made_key("another").public_key()});
  EXPECT_TRUE(desk.sent<Renewed>(conn).empty()) << "one key per identity";
  desk.deliver_control(conn, Renew{key});
  const auto renewed = desk.sent<Renewed>(conn);
  ASSERT_EQ(renewed.size(), 1u);
  const auto identity =
      trust::check_certificate(renewed[0].certificate, made_authority().public_key(), "run", kMadeUnix_s + 1);
  ASSERT_TRUE(identity.has_value());
  EXPECT_EQ(identity->worker, WorkerId{1});
  EXPECT_EQ(identity->key, key);
  desk.join(2);
  desk.core.expel(WorkerId{1}, "its rollouts were wrong", desk.now);
  desk.take();
  EXPECT_EQ(desk.goodbye(conn), "its rollouts were wrong");
  EXPECT_EQ(desk.lost(1), "its rollouts were wrong");
  desk.pass_time(seconds(1));
  const SignatureChecker checker("run", made_authority().public_key());
  const auto beacon = checker.open(desk.sent<SignedBeacon>(2).back());
  ASSERT_TRUE(beacon.has_value());
  EXPECT_EQ(beacon->revoked, WorkerSet{WorkerId{1}});
  const ConnId again = desk.accept_peer({Kind::kWorker, WorkerId{1}});
  desk.deliver_control(again, Hello{"run", "w", {"10.0.0.1", 9}, {}, {}, {}});
  EXPECT_TRUE(desk.closed(again));
  EXPECT_FALSE(desk.has(WorkerId{1}));
}

// Five thousand workers are expelled within an hour. The learner remembers each as long as its certificate may be
// valid, and no longer.
TEST(Learner, RevokesHoweverManyAndForgetsThemWhenTheirCertificatesHaveEnded) {
  Desk desk;
  desk.join(1);
  constexpr std::uint64_t kLast = 5001;
  for (std::uint64_t id = 2; id <= kLast; ++id) {
    const ConnId conn = desk.accept_peer({Kind::kWorker, WorkerId{id}}, "10.0.9.9");
    desk.deliver_control(conn, Hello{"run", "w", {"10.0.9.9", static_cast<std::uint16_t>(id)}, {}, {}, {}});
    desk.core.expel(WorkerId{id}, "it lies", desk.now);
  }
  desk.pass_time(seconds(1));
  const SignatureChecker checker("run", made_authority().public_key());
  const auto revoked = [&] { return checker.open(desk.sent<SignedBeacon>(1).back())->revoked; };
  for (std::uint64_t id = 2; id <= kLast; ++id) ASSERT_TRUE(revoked().contains(WorkerId{id})) << id;
  EXPECT_FALSE(revoked().contains(WorkerId{1}));
  desk.pass_time(trust::kWorkerLifetimeMax);
  EXPECT_TRUE(revoked().contains(WorkerId{kLast})) << "clocks may differ";
  desk.pass_time(trust::kClockTolerance + std::chrono::minutes(2));
  EXPECT_EQ(revoked(), WorkerSet{});
  EXPECT_TRUE(desk.core.state().revoked.empty());
  EXPECT_EQ(desk.core.state().known.size(), 1u) << "their names are forgotten";
  EXPECT_TRUE(desk.core.state().known.contains(WorkerId{1}));
}

// A machine that slept for hours has its key, but no valid certificate.
TEST(Learner, AnEnrolledWorkerComesBackWithItsKey) {
  Desk desk;
  const trust::Authority authority = made_authority();
  const trust::SigningKey key = made_key("seven");
  const auto answer = [&](const ControlMessage& says) {
    const ConnId conn = desk.accept_peer({});
    desk.deliver_control(conn, says);
    EXPECT_TRUE(desk.closed(conn));
    return conn;
  };
  const auto back = [&](const trust::SigningKey& k, const trust::SigningKey& prover) {
    return answer(Return{k.public_key(), prover.sign("return 4", authority.fingerprint())});
  };
  EXPECT_THAT(desk.goodbye(back(key, key)), HasSubstr("a join token is needed"));
  const trust::Secret token = *trust::issue_token(authority, "vast-7", trust::Nonce{}, kMadeUnix_s);
  const std::string text(token.reveal());
  const Enrol enrol{text, "vast-7", key.public_key(), key.sign("enrol 2", std::as_bytes(std::span(text)))};
  const auto first = desk.sent<Enrolled>(answer(enrol)).at(0);
  desk.pass_time(std::chrono::hours(2));
  const auto valid = [&](const Enrolled& e) {
    const double now_unix_s = kMadeUnix_s + echoline::seconds(desk.now.time_since_epoch());
    return trust::check_certificate(e.certificate, authority.public_key(), "run", now_unix_s).has_value();
  };
  EXPECT_FALSE(valid(first));
  const auto second = desk.sent<Enrolled>(back(key, key)).at(0);
  EXPECT_EQ(second.worker, first.worker);
  EXPECT_TRUE(valid(second));
  EXPECT_THAT(desk.goodbye(back(key, made_key("eight"))), HasSubstr("does not hold the key"));
  EXPECT_EQ(desk.sent<Enrolled>(back(key, key)).at(0).certificate, second.certificate)
      << "a second request gets the same certificate";
  // Its token serves as well, although it was used long ago or has expired. No second token is used up.
  const trust::Secret other = *trust::issue_token(authority, "vast-7", trust::Nonce{std::byte{1}},
                                                  kMadeUnix_s + echoline::seconds(desk.now.time_since_epoch()));
  const std::string more(other.reveal());
  const auto used = desk.core.state().used_tokens.size();
  EXPECT_EQ(desk.sent<Enrolled>(answer(Enrol{more, "vast-7", key.public_key(),
                                             key.sign("enrol 2", std::as_bytes(std::span(more)))}))
                .at(0)
                .worker,
            first.worker);
  EXPECT_EQ(desk.core.state().used_tokens.size(), used);
  // The learner still knows it after a restart. Once expelled, it is refused.
  LearnerConfig c = Desk::config(16);
  c.state = desk.core.state();
  c.core.unix_origin_s = kMadeUnix_s + 7200;
  Desk again(std::move(c));
  const ConnId conn = again.accept_peer({});
  again.deliver_control(conn, Return{key.public_key(), key.sign("return 4", authority.fingerprint())});
  EXPECT_EQ(again.sent<Enrolled>(conn).at(0).worker, first.worker);
  const ConnId control = again.accept_peer({Kind::kWorker, first.worker, 0, 0, key.public_key()});
  again.deliver_control(control, Hello{"run", "w", {"10.0.0.1", 9}, {}, {}, {}});
  again.core.expel(first.worker, "it lies", again.now);
  const ConnId refused = again.accept_peer({});
  again.deliver_control(refused, Return{key.public_key(), key.sign("return 4", authority.fingerprint())});
  EXPECT_THAT(again.goodbye(refused), HasSubstr("revoked"));
}

// Two attempts at the same target are a second apart. Only the issuer of tokens can name another host than the worker's
// source address.
TEST(Learner, DialsWorkersWhereTheyComeFrom) {
  LearnerConfig c = Desk::config(16);
  c.state.emplace().known[WorkerId{4}].host = "gpu.example";
  Desk desk(std::move(c));
  const auto join = [&](std::uint64_t id, const Endpoint& named) {
    const std::size_t before = desk.all<act::Dial>().size();
    const ConnId conn = desk.accept_peer({Kind::kWorker, WorkerId{id}}, "203.0.113.7");
    desk.deliver_control(conn, Hello{"run", "w", named, {}, {}, {}});
    const auto dials = desk.all<act::Dial>();
    return std::pair(conn, dials.size() > before ? dials.back().to : Endpoint{});
  };
  const auto victim = join(1, {"127.0.0.1", 22});
  EXPECT_EQ(victim.second, (Endpoint{"203.0.113.7", 22}));
  const auto other = join(2, {"db.internal", 5432});
  EXPECT_EQ(other.second, (Endpoint{"203.0.113.7", 5432}));
  ASSERT_EQ(desk.sent<Notice>(other.first).size(), 1u);
  EXPECT_THAT(desk.sent<Notice>(other.first)[0].text, HasSubstr("instead of db.internal:5432"));
  EXPECT_EQ(join(4, {"", 7070}).second, (Endpoint{"gpu.example", 7070}));
  // Repeated attempts come once a second.
  std::size_t dials = 0;
  for (int i = 0; i < 100; ++i) {
    dials += join(1, {"127.0.0.1", 22}).second != Endpoint{};
    desk.now += milliseconds(10);
    desk.core.on_timer(desk.now);
    desk.take();
  }
  EXPECT_LE(dials, 2u);
}

// The learner probes again after children fail to connect, and after a while, but not once per join.
TEST(Learner, TriesAgainWhetherAWorkerCanBeReached) {
  Desk desk(8);
  desk.join_all(2);
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2));
  const auto reachable = [&](std::size_t i) { return desk.core.stats().workers.at(i).reachable; };
  desk.pass_time(seconds(2));
  const std::size_t before = desk.all<act::Dial>().size();
  desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kUnreachable, "refused"});
  ASSERT_EQ(desk.all<act::Dial>().size(), before + 1);
  EXPECT_EQ(desk.all<act::Dial>().back().expected, WorkerId{1});
  desk.core.on_closed(desk.all<act::Dial>().back().conn, "refused", desk.now);
  desk.take();
  EXPECT_FALSE(reachable(0));
  EXPECT_THAT(desk.chain(), ElementsAre(2, 1));
  ASSERT_EQ(desk.sent<Notice>(1).size(), 1u);
  EXPECT_THAT(desk.sent<Notice>(1)[0].text, HasSubstr("cannot be reached at 10.0.0.1:9: refused"));
  desk.pass_time(std::chrono::minutes(2));  // now its port is open
  ASSERT_EQ(desk.all<act::Dial>().size(), before + 2);
  desk.core.on_connected(desk.all<act::Dial>().back().conn, desk.now);
  desk.take();
  EXPECT_TRUE(reachable(0));
}

TEST(Learner, RenewsAGrantBeforeItExpires) {
  Desk desk(8);
  desk.join_all(2);
  const SignatureChecker checker("run", made_authority().public_key());
  const auto ends = [&] { return open(checker, *desk.sent<Assign>(2).back().grant)->expires_unix_ms; };
  const auto now_ms = [&] {
    return static_cast<std::uint64_t>((kMadeUnix_s + echoline::seconds(desk.now.time_since_epoch())) * 1e3);
  };
  const auto first = open(checker, *desk.sent<Assign>(2).back().grant);
  EXPECT_EQ(first->child, WorkerId{2});
  EXPECT_EQ(first->from, (std::vector<Grant::From>{{WorkerId{1}, 1}}));
  for (int minutes = 0; minutes < 30; ++minutes) {
    EXPECT_GE(ends(), now_ms() + 300'000) << "as long as a worker waits for its learner";
    desk.pass_time(std::chrono::minutes(1));
  }
  EXPECT_LE(desk.sent<Assign>(2).size(), 10u);
  // A child with a new parent is no longer served by the old one.
  EXPECT_TRUE(desk.sent<Release>(1).empty());
  desk.deliver_control(1, Draining{});
  ASSERT_THAT(desk.chain(), ElementsAre(2, 1));
  ASSERT_EQ(desk.sent<Release>(1).size(), 1u);
  EXPECT_EQ(desk.sent<Release>(1)[0].child, WorkerId{2});
}

TEST(Learner, BeaconsKeepTheirOrderThoughTheClockGoesBack) {
  const SignatureChecker checker("run", made_authority().public_key());
  Desk before;
  const ConnId conn = before.join(1);
  before.pass_time(seconds(10));
  LearnerConfig c = Desk::config(16);
  c.state = before.core.state();
  c.core.unix_origin_s = kMadeUnix_s - 3 * 3600;
  Desk after(std::move(c));
  EXPECT_GT(checker.open(after.sent<SignedBeacon>(after.join(1)).at(0))->sequence,
            checker.open(before.sent<SignedBeacon>(conn).back())->sequence);
  const std::uint64_t last = after.core.issue_time(after.now);
  EXPECT_GT(last, before.core.issue_time(before.now));
  EXPECT_GT(after.core.issue_time(after.now), last);
  after.pass_time(seconds(10));
  EXPECT_GE(after.core.issue_time(after.now), last + 9'000) << "the sequence continues with the clock";
}

// The learner began an epoch, told a worker, could not save it, and after its death began the epoch before again.
TEST(Learner, AnswersNoWorkerBeforeItsStateIsOnDisk) {
  LearnerConfig c = Desk::config(16);
  c.durable = true;
  Desk desk(std::move(c));
  const auto refused = [&] {
    const ConnId conn = desk.accept_peer({trust::PeerIdentity::Kind::kWorker, WorkerId{1}});
    const auto closed = desk.all<act::Close>();
    return !closed.empty() && closed.back().conn == conn;
  };
  EXPECT_TRUE(refused());
  desk.core.on_saved(fail(Code::kUnavailable, "save state", "input/output error"), desk.now);
  EXPECT_TRUE(refused());
  desk.pass_time(seconds(2));
  desk.core.on_saved(ok(), desk.now);
  EXPECT_FALSE(refused());
  EXPECT_THAT(desk.sent<SignedBeacon>(desk.join(1)), SizeIs(1));
}

TEST(Learner, BeaconsGrowAcrossRestarts) {
  const SignatureChecker checker("run", made_authority().public_key());
  const auto first_beacon = [&](double origin) {
    LearnerConfig c = Desk::config(16);
    c.core.unix_origin_s = origin;
    Desk desk(std::move(c));
    return checker.open(desk.sent<SignedBeacon>(desk.join(1)).at(0))->sequence;
  };
  EXPECT_LT(first_beacon(kMadeUnix_s), first_beacon(kMadeUnix_s + 1));
}

TEST(Learner, ServesItsOwnChildrenOnly) {
  Desk desk(8);
  desk.join_all(2);
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2));
  const auto edge = [&](std::uint64_t id, const PeerHello& hello) {
    const ConnId conn = desk.accept_peer({Kind::kWorker, WorkerId{id}});
    desk.deliver_control(conn, hello);
    return conn;
  };
  const SignedGrant one = made_grant(1, 0), two = made_grant(2, 0),
                    help = made_grant(2, 0, {.catch_up_to = Version{0}});
  EXPECT_FALSE(desk.closed(edge(1, {"run", 0, {}, false, {}, one})));
  EXPECT_THAT(desk.goodbye(edge(2, {"run", 0, {}, false, {}, two})), HasSubstr("was assigned another parent"));
  EXPECT_THAT(desk.goodbye(edge(1, {"run", 0, {}, false, {}})), HasSubstr("the child shows none"));
  EXPECT_THAT(desk.goodbye(edge(1, {"run", 0, {}, false, {}, two})), HasSubstr("found one for worker 2"));
  EXPECT_THAT(desk.goodbye(edge(2, {"run", 0, Version{0}, false, {}, two})), HasSubstr("does not cover the request"));
  EXPECT_NE(desk.goodbye(edge(1, {"another", 0, {}, false, {}})), "");
  EXPECT_THAT(desk.goodbye(edge(2, {"run", 0, Version{0}, false, {}, help})), HasSubstr("which is not published"));
  ASSERT_TRUE(desk.publish(make(full(0), 5000)).has_value());
  const ConnId helped = edge(2, {"run", 0, Version{0}, false, {}, help});
  EXPECT_FALSE(desk.closed(helped));
  desk.pass_time(milliseconds(100));
  EXPECT_EQ(desk.sent<SignedManifest>(helped).size(), 1u);
  // An edge with a new introduction replaces the child's open edge. A further stream does not.
  const ConnId first = edge(1, {"run", 0, {}, false, {}, one}), more = edge(1, {"run", 1, {}, false, {}, one});
  EXPECT_FALSE(desk.closed(first));
  const ConnId anew = edge(1, {"run", 0, {}, false, {}, one});
  EXPECT_TRUE(desk.closed(first));
  EXPECT_TRUE(desk.closed(more));
  EXPECT_FALSE(desk.closed(helped));
  desk.deliver_control(anew, Draining{});
  EXPECT_TRUE(desk.closed(anew));
  EXPECT_TRUE(desk.has(WorkerId{1}));
}

// ---- publications ----

TEST(Learner, RefusesBadPublications) {
  Desk desk;
  ASSERT_TRUE(desk.publish(make(full(3), 10)).has_value());
  EXPECT_THAT(desk.publish(make(full(3), 10)).error().detail, HasSubstr("versions must grow, the last was 3"));
  EXPECT_THAT(desk.publish(make(delta(5, 4), 10)).error().detail, HasSubstr("its base was not published"));
  EXPECT_THAT(desk.publish(make(full(4), 10), true).error().detail, HasSubstr("that version was not published"));
  EXPECT_TRUE(desk.publish(make(delta(4, 3), 10)).has_value());
  EXPECT_TRUE(desk.publish(make(full(4), 10), true).has_value());
  EXPECT_THAT(desk.publish(make(delta(4, 2), 10, {.policy_digest = digest_of(9)}), true).error().detail,
              HasSubstr("published before with digest"));
  EXPECT_EQ(desk.core.add(PublicationId{}, {}, desk.now).error().code, Code::kNotFound);
  // An abandoned publication does not count as published.
  const Made five = make(delta(5, 4), 10);
  ASSERT_TRUE(desk.core.begin(five.announcement, five.opening, false, desk.now).has_value());
  desk.core.abandon(five.id, desk.now);
  EXPECT_EQ(desk.core.finish(five.manifest, five.closing, desk.now).error().code, Code::kNotFound);
  EXPECT_TRUE(desk.publish(make(delta(5, 4), 20)).has_value());
}

TEST(Learner, MeasuresTheQuorumOfTheWorkersPresentAtTheStart) {
  Desk desk;
  desk.join_all(11);
  ASSERT_TRUE(desk.publish(make(full(0), 1000)).has_value());
  desk.join(12);  // too late to count
  for (std::uint64_t id = 1; id <= 8; ++id) {
    desk.now += milliseconds(10);
    desk.deliver_control(id, Installed{Version{0}, digest_of(0), 0});
  }
  EXPECT_THAT(desk.all<act::ReportBroadcast>(), IsEmpty());               // 8 of 11; ceil(9.9) = 10 needed
  desk.core.on_closed(desk.control.at(WorkerId{11}), "reset", desk.now);  // 8 of 10; 9 needed
  desk.now += milliseconds(10);
  desk.deliver_control(9, Installed{Version{0}, digest_of(0), 0});
  ASSERT_THAT(desk.all<act::ReportBroadcast>(), SizeIs(1));
  const BroadcastReport report = desk.all<act::ReportBroadcast>()[0].report;
  EXPECT_EQ(report.t_b, milliseconds(90));
  EXPECT_EQ(report.workers, 10u);
  EXPECT_EQ(desk.all<act::ReportInstalled>().size(), 9u);
}

TEST(Learner, TrustsOnlyAcknowledgementsThatCanBeTrue) {
  Desk desk;
  desk.join_all(2);
  ASSERT_TRUE(desk.publish(make(full(3), 10)).has_value());
  desk.deliver_control(1, Installed{Version{3}, digest_of(3), 0});
  desk.deliver_control(1, Installed{Version{2}, digest_of(2), 0});  // older: ignored
  desk.deliver_control(1, Installed{Version{9}, digest_of(9), 7});  // of another epoch: ignored
  EXPECT_EQ(desk.core.stats().workers[0].installed, Version{3});
  EXPECT_THAT(desk.all<act::ReportInstalled>(), SizeIs(1));
  desk.deliver_control(2, Installed{Version{4}, digest_of(4), 0});
  EXPECT_THAT(desk.lost(2), HasSubstr("not published"));
  EXPECT_TRUE(desk.has(WorkerId{1}));
}

TEST(Learner, ARestartedLearnerTrustsAcknowledgementsOfItsEarlierPublications) {
  LearnerConfig c = Desk::config(16);
  c.state.emplace();
  c.state->published = {{Version{3}, digest_of(3)}, {Version{4}, digest_of(4)}};
  c.resumed_at = Version{4};
  Desk desk(std::move(c));
  EXPECT_EQ(desk.core.epoch(), 0u);
  desk.join(1);
  desk.deliver_control(1, Installed{Version{4}, digest_of(4), 0});
  EXPECT_TRUE(desk.has(WorkerId{1}));
  EXPECT_EQ(desk.publish(make(full(3), 10)).error().code, Code::kInvalid);  // before the restart it was 4
  EXPECT_TRUE(desk.publish(make(delta(5, 4), 10)).has_value());
}

TEST(Learner, ALearnerThatResumesFromAnEarlierVersionBeginsAnEpoch) {
  LearnerConfig c = Desk::config(16);
  c.state.emplace();
  c.state->published = {{Version{3}, digest_of(3)}, {Version{4}, digest_of(4)}};
  c.resumed_at = Version{3};
  Desk desk(std::move(c));
  EXPECT_EQ(desk.core.epoch(), 1u);
  EXPECT_THAT(desk.core.state().published, SizeIs(1));
  const ConnId conn = desk.join(1);
  EXPECT_EQ(SignatureChecker("run", made_authority().public_key()).open(desk.sent<SignedBeacon>(conn).at(0))->epoch,
            1u);
  EXPECT_TRUE(desk.publish(make(delta(4, 3), 10, {.epoch = 1, .policy_digest = digest_of(44)})).has_value());
}

TEST(Learner, GivesUpAWorkerThatDoesNotRead) {
  Desk desk(8000);
  const ConnId conn = desk.join(1);
  const Slice message{std::vector<std::byte>(kMessageBytesMax / 4)};
  for (int i = 0; i < 15; ++i) desk.core.send_message(WorkerId{1}, message, desk.now);
  for (int i = 0; i < 2000; ++i) {  // it reads them all
    desk.now += milliseconds(100);
    desk.core.on_timer(desk.now);
    desk.deliver_control(conn, Heartbeat{});
    desk.core.on_sent(conn, Uplink::kWindowBytes, desk.now);
    desk.take();
  }
  for (int i = 0; i < 15; ++i) desk.core.send_message(WorkerId{1}, message, desk.now);
  desk.take();
  EXPECT_EQ(desk.away(1), "");
  for (int i = 0; i < 2; ++i) desk.core.send_message(WorkerId{1}, message, desk.now);
  desk.take();
  EXPECT_THAT(desk.away(1), HasSubstr("does not take its messages"));
}

// ---- topology ----

TEST(Learner, PlansChainsAndReattachesTheTailBehindADeadWorker) {
  Desk desk(16);  // two chains of 8
  desk.join_all(4);
  ASSERT_THAT(desk.chains(), SizeIs(2));
  const WorkerId seed = desk.chains()[0][0], tail = desk.chains()[0][1];
  desk.core.on_closed(desk.control.at(seed), "reset", desk.now);
  desk.take();
  EXPECT_EQ(desk.core.topology().parents().at(tail), std::vector<WorkerId>{kLearnerId});
  EXPECT_THAT(desk.away(seed.value), HasSubstr("reset"));
  const auto assign = desk.sent<Assign>(tail.value);
  EXPECT_EQ(assign.back().parents.at(0).worker, kLearnerId);
  EXPECT_EQ(assign.back().parents.at(0).endpoint, (Endpoint{"10.0.0.0", 1}));
}

TEST(Learner, ALaterWorkerMovesNoOther) {
  Desk desk(8);
  desk.join_all(3);
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  const auto before = desk.sent<Assign>(std::uint64_t{2}).size();
  desk.join(4);
  desk.pass_time(2 * TopologyPlan::kDelay);
  EXPECT_THAT(desk.chain(), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(desk.sent<Assign>(std::uint64_t{2}).size(), before);  // its parents are the same
}

TEST(Learner, AnUnreachableWorkerForwardsToNoOther) {
  Desk desk(8);
  desk.join(1, false);
  desk.join(2);
  desk.join(3);
  desk.pass_time(2 * TopologyPlan::kDelay);
  EXPECT_THAT(desk.chain(), ElementsAre(2, 3, 1));
  for (const WorkerView& view : desk.core.stats().workers) EXPECT_EQ(view.reachable, view.info.id != WorkerId{1});
}

// ---- presence ----

LearnerConfig patient(Duration heartbeat_timeout, Duration away_max = std::chrono::minutes(5)) {
  LearnerConfig config = Desk::config(8);
  config.network.heartbeat_timeout = heartbeat_timeout;
  config.away_max = away_max;
  return config;
}

TEST(Learner, ASilentWorkerLosesOnlyItsPlaceUntilItIsHeardAgain) {
  Desk desk(patient(seconds(20)));
  desk.join_all(3);
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2, 3));
  desk.pass_time(seconds(4), {1});
  EXPECT_THAT(desk.chain(), ElementsAre(2, 3));
  desk.pass_time(seconds(12), {1});
  EXPECT_EQ(desk.away(1), "") << "16 s of 20";
  EXPECT_EQ(desk.lost(1), "");
  EXPECT_FALSE(desk.closed(desk.control.at(WorkerId{1})));
  EXPECT_EQ(desk.goodbye(desk.control.at(WorkerId{1})), "");
  const std::size_t assigned = desk.sent<Assign>(std::uint64_t{1}).size();
  desk.pass_time(seconds(2));
  EXPECT_THAT(desk.chain(), ElementsAre(2, 3, 1)) << "a worker that is heard again gets a place";
  EXPECT_GT(desk.sent<Assign>(std::uint64_t{1}).size(), assigned);
  EXPECT_THAT(desk.all<act::ReportWorkerJoined>(), SizeIs(3)) << "the worker had not left";
}

// The operator's minimum holds for any measured heartbeat interval and any complaint of a child.
TEST(Learner, NoWorkerLosesItsPlaceBeforeTheOperatorAllowsIt) {
  for (const bool child_complains : {false, true}) {
    LearnerConfig config = patient(seconds(20));
    config.network.silence_min = seconds(10);
    Desk desk(config);
    desk.join_all(3);
    desk.pass_time(seconds(60));
    EXPECT_EQ(desk.sent<Welcome>(std::uint64_t{1}).at(0).patience, seconds(100)) << "workers wait longer";
    for (int s = 1; s < 10; ++s) {
      desk.pass_time(seconds(1), {1});
      if (child_complains) desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kSilent, "nothing heard"});
      ASSERT_THAT(desk.chain(), testing::Contains(1)) << s << " s of 10";
    }
    desk.pass_time(seconds(2), {1});
    EXPECT_THAT(desk.chain(), testing::Not(testing::Contains(1)));
    EXPECT_EQ(desk.away(1), "");
  }
  // The agreed limit on absence still holds. Without the key, the learned timeout has its minimum of four heartbeats.
  LearnerConfig config = patient(seconds(5));
  config.network.silence_min = seconds(60);
  Desk late(config), learned(patient(seconds(20)));
  late.join_all(3), learned.join_all(3);
  late.pass_time(seconds(7), {1}), learned.pass_time(seconds(4), {1});
  EXPECT_THAT(late.away(1), HasSubstr("no heartbeat"));
  EXPECT_THAT(learned.chain(), ElementsAre(2, 3));
}

TEST(Learner, AWorkerThatWasAwayKeepsItsRecord) {
  Desk desk(patient(seconds(5)));
  desk.join_all(3);
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  for (const std::uint64_t child : {2, 2, 3, 3}) desk.deliver_control(child, Poisoned{WorkerId{1}, {}, 0});
  ASSERT_EQ(desk.core.stats().quarantined, 1u);
  const ConnId before = desk.control.at(WorkerId{1});
  desk.pass_time(seconds(9), {1});
  EXPECT_THAT(desk.away(1), HasSubstr("no heartbeat for"));
  EXPECT_EQ(desk.away(2), "");
  EXPECT_EQ(desk.lost(1), "");
  EXPECT_TRUE(desk.closed(before));
  EXPECT_EQ(desk.goodbye(before), "") << "it is not told to leave";
  ASSERT_THAT(desk.core.stats().away, SizeIs(1));
  EXPECT_EQ(desk.core.stats().away[0].info.id, WorkerId{1});
  EXPECT_FALSE(desk.has(WorkerId{1}));
  desk.join(1);
  desk.pass_time(seconds(1));
  EXPECT_THAT(desk.all<act::ReportWorkerJoined>(), SizeIs(4));
  EXPECT_THAT(desk.core.stats().away, IsEmpty());
  EXPECT_THAT(desk.chain(), ElementsAre(3, 2, 1));
  EXPECT_TRUE(desk.core.stats().workers[0].quarantined) << "the quarantine survives a return";
  EXPECT_EQ(desk.core.stats().lost, 0u);
}

TEST(Learner, AnAbsentWorkerIsLostAfterItsTimeAndNotBefore) {
  Desk desk(patient(seconds(5), seconds(60)));
  desk.join_all(3);
  desk.core.on_closed(desk.control.at(WorkerId{1}), "reset", desk.now);
  desk.take();
  EXPECT_THAT(desk.away(1), HasSubstr("reset"));
  desk.pass_time(seconds(59));
  EXPECT_EQ(desk.lost(1), "");
  desk.pass_time(seconds(2));
  EXPECT_THAT(desk.lost(1), HasSubstr("away for 1 min"));
  EXPECT_THAT(desk.lost(1), HasSubstr("reset"));
  EXPECT_EQ(desk.core.stats().lost, 1u);
  desk.join(1);  // late, but with the same identity
  EXPECT_TRUE(desk.has(WorkerId{1}));
  // The machine has ended, or the worker is expelled: the learner does not wait.
  for (const std::uint64_t id : {2, 3}) desk.core.on_closed(desk.control.at(WorkerId{id}), "reset", desk.now);
  desk.core.give_up(WorkerId{2}, "its machine has ended", desk.now);
  desk.core.expel(WorkerId{3}, "its rollouts were wrong", desk.now);
  desk.take();
  EXPECT_EQ(desk.lost(2), "its machine has ended");
  EXPECT_EQ(desk.lost(3), "its rollouts were wrong");
  EXPECT_TRUE(desk.core.state().revoked.contains(WorkerId{3}));
  EXPECT_THAT(desk.core.stats().away, IsEmpty());
}

// Messages that arrived while this process was stopped are still in its sockets, because timers run first.
TEST(Learner, JudgesNoWorkerForTheTimeInWhichItDidNotRun) {
  Desk desk(patient(seconds(3), seconds(10)));
  desk.join_all(3);
  desk.core.on_closed(desk.control.at(WorkerId{3}), "reset", desk.now);
  desk.take();
  desk.pass_time(seconds(1));
  desk.now += seconds(40);
  desk.core.on_timer(desk.now);
  desk.take();
  EXPECT_EQ(desk.away(1), "");
  EXPECT_EQ(desk.lost(3), "") << "it could not come back in that time";
  EXPECT_THAT(desk.chain(), ElementsAre(1, 2)) << "not even its place is lost";
  desk.pass_time(seconds(6), {1});
  EXPECT_THAT(desk.away(1), HasSubstr("no heartbeat for")) << "the timeout counts from the pause's end";
  EXPECT_EQ(desk.away(2), "");
}

TEST(Learner, APauseDoesNotExtendALaterAbsence) {
  Desk desk(patient(seconds(3), seconds(10)));
  desk.join_all(2);
  desk.now += std::chrono::hours(3);
  desk.core.on_closed(desk.control.at(WorkerId{2}), "reset", desk.now);  // before any timer
  desk.core.on_timer(desk.now);
  desk.take();
  desk.pass_time(seconds(12));
  EXPECT_EQ(desk.away(1), "");
  EXPECT_NE(desk.lost(2), "");
}

TEST(Learner, ReportsTheTroublesOfWorkers) {
  Desk desk;
  desk.join_all(1);
  for (int i = 0; i < 2 * LearnerCore::kTroublesMax; ++i) desk.deliver_control(1, Trouble{"the disk is full"});
  ASSERT_THAT(desk.all<act::ReportWorkerTrouble>(), SizeIs(LearnerCore::kTroublesMax));
  EXPECT_EQ(desk.all<act::ReportWorkerTrouble>()[0].worker, WorkerId{1});
  EXPECT_EQ(desk.all<act::ReportWorkerTrouble>()[0].text, "the disk is full");
}

TEST(Learner, ASilentWorkerIsNotAskedToHelp) {
  Desk desk(8);
  desk.join_all(3);
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  Heartbeat beat;
  beat.holdings = {{full(0), 10}};
  desk.deliver_control(3, beat);
  const auto silent = [&] {
    for (const WorkerView& view : desk.core.stats().workers)
      if (view.info.id == WorkerId{3}) return view.silent;
    return false;
  };
  for (int i = 0; i < 30 && !silent(); ++i) desk.pass_time(milliseconds(250), {3});
  ASSERT_TRUE(silent()) << "it is a member, but silent";
  desk.deliver_control(2, NeedHelp{Version{0}, false, {}});
  ASSERT_THAT(desk.sent<Help>(std::uint64_t{2}), SizeIs(1));
  EXPECT_EQ(desk.sent<Help>(std::uint64_t{2})[0].from.worker, kLearnerId);
}

TEST(Learner, AHelpedWorkerCountsAgainstItsParent) {
  Desk desk(8);
  desk.join_all(3);
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2, 3));
  const auto fail = [&] {
    desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kLost, "reset"});
    desk.pass_time(milliseconds(300));
  };
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  Heartbeat beat;
  beat.holdings = {{full(0), 10}};
  desk.deliver_control(3, beat);
  fail();
  fail();
  desk.deliver_control(2, NeedHelp{Version{0}, false, {}});
  ASSERT_THAT(desk.sent<Help>(std::uint64_t{2}), SizeIs(1));
  desk.deliver_control(2, Installed{Version{0}, digest_of(0), 0});
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2, 3));
  fail();
  EXPECT_THAT(desk.chain(), ElementsAre(1, 3, 2)) << "three times in a row, regardless of helpers";
}

TEST(Learner, ReportsAPathThatSwallowsLargePackets) {
  Desk desk;
  desk.join_all(1);
  desk.core.on_large_packets_dropped(WorkerId{1}, "the path to 10.0.0.1 swallows packets of 1500 bytes", desk.now);
  desk.take();
  ASSERT_THAT(desk.all<act::ReportWorkerTrouble>(), SizeIs(1));
  EXPECT_EQ(desk.all<act::ReportWorkerTrouble>()[0].worker, WorkerId{1});
  EXPECT_THAT(desk.all<act::ReportWorkerTrouble>()[0].text, HasSubstr("swallows packets"));
}

TEST(Learner, LetsTheParentDialIfTheChildCannotAndDemotesItIfThatFailsToo) {
  Desk desk(8);
  desk.join_all(3);
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2, 3));
  desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kUnreachable, "no route"});
  ASSERT_THAT(desk.sent<DialChild>(std::uint64_t{1}), SizeIs(1));
  EXPECT_EQ(desk.sent<DialChild>(std::uint64_t{1})[0].worker, WorkerId{2});
  EXPECT_TRUE(desk.sent<Assign>(std::uint64_t{2}).back().parents.at(0).dials);
  EXPECT_THAT(desk.chain(), ElementsAre(1, 2, 3));
  const auto fails = [&](std::uint64_t child) {
    for (int i = 0; i < 3; ++i, desk.pass_time(milliseconds(300)))
      desk.deliver_control(child, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kUnreachable, "no route"});
  };
  fails(2);
  EXPECT_THAT(desk.chain(), ElementsAre(1, 3, 2)) << "they are separated, and the child moves no nearer";
  desk.deliver_control(3, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kUnreachable, "no route"});
  ASSERT_THAT(desk.sent<DialChild>(std::uint64_t{1}), SizeIs(testing::Gt(1u)));
  fails(3);
  EXPECT_THAT(desk.chain(), ElementsAre(3, 2, 1)) << "two children accuse the parent, so it is at fault";
  desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kLost, "settled meanwhile"});
  EXPECT_THAT(desk.chain(), ElementsAre(3, 2, 1));
}

TEST(Learner, AParentThatIsSilentToChildAndLearnerLosesItsPlace) {
  Desk desk(8);
  desk.join_all(2);
  desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kSilent, "nothing heard"});
  EXPECT_EQ(desk.lost(1), "");  // the learner still hears it
  desk.pass_time(milliseconds(1500), {1});
  desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kSilent, "nothing heard"});
  EXPECT_THAT(desk.chain(), ElementsAre(1, 2)) << "it may only be late";
  desk.pass_time(milliseconds(500), {1});
  EXPECT_THAT(desk.chain(), ElementsAre(2));
  EXPECT_EQ(desk.away(1), "");
}

LearnerConfig trees(double up_mbit) {
  LearnerConfig config = Desk::config(up_mbit);
  config.policy = chains::TopologyPolicy::kTrees;
  return config;
}

TEST(Learner, PlansTreesAgainWhenAWorkerIsLost) {
  Desk desk(trees(8));
  desk.join_all(6);
  EXPECT_EQ(desk.core.topology().stripes(), 4u);
  const auto parents = desk.core.topology().parents();
  const WorkerId busiest = parents.at(WorkerId{6})[0];
  EXPECT_THAT(desk.core.topology().children_of(busiest), SizeIs(testing::Gt(1u)));
  desk.core.expel(busiest, "gone", desk.now);
  desk.take();
  desk.pass_time(2 * TopologyPlan::kDelay);
  EXPECT_EQ(desk.core.topology().size(), 5u);
  for (const auto& [id, of] : desk.core.topology().parents()) EXPECT_THAT(of, testing::Each(testing::Ne(busiest)));
  for (std::uint64_t id = 1; id <= 6; ++id) EXPECT_LE(desk.core.topology().copies_sent_by(WorkerId{id}), 1);
}

TEST(Learner, AParentThatIsSilentToSeveralChildrenIsASlowHop) {
  Desk desk(trees(8));
  desk.join_all(6);
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  const WorkerId parent = desk.core.topology().parents().at(WorkerId{6})[0];
  const std::vector<WorkerId> children = desk.core.topology().children_of(parent);
  ASSERT_GE(children.size(), 2u);
  const auto silent = [&](WorkerId child) {
    desk.deliver_control(child.value, EdgeFailed{parent, EdgeTroubleKind::kSilent, "nothing heard"});
  };
  silent(children[0]);
  desk.pass_time(std::chrono::seconds(4));  // too long ago to count together
  silent(children[1]);
  EXPECT_THAT(desk.all<act::ReportSlowHop>(), SizeIs(0));
  silent(children[0]);
  const auto found = desk.all<act::ReportSlowHop>();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].hop.from, parent);
  EXPECT_THAT(found[0].hop.text, HasSubstr("limited by sender uplink: 0 bit/s instead of"));
  EXPECT_EQ(desk.core.topology().copies_sent_by(parent), 0);
  EXPECT_EQ(desk.lost(parent.value), "");
}

TEST(Learner, DrainsByMovingAWorkerBehindTheOthers) {
  Desk desk(8);
  desk.join_all(3);
  desk.deliver_control(1, Draining{});
  EXPECT_THAT(desk.chain(), ElementsAre(2, 3, 1));
  desk.deliver_control(1, Goodbye{"drained"});
  EXPECT_THAT(desk.lost(1), HasSubstr("it left: drained"));
  EXPECT_THAT(desk.chain(), ElementsAre(2, 3));
}

// ---- slow hops ----

TEST(Learner, DetectsASlowHopAndRoutesAroundIt) {
  Desk desk(8);
  desk.join_all(3);
  const Made made = make(full(0), 8'000'000, {.chunk_bytes = 65536});
  ASSERT_TRUE(desk.publish(made).has_value());
  // Worker 1 soon has everything. Worker 2 receives a tenth of its parent's possible rate. Worker 3 has the same as 2.
  for (int beat = 1; desk.all<act::ReportSlowHop>().empty() && beat < 40; ++beat) {
    desk.now += milliseconds(500);
    const auto chunks = [&](double bytes_per_s) {
      return static_cast<std::uint32_t>(std::min(8e6, bytes_per_s * 0.5 * beat) / 65536);
    };
    const auto beats = [&](std::uint64_t worker, std::uint32_t n) {
      Heartbeat h;
      h.progress = {{made.id, {n}}};
      desk.deliver_control(worker, h);
    };
    beats(1, chunks(1e6));
    beats(2, chunks(1e5));
    beats(3, chunks(1e5));
    desk.core.on_timer(desk.now);
    desk.take();
  }
  const auto found = desk.all<act::ReportSlowHop>();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].hop.from, WorkerId{1});
  EXPECT_EQ(found[0].hop.to, WorkerId{2});
  EXPECT_THAT(found[0].hop.text, HasSubstr("worker 1 -> 2 limited by sender uplink"));
  EXPECT_THAT(desk.chain(), ElementsAre(2, 3, 1));
  EXPECT_THAT(desk.core.stats().slow_hops, SizeIs(1));
}

// One of a parent's two children is slow, or claims to be. Both share the parent's uplink, so the learner makes the
// slow child a leaf and leaves the parent. The complaint of an only child is trusted, once.
TEST(Learner, AWorkerThatIsSlowAloneIsMovedItself) {
  for (const bool both : {false, true}) {
    Desk desk(trees(8));
    desk.join_all(6);
    const std::uint32_t stripes = desk.core.topology().stripes();
    const WorkerId parent = desk.core.topology().parents().at(WorkerId{6})[0];
    ASSERT_NE(parent, kLearnerId);
    const auto children = desk.core.topology().children_of(parent);
    ASSERT_GE(children.size(), 2u);
    const Made made = make(full(0), 16'000'000, {.chunk_bytes = 16384});
    ASSERT_TRUE(desk.publish(made).has_value());
    const std::uint32_t all = static_cast<std::uint32_t>(made.chunks.size()) / stripes;
    for (std::uint32_t beat = 1; desk.all<act::ReportSlowHop>().empty() && beat < 40; ++beat) {
      desk.now += milliseconds(500);
      for (std::uint64_t id = 1; id <= 6; ++id) {
        const bool child = std::find(children.begin(), children.end(), WorkerId{id}) != children.end();
        const bool slow = both ? child : WorkerId{id} == children[0];
        Heartbeat h;
        h.progress = {{made.id, std::vector(stripes, slow ? beat : std::min(all, 40 * beat))}};
        desk.deliver_control(id, h);
      }
      desk.core.on_timer(desk.now);
      desk.take();
    }
    const auto found = desk.all<act::ReportSlowHop>();
    ASSERT_FALSE(found.empty());
    EXPECT_EQ(desk.core.topology().copies_sent_by(children[0]), 0);
    std::size_t blamed = 0;
    for (const auto& hop : found) blamed += hop.hop.text.find("sender uplink") != std::string::npos;
    EXPECT_EQ(blamed > 0, both) << found[0].hop.text;
  }
}

// A child with a slow link lacks chunks that all its parents have. Each parent sends its part of the link's rate.
TEST(Learner, AChildOfSeveralParentsIsNotExpectedToReceiveAllOfItFromEach) {
  Desk desk(trees(8));
  for (std::uint64_t id = 1; id <= 5; ++id) desk.join(id);
  desk.join(6, true, BitRate{kMegabytePerS.bits_per_s / 5});
  desk.pass_time(2 * TopologyPlan::kDelay);
  const std::uint32_t stripes = desk.core.topology().stripes();
  ASSERT_GE(desk.core.topology().parents().at(WorkerId{6}).size(), 4u);
  const Made made = make(full(0), 4'000'000, {.chunk_bytes = 16384});
  ASSERT_TRUE(desk.publish(made).has_value());
  const std::uint32_t all = static_cast<std::uint32_t>(made.chunks.size()) / stripes;
  for (std::uint32_t beat = 0; beat < 30; ++beat, desk.now += milliseconds(500)) {
    for (std::uint64_t id = 1; id <= 6; ++id) {
      Heartbeat h;
      const std::uint32_t received = beat * 100'000 / 16384 / stripes;  // of a stripe, at 0.2 MB/s
      h.progress = {{made.id, std::vector(stripes, id == 6 ? std::min(all, received) : all)}};
      desk.deliver_control(id, h);
    }
    desk.core.on_timer(desk.now);
    desk.take();
  }
  EXPECT_THAT(desk.all<act::ReportSlowHop>(), IsEmpty());
}

// The learner drops deltas for single workers if a snapshot, which serves every worker, finds no room.
TEST(Learner, ASnapshotGetsTheRoomOfDeltasForSingleWorkers) {
  LearnerConfig c = Desk::config(16);
  c.catch_ups_on_demand = true;
  c.store_bytes_max = {13'000};
  Desk desk(c);
  for (std::uint64_t v = 0; v <= 3; ++v)
    ASSERT_TRUE(desk.publish(v == 0 ? make(full(0), 4000) : make(delta(v, v - 1), 3000)).has_value());
  ASSERT_TRUE(desk.publish(make(delta(3, 0), 4000), true).has_value());
  ASSERT_TRUE(desk.publish(make(delta(3, 1), 4000), true).has_value());
  EXPECT_TRUE(desk.publish(make(full(3), 8000), true).has_value());
}

}  // namespace
}  // namespace echoline::overlay
