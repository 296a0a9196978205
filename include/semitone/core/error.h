#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone {

/// Base of every exception that Semitone throws on purpose: bad input, wrong use, an unreadable
/// file.
///
/// All messages have the same form, and most name the remedy:
///
///     [amp.initialize] expected fp32 parameters, got bfloat16 'conv1.weight' — pass the model
///     before casting it
///
/// Errors of LibTorch itself, such as shapes that do not match, pass through as c10::Error.
///
/// Copies are cheap and never throw: copies share what they hold, as those of std::runtime_error do.
/// (`throw error;` makes one.)
class Error : public std::runtime_error {
 public:
  /// @param component  the component, without brackets: "amp.initialize"
  /// @param expected   what would have been right
  /// @param got        what was found instead, with names and values
  /// @param remedy     what to do; may be empty if it is obvious
  Error(std::string_view component, std::string_view expected, std::string_view got,
        std::string_view remedy = {});

  // A move is a copy, so that no error is ever without its component.
  Error(const Error&) noexcept = default;
  Error& operator=(const Error&) noexcept = default;
  ~Error() override = default;

  /// The component, without brackets.
  const std::string& component() const noexcept { return *component_; }

 private:
  std::shared_ptr<const std::string> component_;
};

/// A file or folder is missing, unreadable, truncated, corrupt or cannot be written.
class FileError : public Error {
 public:
  using Error::Error;
};

/// Training cannot continue: too many consecutive steps were skipped (see scaling/loss_scale.h), or
/// losses or gradients are those of a diverged training (see amp/divergence_guard.h).
class DivergedError : public Error {
 public:
  using Error::Error;
};

/// A process lost contact with others of its group: a peer died, stopped, is unreachable, arrived
/// too late or called another collective.
class CommError : public Error {
 public:
  /// @param ranks  the ranks at fault, as far as known
  CommError(std::string_view component, std::string_view expected, std::string_view got,
            std::string_view remedy = {}, std::vector<int> ranks = {})
      : Error(component, expected, got, remedy),
        ranks_(std::make_shared<const std::vector<int>>(std::move(ranks))) {}

  CommError(const CommError&) noexcept = default;
  CommError& operator=(const CommError&) noexcept = default;
  ~CommError() override = default;

  const std::vector<int>& ranks() const noexcept { return *ranks_; }

 private:
  std::shared_ptr<const std::vector<int>> ranks_;
};

}  // namespace semitone
