// Implements the adapter that the data sets of data_sets.cpp share.
#include "data_plane/adapters/maths/data_set.hpp"

#include <charconv>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/random.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane::maths {
namespace {

constexpr std::size_t kAnswerBytesShown = 80;

class DataSet final : public Adapter {
 public:
  DataSet(std::string name, Rule rule, RewardWeights reward, std::uint64_t seed)
      : name_(std::move(name)), rule_(rule), reward_(reward), shuffle_key_(mix64(seed)) {}

  Status open(const DataSetOptions& options, const RowReader& reader) {
    ECHO_ASSIGN(train_, RowFile::open(options.train, reader));
    if (options.held_out) {
      ECHO_ASSIGN(const RowFile held_out, RowFile::open(*options.held_out, reader));
      ECHO_TRY(read_held_out(held_out));
      std::unordered_set<std::uint64_t> held_out_prompts;
      for (std::size_t i = 0; i < held_out.size(); ++i) held_out_prompts.insert(held_out.prompt_hash(i));
      // Drops the training rows whose prompt is held out.
      (void)train_->move_out([&](std::uint64_t hash) { return held_out_prompts.contains(hash); });
      if (train_->size() == 0)
        return fail(Code::kInvalid, "", "every problem of '{}' is held out in '{}'", options.train.string(),
                    options.held_out->string());
      return ok();
    }
    // Splits by the prompt's hash, so that all rows of a prompt are on the same side.
    const double share = options.held_out_fraction;
    const auto is_held_out = [&](std::uint64_t prompt_hash) {
      // The upper 53 bits of the mixed hash, divided by 2^53: a number in [0, 1), uniform over the prompts.
      return static_cast<double>(mix64(prompt_hash ^ shuffle_key_) >> 11) * 0x1.0p-53 < share;
    };
    ECHO_TRY(read_held_out(train_->move_out(is_held_out)));
    if (train_->size() == 0 || held_out_.empty())
      return fail(Code::kInvalid, "",
                  "{}: held_out_fraction = {} leaves {} problems to train on and {} to evaluate with; "
                  "choose another one, or a file in held_out",
                  options.train.string(), share, train_->size(), held_out_.size());
    return ok();
  }

  std::string_view name() const override { return name_; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (!train_)
      return fail(Code::kUnavailable, name_ + " problem", "this adapter was made for scoring, so it has no problems");
    const std::size_t row = shuffled_cycle(index, train_->size(), shuffle_key_);
    ECHO_ASSIGN(Row content, train_->row(row));
    return to_problem("train", train_->line(row), std::move(content));
  }

  std::vector<Problem> evaluation() const override { return held_out_; }

  Result<Score> score(const Problem& problem, std::string_view response) const override {
    Verdict verdict = grade(rule_, response, problem.reference());
    verdict.correct = verdict.correct && !problem.reference().empty();  // an empty response must not be correct
    return reward_.score(verdict, response);
  }

  std::optional<std::string> demonstration(const Problem& problem) const override {
    const std::string prefix = name_ + "/train/";
    if (!train_ || !problem.id().starts_with(prefix)) return std::nullopt;
    const char* const end = problem.id().data() + problem.id().size();
    std::uint32_t line = 0;
    const auto [stop, error] = std::from_chars(problem.id().data() + prefix.size(), end, line);
    if (error != std::errc{} || stop != end) return std::nullopt;
    const auto index = train_->index_of_line(line);
    if (!index) return std::nullopt;
    auto row = train_->row(*index);
    if (!row) return std::nullopt;
    // A worked solution that the rule does not accept gets the answer in the rule's form after it.
    std::string response = std::move(row->demonstration);
    if (grade(rule_, response, row->reference).correct) return response;
    if (!response.empty()) response += '\n';
    return response + shortest_response(rule_, row->reference);
  }

