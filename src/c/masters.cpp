#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/scaling/master_weights.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/parameters.h"

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using semitone::Error;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

struct SemitoneMasters {
  static constexpr const char* kType = "SemitoneMasters";
  explicit SemitoneMasters(std::vector<at::Tensor> parameters)
      : list(std::move(parameters)), masters(list) {}
  // Otherwise MasterWeights gives the gradients to the model, where the next backward pass adds to
  // them.
  ~SemitoneMasters() { masters.clear_gradients(); }

  ParameterList list;  // holds the masters in place of their parameters
  semitone::amp::MasterWeights masters;
};

namespace semitone::c {
namespace {

const std::vector<at::Tensor>& tensors_in(const SemitoneMasters& masters) {
  return masters.list.param_groups().front().params();
}

// MasterWeights would make a master for such a parameter, and move its gradients there. The
// caller's optimizer has the parameter itself, and would see no gradient.
void require_no_unfrozen(const SemitoneMasters& masters, const char* function) {
  const std::vector<at::Tensor>& tensors = tensors_in(masters);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_16bit(tensors[i].scalar_type()) || !tensors[i].requires_grad()) continue;
    throw Error(function, "a master for each 16-bit parameter that requires a gradient",
                "none for the parameter in place " + std::to_string(i) + " of " +
                    std::to_string(tensors.size()) + ", which was frozen at first",
                "destroy the masters and create them anew, or unfreeze parameters before "
                "semitone_masters_create()");
  }
}

}  // namespace
}  // namespace semitone::c

SemitoneStatus semitone_masters_create(const SemitoneTensor* const* parameters, size_t count,
                                       SemitoneMasters** masters) {
  return run_without_casts(__func__, [&](const char* function) {
    require_pointer(masters, "pointer for the masters", function);
    give(std::make_unique<SemitoneMasters>(tensors_of(parameters, count, function)), masters);
  });
}

SemitoneStatus semitone_masters_destroy(SemitoneMasters* masters) {
  return destroy(__func__, masters);
}

SemitoneStatus semitone_masters_list(const SemitoneMasters* masters, SemitoneTensor** tensors,
                                     size_t count) {
  return run(__func__, [&](const char* function) {
    const std::vector<at::Tensor>& all = tensors_in(get(masters, function));
    if (count != all.size()) {
      throw Error(function, "space for " + std::to_string(all.size()) + " tensors",
                  std::to_string(count));
    }
    if (count > 0) require_pointer(tensors, "list for the tensors", function);
    for (std::size_t i = 0; i < count; ++i) tensors[i] = new_tensor(all[i]);
  });
}

SemitoneStatus semitone_masters_take_gradients(SemitoneMasters* masters) {
  return run_without_casts(__func__, [&](const char* function) {
    SemitoneMasters& self = get(masters, function);
    for (const at::Tensor& tensor : tensors_in(self))
      require_no_expanded_gradient(tensor, function);
    self.masters.for_each([&](const at::Tensor& parameter, const at::Tensor&) {
      require_no_expanded_gradient(parameter, function);
    });
    self.masters.take_gradients();
  });
}

SemitoneStatus semitone_masters_clear_gradients(SemitoneMasters* masters) {
  return run(__func__, [&](const char* function) {
    SemitoneMasters& self = get(masters, function);
    self.masters.clear_gradients();
    self.list.zero_grad();
  });
}

SemitoneStatus semitone_masters_write_model(SemitoneMasters* masters) {
  return run_without_casts(
      __func__, [&](const char* function) { get(masters, function).masters.write_model(); });
}

SemitoneStatus semitone_masters_sync(SemitoneMasters* masters) {
  return run_without_casts(__func__, [&](const char* function) {
    SemitoneMasters& self = get(masters, function);
    require_no_unfrozen(self, function);
    self.masters.sync();
  });
}

SemitoneStatus semitone_masters_save(const SemitoneMasters* masters, char** bytes, size_t* size) {
  return run(__func__, [&](const char* function) {
    torch::serialize::OutputArchive archive;
    get(masters, function).masters.save(archive);
    save_archive(archive, bytes, size, function);
  });
}

SemitoneStatus semitone_masters_load(SemitoneMasters* masters, const void* bytes, size_t size) {
  return run_without_casts(__func__, [&](const char* function) {
    SemitoneMasters& self = get(masters, function);
    require_no_unfrozen(self, function);
    torch::serialize::InputArchive archive = load_archive(bytes, size, function);
    self.masters.load(archive);
  });
}
