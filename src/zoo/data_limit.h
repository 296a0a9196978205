#pragma once

// Internal interface: the program includes this header.

#include "semitone/core/error.h"

#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace semitone::zoo {

// Data would take more memory than max_bytes, an option of their reader, allows. It has the parts
// of its message, since the program names its flags as the remedy.
class DataLimitError : public FileError {
 public:
  DataLimitError(std::string_view component, std::string_view expected, std::string_view got,
                 std::string_view remedy)
      : FileError(component, expected, got, remedy),
        parts_(std::make_shared<const std::pair<std::string, std::string>>(expected, got)) {}

  DataLimitError(const DataLimitError&) noexcept = default;
  DataLimitError& operator=(const DataLimitError&) noexcept = default;
  ~DataLimitError() override = default;

  const std::string& expected() const noexcept { return parts_->first; }
  const std::string& got() const noexcept { return parts_->second; }

 private:
  std::shared_ptr<const std::pair<std::string, std::string>> parts_;
};

}  // namespace semitone::zoo
