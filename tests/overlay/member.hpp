// A worker's core driven by hand, joined and with a parent.
#pragma once
#include "overlay/member/member_core.hpp"
#include "tests/overlay/actions.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {

inline constexpr WorkerId kSelf{7}, kParent{4};
inline constexpr ConnId kControl{1};
inline constexpr Duration kBeat = std::chrono::milliseconds(500);

inline MemberConfig config(double now_unix_s = kMadeUnix_s) {
  const trust::Authority authority = made_authority();
  const trust::SigningKey key = made_key("worker 7");
  WorkerState state;
  state.run_id = "run";
  state.authority = authority.certificate();
  state.certificate = *authority.issue(
      {key.public_key(), trust::PeerIdentity::Kind::kWorker, kSelf, 1, now_unix_s, trust::kWorkerLifetimeMax});
  state.worker = kSelf;
  MemberConfig c{.core = {},
                 .learner = {"10.0.0.0", 1},
                 .data = {"10.0.0.7", 1},
                 .name = "offer",
                 .key = key,
                 .state = std::move(state),
                 .checker = nullptr,
                 .store = {},
                 .durable = false,
                 .join_timeout = {},
                 .away_max = {},
                 .parts_unread_max = {},
                 .place = {}};
  c.core.unix_origin_s = now_unix_s - 1;
  c.checker = std::make_shared<SignatureChecker>("run", authority.public_key());
  c.join_timeout = std::chrono::seconds(10);
  c.away_max = std::chrono::seconds(30);
  return c;
}

// A member that has joined and been given a parent.
struct Member {
  Bytes policy;  // size of the policy, as the learner states it
  MemberCore core;
  ConnId parent{};
  std::vector<Action> actions;
  TimePoint now = TimePoint(std::chrono::seconds(1));
  bool saves = true;  // each act::SaveState is answered at once

  explicit Member(MemberConfig c = config(), double learner_unix_s = kMadeUnix_s, bool joined = true,
                  Bytes learners_policy = {})
      : policy(learners_policy), core(std::move(c)) {
    core.start(now);
    if (!joined) return;
    core.on_connected(kControl, now);
    welcome(kControl, learner_unix_s);
    assign({{kParent, {"10.0.0.4", 1}, 1, false}});
    parent = last<act::Dial>()->conn;
    core.on_connected(parent, now);
    take();
  }
  void welcome(ConnId control, double learner_unix_s = kMadeUnix_s) {
    deliver_control(control, Welcome{.worker = kSelf,
                                     .heartbeat = kBeat,
                                     .patience = std::chrono::seconds(9),
                                     .unix_ms = static_cast<std::uint64_t>(learner_unix_s * 1e3),
                                     .application = "welcome",
                                     .away_max = std::chrono::seconds(90),
                                     .policy = policy});
  }
  void assign(std::vector<Parent> parents, std::uint32_t stripes = 1) {
    deliver_control(kControl, Assign{stripes, std::move(parents)});
  }
  void take() {
    core.check();
    for (bool again = true; std::exchange(again, false);)
      for (Action& a : core.take_actions()) {
        if (saves && std::holds_alternative<act::SaveState>(a)) {
          core.on_saved(ok(), now);
          again = true;
        }
        actions.push_back(std::move(a));
      }
  }
  void deliver_control(ConnId conn, const ControlMessage& m) {
    const Slice frame(encode_control(m));
    core.on_frame(conn, {FrameType::kControl, frame.part(8, frame.size() - 8), {}, {}}, now);
    take();
  }
  void deliver_frame(ConnId conn, Frame frame) {
    core.on_frame(conn, std::move(frame), now);
    take();
  }
  void deliver_publication(const Made& made) { deliver_publication(parent, made); }
  void deliver_publication(ConnId conn, const Made& made) {
    deliver_control(conn, made.opening);
    for (std::size_t i = 0; i < made.chunks.size(); ++i) deliver_frame(conn, made.chunk(i));
    deliver_control(conn, made.closing);
  }
  // Lets the parent send meanwhile, and the learner unless it is silent.
  void pass_time(Duration time, bool learner = true) {
    for (const TimePoint end = now + time; now < end;) {
      now = std::min(end, now + kBeat);
      if (learner) deliver_control(kControl, SignedBeacon{beacon_now()});
      if (!closed(parent)) deliver_control(parent, EdgeStatus{});
      core.on_timer(now);
      take();
    }
  }
  Beacon beacon(std::uint64_t sequence) const {
    const auto ms = static_cast<std::uint64_t>(kMadeUnix_s * 1e3 + echoline::seconds(now.time_since_epoch()) * 1e3);
    return {"run", 0, sequence, ms, ms + 60'000, newest, {}};
  }
  SignedBeacon beacon_now() {
    Beacon b = beacon(0);
    b.sequence = sequence = std::max(sequence + 1, b.issued_unix_ms);
    return sign(b, made_key("authority"));
  }
  std::uint64_t sequence = 0;
  std::optional<Version> newest;  // as the learner's beacons say

  std::vector<PublicationKey> delivered() const {
    std::vector<PublicationKey> keys;
    for (const auto& d : all<act::DeliverPublication>()) keys.push_back({d.publication.version, d.publication.base});
    return keys;
  }
  template <class T>
  std::vector<T> sent(ConnId conn) const {  // control messages of one kind
    return sent_over<T>(actions, conn);
  }
  template <class T>
  std::vector<T> all() const {
    return all_of<T>(actions);
  }
  template <class T>
  std::optional<T> last() const {
    const auto found = all<T>();
    return found.empty() ? std::nullopt : std::optional(found.back());
  }
  bool closed(ConnId conn) const {
    for (const auto& c : all<act::Close>())
      if (c.conn == conn) return true;
    return false;
  }
  std::string end() const { return last<act::ReportEnd>() ? last<act::ReportEnd>()->reason : ""; }
};

}  // namespace echoline::overlay
