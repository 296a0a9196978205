#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/amp/opt_level.h"
#include "semitone/autocast/model.h"
#include "src/train/classifier.h"
#include "src/train/memory_format.h"
#include "src/train/optimizers.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

// The part of a training that `semitone train` and `semitone bench` have in common.
namespace semitone::train {

// The level of a training, its device and its 16-bit dtype.
struct Precision {
  amp::OptLevel opt_level;
  c10::DeviceType device;
  std::optional<c10::ScalarType> chosen_dtype;  // fp16 or bf16; none: the device's default

  // fp16 or bf16.
  c10::ScalarType lower_dtype() const;
  // The dtype of weights or operators: fp32 at O0, else lower_dtype().
  c10::ScalarType dtype() const;
  // O3 in fp16.
  bool has_fp16_weights_only() const;

  // Error of the component unless the chosen dtype has 16 bits.
  void check(std::string_view component) const;

  // Silent options of amp::initialize, for convolutions in a memory format.
  amp::Options amp_options(MemoryFormat format) const;
};

// @tparam Options  with opt_level(), device() and dtype()
template <typename Options>
Precision precision_of(const Options& options) {
  return {options.opt_level(), options.device().type(), options.dtype()};
}

// A model and its optimizer after amp::initialize.
struct Setup {
  // @param its_model      on its device
  // @param its_optimizer  a name in optimizers()
  // @param settings       eps is set for fp16 weights without masters: see TrainOptions::optimizer
  Setup(const Precision& precision, Classifier its_model, std::string_view its_optimizer,
        OptimizerSettings settings, const amp::Options& options);

  Classifier model;
  amp::Model handle;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  amp::MixedPrecision mixed;
};

}  // namespace semitone::train
