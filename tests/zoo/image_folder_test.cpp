#include "semitone/zoo/image_folder.h"

#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;
using test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ImageFolderTest : public ::testing::Test {
 protected:
  // An image of one value.
  void add(const std::string& name, int value, std::int64_t height = 2, std::int64_t width = 3) {
    fs::create_directories((folder_ / name).parent_path());
    const at::Tensor image = torch::full({3, height, width}, value, torch::kByte);
    const bool is_png = name.ends_with("png") || name.ends_with("PNG");
    write_text(folder_ / name, is_png ? test::png_bytes(image) : test::ppm_bytes(image));
  }

  ImageSet load(Split split = Split::train, const ImageFolderOptions& options = {}) {
    return load_image_folder(folder_.path(), split, options);
  }
  std::string message(Split split = Split::train, const ImageFolderOptions& options = {}) {
    return test::message_of<FileError>([&] { load(split, options); });
  }
  // The value of each image.
  static std::vector<int> values(const ImageSet& set) {
    std::vector<int> result;
    for (std::int64_t i = 0; i < set.size(); ++i) {
      const at::Tensor& image = set.images[i];
      EXPECT_TRUE(image.eq(image.flatten()[0]).all().item<bool>()) << i;
      result.push_back(image.flatten()[0].item<int>());
    }
    return result;
  }
  static std::vector<std::int64_t> labels(const ImageSet& set) {
    const auto* const data = set.labels.const_data_ptr<std::int64_t>();
    return {data, data + set.labels.numel()};
  }

  test::TemporaryFolder folder_;
};

TEST_F(ImageFolderTest, ClassesAndImagesAreInTheOrderOfTheirNames) {
  add("train/dog/b.ppm", 2);
  add("train/dog/a.PNG", 1);
  add("train/cat/10.png", 3);
  add("train/cat/9.png", 4);
  add("train/cat/sub/0.jpeg", 5);  // the content decides about the format
  add("train/Zebra/z.pgm.ppm", 6);
  add("test/cat/x.png", 7);
  add("test/dog/x.png", 8);
  add("test/Zebra/x.png", 9);
  write_text(folder_ / "train/dog/notes.txt", "ignored");
  write_text(folder_ / "train/dog/.hidden.png", "ignored");
  write_text(folder_ / "README", "ignored");
  const ImageSet train = load();
  EXPECT_EQ(train.classes, 3);
  EXPECT_THAT(train.class_names, ElementsAre("Zebra", "cat", "dog"));
  EXPECT_EQ(train.images.sizes(), (std::vector<std::int64_t>{6, 3, 2, 3}));
  EXPECT_THAT(values(train), ElementsAre(6, 3, 4, 5, 1, 2));
  EXPECT_THAT(labels(train), ElementsAre(0, 1, 1, 1, 2, 2));
  const ImageSet test = load(Split::test);
  EXPECT_THAT(values(test), ElementsAre(9, 7, 8));
  EXPECT_EQ(test.class_names, train.class_names);
  fs::rename(folder_ / "test", folder_ / "val");
  EXPECT_THAT(values(load(Split::test)), ElementsAre(9, 7, 8));
}

TEST_F(ImageFolderTest, AShareIsHeldOutOfEachClass) {
  for (int i = 0; i < 10; ++i) add("a/" + std::to_string(i) + ".ppm", i);
  for (int i = 10; i < 12; ++i) add("b/" + std::to_string(i) + ".ppm", i);
  add("c/12.ppm", 12);
  const auto sets = [&](const ImageFolderOptions& options) {
    const ImageSet train = load(Split::train, options);
    const ImageSet test = load(Split::test, options);
    std::vector<int> all = values(train);
    const std::vector<int> tested = values(test);
    all.insert(all.end(), tested.begin(), tested.end());
    EXPECT_EQ(std::set<int>(all.begin(), all.end()).size(), 13U);
    EXPECT_EQ(all.size(), 13U);
    EXPECT_EQ(test.classes, 3);
    return tested;
  };
  const auto chosen = sets(ImageFolderOptions());
  EXPECT_EQ(chosen.size(), 3U);  // two of ten, one of two, none of one
  EXPECT_THAT(labels(load(Split::test)), ElementsAre(0, 0, 1));
  EXPECT_EQ(sets(ImageFolderOptions()), chosen);
  std::set<std::vector<int>> choices;
  for (std::uint64_t seed = 0; seed < 8; ++seed)
    choices.insert(sets(ImageFolderOptions().seed(seed)));
  EXPECT_GT(choices.size(), 4U);
  EXPECT_EQ(sets(ImageFolderOptions().test_share(0.5)).size(), 6U);
  EXPECT_EQ(sets(ImageFolderOptions().test_share(0.001)).size(), 2U);
  EXPECT_EQ(sets(ImageFolderOptions().test_share(0.999)).size(), 10U);
  // It depends on names below the folder only: another place gives the same choice.
  test::TemporaryFolder other;
  fs::copy(folder_.path(), other.path(), fs::copy_options::recursive);
  EXPECT_EQ(values(load_image_folder(other.path(), Split::test)), chosen);
}

