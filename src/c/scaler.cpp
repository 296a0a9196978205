#include "semitone/core/error.h"
#include "semitone/scaling/grad_scaler.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/options.h"
#include "src/c/parameters.h"

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

using semitone::Error;
using semitone::amp::GradScaler;
using semitone::amp::Step;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

struct SemitoneScaler {
  static constexpr const char* kType = "SemitoneScaler";
  GradScaler scaler;
  // Since the last update. GradScaler tells lists apart by their addresses.
  std::vector<std::unique_ptr<ParameterList>> lists = {};
  std::unordered_set<const c10::TensorImpl*> unscaled = {};

  void forget_lists() {
    lists.clear();
    unscaled.clear();
  }
};

SemitoneStatus semitone_scaler_create(const char* preset, const SemitoneOption* options,
                                      size_t option_count, SemitoneScaler** scaler) {
  return run(__func__, [&](const char* function) {
    require_pointer(scaler, "pointer for the scaler", function);
    give(std::make_unique<SemitoneScaler>(SemitoneScaler{GradScaler(
             with_options(loss_scale_preset(preset, function), options, option_count, function))}),
         scaler);
  });
}

SemitoneStatus semitone_scaler_destroy(SemitoneScaler* scaler) {
  return destroy(__func__, scaler);
}

SemitoneStatus semitone_scaler_set_options(SemitoneScaler* scaler, const SemitoneOption* options,
                                           size_t option_count) {
  return run(__func__, [&](const char* function) {
    GradScaler& self = get(scaler, function).scaler;
    self.set_options(with_options(self.scaler().options(), options, option_count, function));
  });
}

SemitoneStatus semitone_scaler_scale(SemitoneScaler* scaler, const SemitoneTensor* loss,
                                     SemitoneTensor** scaled) {
  return run_without_casts(__func__, [&](const char* function) {
    require_pointer(scaled, "pointer for the scaled loss", function);
    *scaled = new_tensor(get(scaler, function).scaler.scale(tensor_of(loss, function)));
  });
}

SemitoneStatus semitone_scaler_unscale(SemitoneScaler* scaler,
                                       const SemitoneTensor* const* parameters, size_t count,
                                       int32_t* found_inf) {
  return run_without_casts(__func__, [&](const char* function) {
    require_pointer(found_inf, "pointer for found_inf", function);
    SemitoneScaler& self = get(scaler, function);
    std::vector<at::Tensor> tensors = tensors_of(parameters, count, function);
    for (const at::Tensor& tensor : tensors) {
      if (self.unscaled.count(tensor.unsafeGetTensorImpl()) == 0) continue;
      throw Error(function, "each parameter once between two updates", "one for the second time",
                  "call semitone_scaler_update() once at the end of an iteration");
    }
    for (const at::Tensor& tensor : tensors) require_no_expanded_gradient(tensor, function);
    auto list = std::make_unique<ParameterList>(tensors);
    self.lists.reserve(self.lists.size() + 1);
    self.scaler.unscale_(*list);
    // From here on gradients are unscaled, whatever happens to the result.
    for (const at::Tensor& tensor : tensors) self.unscaled.insert(tensor.unsafeGetTensorImpl());
    self.lists.push_back(std::move(list));
    *found_inf = self.scaler.step(*self.lists.back()) == Step::skipped ? 1 : 0;
  });
}

SemitoneStatus semitone_scaler_update(SemitoneScaler* scaler) {
  return run(__func__, [&](const char* function) {
    SemitoneScaler& self = get(scaler, function);
    if (self.lists.empty()) {
      throw Error(function, "gradients that were unscaled since the last update", "none",
                  "call semitone_scaler_unscale() before the optimizer's step");
    }
    try {
      self.scaler.update();
    } catch (const semitone::DivergedError&) {
      self.forget_lists();  // as after any update
      throw;
    }
    self.forget_lists();
  });
}

SemitoneStatus semitone_scaler_get_scale(const SemitoneScaler* scaler, double* scale) {
  return run(__func__, [&](const char* function) {
    require_pointer(scale, "pointer for the scale", function);
    *scale = get(scaler, function).scaler.get_scale();
  });
}

SemitoneStatus semitone_scaler_set_scale(SemitoneScaler* scaler, double scale) {
  return run(__func__, [&](const char* function) {
    SemitoneScaler& self = get(scaler, function);
    self.scaler.update(scale);
    self.forget_lists();
  });
}

SemitoneStatus semitone_scaler_skipped_steps(const SemitoneScaler* scaler, int64_t* steps) {
  return run(__func__, [&](const char* function) {
    require_pointer(steps, "pointer for the number of steps", function);
    *steps = get(scaler, function).scaler.scaler().skipped_steps();
  });
}

SemitoneStatus semitone_scaler_name_parameters(SemitoneScaler* scaler, const char* const* names,
                                               const SemitoneTensor* const* parameters,
                                               size_t count) {
  return run(__func__, [&](const char* function) {
    SemitoneScaler& self = get(scaler, function);
    const std::vector<at::Tensor> tensors = tensors_of(parameters, count, function);
    self.scaler.name_parameters(module_of(names_of(names, count, function), tensors));
  });
}

SemitoneStatus semitone_scaler_set_group(SemitoneScaler* scaler, const SemitoneGroup* group) {
  return run(__func__, [&](const char* function) {
    GradScaler& self = get(scaler, function).scaler;
    if (group == nullptr) {
      self.set_found_inf_hook({});
      return;
    }
    self.set_found_inf_hook([ranks = group_of(group, function)](at::Tensor& found_inf) {
      // The gradients may be on a device that the group does not take: a GPU, with gloo.
      at::Tensor flag = found_inf.to(ranks.device());
      ranks.all_reduce(flag, semitone::comm::ReduceOp::max);
      if (!flag.is_same(found_inf)) found_inf.copy_(flag);
    });
  });
}

SemitoneStatus semitone_scaler_save(const SemitoneScaler* scaler, char** bytes, size_t* size) {
  return run(__func__, [&](const char* function) {
    torch::serialize::OutputArchive archive;
    get(scaler, function).scaler.save(archive);
    save_archive(archive, bytes, size, function);
  });
}

SemitoneStatus semitone_scaler_load(SemitoneScaler* scaler, const void* bytes, size_t size) {
  return run(__func__, [&](const char* function) {
    SemitoneScaler& self = get(scaler, function);
    torch::serialize::InputArchive archive = load_archive(bytes, size, function);
    self.scaler.load(archive);
    self.forget_lists();
  });
}
