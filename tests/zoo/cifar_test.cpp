#include "semitone/zoo/cifar.h"

#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;
using test::cifar_bytes;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += "class" + std::to_string(i) + "\n";
  return text;
}

class Cifar10Test : public ::testing::Test {
 protected:
  Cifar10Test() { test::write_cifar10(folder_.path(), 10, 4); }

  std::string message(Split split = Split::test, std::int64_t max_bytes = 1 << 20) {
    return test::message_of<FileError>([&] { load_cifar10(folder_.path(), split, max_bytes); });
  }

  test::TemporaryFolder folder_;
};

TEST_F(Cifar10Test, ReadsBothHalves) {
  for (const auto& [split, count, seed] :
       {std::tuple{Split::train, 10, 1}, std::tuple{Split::test, 4, 2}}) {
    const ImageSet set = load_cifar10(folder_.path(), split);
    const ImageSet made = test::made_up_colours(count, static_cast<std::uint64_t>(seed));
    EXPECT_EQ(set.size(), count);
    EXPECT_EQ(set.channels(), 3);
    EXPECT_EQ(set.classes, 10);
    EXPECT_TRUE(set.class_names.empty());
    EXPECT_TRUE(torch::equal(set.images, made.images));
    EXPECT_TRUE(torch::equal(set.labels, made.labels));
    EXPECT_TRUE(set.images.is_contiguous());
  }
}

TEST_F(Cifar10Test, TheFirstByteIsTheLabelAndRedComesFirst) {
  std::string record(3073, '\0');
  record[0] = 7;
  record[1 + 33] = 'r';         // row 1, column 1
  record[1 + 1024] = 'g';       // row 0, column 0
  record[1 + 2048 + 31] = 'b';  // row 0, column 31
  write_text(folder_ / "test_batch.bin", record);
  const ImageSet set = load_cifar10(folder_.path(), Split::test);
  ASSERT_EQ(set.size(), 1);
  EXPECT_EQ(set.labels.item<std::int64_t>(), 7);
  EXPECT_EQ(set.images[0][0][1][1].item<int>(), 'r');
  EXPECT_EQ(set.images[0][1][0][0].item<int>(), 'g');
  EXPECT_EQ(set.images[0][2][0][31].item<int>(), 'b');
  EXPECT_EQ(set.images.sum().item<int>(), 'r' + 'g' + 'b');
}

TEST_F(Cifar10Test, FindsTheArchivesFolderAndGzippedFiles) {
  test::TemporaryFolder outer;
  fs::rename(folder_.path(), outer / "cifar-10-batches-bin");
  EXPECT_EQ(load_cifar10(outer.path(), Split::train).size(), 10);
  const fs::path plain = outer / "cifar-10-batches-bin/test_batch.bin";
  write_text(plain.string() + ".gz", test::gzip(test::read_text(plain)));
  fs::remove(plain);
  EXPECT_TRUE(torch::equal(load_cifar10(outer.path(), Split::test).images,
                           test::made_up_colours(4, 2).images));
}

TEST_F(Cifar10Test, ReadsTheNamesOfClasses) {
  write_text(folder_ / "batches.meta.txt", lines(10) + "\n");
  EXPECT_EQ(load_cifar10(folder_.path(), Split::test).class_names.at(9), "class9");
  write_text(folder_ / "batches.meta.txt", "cat\r\ndog\r\n");
  EXPECT_THAT(message(),
              AllOf(HasSubstr("10 names"), HasSubstr("batches.meta.txt"), HasSubstr("got 2")));
}

TEST_F(Cifar10Test, MissingFolderAndFiles) {
  fs::remove(folder_ / "data_batch_4.bin");
  EXPECT_THAT(message(Split::train),
              AllOf(HasSubstr("[zoo.cifar] expected a file data_batch_4.bin"), HasSubstr("none")));
  EXPECT_EQ(load_cifar10(folder_.path(), Split::test).size(), 4);
  fs::remove_all(folder_.path());
  EXPECT_THAT(message(), AllOf(HasSubstr("a folder"), HasSubstr(folder_.path().string())));
  write_text(folder_.path(), "");
  EXPECT_THAT(message(), HasSubstr("a file of that name"));
}

TEST_F(Cifar10Test, DamagedFiles) {
  const fs::path file = folder_ / "test_batch.bin";
  const std::string whole = test::read_text(file);
  write_text(file, whole.substr(0, whole.size() - 1));
  EXPECT_THAT(message(), AllOf(HasSubstr("whole images of 3073 bytes"), HasSubstr(file.string()),
                               HasSubstr("3 images and 3072 bytes"), HasSubstr("copy the file")));
  write_text(file, whole + "x");
  EXPECT_THAT(message(), HasSubstr("4 images and 1 bytes"));
  write_text(file, "");
  EXPECT_THAT(message(), AllOf(HasSubstr("[zoo.cifar] expected data in"), HasSubstr("empty file")));
  write_text(file, test::gzip(""));
  EXPECT_THAT(message(), HasSubstr("at least one image"));
  const std::string packed = test::gzip(whole);
  write_text(file, packed.substr(0, packed.size() / 2));
  EXPECT_THAT(message(), AllOf(HasSubstr("[zoo.cifar]"), HasSubstr("ends early")));
  fs::remove(file);
  fs::create_symlink(file, file);
  EXPECT_THAT(message(), AllOf(HasSubstr("[zoo.cifar]"), HasSubstr(file.string())));
  fs::remove(file);
  fs::create_directory(file);
  EXPECT_THAT(message(), HasSubstr("a regular file"));
}

