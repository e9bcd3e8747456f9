// Reads the actions of a core, for tests.
#pragma once
#include <vector>

#include "overlay/action.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

// The actions of one kind.
template <class T>
std::vector<T> all_of(const std::vector<Action>& actions) {
  std::vector<T> found;
  for (const Action& a : actions)
    if (const auto* action = std::get_if<T>(&a)) found.push_back(*action);
  return found;
}

// The control messages of one kind that were sent over a connection.
template <class T>
std::vector<T> sent_over(const std::vector<Action>& actions, ConnId conn) {
  std::vector<T> found;
  for (const Action& a : actions) {
    const auto* send = std::get_if<act::Send>(&a);
    constexpr std::byte kControlType{1};  // FrameType::kControl, at byte 2 of the header
    if (!send || send->conn != conn || send->head.data()[2] != kControlType) continue;
    const auto message = decode_control(send->head.bytes().subspan(kFrameHeaderBytes));
    if (message && std::holds_alternative<T>(*message)) found.push_back(std::get<T>(*message));
  }
  return found;
}

}  // namespace echoline::overlay
