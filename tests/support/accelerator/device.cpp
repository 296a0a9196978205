#include "tests/support/accelerator/machine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

// What LibTorch asks of a device: memory, streams, events.
namespace semitone::test::accelerator {
namespace {

constexpr c10::StreamId kStreamsOfPool = 8;

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> streams{};

void set_current(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "the pretend accelerator has no device ", index);
  current = index;
}

struct Event {
  Clock clock;
  bool asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(current); }
  void setDevice(c10::Device to) const override { set_current(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device of) const override {
    return current_stream(of.has_index() ? of.index() : current);
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, device(of.has_index() ? of.index() : current), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*high*/) const override {
    static thread_local c10::StreamId next = 0;
    next = next % kStreamsOfPool + 1;
    return c10::Stream(c10::Stream::UNSAFE, device(of.has_index() ? of.index() : current), next);
  }
  c10::Stream getNewStream(c10::Device of, int /*priority*/) const override {
    return getStreamFromGlobalPool(of, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    const Lock lock(machine().mutex());
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {machine().timeline().past(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Lock lock(machine().mutex());
    if (event != nullptr) machine().timeline().block(stream, static_cast<Event*>(event)->clock);
  }
  // The first answer is that the work is not done: the host learns nothing from it.
  bool queryEvent(void* event) const override {
    const Lock lock(machine().mutex());
    if (event == nullptr) return true;
    if (!std::exchange(static_cast<Event*>(event)->asked, true)) return false;
    machine().host_waits(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* /*first*/, void* /*second*/, c10::DeviceIndex) const override {
    return 1;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock(machine().mutex());
    machine().host_waits(machine().timeline().past(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Lock lock(machine().mutex());
    wait_for(machine().timeline().past(stream));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    const Lock lock(machine().mutex());
    wait_for(machine().timeline().past(index));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const Lock lock(machine().mutex());
    if (Block* const block = machine().memory().find(data.get())) block->recorded.push_back(stream);
  }

 private:
  static Machine& machine() { return Machine::instance(); }
  static void wait_for(const Clock& clock) {
    const Lock lock(machine().mutex());
    ++machine().counts().waits;
    machine().host_waits(Clock(clock));
  }
};

// As LibTorch's caching allocators: freed memory is reused by later work on the stream of its
// allocation, so work on another stream must be before that, or be recorded.
void free_memory(void* data) {
  Machine& machine = Machine::instance();
  const Lock lock(machine.mutex());
  const Block* const block = machine.memory().find(data);
  if (block == nullptr) return;
  const Clock& past = machine.timeline().past(block->stream);
  for (const Access& access : block->accesses) {
    const c10::Stream stream = machine.timeline().stream_of(access.moment);
    const auto& recorded = block->recorded;
    if (contains(past, access.moment) ||
        std::find(recorded.begin(), recorded.end(), stream) != recorded.end())
      continue;
    machine.record_error(c10::str("a block of ", block->bytes, " bytes of ",
                                  describe(block->stream), " is freed, and ", access.work,
                                  " uses it on ", describe(stream), " without record_stream"));
  }
  machine.memory().free(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    Machine& machine = Machine::instance();
    const Lock lock(machine.mutex());
    const c10::Stream stream = current_stream(current);
    if (bytes == 0) return {nullptr, nullptr, &free_memory, stream.device()};
    void* const data = machine.memory().allocate(bytes, stream);
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    // Earlier work on that stream may still use the memory, for what was there before.
    machine.memory().find(data)->accesses.push_back(
        {begin, begin + bytes, true, machine.timeline().launch(stream), "the allocation"});
    return {data, data, &free_memory, stream.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    const Memory& memory = Machine::instance().memory();
    std::memcpy(memory.shadow(to), memory.shadow(from), count);
  }
};

// Pinned memory of the host.
class PinnedAllocator final : public at::HostAllocator {
 public:
  static PinnedAllocator& instance() {
    static auto* const allocator = new PinnedAllocator;
    return *allocator;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    const Lock lock(Machine::instance().mutex());
    void* const data = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    ranges_[reinterpret_cast<std::uintptr_t>(data)] = bytes;
    return {data, data, &release, c10::kCPU};
  }
  bool owns(const void* data) {
    const Lock lock(Machine::instance().mutex());
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    auto found = ranges_.upper_bound(address);
    if (found == ranges_.begin()) return false;
    --found;
    return address <= found->first + found->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void release(void* data) {
    const Lock lock(Machine::instance().mutex());
    instance().ranges_.erase(reinterpret_cast<std::uintptr_t>(data));
    std::free(data);
  }
  std::map<std::uintptr_t, std::size_t> ranges_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = current;
    set_current(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::instance().owns(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const Lock lock(Machine::instance().mutex());
    const Block* const block = Machine::instance().memory().find(data);
    TORCH_CHECK(block != nullptr, "not an address of the pretend accelerator");
    return block->stream.device();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const Memory& memory = Machine::instance().memory();
    c10::DataPtr data = storage.allocator()->allocate(bytes);
    if (storage.nbytes() > 0 && bytes > 0)
      std::memcpy(memory.shadow(data.get()), memory.shadow(storage.data()),
                  std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool registered = [] {
  c10::register_privateuse1_backend("accelerator");
  static DeviceAllocator allocator;
  c10::SetAllocator(kType, &allocator);
  static const c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &PinnedAllocator::instance());
  return true;
}();

}  // namespace

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index),
                     streams.at(static_cast<std::size_t>(index)));
}

c10::DeviceIndex current_device() {
  return current;
}

}  // namespace semitone::test::accelerator
