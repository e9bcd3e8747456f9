// Text that must not reach a log, an error message or a core dump, such as a token or a key.
#pragma once
#include <fmt/format.h>

#include <ostream>
#include <string>
#include <string_view>

namespace echoline::overlay::trust {

// Overwrites the text's memory, then empties it.
void wipe(std::string& text);

// Prints as "(hidden)". The destructor overwrites its memory. Equality takes constant time.
class Secret {
 public:
  Secret() = default;
  explicit Secret(std::string&& text) : text_(std::move(text)) { wipe(text); }  // a move copies short texts
  ~Secret() { wipe(text_); }
  Secret(const Secret&) = default;
  Secret(Secret&& other) noexcept : text_(std::move(other.text_)) { wipe(other.text_); }
  Secret& operator=(Secret other) noexcept {
    text_.swap(other.text_);
    return *this;
  }
  friend bool operator==(const Secret& a, const Secret& b);
  friend std::ostream& operator<<(std::ostream& out, const Secret&) { return out << "(hidden)"; }

  // The text itself, for sending or storing it.
  std::string_view reveal() const { return text_; }
  bool empty() const { return text_.empty(); }

 private:
  std::string text_;
};

}  // namespace echoline::overlay::trust

template <>
struct fmt::formatter<echoline::overlay::trust::Secret> : fmt::formatter<std::string_view> {
  template <class Context>
  auto format(const echoline::overlay::trust::Secret&, Context& context) const {
    return fmt::formatter<std::string_view>::format("(hidden)", context);
  }
};
