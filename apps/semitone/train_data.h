#pragma once

#include "src/train/data_set.h"

#include <string>
#include <string_view>

// The data set of a training.
namespace semitone::cli {

// The directory in the environment, or MNIST's in this repository.
std::string default_data_dir();

// FileError of the component if the directory does not exist.
train::DataSet load_data(const std::string& directory, std::string_view component);

}  // namespace semitone::cli
