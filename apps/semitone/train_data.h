#pragma once

#include "apps/semitone/flags.h"
#include "src/train/task.h"

#include <cstdint>
#include <string>
#include <string_view>

// The data set of a training.
namespace semitone::cli {

// Returns SEMITONE_DATA_DIR, or else data/mnist of the sources.
std::string default_data_dir();

// Where the data set is, and what is made of a folder of images.
struct DataFlags {
  std::string directory{};
  std::int64_t image_size = 0;  // 0: as the images are
  double test_share = 0.2;
};

// Sets the directory to default_data_dir(), and adds the flags.
void add_data_flags(Flags& add, DataFlags& flags);

// Returns the task of a model on the training and test images of a directory, whose content tells the format: the files of
// MNIST, CIFAR-10 or CIFAR-100 (fine labels), or a sub-folder for each class or split, as
// zoo::load_image_folder reads it. FileError of the component if the directory does not exist, or
// has none or several of them. UsageError for --image-size with other data than a folder of images.
train::Task load_task(const train::ModelChoice& model, const DataFlags& flags,
                      std::string_view component);

}  // namespace semitone::cli
