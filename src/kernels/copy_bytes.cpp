#include "src/kernels/copy_bytes.h"

#include "src/core/parallel_for.h"

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

namespace semitone::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// The width of a vector has no meaning here, since memory is the limit: the vectors are those that
// every processor has.
using Bytes = hn::ScalableTag<std::uint8_t>;

void copy_past_caches(const std::uint8_t* from, std::uint8_t* to, std::size_t count) {
  const Bytes bytes;
  const std::size_t width = hn::Lanes(bytes);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % width;
  const std::size_t head = std::min(count, misaligned == 0 ? 0 : width - misaligned);
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + 4 * width <= count; i += 4 * width) {
    // All reads come first: the compiler does not know that `to` is elsewhere.
    const auto a = hn::LoadU(bytes, from + i);
    const auto b = hn::LoadU(bytes, from + i + width);
    const auto c = hn::LoadU(bytes, from + i + 2 * width);
    const auto d = hn::LoadU(bytes, from + i + 3 * width);
    hn::Stream(a, bytes, to + i);
    hn::Stream(b, bytes, to + i + width);
    hn::Stream(c, bytes, to + i + 2 * width);
    hn::Stream(d, bytes, to + i + 3 * width);
  }
  hwy::FlushStream();
  std::memcpy(to + i, from + i, count - i);
}

}  // namespace

void copy_bytes(const void* from, void* to, std::int64_t count) {
  constexpr std::int64_t kBytesOfPiece = 1 << 20;  // starting threads for less costs more
  parallel_for(0, count, kBytesOfPiece, [&](std::int64_t begin, std::int64_t end) {
    copy_past_caches(static_cast<const std::uint8_t*>(from) + begin,
                     static_cast<std::uint8_t*>(to) + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace semitone::kernels
