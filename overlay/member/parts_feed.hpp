// Parts of publications that still arrive, for an application that begins before they are whole: without gaps, and no
// more than it can follow. Pure.
#pragma once
#include "overlay/member/standing.hpp"

namespace echoline::overlay {

class PartsFeed {
 public:
  // `unread_max`: bytes that the application has not read yet; 0: no parts are delivered.
  explicit PartsFeed(Bytes unread_max) : unread_max_(unread_max.count) {}

  // Appends act::DeliverPart for what has come of this publication.
  void deliver(const PublicationId& id, const Standing& standing, PublicationStore& store,
               std::vector<Action>& actions);
  // The application has read so many bytes: as many may follow.
  void read(std::uint64_t bytes, const Standing& standing, PublicationStore& store, std::vector<Action>& actions);
  bool feeds(const PublicationId& id) const { return id == delta_.id || id == snapshot_.id; }

 private:
  struct Parts {  // delivered of what arrives
    PublicationId id{};
    std::uint32_t chunks = 0;
  };
  std::uint64_t unread_max_, unread_ = 0;
  Parts snapshot_, delta_;
};

}  // namespace echoline::overlay
