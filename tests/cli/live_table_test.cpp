// The live table: its content on screens of every size, and that it leaves nothing behind on a terminal.
#include "cli/live_table.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace echoline::cli {
namespace {

using nlohmann::json;

json status_with(int workers) {
  json status = {{"run", "a-run"},       {"step", 30},
                 {"steps", 120},         {"publish_every", 1},
                 {"version", 30},        {"phase", "training"},
                 {"wall_seconds", 61.0}, {"reward", 0.5},
                 {"idle_fraction", 0.1}, {"delta_bytes", 4096},
                 {"t_b_seconds", 0.25},  {"usd", 0.01},
                 {"usd_per_hour", 1.5},  {"topology", "learner -> 1 -> 2"}};
  status["accuracy"]["before"] = 0.25;
  for (int i = 1; i <= workers; ++i) {
    json worker = {{"id", i},
                   {"offer", "vast-" + std::to_string(1000 + i)},
                   {"rollouts", 100 * i},
                   {"version", 30},
                   {"bytes_in", 9e9},
                   {"bytes_forwarded", 1e6},
                   {"lost", false},
                   {"seed", i == 1}};
    worker["rollouts_per_s"] = 10.0;
    worker["rollouts_per_s_expected"] = 10.0;
    status["workers"].push_back(worker);
  }
  return status;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(StatusLines, FitEveryScreen) {
  json status = status_with(64);
  status["workers"][7]["offer"] = std::string(300, 'x') + "\x1b[2J";
  status["run"] = std::string(200, 'r');
  for (std::size_t columns : {1, 2, 10, 20, 40, 56, 64, 74, 80, 100, 200})
    for (std::size_t rows : {0, 1, 2, 3, 5, 10, 23, 24, 60, 200}) {
      const auto lines = status_lines(status, {columns, rows});
      EXPECT_LE(lines.size(), rows) << columns << "x" << rows;
      for (const std::string& line : lines) {
        EXPECT_LE(line.size(), columns) << columns << "x" << rows << ": " << line;
        EXPECT_EQ(line.find('\x1b'), std::string::npos);
      }
    }
  EXPECT_EQ(status_lines(status_with(64), {80, 200}).size(), 3u + 1 + 64 + 1) << "room for all: all are shown";
}

TEST(StatusLines, WorkersInTroubleComeFirstAndTheRestIsCounted) {
  json status = status_with(64);
  json& workers = status["workers"];
  workers[60]["away"] = true;
  workers[50]["version"] = 27;
  workers[40]["rollouts_per_s"] = 3.0;
  workers[30]["troubles"] = 2;
  workers[20]["quarantined"] = true;
  workers[10]["lost"] = true;
  workers[55]["version"] = nullptr;
  const auto lines = status_lines(status, {80, 23});
  ASSERT_EQ(lines.size(), 23u);
  const std::string text = joined(lines);
  const auto line_with = [&](const std::string& part) {
    for (std::size_t i = 0; i < lines.size(); ++i)
      if (lines[i].find(part) != std::string::npos) return i;
    ADD_FAILURE() << "no '" << part << "' in\n" << text;
    return lines.size();
  };
  const std::size_t first = line_with("worker") + 1;
  EXPECT_EQ(line_with("vast-1021"), first) << text;  // bad chunks and absence come before late workers
  EXPECT_EQ(line_with("vast-1061"), first + 1) << text;
  EXPECT_EQ(line_with("2 troubles"), first + 2) << text;
  EXPECT_EQ(line_with("3 behind"), first + 3) << text;
  EXPECT_EQ(line_with("slow: 3.0 of 10.0/s"), first + 4) << text;
  EXPECT_EQ(line_with("joining"), first + 5) << text;
  EXPECT_EQ(line_with("seed"), first + 6) << text;
  EXPECT_EQ(text.find("vast-1011"), std::string::npos) << "a lost worker leaves its line to others";
  EXPECT_NE(text.find("and 47 more, 1 lost"), std::string::npos) << text;
  // With room for few workers, the last line still counts those in trouble.
  EXPECT_NE(joined(status_lines(status, {80, 8})).find("of them in trouble"), std::string::npos);
}

TEST(StatusLines, NarrowScreensKeepNumbersAndProblems) {
  json status = status_with(3);
  status["workers"][2]["version"] = 20;
  const std::string text = joined(status_lines(status, {40, 23}));
  for (const char* part :
       {"step 30 of 120", "reward 0.500", "accuracy before 0.250", "T_b 0.25 s", "$0.0100", "10 beh"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
}

TEST(StatusLines, UnpricedMachinesAreNotCountedAsFree) {
  json status = status_with(1);
  status["prices_known"] = false;
  EXPECT_NE(joined(status_lines(status, {80, 24})).find("at least $0.0100"), std::string::npos);
}

TEST(StatusLines, AStatusOfAnotherVersionIsShownAsFarAsItGoes) {
  for (const char* odd :
       {"{}", R"({"workers":5})", R"({"workers":[1,{"id":"x","offer":null}],"step":"3","accuracy":[]})"})
    EXPECT_FALSE(status_lines(json::parse(odd), {80, 24}).empty()) << odd;
}

// A terminal with the escape sequences that the table uses. Long rows wrap if it becomes narrower.
class Terminal {
 public:
  Terminal(unsigned short columns, unsigned short rows) : columns_(columns), rows_(rows) {
    struct winsize size {
      rows, columns, 0, 0
    };
    EXPECT_EQ(::openpty(&master_, &slave_, nullptr, nullptr, &size), 0);
    ::fcntl(master_, F_SETFL, O_NONBLOCK);
    file_ = ::fdopen(slave_, "w");
  }
  ~Terminal() {
    std::fclose(file_);
    ::close(master_);
  }
  std::FILE* file() const { return file_; }

  void resize(unsigned short columns, unsigned short rows) {
    read();
    std::vector<std::string> reflowed;
    for (const std::string& line : screen_)
      for (std::size_t start = 0; start == 0 || start < line.size(); start += columns)
        reflowed.push_back(line.substr(start, columns));
    while (!reflowed.empty() && reflowed.back().empty()) reflowed.pop_back();
    cursor_row_ = reflowed.size();
    screen_ = reflowed;
    columns_ = columns, rows_ = rows;
    scroll();
    struct winsize size {
      rows, columns, 0, 0
    };
    ::ioctl(slave_, TIOCSWINSZ, &size);
  }

  // The visible lines.
  std::vector<std::string> screen() {
    read();
    while (!screen_.empty() && screen_.back().empty()) screen_.pop_back();
    return screen_;
  }

 private:
  void read() {
    char block[65536];
    for (ssize_t n; (n = ::read(master_, block, sizeof block)) > 0;)
      for (ssize_t i = 0; i < n; ++i) put_character(block[i]);
  }

  void put_character(char c) {
    if (!escape_so_far_.empty() || c == '\x1b') {
      escape_so_far_ += c;
      if (escape_so_far_.size() > 2 && std::isalpha(static_cast<unsigned char>(c)))
        perform_escape(std::exchange(escape_so_far_, ""));
    } else if (c == '\r') {
      cursor_column_ = 0;
    } else if (c == '\n') {
      ++cursor_row_, cursor_column_ = 0;
      scroll();
    } else {
      if (cursor_column_ == columns_ && wraps_lines_) put_character('\n');
      if (cursor_column_ == columns_) return;
      line().resize(std::max(line().size(), cursor_column_ + 1), ' ');
      line()[cursor_column_++] = c;
    }
  }

  void perform_escape(const std::string& escape) {
    const std::size_t number = std::strtoul(escape.c_str() + 2, nullptr, 10);
    if (escape == "\x1b[?7l")
      wraps_lines_ = false;
    else if (escape == "\x1b[?7h")
      wraps_lines_ = true;
    else if (escape == "\x1b[H")
      cursor_row_ = cursor_column_ = 0;
    else if (escape == "\x1b[2J")
      screen_.clear();
    else if (escape == "\x1b[J")
      line().resize(cursor_column_), screen_.resize(cursor_row_ + 1);
    else if (escape.back() == 'A')
      cursor_row_ -= std::min(number, cursor_row_);
    else
      ADD_FAILURE() << "unknown escape " << escape.substr(1);
  }

  std::string& line() {
    if (screen_.size() <= cursor_row_) screen_.resize(cursor_row_ + 1);
    return screen_[cursor_row_];
  }
  void scroll() {
    for (; cursor_row_ >= rows_; --cursor_row_)
      if (!screen_.empty()) screen_.erase(screen_.begin());
    if (screen_.size() > rows_) screen_.resize(rows_);
  }

  std::size_t columns_, rows_;
  int master_ = -1, slave_ = -1;
  std::FILE* file_ = nullptr;
  std::vector<std::string> screen_;
  std::size_t cursor_row_ = 0, cursor_column_ = 0;
  bool wraps_lines_ = true;
  std::string escape_so_far_;
};

std::size_t count(const std::vector<std::string>& lines, const std::string& part) {
  return static_cast<std::size_t>(std::count_if(
      lines.begin(), lines.end(), [&](const std::string& line) { return line.find(part) != std::string::npos; }));
}

TEST(LiveTable, LeavesNoGarbageWhenTheTerminalChangesItsSize) {
  ::setenv("TERM", "xterm", 1);
  Terminal terminal(120, 40);
  LiveTable table(terminal.file());
  const json status = status_with(64);
  table.print("first message");
  for (const auto& [columns, rows] : std::vector<std::pair<unsigned short, unsigned short>>{
           {120, 40}, {60, 40}, {40, 12}, {41, 12}, {100, 50}, {30, 5}, {80, 24}}) {
    if (columns != 120) terminal.resize(columns, rows);
    table.show(status, {});
    table.show(status, {});
    const auto screen = terminal.screen();
    const auto lines = status_lines(status, {columns, rows >= 16 ? rows - 4u : rows - 1u});
    ASSERT_GE(screen.size(), lines.size());
    EXPECT_EQ(std::vector<std::string>(screen.end() - static_cast<std::ptrdiff_t>(lines.size()), screen.end()), lines)
        << columns << "x" << rows;
    EXPECT_EQ(count(screen, "step 30"), 1u) << columns << "x" << rows << "\n" << joined(screen);
    EXPECT_LE(count(screen, "worker "), 1u) << joined(screen);
  }
  // A message moves the table down and clears the lines below it.
  table.print("second message");
  const auto screen = terminal.screen();
  EXPECT_EQ(count(screen, "second message"), 1u) << joined(screen);
  EXPECT_EQ(count(screen, "step 30"), 1u) << joined(screen);
}

TEST(LiveTable, AFileGetsALineNowAndThenAndNoEscapes) {
  std::FILE* file = std::tmpfile();
  LiveTable table(file);
  json status = status_with(3);
  TimePoint now{};
  for (int second = 0; second < 100; ++second, now += std::chrono::seconds(1)) {
    status["step"] = second;
    table.show(status, now);
  }
  table.print("a message");
  std::rewind(file);
  std::string text(1 << 16, 0);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5) << text;
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(text.find("a message\n"), std::string::npos);
}

}  // namespace
}  // namespace echoline::cli
