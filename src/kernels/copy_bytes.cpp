#include "src/kernels/copy_bytes.h"

#include "src/core/parallel_for.h"

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

HWY_BEFORE_NAMESPACE();
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
  std::memcpy(to + i, from + i, count - i);
}

}  // namespace

void copy_bytes(std::span<const BytesToCopy> parts) {
  constexpr std::int64_t kBytesOfPiece = 1 << 20;  // starting threads for less costs more
  std::int64_t total = 0;
  for (const BytesToCopy& part : parts) total += part.count;
  parallel_for(0, total, kBytesOfPiece, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t start = 0;  // of a part, among all bytes
    for (const auto& [from, to, count] : parts) {
      const std::int64_t first = std::max(begin - start, std::int64_t{0});
      const std::int64_t last = std::min(end - start, count);
      if (first < last) {
        copy_past_caches(static_cast<const std::uint8_t*>(from) + first,
                         static_cast<std::uint8_t*>(to) + first,
                         static_cast<std::size_t>(last - first));
      }
      start += count;
    }
    hwy::FlushStream();
  });
}

}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();