 private:
  Status read_held_out(const RowFile& rows) {
    if (rows.size() > kHeldOutMax)
      return fail(Code::kInvalid, "", "{}: {} evaluation problems, at most {}; hold out fewer", rows.path().string(),
                  rows.size(), kHeldOutMax);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      ECHO_ASSIGN(Row row, rows.row(i));
      bytes += row.prompt.text.size() + row.reference.size();
      if (bytes > kHeldOutBytesMax)
        return fail(Code::kInvalid, "", "{}: more than {} MiB of evaluation problems; hold out fewer",
                    rows.path().string(), kHeldOutBytesMax >> 20);
      held_out_.push_back(to_problem("test", rows.line(i), std::move(row)));
    }
    return ok();
  }

  Problem to_problem(std::string_view split, std::uint32_t line, Row row) const {
    Problem problem;
    problem.set_id(fmt::format("{}/{}/{}", name_, split, line));
    set_prompt(problem, std::move(row.prompt));
    problem.set_reference(std::move(row.reference));
    return problem;
  }

  std::string name_;
  Rule rule_;
  RewardWeights reward_;
  std::uint64_t shuffle_key_;     // chooses the order and the split
  std::optional<RowFile> train_;  // absent: for scoring only
  std::vector<Problem> held_out_;
};

}  // namespace

std::string shortest_response(Rule rule, std::string_view answer) {
  switch (rule) {
    case Rule::kGsm8kStrict:
      return fmt::format("#### {}", answer);
    case Rule::kMathDapo:
      return fmt::format("Answer: {}", answer);
    case Rule::kMathDapoBoxed:
    case Rule::kMathReward:
    case Rule::kHendrycksMath:
      return fmt::format("\\boxed{{{}}}", answer);
    case Rule::kGsm8kFlexible:
    case Rule::kLastNumber:
    case Rule::kExact:
      break;
  }
  return std::string(answer);
}

void DataSetOptions::read_files(ConfigSection& s, AdapterUse use, const char* train_meaning) {
  if (use == AdapterUse::kProblems)
    s.require("train", train, train_meaning);
  else
    s.read("train", train, train_meaning);
  s.read("held_out", held_out, "the same for evaluation; its problems are never trained on");
  const bool has_both = s.has("held_out") && s.has("held_out_fraction");
  s.read("held_out_fraction", held_out_fraction, {.min = 0.0001, .max = 0.5},
         "without `held_out`: approximate share of the problems in `train` to hold out, determined by the seed");
  if (has_both) s.error("held_out_fraction", "expected 'held_out' or 'held_out_fraction', not both");
}

void DataSetOptions::read_two_files(ConfigSection& s, AdapterUse use, const char* train_meaning,
                                    const char* held_out_key, const char* held_out_meaning) {
  std::filesystem::path test;
  for (const auto& [key, path, meaning] :
       {std::tuple{"train", &train, train_meaning}, {held_out_key, &test, held_out_meaning}}) {
    if (use == AdapterUse::kProblems)
      s.require(key, *path, meaning);
    else
      s.read(key, *path, meaning);
  }
  held_out = test;
}

void DataSetOptions::read_reward(ConfigSection& s) {
  reward.read(s.section("reward", "Reward of a response: right or wrong, and more for its form."));
}

Result<std::unique_ptr<Adapter>> make_data_set(std::string name, const DataSetOptions& options, const RowReader& reader,
                                               std::uint64_t seed, AdapterUse use) {
  auto data_set = std::make_unique<DataSet>(std::move(name), options.rule, options.reward, seed);
  if (use == AdapterUse::kProblems)
    ECHO_TRY(data_set->open(options, [reader, rule = options.rule](const nlohmann::json& json) -> Result<Row> {
      ECHO_ASSIGN(Row row, reader(json));
      if (!grade(rule, shortest_response(rule, row.reference), row.reference).correct)
        return fail(Code::kInvalid, "", "no response can be right: by this rule even '{}' is not the answer '{}'",
                    shortest_response(rule, row.reference).substr(0, kAnswerBytesShown),
                    row.reference.substr(0, kAnswerBytesShown));
      return row;
    }));
  return std::unique_ptr<Adapter>(std::move(data_set));
}

}  // namespace echoline::data_plane::maths
