#include "apps/semitone/train_data.h"

#include "semitone/core/error.h"
#include "semitone/zoo/mnist.h"
#include "src/core/env.h"

#include <filesystem>
#include <system_error>

namespace semitone::cli {

std::string default_data_dir() {
  return env::get(env::kDataDir).value_or(SEMITONE_DEFAULT_DATA_DIR);
}

train::DataSet load_data(const std::string& directory, std::string_view component) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(directory, ignored)) {
    throw FileError(component, "a folder with the data at '" + directory + "'", "none",
                    std::string("give --data DIR or set ") + env::kDataDir.name);
  }
  return {zoo::load_mnist(directory, zoo::Split::train),
          zoo::load_mnist(directory, zoo::Split::test)};
}

}  // namespace semitone::cli
