// Text that must not end up in a log, an error message or a core dump: tokens and keys are passed around in it.
#pragma once
#include <fmt/format.h>

#include <ostream>
#include <string>
#include <string_view>

namespace echoline::overlay::trust {

// Overwrites the text's memory, then empties it.
void wipe(std::string& text);

// Printed as "(hidden)"; its memory is overwritten when it goes. Equality takes the same time wherever texts differ.
class Secret {
 public:
  Secret() = default;
  explicit Secret(std::string&& text) : text_(std::move(text)) { wipe(text); }
  ~Secret() { wipe(text_); }
  Secret(const Secret&) = default;
  Secret(Secret&& other) noexcept : text_(std::move(other.text_)) { wipe(other.text_); }
  Secret& operator=(Secret other) noexcept {
    text_.swap(other.text_);
    return *this;
  }
  friend bool operator==(const Secret& a, const Secret& b);
  friend std::ostream& operator<<(std::ostream& out, const Secret&) { return out << "(hidden)"; }

  // The text itself, for whoever has to send or store it.
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
