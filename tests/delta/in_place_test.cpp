// Applying to files: results, refusals, sound and damaged journals, and that a failure changes nothing.
#include "delta/in_place.hpp"

#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <fstream>

#include "delta/new_checkpoint.hpp"
#include "tests/delta/in_place_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class InPlaceTest : public ::testing::Test {
 protected:
  InPlaceTest()
      : base_(small_state(1)),
        next_(changed_state(base_, 2)),
        patch_(delta_between(base_, next_)),
        disk_(base_),
        file_and_folder_{disk_.file(), disk_.folder()} {}

  std::string refusal(const fs::path& path, const Blob& patch, Code code, const ApplyOptions& options = {}) {
    const Content before = content_of(path);
    const auto applied = apply_in_place(path, patch, options);
    EXPECT_EQ(content_of(path), before);
    if (applied) return "accepted";
    EXPECT_EQ(applied.error().code, code) << applied.error().message();
    return applied.error().message();
  }
  // Files in the root and in the folder that begin with a dot.
  std::vector<std::string> hidden() {
    std::vector<std::string> names;
    for (const fs::path& folder : {disk_.root(), disk_.folder()})
      for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().filename().string().starts_with('.')) names.push_back(entry.path().filename().string());
    return names;
  }
  fs::path journal(const fs::path& path) {
    return path == disk_.file() ? disk_.root() / ".policy.safetensors.echoline-journal"
                                : path / ".model.safetensors.index.json.echoline-journal";
  }

  OwnedState base_, next_;
  Blob patch_;
  CheckpointsOnDisk disk_;
  std::vector<fs::path> file_and_folder_;
};

TEST_F(InPlaceTest, TurnsBaseIntoResult) {
  for (const fs::path& path : file_and_folder_) {
    for (const unsigned threads : {1u, 3u}) {
      std::map<ApplyStage, int> stages;
      std::uint64_t done_bytes = 0, total_bytes = 1;  // as last reported
      ApplyOptions options{.threads = threads};
      options.observer = [&](ApplyStage stage) { ++stages[stage]; };
      options.progress = [&](std::uint64_t done, std::uint64_t total) { done_bytes = done, total_bytes = total; };
      const Content before = content_of(path);
      const auto report = apply_in_place(path, patch_, options);
      ASSERT_TRUE(report) << report.error().message();
      EXPECT_FALSE(report->already_applied);
      EXPECT_EQ(report->recovery, Recovery::kNothing);
      EXPECT_GT(report->journal_bytes, 0u);
      EXPECT_GT(report->written_bytes, 0u);
      EXPECT_EQ(done_bytes, total_bytes);
      EXPECT_EQ(stages[ApplyStage::kCommitted], 1);
      EXPECT_GT(stages[ApplyStage::kRecordWritten], 3);
      EXPECT_GT(stages[ApplyStage::kRangeWritten], 3);
      EXPECT_EQ(stages[ApplyStage::kVerified], 1);
      EXPECT_EQ(stages[ApplyStage::kJournalRemoved], 1);
      EXPECT_TRUE(same_bytes(Checkpoint::open(path)->view(), next_.view()));
      EXPECT_THAT(hidden(), ElementsAre());
      restore(path == disk_.file() ? disk_.root() : path, before);
    }
  }
}

