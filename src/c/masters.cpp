#include "semitone/core/error.h"
#include "semitone/scaling/master_weights.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/parameters.h"

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

  ParameterList list;  // holds the masters in place of their parameters
  semitone::amp::MasterWeights masters;
};

SemitoneStatus semitone_masters_create(const SemitoneTensor* const* parameters, size_t count,
                                       SemitoneMasters** masters) {
  return run(__func__, [&](const char* function) {
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
    const std::vector<at::Tensor>& all =
        get(masters, function).list.param_groups().front().params();
    if (count != all.size()) {
      throw Error(function, "space for " + std::to_string(all.size()) + " tensors",
                  std::to_string(count));
    }
    if (count > 0) require_pointer(tensors, "list for the tensors", function);
    for (std::size_t i = 0; i < count; ++i) tensors[i] = new_tensor(all[i]);
  });
}

SemitoneStatus semitone_masters_take_gradients(SemitoneMasters* masters) {
  return run(__func__,
             [&](const char* function) { get(masters, function).masters.take_gradients(); });
}

SemitoneStatus semitone_masters_clear_gradients(SemitoneMasters* masters) {
  return run(__func__, [&](const char* function) {
    SemitoneMasters& self = get(masters, function);
    self.masters.clear_gradients();
    self.list.zero_grad();
  });
}

SemitoneStatus semitone_masters_write_model(SemitoneMasters* masters) {
  return run(__func__, [&](const char* function) { get(masters, function).masters.write_model(); });
}

SemitoneStatus semitone_masters_sync(SemitoneMasters* masters) {
  return run(__func__, [&](const char* function) { get(masters, function).masters.sync(); });
}

SemitoneStatus semitone_masters_save(const SemitoneMasters* masters, char** bytes, size_t* size) {
  return run(__func__, [&](const char* function) {
    torch::serialize::OutputArchive archive;
    get(masters, function).masters.save(archive);
    save_archive(archive, bytes, size, function);
  });
}

SemitoneStatus semitone_masters_load(SemitoneMasters* masters, const void* bytes, size_t size) {
  return run(__func__, [&](const char* function) {
    SemitoneMasters& self = get(masters, function);
    torch::serialize::InputArchive archive = load_archive(bytes, size, function);
    self.masters.load(archive);
  });
}
