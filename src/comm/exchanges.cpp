#include "semitone/comm/group.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/comm/checks.h"
#include "src/comm/process_group.h"
#include "src/comm/ranks.h"
#include "src/comm/strings.h"
#include "src/core/exact_weights.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

// Collectives with a root, all_to_all, and messages between two ranks.
namespace semitone::comm {
namespace {

using Splits = std::vector<std::int64_t>;

// Two ranks compare their tensors by this many characters of a description.
constexpr std::int64_t kDescriptionBytes = 128;

std::int64_t sum_of(const Splits& splits) {
  return std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
}

bool is_compared(const Group& group) {
  return group.impl()->options.check().value_or(CheckLevel::none) != CheckLevel::none;
}

// The tensor was received: for autograd, and for the holders of exact weights.
void settle(const at::Tensor& tensor) {
  mark_written(tensor);
  settle_exact_weight(tensor);
}

// CommError on every rank unless each rank expects from each other what that one sends.
void compare_splits(const Group& group, const Splits& inputs, const Splits& outputs) {
  const auto size = static_cast<std::size_t>(group.size());
  Splits mine = inputs;
  mine.insert(mine.end(), outputs.begin(), outputs.end());
  std::vector<Splits> all{mine};
  if (size > 1) {
    if (!is_compared(group)) return;
    all.clear();
    for (const at::Tensor& of_rank :
         all_gather_unchecked(group, torch::tensor(mine, torch::kLong).to(group.device()))) {
      const at::Tensor numbers = of_rank.cpu();
      const auto* const first = numbers.const_data_ptr<std::int64_t>();
      all.emplace_back(first, first + 2 * size);
    }
  }
  const auto& members = group.impl()->members;
  for (std::size_t from = 0; from < size; ++from) {
    for (std::size_t to = 0; to < size; ++to) {
      const std::int64_t sent = all[from][to];
      const std::int64_t expected = all[to][size + from];
      if (sent == expected) continue;
      throw CommError(
          "comm.all_to_all", "parts of the sizes that their receivers expect",
          fmt::format("{} for rank {} from rank {}, which expects {}", sent, members[to],
                      members[from], expected),
          "pass as output_splits what the other ranks have in their input_splits for this rank");
    }
  }
}

// LibTorch 2.15 has another name for it, and warns of the earlier one.
template <typename ProcessGroup>
c10::intrusive_ptr<c10d::Work> start_all_to_all_in(ProcessGroup& group, at::Tensor& output,
                                                   at::Tensor& input, Splits& output_splits,
                                                   Splits& input_splits) {
  if constexpr (requires { group.all_to_all_single(output, input, output_splits, input_splits); }) {
    return group.all_to_all_single(output, input, output_splits, input_splits);
  } else {
    return group.alltoall_base(output, input, output_splits, input_splits);
  }
}

// Sends consecutive parts of a flat tensor, with these numbers of elements.
void exchange(const Group& group, at::Tensor output, at::Tensor input, Splits output_splits,
              Splits input_splits) {
  const at::NoGradGuard no_grad;
  start_all_to_all(group, output, input, std::move(output_splits), std::move(input_splits))->wait();
}

void check_splits(const std::string& name, const Splits& splits, int ranks) {
  const bool negative =
      std::any_of(splits.begin(), splits.end(), [](auto each) { return each < 0; });
  if (splits.size() == static_cast<std::size_t>(ranks) && !negative) return;
  throw Error("comm.all_to_all", fmt::format("{} extents in {}, from 0", ranks, name),
              fmt::format("[{}]", fmt::join(splits, ", ")));
}

// "float32[*, 3]"
std::string describe_rows(const at::Tensor& tensor) {
  std::string text = dtype_name(tensor.scalar_type()) + "[*";
  for (std::int64_t i = 1; i < tensor.dim(); ++i) text += fmt::format(", {}", tensor.size(i));
  return text + "]";
}

at::Tensor all_to_all_rows(const Group& group, const at::Tensor& tensor, Splits input_splits,
                           Splits output_splits) {
  Splits shape = tensor.sizes().vec();
  shape[0] = sum_of(output_splits);
  const at::Tensor received = at::empty(shape, tensor.options());
  std::int64_t row = 1;  // of elements that the transport takes
  for (std::int64_t i = 1; i < tensor.dim(); ++i) row *= tensor.size(i);
  if (!is_reducible(tensor.scalar_type())) row *= tensor.element_size();
  for (std::int64_t& split : input_splits) split *= row;
  for (std::int64_t& split : output_splits) split *= row;
  exchange(group, transportable(received).view(-1), transportable(tensor).view(-1),
           std::move(output_splits), std::move(input_splits));
  return received;
}

// The two ranks of a message.
struct Ends {
  int from;
  int to;
};

void check_message(const Group& group, const at::Tensor& tensor, int peer, int tag,
                   const std::string& call) {
  check_tensor(group, tensor, call);
  if (peer < 0 || peer >= group.size() || peer == group.rank()) {
    throw Error("comm." + call, fmt::format("another rank, from 0 to {}", group.size() - 1),
                fmt::format("{} on rank {}", peer, group.rank()));
  }
  if (tag < 0) throw Error("comm." + call, "a tag from 0", std::to_string(tag));
}

void transfer(const Group& group, const at::Tensor& tensor, const Ends& ends, int tag) {
  std::vector<at::Tensor> tensors{tensor};
  const auto work = group.rank() == ends.from ? process_group(group)->send(tensors, ends.to, tag)
                                              : process_group(group)->recv(tensors, ends.from, tag);
  work->wait();
}

// CommError on both ranks if their tensors differ, before anything else is sent.
void compare_message(const Group& group, const at::Tensor& tensor, const Ends& ends, int tag) {
  if (!is_compared(group)) return;
  const std::string mine = describe({tensor});
  const bool sends = group.rank() == ends.from;
  std::string padded = mine;
  padded.resize(static_cast<std::size_t>(kDescriptionBytes));
  const at::Tensor own = to_bytes(padded, kDescriptionBytes).to(group.device());
  const at::Tensor other = at::empty_like(own);
  transfer(group, sends ? own : other, ends, tag);
  transfer(group, sends ? other : own, {ends.to, ends.from}, tag);
  const std::string theirs = to_string(other, kDescriptionBytes);
  if (theirs == padded) return;
  const auto& members = group.impl()->members;
  const auto name = [&](int rank) { return members[static_cast<std::size_t>(rank)]; };
  const std::string& sent = sends ? mine : theirs;
  const std::string& expected = sends ? theirs : mine;
  throw CommError(sends ? "comm.send" : "comm.recv", "the same tensor on both ranks",
                  fmt::format("{} from rank {}, which rank {} receives as {}", sent.c_str(),
                              name(ends.from), name(ends.to), expected.c_str()),
                  "pass recv a tensor of the shape and dtype that is sent");
}

}  // namespace

c10::intrusive_ptr<c10d::Work> start_all_to_all(const Group& group, at::Tensor& output,
                                                at::Tensor& input, Splits output_splits,
                                                Splits input_splits) {
  return start_all_to_all_in(*process_group(group), output, input, output_splits, input_splits);
}

void Group::reduce(at::Tensor& tensor, int root, ReduceOp op) const {
  check_reducible(*this, tensor, "reduce", op);
  check_root(root, size(), "reduce");
  if (impl_->process_group == nullptr) return;
  const at::NoGradGuard no_grad;
  announce(*this, "reduce", fmt::format("{} to rank {}", describe({tensor}), root));
  const bool receives = rank() == root;
  // Gloo leaves partial results in the tensors of the other ranks.
  std::vector<at::Tensor> tensors{receives ? tensor.detach() : tensor.detach().clone()};
  c10d::ReduceOptions options;
  options.reduceOp = to_c10d(op);
  options.rootRank = root;
  impl_->process_group->reduce(tensors, options)->wait();
  if (!receives) return;
  if (op == ReduceOp::mean) tensors[0].div_(size());
  settle(tensor);
}

std::vector<at::Tensor> Group::gather(const at::Tensor& tensor, int root) const {
  check_tensor(*this, tensor, "gather");
  check_root(root, size(), "gather");
  if (impl_->process_group == nullptr) return {tensor.detach().clone()};
  const at::NoGradGuard no_grad;
  announce(*this, "gather", fmt::format("{} to rank {}", describe({tensor}), root));
  std::vector<at::Tensor> inputs{transportable(tensor)};
  std::vector<at::Tensor> gathered;
  std::vector<std::vector<at::Tensor>> outputs;
  if (rank() == root) {
    outputs.emplace_back();
    for (int each = 0; each < size(); ++each) {
      gathered.push_back(at::empty_like(tensor.detach()));
      outputs[0].push_back(transportable(gathered.back()));
    }
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  impl_->process_group->gather(outputs, inputs, options)->wait();
  return gathered;
}

void Group::scatter(at::Tensor& tensor, const std::vector<at::Tensor>& tensors, int root) const {
  check_tensor(*this, tensor, "scatter");
  check_root(root, size(), "scatter");
  if (rank() == root) {
    if (tensors.size() != static_cast<std::size_t>(size())) {
      throw Error("comm.scatter", fmt::format("{} tensors on rank {}", size(), root),
                  std::to_string(tensors.size()));
    }
    for (const at::Tensor& part : tensors) {
      check_tensor(*this, part, "scatter");
      if (part.sizes() == tensor.sizes() && part.scalar_type() == tensor.scalar_type()) continue;
      throw Error("comm.scatter", "tensors like the one that receives, " + describe({tensor}),
                  describe({part}));
    }
  }
  const at::NoGradGuard no_grad;
  if (impl_->process_group == nullptr) {
    tensor.detach().copy_(tensors[0]);
    return settle(tensor);
  }
  announce(*this, "scatter", fmt::format("{} from rank {}", describe({tensor}), root));
  std::vector<at::Tensor> outputs{transportable(tensor)};
  std::vector<std::vector<at::Tensor>> inputs;
  if (rank() == root) {
    inputs.emplace_back();
    for (const at::Tensor& part : tensors) inputs[0].push_back(transportable(part));
  }
  c10d::ScatterOptions options;
  options.rootRank = root;
  impl_->process_group->scatter(outputs, inputs, options)->wait();
  settle(tensor);
}

at::Tensor Group::all_to_all(const at::Tensor& tensor) const {
  check_tensor(*this, tensor, "all_to_all");
  check_divisible(*this, tensor, "all_to_all", "pass the sizes of the parts");
  announce(*this, "all_to_all", describe({tensor}));
  at::Tensor received = at::empty_like(tensor.detach());
  all_to_all_async(received, tensor).wait();
  return received;
}

at::Tensor Group::all_to_all(const at::Tensor& tensor, const Splits& input_splits,
                             const Splits& output_splits) const {
  check_tensor(*this, tensor, "all_to_all");
  check_splits("input_splits", input_splits, size());
  check_splits("output_splits", output_splits, size());
  if (tensor.dim() == 0 || tensor.size(0) != sum_of(input_splits)) {
    throw Error("comm.all_to_all",
                fmt::format("a first extent of {}, the sum of input_splits", sum_of(input_splits)),
                c10::str("the shape ", tensor.sizes()));
  }
  announce(*this, "all_to_all", describe_rows(tensor));
  compare_splits(*this, input_splits, output_splits);
  if (impl_->process_group == nullptr) return tensor.detach().clone();
  return all_to_all_rows(*this, tensor, input_splits, output_splits);
}

void Group::all_to_all(const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs) const {
  const auto ranks = static_cast<std::size_t>(size());
  if (outputs.size() != ranks || inputs.size() != ranks) {
    throw Error("comm.all_to_all", fmt::format("{} outputs and {} inputs", size(), size()),
                fmt::format("{} and {}", outputs.size(), inputs.size()));
  }
  for (const auto* const tensors : {&outputs, &inputs}) {
    for (const at::Tensor& tensor : *tensors) {
      check_tensor(*this, tensor, "all_to_all");
      if (tensor.scalar_type() == inputs[0].scalar_type()) continue;
      throw Error("comm.all_to_all", "tensors of one dtype",
                  fmt::format("{} and {}", dtype_name(inputs[0].scalar_type()),
                              dtype_name(tensor.scalar_type())));
    }
  }
  const at::NoGradGuard no_grad;
  Splits input_splits;
  Splits output_splits;
  std::vector<at::Tensor> flat;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    input_splits.push_back(inputs[rank].numel());
    output_splits.push_back(outputs[rank].numel());
    flat.push_back(inputs[rank].detach().view(-1));
  }
  at::Tensor received = all_to_all(at::cat(flat), input_splits, output_splits);
  std::int64_t start = 0;
  for (const at::Tensor& output : outputs) {
    output.detach().copy_(received.narrow(0, start, output.numel()).view(output.sizes()));
    start += output.numel();
    settle(output);
  }
}

void Group::send(const at::Tensor& tensor, int to, int tag) const {
  check_message(*this, tensor, to, tag, "send");
  const at::NoGradGuard no_grad;
  compare_message(*this, tensor, {rank(), to}, tag);
  transfer(*this, transportable(tensor), {rank(), to}, tag);
}

void Group::recv(at::Tensor& tensor, int from, int tag) const {
  check_message(*this, tensor, from, tag, "recv");
  const at::NoGradGuard no_grad;
  compare_message(*this, tensor, {from, rank()}, tag);
  transfer(*this, transportable(tensor), {from, rank()}, tag);
  settle(tensor);
}

}  // namespace semitone::comm
