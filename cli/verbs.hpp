// The verbs of the program. Each add_ function adds one verb to the program (main.cpp calls them all). The verb's
// callback runs it and sets `exit_code`.
#pragma once
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "cli/verb.hpp"

namespace echoline::cli {

void add_up(Verb& program, int& exit_code);
void add_learner(Verb& program, int& exit_code);
void add_worker(Verb& program, int& exit_code);
void add_node(Verb& program, int& exit_code);
void add_relay(Verb& program, int& exit_code);
void add_token(Verb& program, int& exit_code);
void add_publish(Verb& program, int& exit_code);
void add_plan(Verb& program, int& exit_code);
void add_apply(Verb& program, int& exit_code);
void add_model(Verb& program, int& exit_code);
void add_evaluate(Verb& program, int& exit_code);
void add_rescore(Verb& program, int& exit_code);
void add_config(Verb& program, int& exit_code);
void add_completion(Verb& program, int& exit_code);
void add_man(Verb& program, int& exit_code);
void add_sim(Verb& program, int& exit_code);
void add_sweep(Verb& program, int& exit_code, const std::string& version);
void add_advise(Verb& program, int& exit_code);
void add_status(Verb& program, int& exit_code);
void add_report(Verb& program, int& exit_code);
void add_doctor(Verb& program, int& exit_code);
void add_delta(Verb& program, int& exit_code);
void add_adapter(Verb& program, int& exit_code);
void add_ledger(Verb& program, int& exit_code);
void add_down(Verb& program, int& exit_code);
void add_bundle(Verb& program, int& exit_code);
void add_store(Verb& program, int& exit_code);

// The program's file, to start it again; in a bundle, the script that starts it.
std::filesystem::path own_program();

// Prints "echoline VERB: message" to stderr, and under --json the error as an object to stdout (json_errors.hpp).
// Returns the exit code of the error. `verb` is empty for the program itself.
int report_error(std::string_view verb, const Error& error);

// Splits the values of --set; kInvalid for one that is not of the form key=value.
Result<std::vector<std::pair<std::string, std::string>>> parse_overrides(const std::vector<std::string>& texts);

// The folder of a run, by the run's name or path; if that is empty, of the newest run below ./runs. kInvalid: there is
// no such run.
Result<std::filesystem::path> find_run(const std::string& name_or_path);

}  // namespace echoline::cli
