#pragma once

#include "semitone/c/semitone.h"
#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace semitone::c {

// Arguments of the C interface in C++. `function` is the name of the function, for errors.

// The tensor of a pointer. Error if it is null, or a tensor that is undefined.
const at::Tensor& tensor_of(const SemitoneTensor* tensor, const char* function);
at::Tensor& tensor_of(SemitoneTensor* tensor, const char* function);
// Tensors of a list. The copies refer to the same TensorImpl.
std::vector<at::Tensor> tensors_of(const SemitoneTensor* const* tensors, std::size_t count,
                                   const char* function);
// Error if the tensor has an expanded gradient. A pass over gradients refuses it too, but only after
// it has changed others.
void require_no_expanded_gradient(const at::Tensor& tensor, const char* function);
// A new at::Tensor for the caller.
SemitoneTensor* new_tensor(at::Tensor tensor);

// Names of tensors, or their numbers if the list is null. Error for a name that appears twice, and
// for names that no module can have.
std::vector<std::string> names_of(const char* const* names, std::size_t count,
                                  const char* function);

// Error if the string is null. `what` completes "expected a …".
std::string string_of(const char* text, const char* what, const char* function);

// A copy that semitone_free() frees, with a zero byte at its end.
char* new_string(const std::string& text);

// "cpu", "cuda:1"; null: the default device. Error for anything else.
c10::Device device_of(const char* name, const char* function);

// What an archive writes to a file, and the archive of such bytes. FileError if they are none.
void save_archive(const torch::serialize::OutputArchive& archive, char** bytes, std::size_t* size,
                  const char* function);
torch::serialize::InputArchive load_archive(const void* bytes, std::size_t size,
                                            const char* function);

// The group of a handle.
const comm::Group& group_of(const SemitoneGroup* group, const char* function);

}  // namespace semitone::c
