#pragma once

#include "src/train/data_set.h"

#include <string>
#include <string_view>

// The data set of a training.
namespace semitone::cli {

// Returns SEMITONE_DATA_DIR, or else data/mnist of the sources.
std::string default_data_dir();

// Loads the training and test images of a directory, whose file names tell the format: MNIST's,
// CIFAR-10's or CIFAR-100's (fine labels). FileError of the component if the directory does not
// exist, or has the files of none or of several of them.
train::DataSet load_data(const std::string& directory, std::string_view component);

}  // namespace semitone::cli
