#include "semitone/zoo/mnist.h"

#include "semitone/core/error.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace semitone::zoo {
namespace {

using test::idx_bytes;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;

class MnistTest : public ::testing::Test {
 protected:
  MnistTest() { test::write_data_set(folder_.path(), 40, 20); }

  std::string message(Split split = Split::test) {
    try {
      load_mnist(folder_.path(), split);
    } catch (const FileError& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  void write_images(const at::Tensor& images) {
    write_text(folder_ / "t10k-images-idx3-ubyte", idx_bytes(images));
  }
  void write_labels(const at::Tensor& labels) {
    write_text(folder_ / "t10k-labels-idx1-ubyte", idx_bytes(labels));
  }

  test::TemporaryFolder folder_;
};

TEST_F(MnistTest, ReadsBothHalves) {
  for (const auto& [split, count, seed] :
       {std::tuple{Split::train, 40, 1}, std::tuple{Split::test, 20, 2}}) {
    const ImageSet set = load_mnist(folder_.path(), split);
    const ImageSet made = test::made_up_images(count, static_cast<std::uint64_t>(seed));
    EXPECT_EQ(set.size(), count);
    EXPECT_EQ(set.images.scalar_type(), torch::kByte);
    EXPECT_EQ(set.labels.scalar_type(), torch::kLong);
    EXPECT_TRUE(torch::equal(set.images, made.images));
    EXPECT_TRUE(torch::equal(set.labels, made.labels));
  }
}

TEST_F(MnistTest, FindsNamesWithADotToo) {
  std::filesystem::rename(folder_ / "t10k-images-idx3-ubyte", folder_ / "t10k-images.idx3-ubyte");
  std::filesystem::rename(folder_ / "train-images-idx3-ubyte.gz",
                          folder_ / "train-images.idx3-ubyte.gz");
  EXPECT_EQ(load_mnist(folder_.path(), Split::test).size(), 20);
  EXPECT_EQ(load_mnist(folder_.path(), Split::train).size(), 40);
  // Kaggle's copy has such folders too.
  std::filesystem::create_directory(folder_ / "t10k-images-idx3-ubyte");
  EXPECT_EQ(load_mnist(folder_.path(), Split::test).size(), 20);
}

TEST_F(MnistTest, ReadsTheRealOne) {
  const std::filesystem::path folder = std::filesystem::path(SEMITONE_SOURCE_DIR) / "data/mnist";
  const ImageSet train = load_mnist(folder, Split::train);
  const ImageSet test = load_mnist(folder, Split::test);
  EXPECT_EQ(train.size(), 60000);
  EXPECT_EQ(test.size(), 10000);
  // The mean pixel that is commonly used for normalisation is 0.1307.
  EXPECT_NEAR(train.images.to(torch::kDouble).mean().item<double>() / 255, 0.1307, 5e-5);
  EXPECT_EQ(train.labels.slice(0, 0, 5).sum().item<int64_t>(), 5 + 0 + 4 + 1 + 9);
  EXPECT_EQ(torch::bincount(test.labels).min().item<int64_t>(), 892);  // fives
}

TEST_F(MnistTest, MissingFolderAndFiles) {
  std::filesystem::remove(folder_ / "t10k-labels-idx1-ubyte");
  EXPECT_THAT(message(),
              AllOf(HasSubstr("t10k-labels-idx1-ubyte"), HasSubstr(folder_.path().string())));
  std::filesystem::remove_all(folder_.path());
  EXPECT_THAT(message(), AllOf(HasSubstr("a folder"), HasSubstr(folder_.path().string())));
  write_text(folder_.path(), "");
  EXPECT_THAT(message(), HasSubstr("a file of that name"));
}

// Permissions and a file system that does not answer have the same effect.
TEST_F(MnistTest, WhatTheSystemDoesNotShowIsNotCalledMissing) {
  const auto labels = folder_ / "t10k-labels-idx1-ubyte";
  std::filesystem::remove(labels);
  std::filesystem::create_symlink(labels, labels);
  EXPECT_THAT(message(), AllOf(HasSubstr("expected to read '" + labels.string() + "'"),
                               HasSubstr("got Too many levels of symbolic links")));
  std::filesystem::remove_all(folder_.path());
  std::filesystem::create_symlink(folder_.path(), folder_.path());
  EXPECT_THAT(message(), AllOf(HasSubstr("[zoo.mnist] expected to read the folder '" +
                                         folder_.path().string() + "'"),
                               HasSubstr("got Too many levels of symbolic links")));
}

TEST_F(MnistTest, DamagedFilesAreNamed) {
  write_text(folder_ / "train-images-idx3-ubyte.gz", "no gzip, no IDX");
  EXPECT_THAT(message(Split::train), HasSubstr("train-images-idx3-ubyte.gz"));
}

TEST_F(MnistTest, ImagesOfAnotherShape) {
  write_images(torch::zeros({20, 28, 32}, torch::kByte));
  EXPECT_THAT(message(), AllOf(HasSubstr("28 x 28"), HasSubstr("[20, 28, 32]")));
  write_images(torch::zeros({20, 28 * 28}, torch::kByte));
  EXPECT_THAT(message(), HasSubstr("[20, 784]"));
  write_images(torch::zeros({0, 28, 28}, torch::kByte));
  EXPECT_THAT(message(), HasSubstr("at least one image"));
}

TEST_F(MnistTest, AnotherNumberOfLabels) {
  write_labels(torch::zeros({19}, torch::kByte));
  EXPECT_THAT(message(), AllOf(HasSubstr("20 labels"), HasSubstr("[19]")));
  write_labels(torch::zeros({20, 1}, torch::kByte));
  EXPECT_THAT(message(), HasSubstr("[20, 1]"));
}

TEST_F(MnistTest, TheFirstLabelOutOfRangeIsNamed) {
  at::Tensor labels = torch::full({20}, 9, torch::kByte);
  labels[7] = 10;
  labels[9] = 255;
  write_labels(labels);
  EXPECT_THAT(message(), AllOf(HasSubstr("labels from 0 to 9"), HasSubstr("10 at index 7")));
}

}  // namespace
}  // namespace semitone::zoo
