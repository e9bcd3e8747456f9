// State machines as tables: the name of every state, and the states that may follow it.
#pragma once
#include <cstddef>

#include "base/result.hpp"

namespace echoline {

struct StateRow {
  const char* name;
  unsigned next_states;  // bit n: the n-th state may follow
};

// The set of these states, for StateRow::next_states.
template <class... State>
constexpr unsigned states(State... members) {
  return (0u | ... | (1u << static_cast<unsigned>(members)));
}

// Changes the state. Ends the process if the table, which has a row for every state, does not allow the change. `what`
// names the machine in the message: "a worker".
template <class State, std::size_t N>
void change_state(State& state, State to, const StateRow (&table)[N], const char* what) {
  const StateRow& from = table[static_cast<std::size_t>(state)];
  ECHO_CHECK(from.next_states >> static_cast<unsigned>(to) & 1, "{} that is {} cannot become {}", what, from.name,
             table[static_cast<std::size_t>(to)].name);
  state = to;
}

}  // namespace echoline
