// Seeds OpenSSL's random numbers, so that a failing round can be repeated.
#pragma once
#include <openssl/rand.h>

#include "base/random.hpp"
#include "base/result.hpp"

namespace echoline::overlay {

class FixedRandom {
 public:
  explicit FixedRandom(std::uint64_t seed) {
    source() = Random(seed);
    set(&method());
  }
  ~FixedRandom() { set(nullptr); }
  FixedRandom(const FixedRandom&) = delete;
  FixedRandom& operator=(const FixedRandom&) = delete;

 private:
  static Random& source() {
    static Random random(0);
    return random;
  }
  static int draw(unsigned char* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = static_cast<unsigned char>(source().next());
    return 1;
  }
  static RAND_METHOD& method() {
    static RAND_METHOD fixed = [] {
      RAND_METHOD m{};
      m.bytes = m.pseudorand = draw;
      m.status = [] { return 1; };
      return m;
    }();
    return fixed;
  }
  static void set(const RAND_METHOD* method) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    ECHO_CHECK(RAND_set_rand_method(method) == 1);
#pragma GCC diagnostic pop
  }
};

}  // namespace echoline::overlay
