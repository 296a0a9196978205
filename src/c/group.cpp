#include "semitone/comm/group.h"

#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/comm/process_group.h"
#include "src/comm/rendezvous.h"
#include "src/core/unreduced.h"

#include <torch/types.h>

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using semitone::Error;
using semitone::comm::Group;
using semitone::comm::ReduceOp;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

struct SemitoneGroup {
  static constexpr const char* kType = "SemitoneGroup";
  Group group;
};

namespace semitone::c {
namespace {

static_assert(static_cast<int>(ReduceOp::sum) == SEMITONE_REDUCE_SUM);
static_assert(static_cast<int>(ReduceOp::mean) == SEMITONE_REDUCE_MEAN);
static_assert(static_cast<int>(ReduceOp::min) == SEMITONE_REDUCE_MIN);
static_assert(static_cast<int>(ReduceOp::max) == SEMITONE_REDUCE_MAX);
static_assert(static_cast<int>(ReduceOp::product) == SEMITONE_REDUCE_PRODUCT);

}  // namespace

const Group& group_of(const SemitoneGroup* group, const char* function) {
  return get(group, function).group;
}

}  // namespace semitone::c

SemitoneStatus semitone_rank_environment(int32_t* rank, int32_t* world_size, int32_t* local_rank) {
  return run(__func__, [&](const char*) {
    const auto found = semitone::comm::ranks_in_environment();
    if (rank != nullptr) *rank = found.rank;
    if (world_size != nullptr) *world_size = found.world_size;
    if (local_rank != nullptr) *local_rank = found.local_rank.value_or(-1);
  });
}

SemitoneStatus semitone_group_create(const char* url, const char* backend, double timeout,
                                     SemitoneGroup** group) {
  return run(__func__, [&](const char* function) {
    require_pointer(group, "pointer for the group", function);
    semitone::comm::InitOptions options;
    if (backend != nullptr) options.backend(backend);
    if (!(timeout >= 0) || timeout > 1e9) {
      throw Error(function, "a timeout in seconds, or 0 for the default", std::to_string(timeout));
    }
    if (timeout > 0) {
      options.timeout(
          std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(timeout * 1000))));
    }
    give(std::make_unique<SemitoneGroup>(
             SemitoneGroup{semitone::comm::init(url == nullptr ? "env://" : url, options)}),
         group);
  });
}

SemitoneStatus semitone_group_destroy(SemitoneGroup* group) {
  return destroy(__func__, group);
}

SemitoneStatus semitone_group_rank(const SemitoneGroup* group, int32_t* rank) {
  return run(__func__, [&](const char* function) {
    require_pointer(rank, "pointer for the rank", function);
    *rank = group_of(group, function).rank();
  });
}

SemitoneStatus semitone_group_size(const SemitoneGroup* group, int32_t* size) {
  return run(__func__, [&](const char* function) {
    require_pointer(size, "pointer for the size", function);
    *size = group_of(group, function).size();
  });
}

SemitoneStatus semitone_group_all_reduce(const SemitoneGroup* group, SemitoneTensor* const* tensors,
                                         size_t count, int32_t op) {
  return run_without_casts(__func__, [&](const char* function) {
    const Group& ranks = group_of(group, function);
    if (op < SEMITONE_REDUCE_SUM || op > SEMITONE_REDUCE_PRODUCT) {
      throw Error(function, "a reduction, SEMITONE_REDUCE_SUM …",
                  "the number " + std::to_string(op));
    }
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> list = tensors_of(tensors, count, function);
    // The messages alone would hide lists that differ in their order, or in some of the sizes.
    semitone::comm::announce(ranks, "all_reduce", semitone::comm::describe(list));
    // One message a dtype, in an order that all ranks have.
    std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
    for (const at::Tensor& tensor : list) by_dtype[tensor.scalar_type()].push_back(tensor);
    for (auto& [dtype, same] : by_dtype) {
      std::vector<at::Tensor> flat;
      flat.reserve(same.size());
      for (const at::Tensor& tensor : same) flat.push_back(tensor.detach().reshape({-1}));
      at::Tensor all = torch::cat(flat);
      ranks.all_reduce(all, static_cast<ReduceOp>(op));
      std::int64_t begin = 0;
      for (at::Tensor& tensor : same) {
        tensor.copy_(all.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
        semitone::clear_unreduced(tensor);
        begin += tensor.numel();
      }
    }
  });
}

SemitoneStatus semitone_group_broadcast(const SemitoneGroup* group, SemitoneTensor* const* tensors,
                                        size_t count, int32_t root) {
  return run_without_casts(__func__, [&](const char* function) {
    const Group& ranks = group_of(group, function);
    if (root < 0 || root >= ranks.size()) {
      throw Error(function, "a rank below " + std::to_string(ranks.size()), std::to_string(root));
    }
    ranks.broadcast(tensors_of(tensors, count, function), root);
  });
}

SemitoneStatus semitone_group_barrier(const SemitoneGroup* group) {
  return run(__func__, [&](const char* function) { group_of(group, function).barrier(); });
}
