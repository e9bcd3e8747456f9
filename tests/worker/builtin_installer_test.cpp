// Installing publications: bit-exact, in order, all or nothing.
#include "worker/engines/builtin_installer.hpp"

#include <gtest/gtest.h>

#include "delta/patch.hpp"
#include "model/weights.hpp"
#include "overlay/sizes.hpp"
#include "tests/delta/in_memory.hpp"
#include "tests/model/on_device.hpp"
#include "tests/worker/publication.hpp"

namespace echoline::worker {
namespace {

class InstallerTest : public ::testing::Test {
 protected:
  InstallerTest() : config_(*model::preset("tiny-64")), installer_(*model::create(config_)) {
    first_ = *model::export_policy(**model::init(config_, 2));
    second_ = *delta::copy_of(first_.view());
    for (std::size_t i = 0; i < second_.size(); ++i) second_.mutable_bytes(i)[0] ^= std::byte{1};
    second_.seal();
    delta::PatchStats stats;
    snapshot_ = publication(3, std::nullopt, *delta::encode_snapshot(first_.view()), first_.digest());
    delta_ = publication(4, 3, *delta::encode_delta(first_.view(), second_.view()), second_.digest());
  }
  model::ModelConfig config_;
  Installer installer_;
  delta::OwnedState first_, second_;
  overlay::Publication snapshot_, delta_;
};

TEST_F(InstallerTest, SnapshotThenDelta) {
  EXPECT_FALSE(installer_.version());
  ASSERT_TRUE(installer_.install(snapshot_));
  EXPECT_EQ(installer_.version(), Version{3});
  ASSERT_TRUE(installer_.install(delta_));
  EXPECT_EQ(installer_.version(), Version{4});
  EXPECT_EQ(installer_.digest(), second_.digest().bytes);
}

TEST_F(InstallerTest, ASnapshotIsNoLargerThanStoresExpect) {
  EXPECT_LE(snapshot_.payload.size(), overlay::publication_bytes_max({2 * config_.parameters()}).count);
}

TEST_F(InstallerTest, TheModelHoldsExactlyThePolicy) {
  const auto model = *model::create(config_);  // no weights are drawn for it: all come with the policy
  Installer installer(model);
  ASSERT_TRUE(installer.install(snapshot_));
  ASSERT_TRUE(installer.install(delta_));
  EXPECT_EQ(model::export_policy(*model)->digest(), second_.digest());
}

// A delta has only the adapter's tensors, and the model computes with the new ones. An adapter that stays at an older
// version has another digest than the publication.
TEST_F(InstallerTest, AnAdapterArrivesBitForBit) {
  config_.adapter = model::AdapterConfig{.rank = 4, .alpha = 8, .base_model = {}};
  auto first = model::init_policy(config_, 2).value(), second = delta::copy_of(first.view()).value();
  for (std::size_t i = 0; i < second.size(); ++i)
    if (model::is_adapter_tensor(second.name(i)))
      for (std::size_t byte = 1; byte < second.bytes(i).size(); byte += 2)
        second.mutable_bytes(i)[byte] = std::byte{0x3c};  // about 0.01
  second.seal();
  delta::PatchStats stats;
  const auto patch = delta::encode_delta(first.view(), second.view(), {}, &stats);
  const auto info = delta::inspect(*patch);
  for (const delta::PatchTensor& tensor : info->tensors)
    EXPECT_TRUE(tensor.changed == 0 || model::is_adapter_tensor(tensor.name)) << tensor.name;

  const auto model = *model::create(config_, torch::kCPU, torch::kBFloat16);
  Installer installer(model);
  const auto logits = [&] {
    const torch::NoGradGuard no_gradients;
    return model->forward(torch::tensor({{1, 2, 3}}, torch::kLong));
  };
  ASSERT_TRUE(installer.install(publication(3, std::nullopt, *delta::encode_snapshot(first.view()), first.digest())));
  const torch::Tensor before = logits();
  ASSERT_TRUE(installer.install(publication(4, 3, *patch, second.digest())));
  EXPECT_EQ(model::export_policy(*model)->digest(), second.digest());
  EXPECT_GT((logits() - before).abs().max().item<double>(), 1e-3);
  EXPECT_NE(first.digest(), second.digest());

  // A delta that leaves the adapter as it was cannot pass for the new version.
  Installer other(*model::create(config_, torch::kCPU, torch::kBFloat16));
  ASSERT_TRUE(other.install(publication(3, std::nullopt, *delta::encode_snapshot(first.view()), first.digest())));
  const auto nothing = delta::encode_delta(first.view(), first.view());
  EXPECT_FALSE(other.install(publication(4, 3, *nothing, second.digest())));
  EXPECT_EQ(other.version(), Version{3});
}

TEST_F(InstallerTest, OnADeviceItIsTheSame) {
  const auto model = *model::create(config_, torch::kCPU, torch::kBFloat16);
  model::test::OnDevice device(model);
  Installer installer(model, 1, device.attach());
  ASSERT_TRUE(installer.install(snapshot_));
  const unsigned kernels = device.backend().kernels_run();
  ASSERT_TRUE(installer.install(delta_));
  EXPECT_GT(device.backend().kernels_run(), kernels);
  EXPECT_EQ(model::export_policy(*model)->digest(), second_.digest());

  // A failed installation leaves no state that could pass for a policy. The next snapshot repairs it.
  ASSERT_TRUE(installer.install(snapshot_));
  device.backend().fail_after(0, 1);
  EXPECT_EQ(installer.install(delta_).error().code, Code::kUnavailable);
  EXPECT_FALSE(installer.version());
  ASSERT_TRUE(installer.install(snapshot_));
  ASSERT_TRUE(installer.install(delta_));
  EXPECT_EQ(model::export_policy(*model)->digest(), second_.digest());
}

TEST_F(InstallerTest, ADeltaNeedsItsBase) {
  EXPECT_EQ(installer_.install(delta_).error().code, Code::kStale);
  ASSERT_TRUE(installer_.install(snapshot_));
  delta_.base = Version{2};
  EXPECT_EQ(installer_.install(delta_).error().code, Code::kStale);
  EXPECT_EQ(installer_.version(), Version{3});
}

TEST_F(InstallerTest, DamageIsRefusedAndThePolicyStays) {
  ASSERT_TRUE(installer_.install(snapshot_));
  std::vector<std::byte> damaged = bytes_of(delta_);
  damaged[damaged.size() / 2] ^= std::byte{4};
  EXPECT_FALSE(installer_.install(publication(4, 3, damaged, second_.digest())));
  EXPECT_EQ(installer_.version(), Version{3});
  ASSERT_TRUE(installer_.install(delta_));  // nothing was half written
}

TEST_F(InstallerTest, AnotherPolicyThanAnnouncedIsRefused) {
  EXPECT_EQ(installer_.install(publication(3, std::nullopt, bytes_of(snapshot_), second_.digest())).error().code,
            Code::kCorrupt);
  EXPECT_FALSE(installer_.version());
  ASSERT_TRUE(installer_.install(snapshot_));
  EXPECT_EQ(installer_.install(publication(4, 3, bytes_of(delta_), first_.digest())).error().code, Code::kCorrupt);
  EXPECT_EQ(installer_.version(), Version{3});
  EXPECT_TRUE(installer_.install(delta_));  // the one before is as it was
}

// The parts of a publication, of at most `bytes_max` bytes each.
std::vector<overlay::PublicationPart> parts_of(const overlay::Publication& source, std::size_t bytes_max) {
  std::vector<overlay::PublicationPart> parts;
  const overlay::Slice payload(bytes_of(source));
  for (std::size_t offset = 0; offset < payload.size(); offset += bytes_max)
    parts.push_back({source.id, source.version, source.base, offset,
                     payload.part(offset, std::min(bytes_max, payload.size() - offset))});
  return parts;
}

TEST_F(InstallerTest, ArrivedPartsOfADeltaAreUsed) {
  delta_.id = {std::byte{4}};
  const auto parts = parts_of(delta_, 100);
  ASSERT_GT(parts.size(), 3u);
  const overlay::Digest before = first_.digest().bytes;
  const auto arrive = [&](std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) installer_.decode_part(parts[i]);
    EXPECT_EQ(installer_.digest(), installer_.version() ? before : overlay::Digest{}) << "parts alone install nothing";
  };
  arrive(parts.size());  // on nothing
  EXPECT_EQ(installer_.install(delta_).error().code, Code::kStale);
  for (const std::size_t n : {parts.size(), parts.size() / 2, std::size_t{1}}) {
    ASSERT_TRUE(installer_.install(snapshot_));
    arrive(n);
    ASSERT_TRUE(installer_.install(delta_));
    EXPECT_EQ(installer_.digest(), second_.digest().bytes);
  }
  // The installer uses the resolved prefix: it does not read again the first bytes of a payload that begins
  // differently.
  ASSERT_TRUE(installer_.install(snapshot_));
  arrive(2);
  std::vector<std::byte> altered_bytes = bytes_of(delta_);
  altered_bytes[150] ^= std::byte{1};
  overlay::Publication altered = publication(4, 3, altered_bytes, second_.digest());
  EXPECT_FALSE(installer_.install(altered)) << "of another publication";
  arrive(2);
  altered.id = delta_.id;
  EXPECT_TRUE(installer_.install(altered));
}

TEST_F(InstallerTest, ArrivedPartsOfAnotherPublicationDoNotMatter) {
  delta_.id = {std::byte{4}};
  const auto parts = parts_of(delta_, 100);
  ASSERT_TRUE(installer_.install(snapshot_));
  std::vector<std::vector<overlay::PublicationPart>> others(4, parts);
  others[0].erase(others[0].begin() + 1);  // a gap
  others[1].erase(others[1].begin());      // no beginning
  for (overlay::PublicationPart& part : others[2]) part.id = {std::byte{9}};
  std::vector<std::byte> garbage(100, std::byte{7});
  others[3][1].bytes = overlay::Slice(garbage);
  for (const auto& other : others) {
    for (const overlay::PublicationPart& part : other) installer_.decode_part(part);
    ASSERT_TRUE(installer_.install(delta_));
    EXPECT_EQ(installer_.digest(), second_.digest().bytes);
    ASSERT_TRUE(installer_.install(snapshot_));
  }
  // Parts that came before a snapshot do not matter either.
  for (const overlay::PublicationPart& part : parts) installer_.decode_part(part);
  ASSERT_TRUE(installer_.install(snapshot_));
  ASSERT_TRUE(installer_.install(delta_));
}

TEST_F(InstallerTest, ArrivedPartsOfASnapshotAreUsed) {
  snapshot_.id = {std::byte{3}};
  const auto parts = parts_of(snapshot_, 1000);
  ASSERT_GT(parts.size(), 3u);
  for (const std::size_t n : {parts.size(), parts.size() / 2, std::size_t{1}}) {
    Installer fresh(*model::create(config_));
    for (std::size_t i = 0; i < n; ++i) fresh.decode_part(parts[i]);
    EXPECT_FALSE(fresh.version()) << "parts alone install nothing";
    ASSERT_TRUE(fresh.install(snapshot_));
    EXPECT_EQ(fresh.digest(), first_.digest().bytes);
    EXPECT_TRUE(fresh.install(delta_));
  }
  // The installer does not read received bytes again, and does not use those of another publication.
  std::vector<std::byte> altered_bytes = bytes_of(snapshot_);
  altered_bytes[1500] ^= std::byte{1};
  overlay::Publication altered = publication(3, std::nullopt, altered_bytes, first_.digest());
  for (std::size_t i = 0; i < 2; ++i) installer_.decode_part(parts[i]);
  EXPECT_FALSE(installer_.install(altered));
  for (std::size_t i = 0; i < 2; ++i) installer_.decode_part(parts[i]);
  altered.id = snapshot_.id;
  EXPECT_TRUE(installer_.install(altered));
}

TEST_F(InstallerTest, ASnapshotArrivesBesideDeltas) {
  overlay::Publication later = publication(5, std::nullopt, *delta::encode_snapshot(first_.view()), first_.digest());
  later.id = {std::byte{5}};
  const auto parts = parts_of(later, 1000);
  delta_.id = {std::byte{4}};
  const auto deltas = parts_of(delta_, 100);
  ASSERT_TRUE(installer_.install(snapshot_));
  installer_.decode_part(parts[0]);
  for (const overlay::PublicationPart& part : deltas) installer_.decode_part(part);
  installer_.decode_part(parts[1]);
  ASSERT_TRUE(installer_.install(delta_));
  installer_.decode_part(parts[2]);
  // The installer still uses the bytes that came before the delta, and does not read them again.
  std::vector<std::byte> altered_bytes = bytes_of(later);
  altered_bytes[500] ^= std::byte{1};
  overlay::Publication altered = publication(5, std::nullopt, altered_bytes, first_.digest());
  altered.id = later.id;
  ASSERT_TRUE(installer_.install(altered));
  EXPECT_EQ(installer_.version(), Version{5});
  EXPECT_EQ(installer_.digest(), first_.digest().bytes);

  // A snapshot overtaken by a delta is forgotten.
  ASSERT_TRUE(installer_.install(snapshot_));
  altered.version = later.version = delta_.version;
  for (overlay::PublicationPart part : parts) {
    part.version = delta_.version;
    installer_.decode_part(part);
  }
  ASSERT_TRUE(installer_.install(delta_));
  EXPECT_FALSE(installer_.install(altered));
  EXPECT_EQ(installer_.version(), delta_.version);
  EXPECT_TRUE(installer_.install(later));
}

TEST_F(InstallerTest, APolicyOfAnotherModelIsRefused) {
  const auto other = *model::export_policy(**model::init(*model::preset("tiny-128"), 1));
  auto copy = *delta::copy_of(other.view());
  EXPECT_FALSE(installer_.install(publication(1, std::nullopt, *delta::encode_snapshot(other.view()), copy.digest())));
  EXPECT_FALSE(installer_.version());
}

}  // namespace
}  // namespace echoline::worker
