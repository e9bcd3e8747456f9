// Reading a run's files row by row: the reader's memory, the rows it skips, and its errors.
#include "learner/row_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/random.hpp"
#include "learner/external/row_pages.hpp"
#include "learner/run_figures.hpp"
#include "learner/run_record.hpp"
#include "tests/learner/rows.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class RowFiles : public ::testing::Test {
 protected:
  RowFiles() {
    std::string name = (std::filesystem::temp_directory_path() / "echoline-rows-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~RowFiles() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& text, std::ios::openmode mode = std::ios::trunc) {
    std::ofstream(rows_file(), std::ios::binary | mode) << text;
  }
  std::filesystem::path rows_file() const { return folder_ / "rows.jsonl"; }
  std::filesystem::path folder_;
};

TEST_F(RowFiles, EveryRowOfAnyLengthComesOnceInOrder) {
  Random random(7);
  std::vector<json> written;
  std::string text;
  for (int i = 0; i < 400; ++i) {
    // The lengths vary, so that rows end at every place of the blocks in which the file is read.
    const std::size_t length = i % 50 == 0 ? kRowBlockBytes + static_cast<std::size_t>(i) : random.below(3000);
    written.push_back({{"i", i}, {"x", std::string(length, 'x')}});
    text += written.back().dump() + "\n";
  }
  write(text);
  const auto rows = read_json_lines(rows_file());
  ASSERT_TRUE(rows) << rows.error().message();
  EXPECT_EQ(*rows, written);
}

// 256 MiB, nearly all of it a hole. Rows of zeroes are no JSON, so the test reads them as text.
TEST_F(RowFiles, TheBufferDoesNotGrowWithTheFile) {
  const std::string row = json{{"kind", "step"}, {"step", 1}}.dump() + "\n";
  write(row);
  const std::uint64_t file_bytes = 256ull << 20;
  {
    std::fstream sparse(rows_file(), std::ios::binary | std::ios::in | std::ios::out);
    for (std::uint64_t position = kRowBytesMax / 2; position < file_bytes; position += kRowBytesMax / 2) {
      sparse.seekp(static_cast<std::streamoff>(position));
      sparse << "\n";
    }
    sparse << row;
  }
  auto file = RowFile::open(rows_file());
  ASSERT_TRUE(file);
  std::uint64_t rows = 0, row_bytes = 0;
  std::size_t buffer_bytes_max = 0;
  for (;;) {
    const auto next = file->next();
    ASSERT_TRUE(next) << next.error().message();
    if (!*next) break;
    ++rows, row_bytes += (*next)->size() + 1;
    buffer_bytes_max = std::max(buffer_bytes_max, file->buffer_bytes());
  }
  EXPECT_EQ(rows, 1 + (file_bytes / (kRowBytesMax / 2) - 1) + 1);
  EXPECT_EQ(row_bytes, std::filesystem::file_size(rows_file()));
  EXPECT_LE(buffer_bytes_max, kRowBytesMax + 2 * kRowBlockBytes);
}

TEST_F(RowFiles, ATornLastRowIsLeftOutHoweverLongItIs) {
  write("{\"a\":1}\n{\"a\":");
  EXPECT_EQ(read_json_lines(rows_file())->size(), 1u);
  write("{\"a\":1}\n" + std::string(5 * kRowBytesMax, 'x'));
  EXPECT_EQ(read_json_lines(rows_file())->size(), 1u);
  write("");
  EXPECT_EQ(read_json_lines(rows_file())->size(), 0u);
  EXPECT_EQ(read_json_lines(folder_ / "nothing").error().code, Code::kNotFound);
  EXPECT_EQ(read_json_lines(folder_).error().code, Code::kIo);
}

