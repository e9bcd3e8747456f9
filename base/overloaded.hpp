// The visitor of a std::variant, made of one function for each alternative: std::visit(Overloaded{[](A) {}, [](B) {}},
// variant).
#pragma once

namespace echoline {

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;  // clang deduces no aggregates before version 17

}  // namespace echoline