TEST_F(ImageFolderTest, ImagesOfSeveralSizesNeedASize) {
  add("a/0.ppm", 1, 4, 6);
  add("a/1.ppm", 2, 5, 6);
  add("b/0.png", 3, 9, 4);
  add("b/1.png", 3, 9, 4);
  EXPECT_THAT(message(Split::train, ImageFolderOptions().test_share(0.3)),
              AllOf(HasSubstr("[zoo.image_folder] expected images of "), HasSubstr(".ppm"),
                    HasSubstr(" — set the size")));
  const ImageFolderOptions options = ImageFolderOptions().size(3);
  const ImageSet train = load(Split::train, options);
  EXPECT_EQ(train.images.sizes(), (std::vector<std::int64_t>{2, 3, 3, 3}));
  EXPECT_EQ(values(train).back(), 3);
}

TEST_F(ImageFolderTest, AnImageThatScalingWouldMakeTooLargeIsNamed) {
  add("train/a/long.ppm", 1, 1, 20000);
  add("train/b/0.ppm", 2);
  add("test/a/0.ppm", 1);
  add("test/b/0.ppm", 2);
  // Of 64 TB, whose allocation fails at once.
  EXPECT_THAT(
      message(Split::train, ImageFolderOptions().size(16384)),
      AllOf(HasSubstr("at most 134217728 pixels in '" + (folder_ / "train/a/long.ppm").string() +
                      "' with a shorter side of 16384, got 16384 x 327680000"),
            HasSubstr("crop the image")));
  EXPECT_EQ(values(load(Split::train, ImageFolderOptions().size(2))), (std::vector<int>{1, 2}));
}

TEST_F(ImageFolderTest, FoldersThatAreNotADataSet) {
  EXPECT_THAT(message(), HasSubstr("at least two classes"));
  add("a/0.ppm", 1);
  EXPECT_THAT(message(), AllOf(HasSubstr("at least two classes"), HasSubstr("got 1")));
  fs::create_directory(folder_ / "b");
  EXPECT_THAT(message(), AllOf(HasSubstr("images in the folder of a class"),
                               HasSubstr((folder_ / "b").string()), HasSubstr("got none")));
  add("b/0.ppm", 1);
  EXPECT_EQ(load().size(), 2);
  EXPECT_THAT(message(Split::test), HasSubstr("at least two images of a class"));
  add("b/photo.WebP", 1);
  EXPECT_THAT(message(), AllOf(HasSubstr("PNG, JPEG, PPM and PGM images"), HasSubstr("photo.WebP"),
                               HasSubstr("mogrify -format png")));
  fs::remove_all(folder_.path());
  EXPECT_THAT(message(), AllOf(HasSubstr("a folder '"), HasSubstr("got none")));
  write_text(folder_.path(), "");
  EXPECT_THAT(message(), HasSubstr("a file of that name"));
}

// They would be the classes.
TEST_F(ImageFolderTest, SplitsOfOtherNamesAreRefused) {
  for (const std::string name : {"Training", "Testing"}) {
    add(name + "/a/0.ppm", 1);
    add(name + "/b/0.ppm", 1);
  }
  EXPECT_THAT(message(), AllOf(HasSubstr("folders train and test, or train and val"),
                               HasSubstr("got Testing, Training"), HasSubstr("rename them")));
  add("cars/0.ppm", 1);  // a class
  EXPECT_EQ(load().class_names.size(), 3U);
}

