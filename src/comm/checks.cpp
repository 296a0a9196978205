#include "src/comm/checks.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/process_group.h"
#include "src/comm/watched_backend.h"

#include <fmt/format.h>

namespace semitone::comm {

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean:  // gloo has no average: divided afterwards
      return c10d::ReduceOp::SUM;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
  }
  return c10d::ReduceOp::SUM;
}

void check_dense(const Group& group, const at::Tensor& tensor, const std::string& collective) {
  const std::string component = "comm." + collective;
  if (!tensor.defined()) throw Error(component, "a tensor", "an undefined one");
  if (tensor.layout() != at::kStrided) throw Error(component, "a dense tensor", "a sparse one");
  if (tensor.is_conj() || tensor.is_neg()) {  // the memory has other values
    throw Error(component, "a tensor whose memory holds its values",
                "a view that conjugates or negates another tensor",
                "pass tensor.resolve_conj().resolve_neg()");
  }
  const c10::Device served = group.device();
  if (group.size() == 1 || tensor.device().type() == served.type()) return;
  throw Error(component,
              fmt::format("a tensor on {}, as the backend {} takes", served.str(), group.backend()),
              "one on " + tensor.device().str(),
              fmt::format("move it, or call comm::init with backend(\"{}\")",
                          backend_for_other_device(served.type()).name));
}

void check_tensor(const Group& group, const at::Tensor& tensor, const std::string& collective) {
  check_dense(group, tensor, collective);
  if (!tensor.is_contiguous()) {
    throw Error("comm." + collective, "a contiguous tensor",
                c10::str("one of strides ", tensor.strides()), "pass tensor.contiguous()");
  }
}

void check_reducible(const Group& group, const at::Tensor& tensor, const std::string& collective,
                     ReduceOp op) {
  check_tensor(group, tensor, collective);
  if (!is_reducible(tensor.scalar_type())) {
    throw Error("comm." + collective,
                "fp64, fp32, fp16, bf16 or an integer that transports can reduce",
                dtype_name(tensor.scalar_type()), "convert it");
  }
  if (op == ReduceOp::mean && !tensor.is_floating_point()) {
    throw Error("comm." + collective, "a floating-point tensor for a mean",
                dtype_name(tensor.scalar_type()), "use sum, and divide the result");
  }
}

void check_divisible(const Group& group, const at::Tensor& tensor, const std::string& collective,
                     const std::string& remedy) {
  if (tensor.dim() != 0 && tensor.size(0) % group.size() == 0) return;
  throw Error("comm." + collective,
              fmt::format("a first dimension that is a multiple of {}", group.size()),
              c10::str("the shape ", tensor.sizes()), remedy);
}

std::vector<std::int64_t> part_sizes(const Group& group, const at::Tensor& tensor) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[0] /= group.size();
  return sizes;
}

void check_output(const Group& group, const at::Tensor& output, at::IntArrayRef sizes,
                  const at::Tensor& sent, const std::string& collective) {
  check_tensor(group, output, collective);
  if (output.sizes() == sizes && output.scalar_type() == sent.scalar_type()) return;
  throw Error("comm." + collective, c10::str("an output ", dtype_name(sent.scalar_type()), sizes),
              describe({output}));
}

void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void check_root(int root, int size, const std::string& collective) {
  if (root < 0 || root >= size) {
    throw Error("comm." + collective, fmt::format("a root from 0 to {}", size - 1),
                std::to_string(root));
  }
}

}  // namespace semitone::comm
