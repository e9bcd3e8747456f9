// The published versions and their digests. Called by LearnerCore (learner_publications.cpp).
#include "overlay/learner/publications.hpp"

namespace echoline::overlay {

std::optional<Version> Publications::newest_published(std::optional<Version> before) const {
  const auto end = before ? published_.lower_bound(*before) : published_.end();
  return end == published_.begin() ? std::nullopt : std::optional(std::prev(end)->first);
}

bool Publications::is_published(const Installed& installed) const {
  const auto it = published_.find(installed.version);
  if (it == published_.end()) return !published_.empty() && installed.version < published_.begin()->first;
  return it->second == installed.policy_digest;
}

Status Publications::check_next(const PublicationKey& key) const {
  constexpr std::string_view kOperation = "publish";
  if (announced_ && key.version <= *announced_)
    return fail(Code::kInvalid, kOperation, "{}: versions must grow, the last was {}", to_text(key), *announced_);
  // After a restart, the newest version may be published again.
  if (const auto before_restart = newest_published(); before_restart && key.version < *before_restart)
    return fail(Code::kInvalid, kOperation, "{}: versions must grow, before the restart it was {}", to_text(key),
                *before_restart);
  if (key.base && !is_published(*key.base))
    return fail(Code::kInvalid, kOperation, "{}: its base was not published (recently)", to_text(key));
  return ok();
}

void Publications::abandon(const PublicationId& id) {
  broadcasts_.abandon(id);
  announced_ = newest_published();
}

Result<bool> Publications::close(const PublicationKey& key, const Manifest& manifest, const SignedManifest& as_signed) {
  const auto [it, added] = published_.emplace(key.version, manifest.policy_digest);
  if (!added && it->second != manifest.policy_digest)
    return fail(Code::kInvalid, "publish", "{}: published before with digest {}, now with {}", to_text(key),
                to_hex(it->second), to_hex(manifest.policy_digest));
  if (published_.size() > kVersionsKept) published_.erase(published_.begin());
  closing_.push_back({.version = key.version, .manifest = manifest, .as_signed = as_signed});
  return added;
}

void Publications::check() const {
  broadcasts_.check();
  ECHO_CHECK(published_.size() <= kVersionsKept);
  for (const Closing& closing : closing_)
    ECHO_CHECK(is_published(closing.version), "version {} closes unpublished", closing.version);
}

}  // namespace echoline::overlay
