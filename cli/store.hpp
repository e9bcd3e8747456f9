// Functions and options that the subcommands of `echoline store` share. Private to cli/.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "cli/delta.hpp"
#include "cli/verbs.hpp"
#include "store/policy_reader.hpp"

namespace echoline::cli {

struct StoreArguments {
  DeltaOptions common;
  store::StoreAddress address;
  std::string key;  // hexadecimal; empty: the store's own key is trusted
};
// Adds the URL and the options of every subcommand.
void add_store_options(Verb* verb, StoreArguments& args, bool with_threads);

// A store that is open for reading.
struct OpenStore {
  std::unique_ptr<store::ObjectStore> objects;
  std::unique_ptr<store::PolicyReader> reader;
};
Result<OpenStore> open_store(const StoreArguments& args);

void add_store_pull(Verb* group, int& exit_code);

}  // namespace echoline::cli
