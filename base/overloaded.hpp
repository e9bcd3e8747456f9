// Makes a visitor of a std::variant from one function per alternative: std::visit(Overloaded{[](A) {}, [](B) {}},
// variant).
#pragma once

namespace echoline {

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;  // clang before version 17 cannot deduce aggregates

}  // namespace echoline
