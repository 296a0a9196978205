#include "semitone/core/error.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/options.h"

#include <c10/core/GradMode.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

using semitone::Error;
using semitone::parallel::NoSync;
using semitone::parallel::detail::ModelTensors;
using semitone::parallel::detail::ReplicaSync;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

struct SemitoneDdp {
  static constexpr const char* kType = "SemitoneDdp";
  ReplicaSync sync;
  bool searches_outputs;    // of each forward, for parameters that it does not use
  bool replaces_outputs;    // some of the at::Tensors that end_forward gets
  bool in_forward = false;  // begin_forward was called, and end_forward was not
  std::vector<NoSync> no_sync = {};
};

SemitoneStatus semitone_ddp_create(const SemitoneGroup* group, const char* const* names,
                                   const SemitoneTensor* const* parameters, size_t count,
                                   const SemitoneTensor* const* buffers, size_t buffer_count,
                                   const SemitoneOption* options, size_t option_count,
                                   SemitoneDdp** ddp) {
  return run_without_casts(__func__, [&](const char* function) {
    require_pointer(ddp, "pointer for the object", function);
    const std::vector<at::Tensor> tensors = tensors_of(parameters, count, function);
    const std::vector<at::Tensor> all_buffers = tensors_of(buffers, buffer_count, function);
    const std::vector<std::string> all_names = names_of(names, count, function);
    ModelTensors model;
    // Each tensor once, as in C++: tied weights are in a list twice.
    std::unordered_set<const c10::TensorImpl*> seen;
    for (std::size_t i = 0; i < count; ++i) {
      if (seen.insert(tensors[i].unsafeGetTensorImpl()).second)
        model.parameters.push_back({all_names[i], tensors[i]});
    }
    for (std::size_t i = 0; i < buffer_count; ++i) {
      if (seen.insert(all_buffers[i].unsafeGetTensorImpl()).second)
        model.buffers.push_back({"buffer " + std::to_string(i), all_buffers[i]});
    }
    const auto ddp_options = with_options(semitone::parallel::DistributedDataParallelOptions(),
                                          options, option_count, function);
    const bool searches_outputs =
        ddp_options.find_unused_parameters() && !ddp_options.static_graph();
    const bool replaces_outputs =
        ddp_options.find_unused_parameters() || ddp_options.static_graph();
    give(std::make_unique<SemitoneDdp>(
             SemitoneDdp{ReplicaSync(std::move(model), group_of(group, function), ddp_options),
                         searches_outputs, replaces_outputs}),
         ddp);
  });
}

SemitoneStatus semitone_ddp_destroy(SemitoneDdp* ddp) {
  return destroy(__func__, ddp);
}

SemitoneStatus semitone_ddp_begin_forward(SemitoneDdp* ddp) {
  return run_without_casts(__func__, [&](const char* function) {
    SemitoneDdp& self = get(ddp, function);
    self.in_forward = false;
    self.sync.before_forward();
    self.in_forward = true;
  });
}

SemitoneStatus semitone_ddp_end_forward(SemitoneDdp* ddp, SemitoneTensor* const* outputs,
                                        size_t count) {
  return run_without_casts(__func__, [&](const char* function) {
    SemitoneDdp& self = get(ddp, function);
    std::vector<at::Tensor> tensors = tensors_of(outputs, count, function);
    if (!self.in_forward) {
      throw Error(function, "semitone_ddp_begin_forward() to be called before", "no call",
                  "call it before each forward");
    }
    // Otherwise all parameters would count as unused, and their gradients would end the training.
    if (tensors.empty() && self.searches_outputs && c10::GradMode::is_enabled() &&
        self.no_sync.empty()) {
      throw Error(function, "the forward's tensors, in which find_unused_parameters searches",
                  "an empty list", "pass what the loss is computed from, or set static_graph too");
    }
    // Its at::Tensor may be the one that the model holds.
    for (const at::Tensor& tensor : tensors) {
      if (!self.replaces_outputs || !tensor.is_leaf() || !tensor.requires_grad()) continue;
      throw Error(function, "tensors that the forward has computed", "a parameter or an input",
                  "pass an alias of it (aten::alias), and compute the loss from that");
    }
    self.in_forward = false;
    const std::vector<at::Tensor> replaced = self.sync.after_forward(std::move(tensors));
    for (std::size_t i = 0; i < count; ++i) tensor_of(outputs[i], function) = replaced[i];
  });
}

SemitoneStatus semitone_ddp_begin_no_sync(SemitoneDdp* ddp) {
  return run(__func__, [&](const char* function) {
    SemitoneDdp& self = get(ddp, function);
    self.no_sync.push_back(self.sync.no_sync());
  });
}

SemitoneStatus semitone_ddp_end_no_sync(SemitoneDdp* ddp) {
  return run(__func__, [&](const char* function) {
    SemitoneDdp& self = get(ddp, function);
    if (self.no_sync.empty()) {
      throw Error(function, "semitone_ddp_begin_no_sync() to be called before", "no call");
    }
    self.no_sync.pop_back();
  });
}