TEST_F(ImageFolderTest, SuffixesOfTheSameFormatsAreRead) {
  for (const std::string name : {"a/0.pnm", "a/1.PNM", "b/0.ppm"}) add(name, 1);
  EXPECT_EQ(load().size() + load(Split::test).size(), 3);
  add("b/photo.avif", 1);
  EXPECT_THAT(message(), HasSubstr("photo.avif"));
}

TEST_F(ImageFolderTest, SplitsHaveTheSameClasses) {
  add("train/a/0.ppm", 1);
  add("train/b/0.ppm", 1);
  EXPECT_THAT(message(), AllOf(HasSubstr("train, and test or val"), HasSubstr("train only")));
  add("test/a/0.ppm", 1);
  EXPECT_THAT(message(), AllOf(HasSubstr("the same classes"), HasSubstr("b in the first only")));
  add("test/b/0.ppm", 1);
  EXPECT_EQ(load(Split::test).size(), 2);
  add("test/aa/0.ppm", 1);
  EXPECT_THAT(message(Split::test), HasSubstr("aa in the second only"));
  add("val/a/0.ppm", 1);
  EXPECT_THAT(message(), HasSubstr("got both"));
  fs::remove_all(folder_ / "train");
  fs::remove_all(folder_ / "val");
  EXPECT_THAT(message(), AllOf(HasSubstr("a folder train"), HasSubstr("test only")));
}

TEST_F(ImageFolderTest, DamagedFilesAreNamed) {
  add("train/a/0.ppm", 1);
  add("train/b/0.png", 1);
  add("test/a/0.ppm", 1);
  add("test/b/0.png", 1);
  const fs::path file = folder_ / "train/b/0.png";
  const std::string whole = test::read_text(file);
  write_text(file, whole.substr(0, whole.size() / 2));
  EXPECT_THAT(message(), AllOf(HasSubstr("a whole PNG in '" + file.string() + "'")));
  write_text(file, "");
  EXPECT_THAT(message(), AllOf(HasSubstr("[zoo.image_folder]"), HasSubstr("an empty file")));
  fs::remove(file);
  fs::create_symlink(folder_ / "nowhere", file);
  EXPECT_THAT(message(), AllOf(HasSubstr(file.string()), HasSubstr("got none")));
  fs::remove(file);
  fs::create_symlink(file, file);
  EXPECT_THAT(message(), AllOf(HasSubstr("to read"), HasSubstr(file.string())));
}

// Counts the files of a folder that are opened from now on.
class OpenedFiles {
 public:
  explicit OpenedFiles(const fs::path& folder)
      : queue_(::inotify_init1(IN_NONBLOCK)),
        watch_(::inotify_add_watch(queue_, folder.c_str(), IN_OPEN)) {}
  ~OpenedFiles() { ::close(queue_); }
  OpenedFiles(const OpenedFiles&) = delete;
  OpenedFiles& operator=(const OpenedFiles&) = delete;

  // The system may have no watches left.
  bool are_counted() const { return watch_ >= 0; }

  // Those since the last call.
  int count() const {
    int files = 0;
    std::array<char, 4096> events{};
    for (ssize_t size = 0; (size = ::read(queue_, events.data(), events.size())) > 0;) {
      for (std::size_t at = 0; at < static_cast<std::size_t>(size);) {
        inotify_event event{};
        std::memcpy(&event, events.data() + at, sizeof(event));
        if ((event.mask & IN_ISDIR) == 0) ++files;
        at += sizeof(event) + event.len;
      }
    }
    return files;
  }

 private:
  int queue_;
  int watch_;
};

