#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

#include <cstdint>

// Targets of cross entropy that are classes, and the reduction of the rows' losses.
namespace semitone::nn {

// Errors of the function `component`, with what is expected.
void check_defined(const char* component, const at::Tensor& tensor, const char* what);
void check_label_smoothing(const char* component, double label_smoothing);
// The targets' dtype, and that they are on the device of the values.
// @param whose  device that is, for the message: "logits'"
void check_targets(const char* component, const at::Tensor& target, const at::Tensor& values,
                   const char* whose);

// The number of rows that are not ignored, in fp64 on the targets' device. Error for an invalid
// target on a CPU; other devices are not checked.
at::Tensor count_rows(const char* component, const at::Tensor& target, std::int64_t classes,
                      std::int64_t ignore_index);

// The losses (N) reduced as at::Reduction says, in their dtype. The sum is in fp64; on a CPU it is
// in order, independently of the threads.
at::Tensor reduced(const at::Tensor& losses, const at::Tensor& count, std::int64_t reduction);

}  // namespace semitone::nn
