// Overwrites secret text. Called by the holders of tokens and keys.
#include "overlay/trust/secret.hpp"

#include <openssl/crypto.h>

namespace echoline::overlay::trust {

void wipe(std::string& text) {
  text.resize(text.capacity());  // the rest of the memory may hold a longer text from before
  OPENSSL_cleanse(text.data(), text.size());
  text.clear();
}

bool operator==(const Secret& a, const Secret& b) {
  return a.text_.size() == b.text_.size() && CRYPTO_memcmp(a.text_.data(), b.text_.data(), a.text_.size()) == 0;
}

}  // namespace echoline::overlay::trust
