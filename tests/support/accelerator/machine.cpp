#include "tests/support/accelerator/machine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace semitone::test::accelerator {
namespace {

// The bytes between a tensor's first and its last element.
std::pair<std::uintptr_t, std::uintptr_t> extent(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + static_cast<std::size_t>(last + 1) * tensor.dtype().itemsize()};
}

bool conflict(const Access& earlier, const Access& later) {
  return (earlier.is_write || later.is_write) && earlier.begin < later.end &&
         later.begin < earlier.end;
}

// Whether every later access that would conflict with `earlier` conflicts with `later` too.
bool covers(const Access& later, const Access& earlier) {
  return later.begin <= earlier.begin && earlier.end <= later.end &&
         (later.is_write || (!earlier.is_write && later.moment.stream == earlier.moment.stream));
}

const char* verb(const Access& access) {
  return access.is_write ? " writes" : " reads";
}

}  // namespace

Machine& Machine::instance() {
  static auto* const machine = new Machine;
  return *machine;
}

void Machine::fail(const std::string& message) {
  record_error(message);
  TORCH_CHECK(false, message);
}

void Machine::check(const Block& block, const Access& now) {
  const c10::Stream stream = timeline_.stream_of(now.moment);
  const Clock& past = timeline_.past(stream);
  for (const Access& earlier : block.accesses) {
    if (!conflict(earlier, now) || contains(past, earlier.moment)) continue;
    fail(c10::str(now.work, verb(now), " a block of ", block.bytes, " bytes on ", describe(stream),
                  ", which does not wait for ", earlier.work, " that", verb(earlier), " it on ",
                  describe(timeline_.stream_of(earlier.moment))));
  }
}

void Machine::access(const std::vector<Use>& uses, Moment moment, const std::string& work) {
  std::vector<std::pair<Block*, Access>> accesses;
  for (const Use& use : uses) {
    if (use.tensor.numel() == 0) continue;
    const auto [begin, end] = extent(use.tensor);
    Block* const block = memory_.find(use.tensor.const_data_ptr());
    if (block == nullptr) fail(work + " uses memory of the accelerator that was freed");
    accesses.emplace_back(block, Access{begin, end, use.is_write, moment, work});
  }
  for (const auto& [block, now] : accesses) check(*block, now);
  for (auto& [block, now] : accesses) {
    std::erase_if(block->accesses,
                  [&now = now](const Access& earlier) { return covers(now, earlier); });
    block->accesses.push_back(std::move(now));
  }
}

void Machine::host_waits(const Clock& clock) {
  timeline_.wait(clock);
  for (auto copy = copies_.begin(); copy != copies_.end();) {
    if (!contains(timeline_.host(), copy->moment)) {
      ++copy;
      continue;
    }
    const Copy done = *copy;
    copy = copies_.erase(copy);
    complete(done);
  }
}

void Machine::complete(const Copy& copy) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (copy.is_to_host) {
    at::Tensor(copy.host).copy_(copy.values);
  } else if (copy.host.numel() > 0 &&
             std::memcmp(copy.host.const_data_ptr(), copy.values.const_data_ptr(),
                         copy.values.nbytes()) != 0) {
    record_error("the host changed pinned memory before the non-blocking copy from it was done");
  }
}

void Machine::arrive_later(const at::Tensor& destination, const at::Tensor& values, Moment moment) {
  at::Tensor poison = at::empty_like(values);
  std::memset(poison.mutable_data_ptr(), 0xFF, poison.nbytes());
  at::Tensor(destination).copy_(poison);
  copies_.push_back({destination.alias(), values, moment, true});
}

void Machine::watch_source(const at::Tensor& source, const at::Tensor& values, Moment moment) {
  if (source.is_contiguous()) copies_.push_back({source.alias(), values, moment, false});
}

std::string describe(c10::Stream stream) {
  return c10::str(stream.device(), " stream ", stream.id());
}

Counts counts() {
  const Lock lock(Machine::instance().mutex());
  return Machine::instance().counts();
}

std::int64_t host_reads() {
  return counts().reads;
}

std::vector<std::string> take_errors() {
  const Lock lock(Machine::instance().mutex());
  return Machine::instance().take_errors();
}

void synchronize() {
  const c10::impl::VirtualGuardImpl guard(kType);
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) guard.synchronizeDevice(index);
}

void move(torch::nn::Module& model, c10::Device to) {
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor moved = tensor.detach().to(to);
      tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
    }
  }
}

void AcceleratorTest::SetUp() {
  take_errors();
}

void AcceleratorTest::TearDown() {
  synchronize();
  for (const std::string& error : take_errors()) ADD_FAILURE() << error;
}

}  // namespace semitone::test::accelerator
