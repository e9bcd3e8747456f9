// Collects bodies for HttpServer and NodeCalls.
#include "learner/external/arriving_body.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace echoline::learner {

Status ArrivingBody::append(std::string_view bytes) {
  if (bytes.size() > bytes_max_ - size_)
    return fail(Code::kExhausted, "receive body", "{} bytes arrive after {}, the limit is {}", bytes.size(), size_,
                bytes_max_);
  if (!file_ && !folder_.empty() && size_ + bytes.size() >= kFileMemoryMin) {
    ECHO_ASSIGN(file_, FileMemory::make(folder_, bytes_max_));
    ECHO_ASSIGN(const std::span<std::byte> start, file_->extend(text_.size()));
    std::memcpy(start.data(), text_.data(), text_.size());
    text_ = {};
  }
  if (file_) {
    ECHO_ASSIGN(const std::span<std::byte> room, file_->extend(bytes.size()));
    std::memcpy(room.data(), bytes.data(), bytes.size());
  } else {
    if (text_.empty()) text_.reserve(std::min(bytes_max_, kFileMemoryMin));
    text_.append(bytes);
  }
  size_ += bytes.size();
  return ok();
}

overlay::Slice ArrivingBody::finish() {
  if (!file_) return slice_of(std::move(text_));
  file_->close();
  const std::span<const std::byte> bytes = file_->bytes();
  return overlay::Slice({std::move(file_), bytes.data()}, bytes.size());
}

overlay::Slice slice_of(std::string text) {
  const auto owner = std::make_shared<const std::string>(std::move(text));
  return overlay::Slice({owner, reinterpret_cast<const std::byte*>(owner->data())}, owner->size());
}

}  // namespace echoline::learner
