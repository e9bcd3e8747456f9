// The contract of ObjectStore, for each of its implementations.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "store/object_store.hpp"

namespace echoline::store {

inline std::string read_from(ObjectStore& store, const std::string& key, std::uint64_t first) {
  std::string text;
  const auto total = store.get(key, first, [&](std::span<const std::byte> bytes) {
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return ok();
  });
  return total ? fmt::format("{} of {}", text, *total) : std::string(to_string(total.error().code));
}

// `large`: an object that S3 stores in parts.
inline void check_contract(ObjectStore& store, const std::string& large) {
  ASSERT_TRUE(store.list("")) << store.list("").error().message();
  EXPECT_TRUE(store.list("").value().empty());
  EXPECT_EQ(store.read("a/b", 100).error().code, Code::kNotFound);
  const Status stored = store.put("a/b", as_bytes("hello"));
  ASSERT_TRUE(stored) << stored.error().message();
  EXPECT_EQ(store.read("a/b", 100).value(), "hello");
  EXPECT_EQ(store.read("a/b", 4).error().code, Code::kExhausted);
  EXPECT_EQ(read_from(store, "a/b", 2), "llo of 5");
  EXPECT_EQ(read_from(store, "a/b", 5), " of 5");
  EXPECT_TRUE(store.put("a/b", as_bytes("world!")));  // replaces
  EXPECT_EQ(read_from(store, "a/b", 0), "world! of 6");
  EXPECT_EQ(store.put_if_absent("a/b", as_bytes("x")).error().code, Code::kStale);
  EXPECT_EQ(read_from(store, "a/b", 0), "world! of 6");
  EXPECT_TRUE(store.put_if_absent("a/c", as_bytes("")));
  EXPECT_EQ(read_from(store, "a/c", 0), " of 0");
  const Status whole = store.put("a-large", as_bytes(large));
  ASSERT_TRUE(whole) << whole.error().message();
  const auto read_back = store.read("a-large", large.size());
  ASSERT_TRUE(read_back) << read_back.error().message();
  EXPECT_TRUE(*read_back == large);
  EXPECT_EQ(read_from(store, "a-large", large.size() - 3),
            fmt::format("{} of {}", large.substr(large.size() - 3), large.size()));
  EXPECT_EQ(store.list("a/").value(), (std::vector<ObjectInfo>{{"a/b", 6}, {"a/c", 0}}));
  EXPECT_EQ(store.list("a").value(), (std::vector<ObjectInfo>{{"a-large", large.size()}, {"a/b", 6}, {"a/c", 0}}));
  EXPECT_TRUE(store.remove("a/b"));
  EXPECT_TRUE(store.remove("a/b"));  // twice: no error
  EXPECT_TRUE(store.remove("a-large"));
  EXPECT_EQ(store.list("").value(), (std::vector<ObjectInfo>{{"a/c", 0}}));
  for (const char* key : {"", "/a", "a/", "a//b", "../a", "a/./b", "a b", "a?b"})
    EXPECT_EQ(store.put(key, as_bytes("x")).error().code, Code::kInvalid) << key;
  EXPECT_TRUE(store.remove("a/c"));
  EXPECT_GT(store.traffic().requests, 10u);
}

}  // namespace echoline::store
