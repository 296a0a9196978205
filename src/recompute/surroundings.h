#pragma once

#include "semitone/autocast/autocast.h"
#include "src/core/replica_parameters.h"
#include "src/recompute/captured_tensors.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

// What the result of a function depends on besides its arguments: noted when it runs, and put in
// force when it runs again.
namespace semitone::nn {

// LibTorch's regions keep no casts while it exists. They have one cache for the whole process.
class [[nodiscard]] NoKeptCasts {
 public:
  NoKeptCasts() { at::autocast::set_autocast_cache_enabled(false); }
  ~NoKeptCasts() { at::autocast::set_autocast_cache_enabled(had_cache_); }
  NoKeptCasts(const NoKeptCasts&) = delete;
  NoKeptCasts& operator=(const NoKeptCasts&) = delete;

 private:
  bool had_cache_ = at::autocast::is_autocast_cache_enabled();
};

// The regions of autocast, Semitone's and LibTorch's, and which parameters those of a replica are
// copies of.
class AutocastRegions {
 public:
  // Those of this thread.
  AutocastRegions();

  // Enters them, with caches of casts of their own, until the end of the scope. There, what holds for
  // a parameter among the inputs also holds for the tensor in its place.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const AutocastRegions& regions) : Scope(regions, {}, {}) {}
    Scope(const AutocastRegions& regions, std::span<const at::Tensor> inputs,
          std::span<const at::Tensor> places);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    NoKeptCasts no_kept_casts_;
    c10::DebugInfoGuard replica_;
    amp::AutocastState::Scope regions_;
    std::vector<std::pair<c10::DeviceType, c10::ScalarType>>
        enabled_;  // and the dtypes from before
  };

 private:
  amp::AutocastState state_;
  std::vector<std::pair<c10::DeviceType, c10::ScalarType>> libtorch_regions_;
  std::shared_ptr<ReplicaParameters> replica_;
};

// The states of default generators before a function runs, and after it.
class RngStates {
 public:
  // Those of the CPU and of the tensors' devices.
  explicit RngStates(const std::vector<at::Tensor>& tensors);

  // Ends the first run. Returns whether random numbers were drawn.
  bool note_end();
  // Of the states that the generators are in.
  std::size_t hash() const;
  // Whether the generators are in the states of the end of the first run.
  bool are_at_end() const;

  // Sets the states before the first run until the end of the scope, and then those from before.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const RngStates& states);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
  };

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
  std::vector<std::size_t> ends_;  // hashes
};

// The values of tensors before a function runs that updates them.
class BufferValues {
 public:
  explicit BufferValues(const std::vector<at::Tensor>& tensors);

  // Ends the first run: large tensors that it did not write to need not be kept.
  void note_end();
  // Those that are not kept, as the first run has read them.
  const std::vector<SeenTensor>& only_read() const { return only_read_; }

  // Gives the tensors these values until the end of the scope, and then those from before. No version
  // counter changes: what a backward pass has saved of them it may still use. The scope lasts until
  // the gradients of the run are computed, since its graph may have saved the tensors themselves.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const BufferValues& values);
    // The run ends. What is written afterwards, by hooks of the backward pass, stays.
    void note_end_of_run();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Earlier {
      const c10::TensorImpl* identity;
      at::Tensor tensor;
      at::Tensor value;
      c10::VariableVersion counter;
      std::uint32_t begun;                   // the version before the run
      std::optional<std::uint32_t> version;  // at the end of the run
    };
    // A run in the backward pass of another one, which it does not write for.
    void note_inner_run(const c10::TensorImpl* identity, std::uint32_t writes);
    void put_back() const;

    std::vector<Earlier> before_;
    Scope* enclosing_;  // on this thread
  };

 private:
  struct Value {
    const c10::TensorImpl* identity;
    at::Tensor tensor;
    at::Tensor value;
    c10::VariableVersion counter;        // of the tensor itself
    std::optional<SeenTensor> original;  // of a large tensor that has a version
  };

  std::vector<Value> values_;
  std::vector<SeenTensor> only_read_;
};

// Which parts of a module are in training mode.
class ModuleModes {
 public:
  // @param module  may be null
  explicit ModuleModes(const std::shared_ptr<torch::nn::Module>& module);
  bool have_changed() const;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

}  // namespace semitone::nn
