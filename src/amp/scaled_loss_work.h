#pragma once

#include "src/amp/mixed_precision_impl.h"

#include <cstdint>
#include <exception>
#include <vector>

namespace semitone::amp {

// The processing of one loss around backward: begin() before it, finish() or put_back() after it.
struct ScaledLoss::Work {
  using Impl = MixedPrecision::Impl;
  using OptimizerRecord = Impl::OptimizerRecord;
  using SetAside = Impl::SetAside;

  // Optimizers that were not named for the loss: one, or several that share parameters. They get
  // their gradients, too: as in training without a loss scale.
  struct Other {
    std::vector<OptimizerRecord*> all;
    // Whether they held gradients of another scale, delayed or in another backward; and these.
    bool was_scaled;
    bool was_open;
    std::vector<SetAside> before;
  };

  // Another MixedPrecision, as it was before backward.
  struct Elsewhere {
    Impl* mixed;
    std::int64_t uses;
    std::vector<at::Tensor> without_gradient;  // the models' parameters
  };

  Impl* mixed;
  std::int64_t loss_id;
  float inverse;
  at::Tensor inverse_on_device;  // if it is to be read there
  bool delay;
  std::vector<OptimizerRecord*> optimizers;    // that were named for the loss
  std::vector<OptimizerRecord*> sharing = {};  // and those that share parameters with them
  std::vector<Other> others = {};
  std::vector<SetAside> free = {};  // parameters in no optimizer
  std::vector<Elsewhere> elsewhere = {};
  bool is_elsewhere = false;  // this is the work for one of those
  bool begun = false;
  int exceptions = std::uncaught_exceptions();

  void begin();
  void finish();
  void put_back() noexcept;
  bool any_gradient() const;

 private:
  std::vector<OptimizerRecord*> concerned() const {
    std::vector<OptimizerRecord*> all = optimizers;
    all.insert(all.end(), sharing.begin(), sharing.end());
    return all;
  }
  void check() const;
  void begin(OptimizerRecord& record);
  void begin(Other& other);
  void begin_free();
  void begin_elsewhere();
  void finish(Other& other);
  void finish(const Elsewhere& there);
  void finish_free();
  void finish_elsewhere();
  void separate_gradients();
  void restore(const std::vector<OptimizerRecord*>& all) noexcept;
  void erase_set_aside(const OptimizerRecord& optimizer);
  void return_to_places(const OptimizerRecord& optimizer);
  bool leaves_others_alone() const { return mixed->named_only || inverse_on_device.defined(); }
};

}  // namespace semitone::amp
