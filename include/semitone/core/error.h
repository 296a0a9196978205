#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone {

/// Base of every exception that Semitone throws on purpose: bad input, wrong use, a file that
/// cannot be read.
///
/// The message has one form everywhere, so that a reader finds the cure without the source:
///
///     [amp.initialize] expected fp32 parameters, got bfloat16 'conv1.weight' — pass the model
///     before casting it
///
/// Errors of LibTorch itself (shapes that do not fit, for example) pass through as c10::Error.
class Error : public std::runtime_error {
 public:
  /// @param where     room and thing, without brackets: "amp.initialize"
  /// @param expected  what would have been right
  /// @param got       what came instead, with names and values
  /// @param remedy    what to do; may be empty where it is obvious
  Error(std::string_view where, std::string_view expected, std::string_view got,
        std::string_view remedy = {});

  /// Room and thing, without brackets.
  const std::string& where() const noexcept { return where_; }

 private:
  std::string where_;
};

/// A file or folder is missing, unreadable, truncated, corrupt or cannot be written.
class FileError : public Error {
 public:
  using Error::Error;
};

/// Training cannot go on: too many steps in a row were skipped (see amp/loss_scale.h).
class DivergedError : public Error {
 public:
  using Error::Error;
};

/// Processes that train together lost each other: a peer died, stopped, cannot be reached, came too
/// late or called something else.
class CommError : public Error {
 public:
  /// @param ranks  the ranks at fault, as far as known
  CommError(std::string_view where, std::string_view expected, std::string_view got,
            std::string_view remedy = {}, std::vector<int> ranks = {})
      : Error(where, expected, got, remedy), ranks_(std::move(ranks)) {}

  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

}  // namespace semitone