// The second image is damaged, and is read by the first of two threads. Each takes a millisecond:
// the other thread would need half a second for its share.
TEST_F(ImageFolderTest, ADamagedFileEndsTheReadingOfAllThreads) {
  constexpr int kImages = 1000;
  for (const char* const name : {"train/b", "test/a", "test/b"})
    fs::create_directories(folder_ / name);
  add("train/a/0000.ppm", 1, 512, 512);
  write_text(folder_ / "train/a/0001.ppm", "damaged");
  for (int i = 0; i < kImages; ++i) {
    fs::create_hard_link(folder_ / "train/a/0000.ppm",
                         folder_ / "train/a" / (std::to_string(1000 + i) + ".ppm"));
  }
  add("train/b/0.ppm", 1);
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const OpenedFiles opened(folder_ / "train/a");
  EXPECT_THAT(message(Split::train, ImageFolderOptions().size(1)), HasSubstr("0001.ppm"));
  at::set_num_threads(before);
  if (!opened.are_counted()) GTEST_SKIP() << "inotify has no watches left";
  EXPECT_GE(opened.count(), 2);
  EXPECT_LT(opened.count(), kImages / 2);
}

TEST_F(ImageFolderTest, LinksAreFollowedUnlessTheyFormALoop) {
  add("images/0.ppm", 4);
  add("set/train/a/0.ppm", 1);
  add("set/train/b/0.ppm", 2);
  add("set/test/a/0.ppm", 1);
  add("set/test/b/0.ppm", 2);
  fs::create_directory_symlink(folder_ / "images", folder_ / "set/train/a/link");
  const ImageSet train = load_image_folder(folder_ / "set", Split::train);
  EXPECT_THAT(values(train), ElementsAre(1, 4, 2));
  fs::create_directory_symlink(folder_ / "set/train/a", folder_ / "images/back");
  const std::string text =
      test::message_of<FileError>([&] { load_image_folder(folder_ / "set", Split::train); });
  EXPECT_THAT(text, AllOf(HasSubstr("a loop"), HasSubstr("link/back"), HasSubstr("remove")));
}

TEST_F(ImageFolderTest, NoMoreIsReadThanAllowed) {
  for (const char* const name : {"train/a/0.ppm", "train/b/0.ppm", "test/a/0.ppm", "test/b/0.ppm"})
    add(name, 1);
  EXPECT_EQ(load(Split::train, ImageFolderOptions().max_bytes(36)).size(), 2);
  EXPECT_THAT(message(Split::train, ImageFolderOptions().max_bytes(35)),
              AllOf(HasSubstr("at most 35 bytes"), HasSubstr("2 images of sizes [3, 2, 3]")));
}

// Before the first image is scaled to that size.
TEST_F(ImageFolderTest, NoImageIsScaledBeyondTheLimit) {
  for (const char* const name :
       {"train/a/0.ppm", "train/b/0.ppm", "test/a/0.ppm", "test/b/0.ppm"}) {
    fs::create_directories((folder_ / name).parent_path());
    write_text(folder_ / name, "damaged");
  }
  for (const std::int64_t size : {std::int64_t{30'000}, std::numeric_limits<std::int64_t>::max()}) {
    EXPECT_THAT(message(Split::train, ImageFolderOptions().size(size).max_bytes(1000)),
                HasSubstr("at most 1000 bytes"));
  }
}

TEST_F(ImageFolderTest, IsReadInInferenceMode) {
  for (const char* const name : {"train/a/0.ppm", "train/b/1.ppm", "test/a/0.ppm", "test/b/0.ppm"})
    add(name, 3);
  const c10::InferenceMode inference;
  EXPECT_THAT(values(load()), ElementsAre(3, 3));
}

TEST_F(ImageFolderTest, OptionsOutOfRangeAreRefused) {
  const auto refuses = [&](const ImageFolderOptions& options, const char* text) {
    test::expect_error([&] { load(Split::train, options); },
                       {"[zoo.image_folder] expected ", text});
  };
  refuses(ImageFolderOptions().size(0), "a size of at least 1, got 0");
  refuses(ImageFolderOptions().test_share(0), "a test_share above 0 and below 1");
  refuses(ImageFolderOptions().test_share(1), "a test_share above 0 and below 1");
  refuses(ImageFolderOptions().max_bytes(0), "max_bytes of at least 1");
}

}  // namespace
}  // namespace semitone::zoo
