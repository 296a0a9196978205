#include "src/kernels/capturable_update.h"

#include "semitone/core/dtype.h"
#include "src/kernels/update_launches.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace semitone::kernels {
namespace {

void check_found_inf(const at::Tensor& found_inf, c10::Device device) {
  if (!found_inf.defined()) return;
  if (found_inf.scalar_type() != at::kFloat || found_inf.numel() != 1 ||
      found_inf.device() != device) {
    throw Error(kUpdate, c10::str("found_inf of one float32 on ", device),
                c10::str(found_inf.numel(), " of ", dtype_name(found_inf.scalar_type()), " on ",
                         found_inf.device()));
  }
}

// With rules and found_inf in the memory of the parameters' device.
template <typename Rule>
void run_there(std::span<const Update> items, const at::Tensor& rules,
               const at::Tensor& found_inf) {
  const std::span<const Rule> list(static_cast<const Rule*>(rules.const_data_ptr()),
                                   static_cast<std::size_t>(rules.numel()) / sizeof(Rule));
  check_updates(items, list);
  if (!has_kernels(rules))
    throw Error(kUpdate, "a device for which there are kernels", rules.device().str());
  for (const Update& item : items) {
    if (item.param.device() == rules.device() && fits_kernel(item)) continue;
    throw Error(kUpdate,
                c10::str("float32 or 16-bit parameters without gaps on ", rules.device(),
                         ", and gradients and state with the same strides"),
                c10::str("one of ", dtype_name(item.param.scalar_type()), ", ", item.param.sizes(),
                         " on ", item.param.device()));
  }
  const float* const flag = found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr;
  if (!runs_on_cuda(rules)) {
    if (flag == nullptr || *flag == 0)
      multi_tensor_update(items, std::vector<Rule>(list.begin(), list.end()));
    return;
  }
  CudaLaunches<Rule> launches;
  for (std::size_t i = 0; i < items.size(); ++i) launches.add(i, items[i], Rule{});
  launches.for_each([&](const at::Tensor&, const std::vector<std::size_t>& numbers,
                        const CudaStep<Rule>& step, CudaStream stream) {
    update_cuda(
        CudaStep<Rule>{
            .spans = step.spans,
            .rules = {},
            .rules_on_device = list.data() + numbers.front(),  // a launch's numbers are consecutive
            .found_inf = flag},
        stream);
  });
}

}  // namespace

CapturableUpdate::CapturableUpdate(c10::Device device) : device_(device) {}

void CapturableUpdate::send(const Rules& rules) {
  std::visit(
      [&]<typename Rule>(const std::vector<Rule>& list) {
        static_assert(std::is_trivially_copyable_v<Rule>);
        const auto bytes = static_cast<std::int64_t>(list.size() * sizeof(Rule));
        if (!rules_.defined()) {
          run_ = run_there<Rule>;
          rules_ = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
        }
        if (run_ != run_there<Rule> || rules_.numel() != bytes)
          throw Error(kUpdate, "as many rules as before, of the same kind", "others");
        // LibTorch's allocator keeps pinned memory until the copy is done. For other memory CUDA
        // only promises that it may have been read when the call returns.
        const auto host_memory =
            at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda());
        const at::Tensor host = at::empty({bytes}, host_memory);
        std::copy(list.begin(), list.end(), static_cast<Rule*>(host.mutable_data_ptr()));
        rules_.copy_(host, /*non_blocking=*/true);
      },
      rules);
}

void CapturableUpdate::run(std::span<const Update> items, const at::Tensor& found_inf) const {
  if (!rules_.defined()) throw Error(kUpdate, "rules that were sent", "none");
  check_found_inf(found_inf, device_);
  run_(items, rules_, found_inf);
}

}  // namespace semitone::kernels
