// Signs, opens and keeps grants. Called by LearnerCore and Children.
#include "overlay/wire/grant.hpp"

#include <algorithm>

#include "overlay/wire/control.pb.h"

namespace echoline::overlay {
namespace {

constexpr std::string_view kContext = "grant 4";  // the purpose of the signature
constexpr std::string_view kOperation = "check grant";

// In this file, `proto` is the protobuf form of a grant.

Error bad(std::string why) { return fail(Code::kCorrupt, kOperation, "{}", why); }

}  // namespace

SignedGrant sign(const Grant& grant, const trust::SigningKey& key) {
  wire::GrantBody proto;
  proto.set_run_id(grant.run_id);
  proto.set_child(grant.child.value);
  proto.set_issued(grant.issued);
  proto.set_expires_unix_ms(grant.expires_unix_ms);
  proto.set_stripes(grant.stripe_count);
  for (const Grant::From& from : grant.from) {
    wire::GrantFrom& proto_from = *proto.add_from();
    proto_from.set_parent(from.parent.value);
    proto_from.set_stripes(from.stripe_mask);
  }
  if (grant.catch_up_to) proto.set_catch_up_to(grant.catch_up_to->value);
  proto.set_full_only(grant.full_only);
  SignedGrant signed_grant;
  ECHO_CHECK(proto.SerializeToString(&signed_grant.body) && signed_grant.body.size() <= kGrantBytesMax);
  signed_grant.signature = key.sign(kContext, std::as_bytes(std::span(signed_grant.body)));
  return signed_grant;
}

Result<Grant> open(const SignatureChecker& checker, const SignedGrant& message) {
  ECHO_TRY(checker.check(kContext, message));
  wire::GrantBody proto;
  if (!proto.ParseFromString(message.body)) return bad(fmt::format("{} bytes are not readable", message.body.size()));
  if (proto.run_id() != checker.run_id())
    return bad(fmt::format("expected one of run '{}', found one of run '{}'", checker.run_id(), proto.run_id()));
  Grant grant{.run_id = proto.run_id(),
              .child = WorkerId{proto.child()},
              .issued = proto.issued(),
              .expires_unix_ms = proto.expires_unix_ms(),
              .stripe_count = proto.stripes(),
              .from = {},
              .catch_up_to = {},
              .full_only = proto.full_only()};
  for (const wire::GrantFrom& from : proto.from()) {
    if (!StripeMask::is_valid(grant.stripe_count, from.stripes()))
      return bad(fmt::format("the stripes {:#x} do not fit {} stripes", from.stripes(), grant.stripe_count));
    grant.from.push_back({WorkerId{from.parent()}, from.stripes()});
  }
  if (proto.has_catch_up_to()) grant.catch_up_to = Version{proto.catch_up_to()};
  return grant;
}

Status GrantBook::check(const Grant& grant, WorkerId child, std::uint64_t now_unix_ms) const {
  if (grant.child != child)
    return fail(Code::kInvalid, kOperation, "expected one for worker {}, found one for worker {}", child, grant.child);
  if (std::none_of(grant.from.begin(), grant.from.end(),
                   [&](const Grant::From& source) { return source.parent == self_; }))
    return fail(Code::kInvalid, kOperation, "it names other parents");
  if (now_unix_ms >= grant.expires_unix_ms)
    return fail(Code::kStale, kOperation, "it ended {} ms ago by the learner's clock",
                now_unix_ms - grant.expires_unix_ms);
  if (grant.issued < ended_up_to_)
    return fail(Code::kStale, kOperation, "it was issued {} ms before the oldest grant that can still be valid",
                ended_up_to_ - grant.issued);
  const auto released = released_.find(child);
  if (released != released_.end() && grant.issued <= released->second.issued_up_to && !grant.catch_up_to)
    return fail(Code::kStale, kOperation, "the learner has given the child another parent since");
  return ok();
}

Status GrantBook::accept(WorkerId child, const PeerHello& hello, std::uint64_t now_unix_ms) {
  if (!hello.grant) return fail(Code::kInvalid, kOperation, "the child shows none: the learner has not sent it here");
  const auto it = accepted_.find({child, hello.catch_up_to.has_value()});
  // A grant that was shown before is not verified again.
  const bool is_known = it != accepted_.end() && it->second.as_signed == *hello.grant;
  Grant grant;
  if (is_known) {
    grant = it->second.grant;
  } else {
    ECHO_ASSIGN(grant, open(checker_, *hello.grant));
  }
  ECHO_TRY(check(grant, child, now_unix_ms));
  if (grant.catch_up_to != hello.catch_up_to || (hello.full_only && !grant.full_only))
    return fail(Code::kInvalid, kOperation, "it does not cover the request");
  if (!is_known) accepted_[{child, hello.catch_up_to.has_value()}] = {*hello.grant, std::move(grant)};
  return ok();
}

Status GrantBook::renew(WorkerId child, const SignedGrant& as_signed, std::uint64_t now_unix_ms) {
  ECHO_ASSIGN(Grant grant, open(checker_, as_signed));
  ECHO_TRY(check(grant, child, now_unix_ms));
  const auto it = accepted_.find({child, /*helped=*/false});
  if (it == accepted_.end() || grant.catch_up_to)
    return fail(Code::kInvalid, kOperation, "it does not continue a shown grant");
  // An older grant may arrive late, over another connection of the edge. It changes nothing.
  if (grant.issued >= it->second.grant.issued) it->second = {as_signed, std::move(grant)};
  return ok();
}

Status GrantBook::check_wanted(WorkerId child, const StripeMask& wanted) const {
  const auto it = accepted_.find({child, /*helped=*/false});
  if (it == accepted_.end()) return fail(Code::kInvalid, kOperation, "none was shown");
  const Grant& grant = it->second.grant;
  for (const Grant::From& source : grant.from)
    if (source.parent == self_ && wanted.stripes == grant.stripe_count && (wanted.wanted & ~source.stripe_mask) == 0)
      return ok();
  return fail(Code::kInvalid, kOperation, "the child wants stripes {:#x} of {}, which its grant of {} stripes lacks",
              wanted.wanted, wanted.stripes, grant.stripe_count);
}

void GrantBook::release(WorkerId child, std::uint64_t issued, std::uint64_t forget_at_unix_ms) {
  if (released_.size() >= kReleasedMax) released_.erase(released_.begin());  // any one
  released_[child] = {.issued_up_to = issued, .forget_at_unix_ms = forget_at_unix_ms};
}

std::vector<std::pair<WorkerId, bool>> GrantBook::take_ended(std::uint64_t now_unix_ms) {
  std::erase_if(released_, [&](const auto& entry) { return entry.second.forget_at_unix_ms <= now_unix_ms; });
  std::vector<std::pair<WorkerId, bool>> ended;
  for (const auto& [key, shown] : accepted_)
    if (!check(shown.grant, key.first, now_unix_ms)) ended.push_back(key);
  for (const auto& key : ended) accepted_.erase(key);
  return ended;
}

}  // namespace echoline::overlay
