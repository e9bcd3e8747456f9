// Delivers parts of publications that still arrive, so that the application can begin before they are complete. Parts
// come without gaps, and never more than `unread_bytes_max` bytes ahead of the application. No I/O and no clock.
#pragma once
#include "overlay/member/install_state.hpp"

namespace echoline::overlay {

class PartsFeed {
 public:
  // `unread_bytes_max`: bytes that the application has not read yet; 0: no parts are delivered.
  explicit PartsFeed(Bytes unread_bytes_max) : unread_bytes_max_(unread_bytes_max.count) {}

  // Appends act::DeliverPart for the chunks of this publication that are here and not delivered yet.
  void deliver(const PublicationId& id, const InstallState& install_state, PublicationStore& store,
               std::vector<Action>& actions);
  // The application has read `bytes` bytes, so as many may follow.
  void on_consumed(std::uint64_t bytes, const InstallState& install_state, PublicationStore& store,
                   std::vector<Action>& actions);
  bool feeds(const PublicationId& id) const { return id == delta_.id || id == snapshot_.id; }

 private:
  struct Feed {
    PublicationId id{};
    std::uint32_t chunks_delivered = 0;
  };
  std::uint64_t unread_bytes_max_, unread_bytes_ = 0;
  Feed snapshot_, delta_;
};

}  // namespace echoline::overlay