TEST_F(InPlaceTest, WritesOnlyPagesThatChange) {
  OwnedState one = copy(base_.view());
  one.mutable_bytes(*one.find("head"))[40'000] ^= std::byte{1};
  one.seal();
  const auto report = apply_in_place(disk_.file(), delta_between(base_, one));
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_LE(report->written_bytes, 4096u);
  EXPECT_EQ(digest_at(disk_.file()), one.digest());
}

TEST_F(InPlaceTest, TheSameAgainDoesNothing) {
  ASSERT_TRUE(apply_in_place(disk_.folder(), patch_));
  const auto again = apply_in_place(disk_.folder(), patch_);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_TRUE(again->already_applied);
  EXPECT_EQ(digest_at(disk_.folder()), next_.digest());
}

TEST_F(InPlaceTest, RefusesPatchesThatDoNotApply) {
  const OwnedState third = changed_state(next_, 3);
  const auto snapshot = encode_snapshot(next_.view());
  ASSERT_TRUE(snapshot);
  Blob damaged = patch_;
  damaged[damaged.size() / 2] ^= std::byte{1};
  for (const fs::path& path : file_and_folder_) {
    EXPECT_THAT(refusal(path, delta_between(next_, third), Code::kStale), HasSubstr(base_.digest().hex()));
    EXPECT_THAT(refusal(path, *snapshot, Code::kInvalid), HasSubstr("snapshot"));
    EXPECT_NE(refusal(path, damaged, Code::kCorrupt), "accepted");
    std::atomic<bool> stop = true;
    EXPECT_THAT(refusal(path, patch_, Code::kCancelled, {.stop = &stop}), HasSubstr("nothing was changed"));
  }
  const fs::path absent = disk_.root() / "absent.safetensors";
  EXPECT_EQ(apply_in_place(absent, patch_).error().code, Code::kInvalid);
  EXPECT_THAT(hidden(), ElementsAre());
}

TEST_F(InPlaceTest, RefusesFilesWithAnotherName) {
  fs::create_symlink(disk_.file(), disk_.root() / "link.safetensors");
  EXPECT_THAT(refusal(disk_.root() / "link.safetensors", patch_, Code::kInvalid), HasSubstr("symbolic link"));
  fs::create_hard_link(disk_.file(), disk_.root() / "other.safetensors");
  EXPECT_THAT(refusal(disk_.file(), patch_, Code::kInvalid), HasSubstr("hard links"));
}

TEST_F(InPlaceTest, OneProcessAtATime) {
  {
    const auto first = LockedCheckpoint::open(disk_.folder());
    ASSERT_TRUE(first) << first.error().message();
    EXPECT_TRUE(LockedCheckpoint::open(disk_.folder()));  // many may read
    EXPECT_THAT(refusal(disk_.folder(), patch_, Code::kUnavailable), HasSubstr("another process"));
    EXPECT_TRUE(LockedCheckpoint::open(disk_.folder() / "model-00001-of-00005.safetensors"));
  }
  ApplyOptions options;
  int refused = 0;
  options.observer = [&](ApplyStage) {
    const auto reading = LockedCheckpoint::open(disk_.folder());
    const auto applying = apply_in_place(disk_.folder(), patch_);
    refused += !reading && reading.error().code == Code::kUnavailable && !applying &&
               applying.error().code == Code::kUnavailable;
    refused -= reading || applying;
  };
  ASSERT_TRUE(apply_in_place(disk_.folder(), patch_, options));
  EXPECT_GT(refused, 10);
  EXPECT_TRUE(LockedCheckpoint::open(disk_.folder()));
}

TEST_F(InPlaceTest, ADiskThatRefusesTheJournal) {
  for (const fs::path& path : file_and_folder_) {
    for (const rlim_t limit : {0, 1000, 20'000}) {
      const Content before = content_of(path);
      const int status = in_child([&] {
        const rlimit file_size{limit, limit};
        std::signal(SIGXFSZ, SIG_IGN);
        ::setrlimit(RLIMIT_FSIZE, &file_size);
        const auto applied = apply_in_place(path, patch_);
        ::_exit(!applied && applied.error().code == Code::kExhausted &&
                        applied.error().detail.find("File too large") != std::string::npos
                    ? 7
                    : 1);
      });
      EXPECT_EQ(WEXITSTATUS(status), 7) << limit;
      EXPECT_EQ(content_of(path), before);
      EXPECT_THAT(hidden(), ElementsAre());
    }
  }
}

TEST_F(InPlaceTest, RecoveryDiscardsOrCompletes) {
  for (const fs::path& path : file_and_folder_) {
    apply_until(path, patch_, ApplyStage::kRecordWritten, 3);
    EXPECT_THAT(hidden(), ElementsAre(HasSubstr(".echoline-journal.part")));
    EXPECT_EQ(*recover(path), Recovery::kDiscarded);
    EXPECT_EQ(digest_at(path), base_.digest());
    apply_until(path, patch_, ApplyStage::kRangeWritten, 3);
    EXPECT_NE(digest_at(path), base_.digest());
    EXPECT_NE(digest_at(path), next_.digest());
    EXPECT_EQ(*recover(path), Recovery::kCompleted);
    EXPECT_EQ(digest_at(path), next_.digest());
    EXPECT_EQ(*recover(path), Recovery::kNothing);
    EXPECT_THAT(hidden(), ElementsAre());
  }
}

TEST_F(InPlaceTest, EveryCallRecoversFirst) {
  const Content base = content_of(disk_.folder());
  const auto crash = [&] {
    restore(disk_.folder(), base);
    apply_until(disk_.folder(), patch_, ApplyStage::kRangeWritten, 2);
  };
  crash();
  {
    const auto opened = LockedCheckpoint::open(disk_.folder());
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_TRUE(same_bytes((*opened)->view(), next_.view()));
  }
  for (const auto& [name, bytes] : base) {
    if (!name.ends_with(".safetensors")) continue;  // recovering one shard recovers all of them
    crash();
    EXPECT_EQ(*recover(disk_.folder() / name), Recovery::kCompleted) << name;
    EXPECT_EQ(digest_at(disk_.folder()), next_.digest());
  }
  crash();
  const auto applied = apply_in_place(disk_.folder(), patch_);
  ASSERT_TRUE(applied) << applied.error().message();
  EXPECT_EQ(applied->recovery, Recovery::kCompleted);
  EXPECT_TRUE(applied->already_applied);
}

TEST_F(InPlaceTest, AnotherCheckpointInTheFolderIsNotConcerned) {
  const fs::path other = disk_.folder() / "adapter.safetensors";
  ASSERT_TRUE(write_safetensors(other, base_.view()));
  apply_until(disk_.folder(), patch_, ApplyStage::kRangeWritten, 2);
  EXPECT_EQ(*recover(other), Recovery::kNothing);
  ASSERT_TRUE(apply_in_place(other, patch_));
  EXPECT_EQ(*recover(disk_.folder()), Recovery::kCompleted);
}

TEST_F(InPlaceTest, DamagedJournalsChangeNothing) {
  for (const fs::path& path : file_and_folder_) {
    apply_until(path, patch_, ApplyStage::kRangeWritten, 2);
    const std::string intact = *read_file(journal(path));
    ASSERT_GT(intact.size(), 1000u);
    const Content before = content_of(path);
    const auto expect_refused = [&](const std::string& bytes, const std::string& what) {
      write_raw(journal(path), bytes);
      const Content damaged = content_of(path);
      const auto recovered = recover(path);
      ASSERT_FALSE(recovered) << what;
      ASSERT_EQ(recovered.error().code, Code::kCorrupt) << what << ": " << recovered.error().message();
      ASSERT_THAT(recovered.error().message(), AllOf(HasSubstr(journal(path).string()), HasSubstr("Restore")));
      ASSERT_EQ(content_of(path), damaged) << what;
      ASSERT_FALSE(LockedCheckpoint::open(path)) << what;
      ASSERT_FALSE(apply_in_place(path, patch_)) << what;
    };
    for (std::size_t byte = 0; byte < intact.size(); byte += byte < 300 ? 1 : 211) {
      std::string damaged = intact;
      damaged[byte] = static_cast<char>(damaged[byte] ^ 0x10);
      expect_refused(damaged, "flipped " + std::to_string(byte));
      expect_refused(intact.substr(0, byte), "cut " + std::to_string(byte));
    }
    expect_refused(intact + '\0', "longer");
    write_raw(journal(path), intact);
    EXPECT_EQ(content_of(path), before);
    EXPECT_EQ(*recover(path), Recovery::kCompleted);
    EXPECT_EQ(digest_at(path), next_.digest());
  }
}

TEST_F(InPlaceTest, JournalsOfOtherFilesChangeNothing) {
  const fs::path path = disk_.file();
  apply_until(path, patch_, ApplyStage::kRangeWritten, 2);
  const std::string torn = *read_file(path);
  // Other weights of the same size under the same name.
  ASSERT_TRUE(write_safetensors(path, changed_state(base_, 9).view(), {{"format", "pt"}, {"note", "kept"}}));
  const Content other = content_of(path);
  auto recovered = recover(path);
  ASSERT_FALSE(recovered);
  EXPECT_EQ(recovered.error().code, Code::kCorrupt);
  EXPECT_THAT(recovered.error().message(), HasSubstr("has changed the files"));
  EXPECT_EQ(content_of(path), other);
  // Another size.
  ASSERT_TRUE(write_safetensors(path, base_.view(), {{"format", "pt"}, {"note", "kept, and longer than before"}}));
  const Content longer = content_of(path);
  recovered = recover(path);
  ASSERT_FALSE(recovered);
  EXPECT_EQ(recovered.error().code, Code::kCorrupt);
  EXPECT_THAT(recovered.error().message(), HasSubstr(fmt::format("written for a file of {}", torn.size())));
  EXPECT_EQ(content_of(path), longer);
  // The file itself, back again.
  write_raw(path, torn);
  EXPECT_EQ(*recover(path), Recovery::kCompleted);
  EXPECT_EQ(digest_at(path), next_.digest());
}

class NewCheckpointTest : public InPlaceTest {
 protected:
  fs::path target(const fs::path& from) { return disk_.root() / (from == disk_.file() ? "new.safetensors" : "new"); }
  Result<PatchInfo> apply(const fs::path& from, const Blob& patch, const fs::path& to) {
    ECHO_ASSIGN(const LockedCheckpoint prev, LockedCheckpoint::open(from));
    return apply_to_new(*prev, patch, to, {.threads = 2});
  }
};

TEST_F(NewCheckpointTest, IsTheResultInTheSameLayout) {
  write_raw(disk_.folder() / "pytorch_model.bin", "weights of another kind");
  write_raw(disk_.folder() / ".notes", "kept");
  fs::create_directory(disk_.folder() / "original");
  for (const fs::path& from : file_and_folder_) {
    const Content before = content_of(from);
    const auto info = apply(from, patch_, target(from));
    ASSERT_TRUE(info) << info.error().message();
    EXPECT_EQ(info->result, next_.digest());
    EXPECT_EQ(content_of(from), before);
    EXPECT_TRUE(same_bytes(Checkpoint::open(target(from))->view(), next_.view()));
    // The same bytes as after a change in place.
    ASSERT_TRUE(apply_in_place(from, patch_));
    Content in_place = content_of(from), fresh = content_of(target(from));
    in_place.erase("pytorch_model.bin");
    if (from == disk_.file()) fresh = {{"policy.safetensors", fresh.at("new.safetensors")}};
    EXPECT_EQ(fresh, in_place);
  }
  EXPECT_FALSE(fs::exists(disk_.root() / "new/original"));
  EXPECT_EQ(fs::status(disk_.root() / "new").permissions() & fs::perms::others_exec, fs::perms::others_exec);
}

TEST_F(NewCheckpointTest, NothingIsOverwrittenOrLeftBehind) {
  const OwnedState third = changed_state(next_, 3);
  for (const fs::path& from : file_and_folder_) {
    const auto stale = apply(from, delta_between(next_, third), target(from));
    ASSERT_FALSE(stale);
    EXPECT_EQ(stale.error().code, Code::kStale);
    EXPECT_FALSE(fs::exists(target(from)));
    write_raw(target(from), "mine");
    const auto onto_existing = apply(from, patch_, target(from));
    ASSERT_FALSE(onto_existing);
    EXPECT_EQ(onto_existing.error().code, Code::kInvalid);
    EXPECT_THAT(onto_existing.error().message(), AllOf(HasSubstr(target(from).string()), HasSubstr("exists")));
    EXPECT_EQ(*read_file(target(from)), "mine");
    EXPECT_FALSE(apply(from, patch_, disk_.root() / "no" / "such"));
    EXPECT_THAT(hidden(), ElementsAre());
  }
}

TEST_F(NewCheckpointTest, Snapshots) {
  const auto snapshot = encode_snapshot(next_.view());
  ASSERT_TRUE(snapshot);
  ASSERT_TRUE(unpack_snapshot(*snapshot, nullptr, disk_.root() / "alone.safetensors"));
  ASSERT_TRUE(unpack_snapshot(*snapshot, nullptr, disk_.root() / "alone/"));
  EXPECT_TRUE(fs::exists(disk_.root() / "alone/model.safetensors"));
  for (const char* name : {"alone.safetensors", "alone"}) EXPECT_EQ(digest_at(disk_.root() / name), next_.digest());
  for (const fs::path& like : file_and_folder_) {
    const auto layout = Checkpoint::open(like);
    ASSERT_TRUE(layout);
    const auto info = unpack_snapshot(*snapshot, &*layout, target(like));
    ASSERT_TRUE(info) << info.error().message();
    EXPECT_EQ(digest_at(target(like)), next_.digest());
    const auto applied = apply(like, patch_, disk_.root() / "applied");
    ASSERT_TRUE(applied);
    if (like == disk_.folder()) {
      EXPECT_EQ(content_of(target(like)), content_of(disk_.root() / "applied"));
    }
    fs::remove_all(disk_.root() / "applied");
    EXPECT_FALSE(unpack_snapshot(*snapshot, &*layout, target(like)));  // it exists now
  }
  const auto other = encode_snapshot({base_.view()[0]});
  const auto layout = Checkpoint::open(disk_.file());
  EXPECT_EQ(unpack_snapshot(*other, &*layout, disk_.root() / "x").error().code, Code::kInvalid);
  EXPECT_EQ(unpack_snapshot(patch_, nullptr, disk_.root() / "x").error().code, Code::kInvalid);
  EXPECT_THAT(hidden(), ElementsAre());
}

}  // namespace
}  // namespace echoline::delta
