#include "semitone/core/error.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/options.h"

#include <memory>
#include <string>
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
  std::vector<NoSync> no_sync = {};
};

SemitoneStatus semitone_ddp_create(const SemitoneGroup* group, const char* const* names,
                                   const SemitoneTensor* const* parameters, size_t count,
                                   const SemitoneTensor* const* buffers, size_t buffer_count,
                                   const SemitoneOption* options, size_t option_count,
                                   SemitoneDdp** ddp) {
  return run(__func__, [&](const char* function) {
    require_pointer(ddp, "pointer for the object", function);
    ModelTensors model;
    const std::vector<std::string> all_names = names_of(names, count, function);
    const std::vector<at::Tensor> tensors = tensors_of(parameters, count, function);
    for (std::size_t i = 0; i < count; ++i) model.parameters.push_back({all_names[i], tensors[i]});
    for (const at::Tensor& buffer : tensors_of(buffers, buffer_count, function))
      model.buffers.push_back({"buffer " + std::to_string(model.buffers.size()), buffer});
    const auto ddp_options = with_options(semitone::parallel::DistributedDataParallelOptions(),
                                          options, option_count, function);
    give(std::make_unique<SemitoneDdp>(
             ReplicaSync(std::move(model), group_of(group, function), ddp_options)),
         ddp);
  });
}

SemitoneStatus semitone_ddp_destroy(SemitoneDdp* ddp) {
  return destroy(__func__, ddp);
}

SemitoneStatus semitone_ddp_begin_forward(SemitoneDdp* ddp) {
  return run(__func__, [&](const char* function) { get(ddp, function).sync.before_forward(); });
}

SemitoneStatus semitone_ddp_end_forward(SemitoneDdp* ddp, SemitoneTensor* const* outputs,
                                        size_t count) {
  return run(__func__, [&](const char* function) {
    ReplicaSync& sync = get(ddp, function).sync;
    const std::vector<at::Tensor> replaced =
        sync.after_forward(tensors_of(outputs, count, function));
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
