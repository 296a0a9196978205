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

// Where the data are, and what is made of a folder of images, or of a text.
struct DataFlags {
  std::string path{};
  std::int64_t image_size = 0;  // 0: as the images are
  double test_share = 0.2;
  std::int64_t sequence_length = 128;
};

// Sets the path to default_data_dir(), and adds the flags.
void add_data_flags(Flags& add, DataFlags& flags);

// Gives the flags that were not given the model's defaults. UsageError for flags that its data do
// not have. Called once the command line is parsed.
void apply_model(CLI::App& command, const train::ModelChoice& model, std::string_view component);

// One line for --help: the defaults of models that have their own.
std::string model_defaults_help();

// Returns the task of a model on the training and test images of a directory, whose content tells the format: the files of
// MNIST, CIFAR-10 or CIFAR-100 (fine labels), or a sub-folder for each class or split, as
// zoo::load_image_folder reads it. For a model of texts, the path is that of a text file. FileError of
// the component if there is none, if a directory has none or several of these formats, and for bytes
// that are no text. UsageError for --image-size with other data than a folder of images.
train::Task load_task(const train::ModelChoice& model, const DataFlags& flags,
                      std::string_view component);

}  // namespace semitone::cli