TEST_F(Cifar10Test, TheFirstLabelOutOfRangeIsNamed) {
  ImageSet set = test::made_up_colours(4, 2);
  set.labels[2] = 10;
  set.labels[3] = 255;
  write_text(folder_ / "test_batch.bin", cifar_bytes(set));
  EXPECT_THAT(message(), AllOf(HasSubstr("labels from 0 to 9"), HasSubstr("10 at image 2")));
}

TEST_F(Cifar10Test, NoMoreIsReadThanAllowed) {
  EXPECT_EQ(load_cifar10(folder_.path(), Split::train, 10 * 3073).size(), 10);
  EXPECT_THAT(message(Split::train, 10 * 3073 - 1),
              AllOf(HasSubstr("at most 30729 bytes"), HasSubstr("data_batch_5.bin")));
  // A stream that would unpack to 64 MiB.
  write_text(folder_ / "test_batch.bin", test::gzip(std::string(std::size_t{64} << 20, '\0')));
  EXPECT_THAT(message(), AllOf(HasSubstr("at most 1048576 bytes"), HasSubstr("got more")));
}

TEST_F(Cifar10Test, ReadsMoreThanItsFirstPieceOfMemory) {
  const auto count = std::int64_t{6000};  // 18.4 MB
  write_text(folder_ / "test_batch.bin",
             test::gzip(std::string(static_cast<std::size_t>(count * 3073), '\1')));
  const ImageSet set = load_cifar10(folder_.path(), Split::test);
  EXPECT_EQ(set.size(), count);
  EXPECT_TRUE(set.images.eq(1).all().item<bool>());
}

class Cifar100Test : public ::testing::Test {
 protected:
  Cifar100Test() {
    std::string bytes;
    for (int i = 0; i < 3; ++i) {
      bytes += static_cast<char>(5 * i);   // coarse
      bytes += static_cast<char>(40 * i);  // fine
      bytes += std::string(3072, static_cast<char>(i + 1));
    }
    write_text(folder_ / "train.bin", bytes);
    write_text(folder_ / "test.bin", bytes.substr(0, 3074));
  }

  test::TemporaryFolder folder_;
};

TEST_F(Cifar100Test, HasFineAndCoarseLabels) {
  write_text(folder_ / "coarse_label_names.txt", lines(20));
  const ImageSet fine = load_cifar100(folder_.path(), Split::train);
  EXPECT_EQ(fine.classes, 100);
  EXPECT_TRUE(torch::equal(fine.labels, torch::tensor({0, 40, 80}, torch::kLong)));
  EXPECT_TRUE(torch::equal(fine.images.select(2, 0).select(2, 0).select(1, 0),
                           torch::tensor({1, 2, 3}, torch::kByte)));
  EXPECT_TRUE(fine.class_names.empty());
  const ImageSet coarse = load_cifar100(folder_.path(), Split::train, Cifar100Labels::coarse);
  EXPECT_EQ(coarse.classes, 20);
  EXPECT_EQ(coarse.class_names.size(), 20U);
  EXPECT_TRUE(torch::equal(coarse.labels, torch::tensor({0, 5, 10}, torch::kLong)));
  EXPECT_EQ(load_cifar100(folder_.path(), Split::test).size(), 1);
}

TEST_F(Cifar100Test, WrongFilesAreNamed) {
  const auto message = [&] {
    return test::message_of<FileError>([&] { load_cifar100(folder_.path(), Split::test); });
  };
  write_text(folder_ / "test.bin", std::string(3074, '\x14'));  // 20
  EXPECT_THAT(message(),
              AllOf(HasSubstr("coarse labels from 0 to 19"), HasSubstr("20 at image 0")));
  std::string record(3074, '\0');
  record[1] = 100;
  write_text(folder_ / "test.bin", record);
  EXPECT_THAT(message(), AllOf(HasSubstr("fine labels from 0 to 99"), HasSubstr("100 at image 0")));
  write_text(folder_ / "test.bin", std::string(3073, '\0'));  // an image of CIFAR-10
  EXPECT_THAT(message(), HasSubstr("whole images of 3074 bytes"));
  fs::remove(folder_ / "test.bin");
  EXPECT_THAT(message(), HasSubstr("a file test.bin"));
}

}  // namespace
}  // namespace semitone::zoo