TEST_F(RowFiles, ABadRowIsNamedByFileAndLine) {
  const auto error_of = [&](const std::string& text) {
    write(text);
    const auto rows = read_json_lines(rows_file());
    EXPECT_FALSE(rows);
    EXPECT_EQ(rows.error().code, Code::kCorrupt);
    return rows.error().detail;
  };
  EXPECT_THAT(error_of("{}\n{}\n[1]\n{}\n"), HasSubstr("rows.jsonl:3: expected a JSON object"));
  EXPECT_THAT(error_of("{}\n\n{}\n"), HasSubstr("rows.jsonl:2:"));
  const std::string longest = json{{"x", std::string(kRowBytesMax - 8, 'x')}}.dump();
  ASSERT_EQ(longest.size(), kRowBytesMax);
  write("{}\n" + longest + "\n");
  EXPECT_EQ(read_json_lines(rows_file())->size(), 2u);
  EXPECT_THAT(
      error_of("{}\n" + longest + " \n{}\n"),
      HasSubstr(fmt::format("rows.jsonl:2: expected a JSON object in a row of at most {} bytes, found one of {}",
                            kRowBytesMax, kRowBytesMax + 1)));
  EXPECT_THAT(error_of("{}\n" + std::string(7 * kRowBytesMax, 'x') + "\n"),
              HasSubstr(fmt::format("found one of {} bytes", 7 * kRowBytesMax)));
}

TEST_F(RowFiles, AnErrorOfTheVisitorEndsIt) {
  write("{\"a\":1}\n{\"a\":2}\n{\"a\":3}\n");
  int seen = 0;
  const Status status = each_row(rows_file(), [&](const json&) -> Status {
    if (++seen == 2) return fail(Code::kInvalid, "test", "enough");
    return ok();
  });
  EXPECT_EQ(status.error().detail, "enough");
  EXPECT_EQ(seen, 2);
}

TEST_F(RowFiles, LastRowsAreFoundFromTheEnd) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += fmt::format("{{\"i\":{}}}\n", i);
  text += "{\"i\":";
  write(text);
  for (const std::uint64_t row_count : {0u, 1u, 2u, 2999u, 3000u, 3001u}) {
    const auto place = last_rows(rows_file(), row_count);
    ASSERT_TRUE(place);
    auto file = RowFile::open(rows_file(), *place);
    ASSERT_TRUE(file);
    std::vector<int> numbers;
    while (auto row = *file->next_object()) numbers.push_back(row->at("i"));
    EXPECT_EQ(numbers.size(), std::min<std::uint64_t>(row_count, 3000));
    if (row_count > 0) {
      EXPECT_EQ(numbers.back(), 2999);
    }
  }
}

TEST_F(RowFiles, ATornRowIsCutOffFromTheEnd) {
  const auto bytes_after_cut = [&](const std::string& text) {
    write(text);
    EXPECT_TRUE(cut_torn_row(rows_file()));
    return std::filesystem::file_size(rows_file());
  };
  EXPECT_EQ(bytes_after_cut(""), 0u);
  EXPECT_EQ(bytes_after_cut("{}\n{}\n"), 6u);
  EXPECT_EQ(bytes_after_cut("{}\n{"), 3u);
  EXPECT_EQ(bytes_after_cut("{}\n" + std::string(3 * kRowBlockBytes, 'x')), 3u);  // over several blocks
  EXPECT_EQ(bytes_after_cut(std::string(3 * kRowBlockBytes, 'x')), 0u);
  EXPECT_TRUE(cut_torn_row(folder_ / "nothing"));
}

TEST_F(RowFiles, ARowThatNoReaderTakesIsNotWritten) {
  const std::filesystem::path run = folder_ / "run";
  const auto record = RunRecord::open(run, false);
  ASSERT_TRUE(record);
  (*record)->append_event("trouble", {{"worker", 3}, {"what", std::string(kRowBytesMax, 'x')}});
  (*record)->append_event("joined", {{"worker", 4}});
  const auto rows = read_json_lines(run / "events.jsonl");
  ASSERT_TRUE(rows) << rows.error().message();
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ(rows->at(0).at("worker"), 3);
  EXPECT_GT(rows->at(0).at("bytes_left_out"), kRowBytesMax);
  EXPECT_FALSE(rows->at(0).contains("what"));
}

