#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>
#include <vector>

// What the collectives of a Group have in common: the checks before anything is sent, which throw
// Error with the collective's name, and what follows when a tensor was written.
namespace semitone::comm {

// The mean is divided afterwards.
c10d::ReduceOp to_c10d(ReduceOp op);

// Error unless the tensor is dense, and on the group's type of device.
void check_dense(const Group& group, const at::Tensor& tensor, const std::string& collective);

// Error unless it is also contiguous.
void check_tensor(const Group& group, const at::Tensor& tensor, const std::string& collective);

// Error unless transports can also reduce it.
void check_reducible(const Group& group, const at::Tensor& tensor, const std::string& collective,
                     ReduceOp op);

// Error unless it is a rank of a group of this size.
void check_root(int root, int size, const std::string& collective);

// Error unless the tensor divides along dimension 0 into one part for each rank.
void check_divisible(const Group& group, const at::Tensor& tensor, const std::string& collective,
                     const std::string& remedy = "");
// The shape of such a part.
std::vector<std::int64_t> part_sizes(const Group& group, const at::Tensor& tensor);

// Error unless a tensor that receives is contiguous, of this shape, and of the dtype that is sent.
void check_output(const Group& group, const at::Tensor& output, at::IntArrayRef sizes,
                  const at::Tensor& sent, const std::string& collective);

// Marks a tensor that a transport has written, for autograd and others that compare versions.
void mark_written(const at::Tensor& tensor);

}  // namespace semitone::comm
