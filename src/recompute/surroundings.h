#pragma once

#include "semitone/autocast/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <utility>
#include <vector>

// What the result of a function depends on beside its arguments, as it was when it ran.
namespace semitone::nn {

// The regions of autocast, Semitone's and LibTorch's.
class AutocastRegions {
 public:
  // Those of this thread.
  AutocastRegions();

  // Enters them, with caches of casts of their own, until the end of the scope.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const AutocastRegions& regions);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool had_cache_;
    amp::AutocastState::Scope regions_;
    std::vector<c10::DeviceType> switched_on_;
  };

 private:
  amp::AutocastState state_;
  std::vector<std::pair<c10::DeviceType, c10::ScalarType>> libtorchs_;
};

// The states of default generators.
class RandomStates {
 public:
  // Those of the CPU and of the tensors' devices.
  static RandomStates of(const std::vector<at::Tensor>& tensors);

  // Sets them until the end of the scope, and then those from before.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const RandomStates& states);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
  };

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

// Gives tensors their values back at the end of the scope. No version counter changes: what a
// backward pass has saved of them it may still use.
class [[nodiscard]] UnchangedTensors {
 public:
  explicit UnchangedTensors(const std::vector<at::Tensor>& tensors);
  ~UnchangedTensors();
  UnchangedTensors(const UnchangedTensors&) = delete;
  UnchangedTensors& operator=(const UnchangedTensors&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> values_;
};

}  // namespace semitone::nn
