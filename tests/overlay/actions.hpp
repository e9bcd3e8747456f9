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
    if (const auto* t = std::get_if<T>(&a)) found.push_back(*t);
  return found;
}

// The control messages of one kind that were sent over a connection.
template <class T>
std::vector<T> sent_over(const std::vector<Action>& actions, ConnId conn) {
  std::vector<T> found;
  for (const Action& a : actions) {
    const auto* s = std::get_if<act::Send>(&a);
    if (!s || s->conn != conn || s->head.data()[2] != std::byte{1}) continue;
    const auto m = decode_control(s->head.bytes().subspan(kFrameHeaderBytes));
    if (m && std::holds_alternative<T>(*m)) found.push_back(std::get<T>(*m));
  }
  return found;
}

}  // namespace echoline::overlay
