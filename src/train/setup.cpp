#include "src/train/setup.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/amp/advice.h"
#include "src/core/dtype_limits.h"

#include <utility>

namespace semitone::train {
namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Precision& precision,
                                                        const Classifier& model,
                                                        std::string_view name,
                                                        OptimizerSettings settings) {
  // fp16 rounds Adam's 1e-8 to 0. This is the smallest normal number.
  if (precision.has_fp16_weights_only()) settings.eps = dtype_limits(at::kHalf).min_normal;
  return find_optimizer(name).make(model.module()->parameters(), settings);
}

}  // namespace

c10::ScalarType Precision::lower_dtype() const {
  return chosen_dtype.value_or(default_16bit_dtype(device));
}

c10::ScalarType Precision::dtype() const {
  return opt_level == amp::OptLevel::O0 ? c10::ScalarType::Float : lower_dtype();
}

bool Precision::has_fp16_weights_only() const {
  return opt_level == amp::OptLevel::O3 && lower_dtype() == c10::ScalarType::Half;
}

void Precision::check(std::string_view component) const {
  if (chosen_dtype.has_value() && !is_16bit(*chosen_dtype))
    throw Error(component, "float16 or bfloat16", dtype_name(*chosen_dtype));
}

amp::Options Precision::amp_options(MemoryFormat format) const {
  amp::Options options(opt_level);
  options.dtype(lower_dtype()).verbosity(0).memory_format(layout_of(format));
  return options;
}

Setup::Setup(const Precision& precision, Classifier its_model, std::string_view its_optimizer,
             OptimizerSettings settings, const amp::Options& options)
    : model(std::move(its_model)),
      handle(model.module()),
      optimizer(make_optimizer(precision, model, its_optimizer, settings)),
      mixed(amp::initialize(handle, *optimizer, options)) {
  // initialize itself is silent here.
  amp::log_advice(amp::advice(handle, mixed.properties()));
}

}  // namespace semitone::train
