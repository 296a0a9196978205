#include "tests/support/accelerator/memory.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

namespace semitone::test::accelerator {
namespace {

constexpr std::size_t kReserved = std::size_t{256} << 30;
constexpr std::size_t kPage = 4096;

// A file in memory, which both ranges of addresses show.
int open_memory() {
  const int file = ::memfd_create("pretend_accelerator", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ::ftruncate(file, kReserved) == 0,
              "no memory for the pretend accelerator");
  return file;
}

char* reserve(int file, int protection) {
  void* const begin = ::mmap(nullptr, kReserved, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(begin != MAP_FAILED, "no addresses for the pretend accelerator");
  return static_cast<char*>(begin);
}

// Each block ends with a page that stays unused.
std::size_t pages_of(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage + kPage;
}

}  // namespace

Memory::Memory() {
  const int file = open_memory();
  addresses_ = reserve(file, PROT_NONE);
  shadow_ = reserve(file, PROT_READ | PROT_WRITE);
  ::close(file);
}

void Memory::let_kernels_in(bool in) {
  const int result = ::mprotect(addresses_, used_, in ? PROT_READ | PROT_WRITE : PROT_NONE);
  TORCH_CHECK(result == 0, "the pretend accelerator cannot protect its memory");
}

void* Memory::allocate(std::size_t bytes, c10::Stream stream) {
  TORCH_CHECK(used_ + pages_of(bytes) <= kReserved, "the pretend accelerator is out of addresses");
  char* const data = addresses_ + used_;
  used_ += pages_of(bytes);
  std::memset(shadow(data), 0xFF, bytes);
  blocks_.emplace(reinterpret_cast<std::uintptr_t>(data), Block{bytes, stream, {}, {}});
  return data;
}

void Memory::free(void* data) {
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == blocks_.end()) return;
  ::madvise(shadow(data), pages_of(found->second.bytes) - kPage, MADV_REMOVE);
  blocks_.erase(found);
}

Block* Memory::find(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto found = blocks_.upper_bound(address);
  if (found == blocks_.begin()) return nullptr;
  --found;
  return address <= found->first + found->second.bytes ? &found->second : nullptr;
}

void* Memory::shadow(const void* data) const {
  return data == nullptr ? nullptr : shadow_ + (static_cast<const char*>(data) - addresses_);
}

bool Memory::owns(const void* data) const {
  return data >= addresses_ && data < addresses_ + kReserved;
}

}  // namespace semitone::test::accelerator
