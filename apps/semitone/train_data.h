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

// The flags for the data: their path, and how images or a text are prepared.
struct DataFlags {
  std::string path{};
  std::int64_t image_size = 0;  // 0: as the images are
  double max_data = 8;          // in GiB
  double test_share = 0.2;
  std::int64_t sequence_length = 128;
};

// Sets the path to default_data_dir(), and adds the flags.
void add_data_flags(Flags& add, DataFlags& flags);

// Sets flags that neither the command line nor --config gives to the model's defaults. UsageError
// for flags that belong to another kind of data. Called when the command line has been parsed.
void apply_model(CLI::App& command, const train::ModelChoice& model, std::string_view component);

// The line of --help that lists the defaults of models that have their own.
std::string model_defaults_help();

// Loads the data and returns the task of a model. For a model of images, the path is a directory
// with the files of MNIST, CIFAR-10 or CIFAR-100 (fine labels), or with a sub-folder for each class
// or split (zoo::load_image_folder); its content tells which. For a model of texts, it is a file.
//
// FileError of the component if nothing is there, or nothing that the system shows, if a directory
// has none or several of these formats, and for a file with zero bytes. FileError that names
// --max-data for images in folders, or a text, beyond that. UsageError for --image-size with other
// data than a folder of images.
train::Task load_task(const train::ModelChoice& model, const DataFlags& flags,
                      std::string_view component);

}  // namespace semitone::cli