TEST_F(RowFiles, PagesTogetherAreTheFile) {
  std::string text;
  std::vector<json> written;
  for (int i = 0; i < 30'000; ++i) {
    written.push_back({{"i", i}, {"x", std::string(static_cast<std::size_t>(i % 200), 'x')}});
    text += written.back().dump() + "\n";
  }
  write(text + "{\"torn\":");
  RowPages pages(rows_file());
  std::vector<json> read;
  for (bool more = true; more;) {
    const auto page = pages.after(read.size(), kPageRowsMax);
    ASSERT_TRUE(page) << page.error().message();
    EXPECT_LE(page->rows.size(), kPageBytesMax + kRowBytesMax);
    const json rows = json::parse(page->rows);
    EXPECT_LE(rows.size(), kPageRowsMax);
    read.insert(read.end(), rows.begin(), rows.end());
    EXPECT_EQ(page->next, read.size());
    more = page->more;
    ASSERT_TRUE(!more || !rows.empty());
  }
  EXPECT_EQ(read, written);
  EXPECT_EQ(json::parse(pages.after(29'990, 3)->rows),
            json(std::vector<json>(written.begin() + 29'990, written.begin() + 29'993)));
  EXPECT_EQ(pages.after(40'000, 3)->rows, "[]");
  EXPECT_EQ(json::parse(pages.last(3)->rows), json(std::vector<json>(written.end() - 3, written.end())));
  EXPECT_EQ(pages.last(0)->rows, "[]");
  const json tail = json::parse(pages.last(30'000)->rows);  // no more than a page takes, the newest ones
  EXPECT_EQ(tail.back(), written.back());
  EXPECT_LT(tail.size(), kPageRowsMax + 1);
  EXPECT_LE(tail.dump().size(), kPageBytesMax + kRowBytesMax);

  write("{\"i\":30000}\n", std::ios::app);  // the torn row is no object now
  EXPECT_THAT(pages.after(30'000, 1).error().detail, HasSubstr("rows.jsonl:30001:"));
}

TEST(Distributions, AreExactAtFirstAndCloseLater) {
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{1000}, Distribution::kExactMax, 4 * Distribution::kExactMax}) {
    Random random(count);
    Distribution folded;
    std::vector<double> values;
    for (std::size_t i = 0; i < count; ++i) {
      values.push_back(std::exp(static_cast<double>(random.below(10'000)) / 1000 - 7));
      folded.add(values.back());
    }
    std::sort(values.begin(), values.end());
    for (const double q : {0.0, 0.01, 0.5, 0.95, 1.0}) {
      const double rank = std::max(0.0, std::ceil(q * static_cast<double>(count)) - 1);
      const double exact = values[static_cast<std::size_t>(rank)], found = folded.quantile(q).value();
      EXPECT_NEAR(found / exact, 1, count <= Distribution::kExactMax ? 0 : Distribution::kRelativeError) << q;
    }
    EXPECT_LE(folded.memory_bytes(), 1'200'000u);
  }
  EXPECT_FALSE(Distribution().quantile(0.5));
}

TEST(RunFigures, RepeatedRowsCountOnce) {
  std::vector<json> rows;
  const auto add_step = [&](int number, double reward) {
    rows.push_back({{"kind", "step"},
                    {"step", number},
                    {"reward_mean", reward},
                    {"step_seconds", 1.0},
                    {"staleness", {{"0", 2}}}});
  };
  for (int i = 1; i <= 10; ++i) add_step(i, 0.1);
  for (int i = 6; i <= 8; ++i) add_step(i, 0.2);  // after a resume from step 5, until it is killed
  for (int i = 6; i <= 12; ++i) add_step(i, 0.3);
  const RunFigures figures = run_figures(rows);
  EXPECT_EQ(figures.steps, 12u);
  EXPECT_EQ(figures.reward.first->second, 0.1);
  EXPECT_EQ(figures.reward.last->second, 0.3);
  EXPECT_NEAR(figures.reward.totals.sum(), 5 * 0.1 + 7 * 0.3, 1e-12);
  EXPECT_EQ(figures.step_seconds.totals().sum(), 12.0);
  EXPECT_EQ(figures.staleness.at(0), 24u);
}

TEST(RunFigures, KeepAStatedNumberOfEvaluationsWithBothEnds) {
  std::vector<json> rows;
  for (int i = 0; i <= 10'001; ++i) rows.push_back({{"kind", "evaluation"}, {"step", i}, {"accuracy", i / 1e5}});
  const RunFigures figures = run_figures(rows);
  const auto& kept_rows = figures.evaluations.rows();
  EXPECT_LE(kept_rows.size(), kEvaluationsReported);
  EXPECT_GT(kept_rows.size(), kEvaluationsReported / 2);
  EXPECT_EQ(kept_rows.begin()->first, 0u);
  EXPECT_EQ(kept_rows.rbegin()->first, 10'001u);
  for (const auto& [step, row] : kept_rows) EXPECT_TRUE(step % 16 == 0 || step == 10'001u) << step;
}

}  // namespace
}  // namespace echoline::learner
